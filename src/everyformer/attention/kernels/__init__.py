"""Kernels: ways to compute the same equation. Each equals `reference`; one that does not support a request raises with the reason."""

"""Kernels: ways of computing the same equation. Each equals `reference`; one that cannot serve says why and raises."""

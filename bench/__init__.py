"""Benchmarks, run by hand with `python -m bench.NAME`. The results are in docs/results."""

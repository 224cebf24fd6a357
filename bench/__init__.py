"""Measurements that are run by hand: `python -m bench.NAME`. What they found is in docs/results."""

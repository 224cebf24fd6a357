"""Studies of models: contracts, plans, benchmarks, images of patterns and attention, curves."""

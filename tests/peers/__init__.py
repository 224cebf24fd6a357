"""Differential tests: our members against code that we did not write, with the same weights."""

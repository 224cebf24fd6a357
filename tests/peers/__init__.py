"""Differential tests: members of the family against independent implementations with the same weights."""

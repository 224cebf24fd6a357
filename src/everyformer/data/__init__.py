"""Data: where it comes from, how text becomes numbers, and the sets that are known by name."""

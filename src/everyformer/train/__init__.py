"""Training: the loop, what it is told, what it keeps, and how it grows beyond one machine."""

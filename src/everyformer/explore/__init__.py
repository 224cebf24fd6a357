"""The local page of `everyformer explore`: what it shows of runs, models and patterns, and the server behind it."""

"""One attention: which query attends to which key (pattern), how strongly (score_mod), the projections of its heads, and `attend`."""

"""Around attention: embeddings, positions, norms, feed-forward nets, wiring, depth, past, heads, whole models."""

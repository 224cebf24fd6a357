"""Networks: embeddings, positions, norms, sublayers, residuals, depths, caches, output heads and whole models."""

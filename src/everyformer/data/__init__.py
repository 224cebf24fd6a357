"""Data sets: text, labelled examples, images, graphs, sentence pairs and environments, and the tokenizers for text."""

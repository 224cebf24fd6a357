"""Inference: text and image generation, beam search, rollouts of agents, and evaluation of language models."""

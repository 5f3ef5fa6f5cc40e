"""Gradients of generated tokens, taken after the generation through the same masked model."""

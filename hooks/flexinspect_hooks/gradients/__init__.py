"""Gradients of generated tokens, computed after the generation with the same masked model."""

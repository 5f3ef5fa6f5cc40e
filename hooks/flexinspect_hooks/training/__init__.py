"""Training steps: statistics of gradients and tensors, and the engine that finds the steps."""

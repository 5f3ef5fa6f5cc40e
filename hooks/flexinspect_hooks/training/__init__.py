"""Training runs: statistics of gradients and tensors, and the session that records the steps."""

"""What is read from the numbers of a divergence: weights, positions, biases, modules, tokens."""

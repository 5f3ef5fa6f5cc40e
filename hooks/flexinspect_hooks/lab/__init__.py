"""The ensemble laboratory beside the model: one worker runs all methods on a sample."""

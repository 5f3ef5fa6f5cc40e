"""A forward pass of a model as the audit repeats it: its arguments, weights, hooks and edits."""

"""What the steps of a program gave, in order, and how far it is from other numbers."""

"""Screens: each keeps its state and binds panels and widgets to it; the widgets draw."""

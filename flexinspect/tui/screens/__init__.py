"""Screens: each owns its state, binds panels and widgets to it, and draws nothing by itself."""

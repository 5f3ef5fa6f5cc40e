"""Panels of the inspector, one module or package each; plug-ins of the group `flexinspect.panels`.

`base`, `panel_source`, `panel_registry`, `timeline` and `token_window` are shared by all panels.
"""

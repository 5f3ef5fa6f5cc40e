"""Panels of the inspector, one module or package each; plug-ins of the group `flexinspect.panels`.

`base`, `source`, `panel_registry`, `timeline` and `token_window` are shared by all panels.
"""

"""Panels of the inspector, one file each; plug-ins of the group `flexinspect.panels`.

A module belongs to the panel whose name it begins with; `sequence` and `windows` serve several.
"""

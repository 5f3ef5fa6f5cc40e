"""Panels of the inspector, one file each; plug-ins of the group `flexinspect.panels`."""

"""Masks in numpy: presets, expressions, edits, counts, pictures, analysis and verification.

Public names load on first use: the interface imports parts of this package at its start.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinspect.masks.mask_analysis import analyse_mask
    from flexinspect.masks.mask_config import MaskConfig
    from flexinspect.masks.mask_expressions import parse_mask
    from flexinspect.masks.reduction import reduce_mask
    from flexinspect.masks.verification import verify_mask

__all__ = ["MaskConfig", "analyse_mask", "parse_mask", "reduce_mask", "verify_mask"]

_MODULES = {
    "analyse_mask": "flexinspect.masks.mask_analysis",
    "MaskConfig": "flexinspect.masks.mask_config",
    "parse_mask": "flexinspect.masks.mask_expressions",
    "reduce_mask": "flexinspect.masks.reduction",
    "verify_mask": "flexinspect.masks.verification",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'flexinspect.masks' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

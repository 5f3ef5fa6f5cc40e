"""Masks in numpy: presets, expressions, edits, counts, pictures, analysis and verification.

Public names load on first use: the interface imports parts of this package at its start. The two
functions that draw are those of the visualisation notebook, under the name that it imports.
`flexinspect.figures` is above this package, so they reach it by its name when they are called: no
module of masks depends on a drawing one, and a type checker, `help` and an editor see the whole
signature, which `__getattr__` would hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flexinspect.masks.mask_analysis import analyse_mask
    from flexinspect.masks.mask_expressions import parse_mask
    from flexinspect.masks.mask_presets import BoolArray, IntArray
    from flexinspect.masks.mask_reduction import reduce_mask
    from flexinspect.masks.size_presets import MaskConfig
    from flexinspect.masks.verification import verify_mask

__all__ = [
    "MaskConfig",
    "analyse_mask",
    "draw_flowchart",
    "parse_mask",
    "reduce_mask",
    "verify_mask",
    "visualize_attention_mask",
]

_MODULES = {
    "analyse_mask": "flexinspect.masks.mask_analysis",
    "MaskConfig": "flexinspect.masks.size_presets",
    "parse_mask": "flexinspect.masks.mask_expressions",
    "reduce_mask": "flexinspect.masks.mask_reduction",
    "verify_mask": "flexinspect.masks.verification",
}
_FIGURES = "flexinspect.figures.notebook_figures"


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'flexinspect.masks' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def visualize_attention_mask(
    config: Mapping[str, Any] | None = None,
    *,
    language: str | None = None,
    theme: str = "light",
    width: float = 6.5,
) -> tuple[Figure, BoolArray, IntArray]:
    """Draw the mask of a paraphrase ensemble, in which segments are isolated from each other.

    Keys of `config` are `num_paraphrases` (3), `tokens_per_paraphrase` (15), `separator_tokens`
    (2), `num_generated_tokens` (5), `display_mode` ("full" or "sampled") and
    `max_display_positions` (60). `language` is a code such as "zh", by default that of
    FLEXINSPECT_LANG; `theme` one of light, dark, colorblind and grayscale; `width` is in inches.

    Returns the matplotlib figure, the matrix, bool (positions, positions), and the positions that
    it shows, int32. In a sampled picture each position is the first of a range, and the figure
    also shows what the other positions of the range attend to.

    Raises `UsageError` for an unknown key, sizes that do not fit each other, or when matplotlib or
    a font is missing.
    """
    draw = import_module(_FIGURES).visualize_attention_mask
    drawn: tuple[Figure, BoolArray, IntArray] = draw(
        config, language=language, theme=theme, width=width
    )
    return drawn


def draw_flowchart(
    config: Mapping[str, Any] | None = None, *, language: str | None = None, theme: str = "light"
) -> Figure:
    """Draw the seven steps of a generation under a mask, and return the matplotlib figure.

    Keys of `config` are `figure_size` (14, 16), `box_width` (3.5), `box_height` (0.6),
    `vertical_spacing` (1.2), `color_input`, `color_processing`, `color_attention`,
    `color_generation` and `color_output`; the figure is 10 units wide. Raises `UsageError` as
    `visualize_attention_mask` does.
    """
    draw = import_module(_FIGURES).draw_flowchart
    figure: Figure = draw(config, language=language, theme=theme)
    return figure

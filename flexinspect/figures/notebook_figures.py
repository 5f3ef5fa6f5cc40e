"""The functions of the visualisation notebook: a mask or the flowchart from a dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flexinspect.core.languages import load_labels
from flexinspect.figures.flowchart_boxes import flow_boxes, flowchart_config, flowchart_title
from flexinspect.figures.flowchart_figure import draw_flowchart_figure
from flexinspect.figures.mask_figure import DEFAULT_WIDTH, draw_mask_figure
from flexinspect.figures.sheet import require_matplotlib
from flexinspect.figures.themes import find_theme
from flexinspect.masks.known_masks import preset_mask
from flexinspect.masks.mask_presets import BoolArray, IntArray
from flexinspect.masks.mask_reduction import reduce_mask
from flexinspect.masks.size_presets import checked_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def visualize_attention_mask(
    config: Mapping[str, Any] | None = None,
    *,
    language: str | None = None,
    theme: str = "light",
    width: float = DEFAULT_WIDTH,
) -> tuple[Figure, BoolArray, IntArray]:
    """Draw the segment isolation of an ensemble; see `flexinspect.masks.visualize_attention_mask`.

    Returns the figure, the matrix, bool (positions, positions), and the positions, int32.
    """
    require_matplotlib()
    shape = checked_config(config or {})
    segments, limit = shape.segments(), shape.display_limit()
    mask = preset_mask("segment-isolation", segments)
    picture = reduce_mask(mask, shape.length, shape.length, limit, limit, segments=segments)
    figure = draw_mask_figure(
        picture,
        labels=load_labels(language),
        theme=find_theme(theme),
        width=width,
        figure=_new_figure(),
    )
    positions = np.asarray(picture.row_edges[:-1], np.int32)
    return figure, mask.cells(positions, positions), positions


def draw_flowchart(
    config: Mapping[str, Any] | None = None, *, language: str | None = None, theme: str = "light"
) -> Figure:
    """Draw the flowchart of the generation; see `flexinspect.masks.draw_flowchart`."""
    require_matplotlib()
    labels = load_labels(language)
    return draw_flowchart_figure(
        flow_boxes(labels),
        flowchart_config(config or {}),
        labels=labels,
        title=flowchart_title(labels),
        theme=find_theme(theme),
        figure=_new_figure(),
    )


def _new_figure() -> Figure:
    """Return one of pyplot's figures: a notebook shows them, and so does `plt.show()`."""
    from matplotlib import pyplot

    figure: Figure = pyplot.figure()
    return figure

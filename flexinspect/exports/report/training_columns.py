"""Reads the steps of a training run into columns: losses, gradient norms, and facts in words."""

from __future__ import annotations

import numpy as np

from flexinspect.core.text import printable
from flexinspect.exports.report import contents
from flexinspect.exports.report.branch_columns import BranchSpan, float_column
from flexinspect.panels.base import training_facts
from flexinspect.panels.timeline import StepWindow
from flexinspect.panels.training_panel import CURVES, LEARNING_RATE, TrainingData, step_facts
from flexinspect.trace.reader import CurvePoint

MAX_POINTS = 2000
"""Points of the curves; a longer run has several steps in each."""

BAD_LOSS, BAD_GRADIENT = 1, 2


def training_columns(span: BranchSpan) -> contents.TrainingColumns | None:
    """Return the curves of a training run with at most `MAX_POINTS` points; None without steps."""
    reader, n_steps = span.source.reader, span.stop - span.start
    facts = training_facts(span.source, span.generation)
    if facts is None or n_steps <= 0:
        return None
    n_points = min(n_steps, MAX_POINTS)
    where = (span.generation, span.start, n_steps, n_points, span.branch)
    points = reader.training_curve(*where)
    groups = reader.parameter_groups(span.generation)
    index = {point: number for number, point in enumerate(points)}
    norms = np.full((len(points), len(groups)), np.nan, np.float32)
    for (point, group), norm in reader.group_curve(*where).items():
        if point in index and 0 <= group < len(groups):
            norms[index[point], group] = norm
    return contents.TrainingColumns(
        step=contents.int_column(point.step for point in points.values()),
        loss=_curve(points, "loss"),
        norm=_curve(points, "gradient norm"),
        rate=_curve(points, LEARNING_RATE),
        bad=np.array([_bad(point) for point in points.values()], np.uint8),
        groups=[printable(name) for name in groups],
        group_norm=norms,
        facts=_described_facts(span) if n_points == n_steps else [],
    )


def _curve(points: dict[int, CurvePoint], name: str) -> contents.Floats:
    return float_column(map(CURVES[name], points.values()))


def _bad(point: CurvePoint) -> int:
    return BAD_LOSS * point.has_nonfinite_loss + BAD_GRADIENT * point.has_nonfinite_gradient


def _described_facts(span: BranchSpan) -> list[list[tuple[str, str]]]:
    """Return the facts of each step as the training panel shows them."""
    run_facts = training_facts(span.source, span.generation) or {}
    steps = span.source.reader.training_steps(span.generation, span.branch, span.start, span.stop)
    window = StepWindow(span.start, span.stop, span.start, span.start, span.stop - 1, len(steps))
    return [
        [
            (printable(name), printable(value))
            for name, value in step_facts(TrainingData(step, run_facts, window, {}))
        ]
        for step in steps.values()
    ]

"""The training panel: the facts of an optimizer step, and the curves of the whole run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from textual.strip import Strip

from flexinspect.core.text import escape_unprintable, format_ranges, plural
from flexinspect.drawing.plots import format_number
from flexinspect.drawing.text_lines import Pen, clip_text
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import (
    Help,
    Missing,
    NoOptions,
    Picture,
    Request,
    format_placement,
    require_training_facts,
)
from flexinspect.panels.panel_source import Source
from flexinspect.panels.timeline import (
    Area,
    StepWindow,
    TimelinePanel,
    draw_beside,
    draw_timeline,
    is_two_column,
    left_width,
    load_whole_run,
    stack_timelines,
    timeline_columns,
)
from flexinspect.records.training_step import AnomalyOrigin, TrainingStepRecord
from flexinspect.trace.reader_queries import CurvePoint

LEARNING_RATE = "learning rate"
CURVE_NAMES = ("loss", LEARNING_RATE, "gradient norm")
CURVE_STYLES = ("good", "accent", "strong")
"""Styles of learning rate curves that are drawn below each other, in turn."""

LOG_SCALE_RATIO = 1e3
"""Ratio of the highest to the lowest value from which a curve is drawn logarithmically."""

_NAME_WIDTH = 15

Curve = Mapping[int, float | None]
"""Values by point."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """One step, the declared facts of its run, and the curves of the run by point."""

    step: TrainingStepRecord
    run_facts: Mapping[str, Any]
    window: StepWindow
    points: Mapping[int, CurvePoint]

    def values(self, name: str) -> dict[int, float | None]:
        """Return a curve by point; NaN for a point with a non-finite value."""
        return {index: _curve_value(name, point) for index, point in self.points.items()}


class TrainingPanel(TimelinePanel[TrainingData]):
    """Facts of a training step beside the curves of loss, learning rate and gradient norm."""

    name = "training"
    title = "Training"
    help = Help(
        "It shows an optimizer step: loss, learning rate, gradient norm before and after clipping, "
        "loss scaler and timings, and the curves of the run.",
        "A column of a curve is a step, or the highest value of several steps; '!' is a non-finite "
        "loss or gradient; the current step is marked; click a column to go there; learning rates "
        "that differ by group are drawn below each other, in the order of the title.",
        "Look for the step before the loss jumps: a gradient norm that rises, a learning rate that "
        "has just changed, steps that the loss scaler skipped.",
    )

    def load(self, source: Source, request: Request[NoOptions]) -> TrainingData:
        """Read the step, and the curves in as many points as there are columns."""
        place, reader = request.place, source.reader
        facts = require_training_facts(source, place)
        window = load_whole_run(reader, place, timeline_columns(request.width))
        step = reader.training_step(place.generation, window.current, place.branch)
        if step is None:
            raise Missing(f"Step {window.current} is not a training step.")
        points = reader.training_curve(
            place.generation,
            window.start,
            len(window),
            window.n_points,
            place.branch,
            n_rates=len(step.learning_rates),
        )
        return TrainingData(step, facts, window, points)

    def describe(self, data: TrainingData) -> list[str]:
        """Return the problem of the step if there is one, its facts, and the ranges of curves."""
        problem = _describe_problem(data)
        facts = [f"{name}: {value}" for name, value in step_facts(data)]
        curves = [text for name in CURVE_NAMES for text in _describe_curve(data, name)]
        return [*([problem] if problem else []), *facts, *curves]

    def paint(self, data: TrainingData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw the facts with the curves beside or below them."""
        width, height = request.width, request.height
        pen, problem = Pen(theme, width), _describe_problem(data)
        left_pen = pen.resize(left_width(width))
        left = left_pen.paragraph(problem, "bad") if problem else []
        left += [
            left_pen.line((clip_text(name, _NAME_WIDTH), "muted"), (value, "text"))
            for name, value in step_facts(data)
        ]
        curves = self.draw_timelines(data, request, theme)
        room = height if is_two_column(width) else max(height - len(curves), 0)
        strips = draw_beside(left[:room], curves[:height], height, pen)
        return Picture(strips, data.window.format_steps(), alarm=bool(problem))

    def timeline_areas(self, data: TrainingData, width: int, height: int) -> dict[str, Area]:
        """Return the areas of the curves, without their titles."""
        if is_two_column(width):
            return stack_timelines(CURVE_NAMES, width, 0, height)
        n_facts = len(step_facts(data)) + (1 if _describe_problem(data) else 0)
        room = max(height - min(n_facts, height // 2), 0)
        areas = stack_timelines(CURVE_NAMES, width, 0, room, most=4)
        top = min(height - sum(area.height + 1 for area in areas.values()), n_facts)
        return {name: replace(area, y=area.y + top) for name, area in areas.items()}

    def draw_timeline(self, name: str, data: TrainingData, area: Area, theme: Theme) -> list[Strip]:
        """Draw one of `CURVE_NAMES`; learning rates that differ by group below each other."""
        rates = rate_curves(data.points) if name == LEARNING_RATE else []
        if len(rates) > 1:
            return _draw_rates(rates, data.window, area, theme)
        low, high = _curve_range(data, name)
        title = [(f"{name} ", "title"), (f"{format_number(low)} to {format_number(high)}", "text")]
        curve = data.values(name)
        if low is not None and high is not None and 0 < low < high / LOG_SCALE_RATIO:
            title.append(("  logarithmic", "muted"))
            curve = {index: _log_ratio(value, low) for index, value in curve.items()}
        style = "good" if name == LEARNING_RATE else "accent"
        points = map(curve.get, range(data.window.n_points))
        return draw_timeline(title, points, data.window, area, theme, style=style)


def step_facts(data: TrainingData) -> list[tuple[str, str]]:
    """Return the facts of the step as (name, value)."""
    step = data.step
    rates = ("unknown" if math.isnan(rate) else format_number(rate) for rate in step.learning_rates)
    loss = f"{format_number(step.loss)} ({step.loss_source})" if step.has_loss else "not reported"
    facts = [
        ("loss", loss),
        ("learning rate", " ".join(rates) or "-"),
        ("gradient norm", _format_norm(step)),
        ("parameters", _format_counts(step)),
        ("micro-batches", str(step.n_backward)),
        ("time", _format_times(step)),
    ]
    if step.group_ratios:
        worst = max(filter(math.isfinite, step.group_ratios), default=math.nan)
        facts.append(("weights change", f"by {format_number(worst)} at most (group)"))
    if step.scale is not None:
        skipped = ", step skipped" if step.is_skipped else ""
        facts.append(("loss scale", f"{step.scale:g}{skipped}"))
    device, weights = f"{step.device} {step.autocast}".strip(), format_placement(data.run_facts)
    if weights not in ("", step.device):
        device = f"{device or '-'}, weights on {weights}"
    return [
        *facts,
        ("device", escape_unprintable(device) or "-"),
        ("measured", escape_unprintable(step.detail) or "-"),
    ]


def _format_norm(step: TrainingStepRecord) -> str:
    if step.total_norm is None:
        return "not measured in this step"
    norm = format_number(step.total_norm)
    if step.norm_before_clip is None:
        return norm
    before, limit = format_number(step.norm_before_clip), format_number(step.max_norm)
    return f"{norm}, clipped from {before} to {limit}"


def _format_counts(step: TrainingStepRecord) -> str:
    counts = (
        (step.n_exploding, "exploding"),
        (step.n_vanishing, "vanishing"),
        (step.n_dead, "dead"),
        (step.n_nonfinite, "non-finite"),
    )
    return ", ".join(
        [f"{step.n_parameters} with gradient", *(f"{n} {name}" for n, name in counts if n)]
    )


def _format_times(step: TrainingStepRecord) -> str:
    times = [
        ("forward", step.forward_ms),
        ("backward", step.backward_ms),
        ("optimizer", step.optimizer_ms),
        ("loader", step.data_ms),
        ("other", step.other_ms),
    ]
    return ", ".join(f"{name} {format_number(ms)}" for name, ms in times if ms is not None) + " ms"


def _describe_problem(data: TrainingData) -> str:
    producer = data.step.anomaly_origin
    return f"Step {data.window.current}: {describe_producer(producer)}" if producer else ""


def describe_producer(producer: AnomalyOrigin) -> str:
    """Return one line on where the anomaly of a step began."""
    name, detail = escape_unprintable(producer.name), escape_unprintable(producer.detail)
    texts = {
        "input": "the batch has NaN or Inf.",
        "weights": f"the weights {name} have NaN or Inf.",
        "module": f"the output of {name} is the first with NaN or Inf.",
        "loss": "the loss produces NaN or Inf.",
        "backward": f"the gradient of {name} is the first with NaN or Inf.",
        "explosion": f"the gradient of {name} explodes ({detail}).",
        "vanishing": f"the gradient of {name} vanishes ({detail}).",
    }
    others = plural(producer.n_affected, "other")
    inherited = f" {others} only propagate it." if producer.n_affected else ""
    return texts.get(producer.kind, f"{escape_unprintable(producer.kind)} {name}.") + inherited


def _curve_value(name: str, point: CurvePoint) -> float | None:
    if name == LEARNING_RATE:
        return next(iter(point.rates), None)
    if name == "loss":
        return math.nan if point.has_nonfinite_loss else point.loss
    return math.nan if point.has_nonfinite_gradient else point.norm


def _describe_curve(data: TrainingData, name: str) -> list[str]:
    """Return sentences about the range of a curve over the run."""
    steps, curves = data.window.format_steps(), rate_curves(data.points)
    if name == LEARNING_RATE and len(curves) > 1:
        return [
            f"{name} of group {groups} in {steps}: {format_range(curve)}."
            for groups, curve in curves
        ]
    low, high = _curve_range(data, name)
    return [f"{name} in {steps}: {format_number(low)} to {format_number(high)}."]


def _curve_range(data: TrainingData, name: str) -> tuple[float | None, float | None]:
    finite = [v for v in data.values(name).values() if v is not None and math.isfinite(v)]
    return (min(finite), max(finite)) if finite else (None, None)


def _log_ratio(value: float | None, low: float) -> float | None:
    """Return the logarithm of a value divided by the lowest one."""
    if value is None or not math.isfinite(value):
        return value
    return math.log10(max(value / low, 1.0))


def rate_curves(points: Mapping[int, CurvePoint]) -> list[tuple[str, Curve]]:
    """Return the distinct learning rate curves, each with the groups that have it: "0-2, 4"."""
    curves: list[tuple[Curve, list[int]]] = []
    for group in range(max((len(point.rates) for point in points.values()), default=0)):
        values = {
            index: point.rates[group] if group < len(point.rates) else None
            for index, point in points.items()
        }
        same = next((groups for curve, groups in curves if curve == values), None)
        if same is None:
            curves.append((values, [group]))
        else:
            same.append(group)
    return [(format_ranges(groups), curve) for curve, groups in curves]


def format_range(curve: Curve) -> str:
    """Return "0.001 to 0.1", or one number for a constant rate."""
    low, high = map(format_number, _bounds(curve))
    return low if low == high else f"{low} to {high}"


def _bounds(curve: Curve) -> tuple[float | None, float | None]:
    known = [value for value in curve.values() if value is not None]
    return min(known, default=None), max(known, default=None)


def _draw_rates(
    curves: list[tuple[str, Curve]], window: StepWindow, area: Area, theme: Theme
) -> list[Strip]:
    """Draw curves below each other, as many as there are rows, under a title with their ranges."""
    shown = curves[: max(area.height, 0)]
    strips: list[Strip] = []
    for i, (_, curve) in enumerate(shown):
        height = area.height * (i + 1) // len(shown) - area.height * i // len(shown)
        rows, style = replace(area, height=height), CURVE_STYLES[i % len(CURVE_STYLES)]
        points = map(curve.get, range(window.n_points))
        strips += draw_timeline((), points, window, rows, theme, style=style)
    more = f" and {len(curves) - len(shown)} more" if len(shown) < len(curves) else ""
    return [_draw_rates_title(shown, more, Pen(theme, area.width)), *strips]


def _draw_rates_title(curves: Sequence[tuple[str, Curve]], more: str, pen: Pen) -> Strip:
    """Draw the range of each curve, or only its highest rate where there is no room."""
    title = "learning rate, group"
    texts = [f" {groups}: {format_range(curve)}" for groups, curve in curves]
    if len(title) + sum(map(len, texts)) + len(more) > pen.width:
        title = "learning rate up to"
        texts = [f" {groups}: {format_number(_bounds(curve)[1])}" for groups, curve in curves]
    return pen.line((title, "title"), *zip(texts, cycle(CURVE_STYLES)), (more, "muted"))

"""The training panel: the facts of an optimizer step, and the curves of the whole run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

from textual.strip import Strip

from flexinspect.core.text import escape_unprintable, plural
from flexinspect.drawing.plots import format_number
from flexinspect.drawing.text_lines import clip_text, line, wrap_paragraph
from flexinspect.drawing.theme import Theme
from flexinspect.panels import timeline
from flexinspect.panels.base import (
    Help,
    Missing,
    Navigate,
    NoOptions,
    Panel,
    Picture,
    Request,
    format_placement,
    require_training_facts,
)
from flexinspect.panels.panel_source import Source
from flexinspect.panels.timeline import (
    COLUMN_GAP,
    MIN_TWO_COLUMN_WIDTH,
    Area,
    CurveSpan,
    draw_curve,
    draw_two_columns,
    left_width,
    load_curve_span,
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
_MAX_CURVE_HEIGHT = 8

Curve = Mapping[int, float | None]
"""Values by point."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """One step, the declared facts of its run, and the curves of the run by point."""

    step: TrainingStepRecord
    run_facts: Mapping[str, Any]
    span: timeline.CurveSpan
    points: Mapping[int, CurvePoint]

    def values(self, name: str) -> dict[int, float | None]:
        """Return a curve by point; NaN for a point with a non-finite value."""
        return {index: _curve_value(name, point) for index, point in self.points.items()}


class TrainingPanel(Panel[TrainingData, NoOptions]):
    """Facts of a training step beside the curves of loss, learning rate and gradient norm."""

    name: ClassVar[str] = "training"
    title: ClassVar[str] = "Training"
    help: ClassVar[Help] = Help(
        "It shows an optimizer step: loss, learning rate, gradient norm before and after clipping, "
        "loss scaler and timings, and the curves of the run.",
        "A column of a curve is a step, or the highest value of several steps; '!' is a non-finite "
        "loss or gradient; the current step is marked; click a column to go there; learning rates "
        "that differ by group are drawn below each other, in the order of the title.",
        "Look for the step before the loss jumps: a gradient norm that rises, a learning rate that "
        "has just changed, steps that the loss scaler skipped.",
    )
    depends_on_size: ClassVar[bool] = True

    def options(self) -> NoOptions:
        """Return the initial options; there are none."""
        return NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> TrainingData:
        """Read the step, and the curves in as many points as there are columns."""
        place, reader = request.place, source.reader
        facts = require_training_facts(source, place)
        span = load_curve_span(reader, place, timeline_columns(request.width))
        step = reader.training_step(place.generation, span.current, place.branch)
        if step is None:
            raise Missing(f"Step {span.current} is not a training step.")
        points = reader.training_curve(
            place.generation,
            span.first,
            span.n_steps,
            span.n_points,
            place.branch,
            n_rates=len(step.learning_rates),
        )
        return TrainingData(step, facts, span, points)

    def describe(self, data: TrainingData) -> list[str]:
        """Return the problem of the step if there is one, its facts, and the ranges of curves."""
        problem = _describe_problem(data)
        facts = [f"{name}: {value}" for name, value in step_facts(data)]
        curves = [text for name in CURVE_NAMES for text in _describe_curve(data, name)]
        return [*([problem] if problem else []), *facts, *curves]

    def paint(self, data: TrainingData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw the facts with the curves beside or below them."""
        width, height = request.width, request.height
        areas = curve_areas(data, width, height)
        problem, column = _describe_problem(data), left_width(width)
        left = wrap_paragraph(problem, column, theme.style("bad")) if problem else []
        text, muted = theme.style("text"), theme.style("muted")
        for name, value in step_facts(data):
            left.append(line([(clip_text(name, _NAME_WIDTH), muted), (value, text)], column, text))
        curves = [
            strip
            for name, area in areas.items()
            for strip in _draw_titled_curve(data, name, area, theme)
        ]
        if width >= MIN_TWO_COLUMN_WIDTH:
            strips = draw_two_columns(left[:height], curves[:height], width, height, theme)
        else:
            strips = [*left[: max(height - len(curves), 0)], *curves]
        return Picture(strips[:height], data.span.format_steps(), alarm=bool(problem))

    def on_mouse(
        self, x: int, y: int, data: TrainingData, request: Request[NoOptions], *, click: bool
    ) -> Navigate | None:
        """Go to the step of a curve's column."""
        for area in curve_areas(data, request.width, request.height).values():
            if click and (x, y) in area:
                step = data.span.step_at(x - area.x)
                return None if step is None else Navigate(step=step)
        return None


def curve_areas(data: TrainingData, width: int, height: int) -> dict[str, Area]:
    """Return the areas of the curves, without their titles."""
    wide, columns = width >= MIN_TWO_COLUMN_WIDTH, timeline_columns(width)
    n_facts = len(step_facts(data)) + (1 if _describe_problem(data) else 0)
    room = height if wide else max(height - min(n_facts, height // 2), 0)
    names = CURVE_NAMES[: max(room // 2, 0)]
    each = min(room // len(names), _MAX_CURVE_HEIGHT if wide else 4) if names else 0
    x = left_width(width) + COLUMN_GAP if wide else 0
    top = 0 if wide else height - each * len(names)
    if not wide:
        top = min(top, n_facts)
    return {
        name: Area(x, top + each * index + 1, columns, each - 1) for index, name in enumerate(names)
    }


def step_facts(data: TrainingData) -> list[tuple[str, str]]:
    """Return the facts of the step as (name, value)."""
    step = data.step
    rates = " ".join(map(_format_rate, step.learning_rates)) or "-"
    loss = f"{format_number(step.loss)} ({step.loss_source})" if step.has_loss else "not reported"
    facts = [
        ("loss", loss),
        ("learning rate", rates),
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


def _format_rate(rate: float) -> str:
    return "unknown" if math.isnan(rate) else format_number(rate)


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
        (step.n_sick, "non-finite"),
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
    producer = data.step.producer
    return f"Step {data.span.current}: {describe_producer(producer)}" if producer else ""


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
    others = plural(producer.n_carriers, "other")
    inherited = f" {others} only propagate it." if producer.n_carriers else ""
    return texts.get(producer.kind, f"{escape_unprintable(producer.kind)} {name}.") + inherited


def _curve_value(name: str, point: CurvePoint) -> float | None:
    if name == LEARNING_RATE:
        return next(iter(point.rates), None)
    if name == "loss":
        return math.nan if point.has_nonfinite_loss else point.loss
    return math.nan if point.has_nonfinite_gradient else point.norm


def _describe_curve(data: TrainingData, name: str) -> list[str]:
    """Return sentences about the range of a curve over the run."""
    steps, curves = data.span.format_steps(), rate_curves(data.points)
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


def _draw_titled_curve(data: TrainingData, name: str, area: Area, theme: Theme) -> list[Strip]:
    rates = rate_curves(data.points) if name == LEARNING_RATE else []
    if len(rates) > 1:
        return draw_rates(rates, data.span, area, theme)
    low, high = _curve_range(data, name)
    title = [
        (f"{name} ", theme.style("title")),
        (f"{format_number(low)} to {format_number(high)}", theme.style("text")),
    ]
    style, values = "good" if name == LEARNING_RATE else "accent", data.values(name)
    if low is not None and high is not None and 0 < low < high / LOG_SCALE_RATIO:
        title.append(("  logarithmic", theme.style("muted")))
        values = {index: _log_ratio(value, low) for index, value in values.items()}
    curve = draw_curve(values, data.span, area, theme, style=style)
    return [line(title, area.width, theme.style("text")), *curve]


def rate_curves(points: Mapping[int, CurvePoint]) -> list[tuple[str, Curve]]:
    """Return the distinct learning rate curves, each with the groups that have it: "0-2, 4"."""
    curves: list[tuple[Curve, list[int]]] = []
    for group in range(max((len(point.rates) for point in points.values()), default=0)):
        values = {index: _group_rate(point, group) for index, point in points.items()}
        same = next((groups for curve, groups in curves if curve == values), None)
        if same is None:
            curves.append((values, [group]))
        else:
            same.append(group)
    return [(_format_groups(groups), curve) for curve, groups in curves]


def format_range(curve: Curve) -> str:
    """Return "0.001 to 0.1", or one number for a constant rate."""
    low, high = map(format_number, _bounds(curve))
    return low if low == high else f"{low} to {high}"


def _bounds(curve: Curve) -> tuple[float | None, float | None]:
    known = [value for value in curve.values() if value is not None]
    return min(known, default=None), max(known, default=None)


def draw_rates(
    curves: list[tuple[str, Curve]], span: CurveSpan, area: Area, theme: Theme
) -> list[Strip]:
    """Draw curves below each other, as many as there are rows, under a title with their ranges."""
    shown = curves[: max(area.height, 0)]
    strips: list[Strip] = []
    for i, (_, curve) in enumerate(shown):
        height = area.height * (i + 1) // len(shown) - area.height * i // len(shown)
        rows = Area(area.x, area.y, area.width, height)
        strips += draw_curve(curve, span, rows, theme, style=CURVE_STYLES[i % len(CURVE_STYLES)])
    more = f" and {len(curves) - len(shown)} more" if len(shown) < len(curves) else ""
    return [_draw_title(shown, more, area.width, theme), *strips]


def _draw_title(curves: Sequence[tuple[str, Curve]], more: str, width: int, theme: Theme) -> Strip:
    """Draw the range of each curve, or only its highest rate where there is no room."""
    title = "learning rate, group"
    texts = [f" {groups}: {format_range(curve)}" for groups, curve in curves]
    if len(title) + sum(map(len, texts)) + len(more) > width:
        title = "learning rate up to"
        texts = [f" {groups}: {format_number(_bounds(curve)[1])}" for groups, curve in curves]
    spans = [(title, theme.style("title"))]
    spans += [
        (text, theme.style(CURVE_STYLES[i % len(CURVE_STYLES)])) for i, text in enumerate(texts)
    ]
    return line([*spans, (more, theme.style("muted"))], width, theme.style("text"))


def _group_rate(point: CurvePoint, group: int) -> float | None:
    return point.rates[group] if group < len(point.rates) else None


def _format_groups(groups: list[int]) -> str:
    runs = groupby(enumerate(groups), key=lambda pair: pair[1] - pair[0])
    ends = [[group for _, group in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)

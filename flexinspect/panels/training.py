"""The training panel: what the step learned, what it took, and the curves of the whole run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.strip import Strip

from flexinspect.panels.base import Go, Help, Missing, NoOptions, Panel, Picture, Request
from flexinspect.panels.parts import curves
from flexinspect.panels.parts.curves import draw_curve, span_of
from flexinspect.panels.parts.trainingboxes import placed
from flexinspect.panels.parts.trainingrates import draw_rates, range_words, rate_curves
from flexinspect.panels.parts.trainingrun import run_of
from flexinspect.panels.parts.windows import (
    BESIDE,
    GAP,
    Area,
    left_width,
    put_beside,
    timeline_columns,
)
from flexinspect.panels.source import Source
from flexinspect.text import visible
from flexinspect.trace.trainingqueries import CurvePoint
from flexinspect.trainingfacts import Producer, TrainingStepRecord
from flexinspect.widgets.lines import clipped, line, paragraph
from flexinspect.widgets.look import Look
from flexinspect.widgets.plots import number

RATE = "learning rate"
CURVES = ("loss", RATE, "gradient norm")
_NAME = 15
_TALLEST = 8
WIDE_RANGE = 1e3
"""From which ratio of highest to lowest a curve is logarithmic."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """One step, the run it belongs to, and the curves of the run by point."""

    step: TrainingStepRecord
    about: Mapping[str, Any]
    span: curves.Span
    points: Mapping[int, CurvePoint]

    def values(self, name: str) -> dict[int, float | None]:
        """Return a curve by point; NaN where something was not finite."""
        return {at: _value(name, point) for at, point in self.points.items()}


class TrainingPanel(Panel[TrainingData, NoOptions]):
    """Facts of a training step beside the curves of loss, learning rate and gradient norm."""

    name: ClassVar[str] = "training"
    title: ClassVar[str] = "Training"
    help: ClassVar[Help] = Help(
        "It shows an optimizer step: loss, learning rate, gradient norm before and after clipping, "
        "the loss scaler, where its time went, and the run's curves.",
        "A column of a curve is a step, or the highest of several; '!' is a loss or gradient that "
        "is not finite; the current step is marked; click a column to go there; learning rates "
        "that differ by group lie below each other, in the order of the title.",
        "Look for the step before the loss jumps: a gradient norm that rises, a learning rate that "
        "has just changed, steps that the scaler left out.",
    )
    sized: ClassVar[bool] = True

    def options(self) -> NoOptions:
        """Return the options; there are none."""
        return NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> TrainingData:
        """Read the step, and the curves in as many points as there are columns."""
        place, reader = request.place, source.reader
        about = run_of(source, place)
        span = span_of(reader, place, timeline_columns(request.width))
        step = reader.training_step(place.generation, span.current, place.branch)
        if step is None:
            raise Missing(f"Step {span.current} is no training step.")
        sizes = (span.first, span.n_steps, span.n_points)
        points = reader.training_curve(
            place.generation, *sizes, place.branch, n_rates=len(step.learning_rates)
        )
        return TrainingData(step, about, span, points)

    def describe(self, data: TrainingData) -> list[str]:
        """Return the facts of the step, then the ends of each curve."""
        lines = [f"{name}: {value}" for name, value in facts_of(data)]
        trouble = _trouble(data)
        words = [said for name in CURVES for said in _curve_words(data, name)]
        return [*([trouble] if trouble else []), *lines, *words]

    def paint(self, data: TrainingData, request: Request[NoOptions], look: Look) -> Picture:
        """Draw the facts with the curves beside or below them."""
        width, height = request.width, request.height
        areas = arrange(data, width, height)
        trouble, side = _trouble(data), left_width(width)
        left = paragraph(trouble, side, look.style("bad")) if trouble else []
        text, muted = look.style("text"), look.style("muted")
        for name, value in facts_of(data):
            left.append(line([(clipped(name, _NAME), muted), (value, text)], side, text))
        drawn = [strip for name, area in areas.items() for strip in _curve(data, name, area, look)]
        if width >= BESIDE:
            strips = put_beside(left[:height], drawn[:height], width, height, look)
        else:
            strips = [*left[: max(height - len(drawn), 0)], *drawn]
        return Picture(strips[:height], data.span.words(), alarm=bool(trouble))

    def point(
        self, x: int, y: int, data: TrainingData, request: Request[NoOptions], *, click: bool
    ) -> Go | None:
        """Go to the step of a curve's column."""
        for area in arrange(data, request.width, request.height).values():
            if click and (x, y) in area:
                step = data.span.step_at(x - area.x)
                return None if step is None else Go(step=step)
        return None


def arrange(data: TrainingData, width: int, height: int) -> dict[str, Area]:
    """Return the areas of the curves, without their titles."""
    wide, columns = width >= BESIDE, timeline_columns(width)
    n_facts = len(facts_of(data)) + (1 if _trouble(data) else 0)
    room = height if wide else max(height - min(n_facts, height // 2), 0)
    names = CURVES[: max(room // 2, 0)]
    each = min(room // len(names), _TALLEST if wide else 4) if names else 0
    x = left_width(width) + GAP if wide else 0
    top = 0 if wide else height - each * len(names)
    if not wide:
        top = min(top, n_facts)
    return {
        name: Area(x, top + each * index + 1, columns, each - 1) for index, name in enumerate(names)
    }


def facts_of(data: TrainingData) -> list[tuple[str, str]]:
    """Return what there is to say of the step, names with values."""
    step = data.step
    rates = " ".join(map(_rate, step.learning_rates)) or "-"
    facts = [
        ("loss", f"{number(step.loss)} ({step.loss_source})" if step.has_loss else "not told"),
        ("learning rate", rates),
        ("gradient norm", _norm_words(step)),
        ("parameters", _counts(step)),
        ("micro-batches", str(step.n_backward)),
        ("time", _times(step)),
    ]
    if step.group_ratios:
        worst = max(filter(math.isfinite, step.group_ratios), default=math.nan)
        facts.append(("weights change", f"by {number(worst)} at most (group)"))
    if step.scale is not None:
        left_out = ", step left out" if step.is_skipped else ""
        facts.append(("loss scale", f"{step.scale:g}{left_out}"))
    where, weights = f"{step.device} {step.autocast}".strip(), placed(data.about)
    if weights not in ("", step.device):
        where = f"{where or '-'}, weights on {weights}"
    return [*facts, ("device", visible(where) or "-"), ("measured", visible(step.detail) or "-")]


def _rate(rate: float) -> str:
    return "unknown" if math.isnan(rate) else number(rate)


def _norm_words(step: TrainingStepRecord) -> str:
    if step.total_norm is None:
        return "not measured in this step"
    clipped_from = ""
    if step.norm_before_clip is not None:
        limit = number(step.max_norm)
        clipped_from = f", clipped from {number(step.norm_before_clip)} to {limit}"
    return number(step.total_norm) + clipped_from


def _counts(step: TrainingStepRecord) -> str:
    named = (
        (step.n_exploding, "explode"),
        (step.n_vanishing, "vanish"),
        (step.n_dead, "dead"),
        (step.n_sick, "not finite"),
    )
    return ", ".join([f"{step.n_parameters} with gradient", *(f"{n} {w}" for n, w in named if n)])


def _times(step: TrainingStepRecord) -> str:
    named = [
        ("forward", step.forward_ms),
        ("backward", step.backward_ms),
        ("optimizer", step.optimizer_ms),
        ("loader", step.data_ms),
        ("other", step.other_ms),
    ]
    return ", ".join(f"{name} {number(ms)}" for name, ms in named if ms is not None) + " ms"


def _trouble(data: TrainingData) -> str:
    producer = data.step.producer
    return f"Step {data.span.current}: {said_of(producer)}" if producer else ""


def said_of(producer: Producer) -> str:
    """Return in a line where trouble began in a step."""
    name = visible(producer.name)
    words = {
        "input": "the batch is not finite.",
        "weights": f"the weights {name} are not finite.",
        "module": f"the output of {name} is the first that is not finite.",
        "loss": "the loss makes numbers that are not finite.",
        "backward": f"the gradient of {name} is the first that is not finite.",
        "explosion": f"the gradient of {name} explodes ({visible(producer.detail)}).",
        "vanishing": f"the gradient of {name} vanishes ({visible(producer.detail)}).",
    }
    carried = f" {producer.n_carriers} others carry it on." if producer.n_carriers else ""
    return words.get(producer.kind, f"{visible(producer.kind)} {name}.") + carried


def _value(name: str, point: CurvePoint) -> float | None:
    if name == RATE:
        return next(iter(point.rates), None)
    if name == "loss":
        return math.nan if point.has_sick_loss else point.loss
    return math.nan if point.has_sick_gradient else point.norm


def _curve_words(data: TrainingData, name: str) -> list[str]:
    """Return sentences about the range of a curve over the run."""
    shown, curves = data.span.words(), rate_curves(data.points)
    if name == RATE and len(curves) > 1:
        return [
            f"{name} of group {groups} in {shown}: {range_words(curve)}."
            for groups, curve in curves
        ]
    low, high = _range(data, name)
    return [f"{name} in {shown}: {number(low)} to {number(high)}."]


def _range(data: TrainingData, name: str) -> tuple[float | None, float | None]:
    known = [v for v in data.values(name).values() if v is not None and math.isfinite(v)]
    return (min(known), max(known)) if known else (None, None)


def _above(value: float | None, low: float) -> float | None:
    """Return the logarithm of a value over the lowest one."""
    if value is None or not math.isfinite(value):
        return value
    return math.log10(max(value / low, 1.0))


def _curve(data: TrainingData, name: str, area: Area, look: Look) -> list[Strip]:
    rates = rate_curves(data.points) if name == RATE else []
    if len(rates) > 1:
        return draw_rates(rates, data.span, area, look)
    low, high = _range(data, name)
    title = [
        (f"{name} ", look.style("title")),
        (f"{number(low)} to {number(high)}", look.style("text")),
    ]
    style, values = "good" if name == RATE else "accent", data.values(name)
    if low is not None and high is not None and 0 < low < high / WIDE_RANGE:
        title.append(("  logarithmic", look.style("muted")))
        values = {at: _above(value, low) for at, value in values.items()}
    drawn = draw_curve(values, data.span, area, look, style=style)
    return [line(title, area.width, look.style("text")), *drawn]

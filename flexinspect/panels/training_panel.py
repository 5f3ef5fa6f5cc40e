"""The panels of a training run: the facts and curves of its steps, and its gradient strip."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, cycle
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable, format_ranges
from flexinspect.drawing.heatmap import CIVIDIS_MISSING, boxes, quantise
from flexinspect.drawing.plots import finite_bounds, format_number
from flexinspect.drawing.text_lines import Pen, clip_text, join_blocks
from flexinspect.drawing.theme import Theme
from flexinspect.panels import base, timeline
from flexinspect.panels.anomaly_text import describe_producer
from flexinspect.panels.base import NoOptions, Picture, Request
from flexinspect.panels.panel_source import Source
from flexinspect.records import training_step
from flexinspect.trace.reader import CurvePoint

LEARNING_RATE = "learning rate"
CURVES: Mapping[str, Callable[[CurvePoint], float | None]] = {
    "loss": lambda point: math.nan if point.has_nonfinite_loss else point.loss,
    LEARNING_RATE: lambda point: next(iter(point.rates), None),
    "gradient norm": lambda point: math.nan if point.has_nonfinite_gradient else point.norm,
}
"""The curves; NaN for a point with a non-finite value."""

CURVE_STYLES = ("good", "accent", "strong")
"""Styles of learning rate curves that are drawn below each other, in turn."""

LOG_SCALE_RATIO = 1e3
"""Ratio of the highest to the lowest value from which a curve is drawn logarithmically."""

_NAME_WIDTH = 15

Curve = Mapping[int, float | None]
"""Values by point."""


class TrainingData(Struct, frozen=True):
    """One step, the declared facts of its run, and the curves of the run by point."""

    step: training_step.TrainingStepRecord
    run_facts: Mapping[str, Any]
    window: timeline.StepWindow
    points: Mapping[int, CurvePoint]

    def title(self, name: str) -> str:
        """Return the name of a curve, with "highest" if its points are buckets of steps."""
        return f"highest {name}" if self.window.n_points < len(self.window) else name

    def values(self, name: str) -> dict[int, float | None]:
        """Return one of `CURVES` by point."""
        return {index: CURVES[name](point) for index, point in self.points.items()}


class TrainingPanel(base.Panel[TrainingData, NoOptions]):
    """Facts of a training step beside the curves of loss, learning rate and gradient norm."""

    name = "training"
    title = "Training"
    help = base.Help(
        "It shows an optimizer step: loss, learning rate, gradient norm before and after clipping, "
        "loss scaler and timings, and the curves of the run.",
        "A column of a curve is a step, or the highest value of several steps; '!' is a non-finite "
        "loss or gradient; the current step is marked; click a column to go there; learning rates "
        "that differ by group are drawn below each other, in the order of the title.",
        "Look for the step before the loss jumps: a gradient norm that rises, a learning rate that "
        "has just changed, steps that the loss scaler skipped.",
    )
    depends_on_size = True

    def load(self, source: Source, request: Request[NoOptions]) -> TrainingData:
        """Read the step, and the curves in as many points as there are columns."""
        place, reader = request.place, source.reader
        facts = base.require_training_facts(source, place)
        window = timeline.load_whole_run(reader, place, timeline.column_widths(request.width)[1])
        step = reader.training_step(place.generation, window.current, place.branch)
        if step is None:
            raise base.Missing(f"Step {window.current} is not a training step.")
        span, n_rates = (window.start, len(window), window.n_points), len(step.learning_rates)
        points = reader.training_curve(place.generation, *span, place.branch, n_rates=n_rates)
        return TrainingData(step, facts, window, points)

    def describe(self, data: TrainingData) -> list[str]:
        """Return the problem of the step if there is one, its facts, and the ranges of curves."""
        steps, rates = data.window.format_steps(), rate_curves(data.points)
        lines = [problem] if (problem := _describe_problem(data)) else []
        lines += [f"{name}: {value}" for name, value in step_facts(data)]
        for name in CURVES:
            if name == LEARNING_RATE and len(rates) > 1:
                named = ((groups, format_range(curve)) for groups, curve in rates)
                title = data.title(name)
                lines += [
                    f"{title} of group {groups} in {steps}: {span}." for groups, span in named
                ]
            else:
                lines.append(f"{data.title(name)} in {steps}: {format_range(data.values(name))}.")
        return lines

    def paint(self, data: TrainingData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw the facts with the curves beside or below them."""
        width, height, window = request.width, request.height, data.window
        pen, problem, facts = Pen(theme, width), _describe_problem(data), step_facts(data)
        left_pen = pen.resize(timeline.column_widths(width)[0])
        left = left_pen.paragraph(problem, "bad") if problem else []
        left += [strip for fact in facts for strip in _draw_fact(*fact, left_pen)]
        if left_pen.width < width:
            areas = timeline.stack_timelines([*CURVES], width, 0, height)
        else:
            room = max(height - min(len(facts) + bool(problem), height // 2), 0)
            areas = timeline.stack_timelines([*CURVES], width, 0, room, most=4)
            left = left[: max(height - sum(area.height + 1 for area in areas.values()), 0)]
            areas = {name: replace(area, y=area.y + len(left)) for name, area in areas.items()}
        drawn = (_draw_curve(name, data, area, theme) for name, area in areas.items())
        strips = timeline.draw_beside(left, [*chain.from_iterable(drawn)], height, pen)
        target = timeline.timeline_target(window, areas)
        return Picture(strips, window.format_steps(), bool(problem), target)


def _draw_fact(name: str, value: str, pen: Pen) -> list[Strip]:
    """Draw a fact, its value below itself where it is too long for a line."""
    values = pen.resize(max(pen.width - _NAME_WIDTH, 1)).paragraph(value)
    names = [clip_text(name, _NAME_WIDTH), *[""] * (len(values) - 1)]
    label = pen.resize(min(_NAME_WIDTH, pen.width))
    if label.width == pen.width:
        return [label.line((name, "muted"))]
    return join_blocks([label.line((one, "muted")) for one in names], values, pen.style("text"))


def _draw_curve(name: str, data: TrainingData, area: timeline.Area, theme: Theme) -> list[Strip]:
    """Draw one of `CURVES`; learning rates that differ by group below each other."""
    rates = rate_curves(data.points) if name == LEARNING_RATE else []
    if len(rates) > 1:
        return _draw_rates(rates, data.window, area, theme)
    curve = data.values(name)
    low, high = finite_bounds(curve.values())
    title = [(f"{data.title(name)} ", "title"), (format_range(curve), "text")]
    if any(value is not None and not math.isfinite(value) for value in curve.values()):
        title.append(("  ! NaN or Inf", "bad"))
    if low is not None and high is not None and 0 < low < high / LOG_SCALE_RATIO:
        title.append(("  logarithmic", "muted"))
        curve = {
            i: math.log10(max(v / low, 1.0)) if v and math.isfinite(v) else v
            for i, v in curve.items()
        }
    style = "good" if name == LEARNING_RATE else "accent"
    points = map(curve.get, range(data.window.n_points))
    return timeline.draw_timeline(title, points, data.window, area, theme, style=style)


def step_facts(data: TrainingData) -> list[tuple[str, str]]:
    """Return the facts of the step as (name, value)."""
    step = data.step
    rates = ("unknown" if math.isnan(rate) else format_number(rate) for rate in step.learning_rates)
    loss = f"{format_number(step.loss)} ({step.loss_source})" if step.has_loss else "not reported"
    counts = (step.n_exploding, step.n_vanishing, step.n_dead, step.n_nonfinite)
    kinds = ("exploding", "vanishing", "dead", "non-finite")
    bad = [f"{n} {kind}" for n, kind in zip(counts, kinds, strict=True) if n]
    parts = ("forward", "backward", "optimizer", "loader", "other")
    ms = (step.forward_ms, step.backward_ms, step.optimizer_ms, step.data_ms, step.other_ms)
    known = ((part, time) for part, time in zip(parts, ms, strict=True) if time is not None)
    times = ", ".join(f"{part} {format_number(time)}" for part, time in known)
    facts = [
        ("loss", loss),
        ("learning rate", " ".join(rates) or "-"),
        ("gradient norm", _format_norm(step)),
        ("parameters", ", ".join([f"{step.n_parameters} with gradient", *bad])),
        ("micro-batches", str(step.n_backward)),
        ("time", f"{times} ms"),
    ]
    if step.group_ratios:
        worst = max(filter(math.isfinite, step.group_ratios), default=math.nan)
        facts.append(("weights change", f"by {format_number(worst)} at most (group)"))
    if step.scale is not None:
        skipped = ", step skipped" if step.is_skipped else ""
        facts.append(("loss scale", f"{step.scale:g}{skipped}"))
    device = f"{step.device} {step.autocast}".strip()
    weights = base.format_placement(data.run_facts)
    if weights not in ("", step.device):
        device = f"{device or '-'}, weights on {weights}"
    return [
        *facts,
        ("device", escape_unprintable(device) or "-"),
        ("measured", escape_unprintable(step.detail) or "-"),
    ]


def _format_norm(step: training_step.TrainingStepRecord) -> str:
    norm = "not measured in this step"
    if step.total_norm is not None:
        norm = format_number(step.total_norm)
    if step.norm_before_clip is None:
        return norm
    before, limit = format_number(step.norm_before_clip), format_number(step.max_norm)
    return f"{norm}, clipped from {before} to {limit}"


def _describe_problem(data: TrainingData) -> str:
    producer = data.step.anomaly_origin
    return f"Step {data.window.current}: {describe_producer(producer)}" if producer else ""


def rate_curves(points: Mapping[int, CurvePoint]) -> list[tuple[str, Curve]]:
    """Return the distinct learning rate curves, each with the groups that have it: "0-2, 4"."""
    groups_by_curve: dict[tuple[float | None, ...], list[int]] = {}
    for group in range(max((len(point.rates) for point in points.values()), default=0)):
        rates = (point.rates[group : group + 1] for point in points.values())
        curve = tuple(rate[0] if rate else None for rate in rates)
        groups_by_curve.setdefault(curve, []).append(group)
    return [
        (format_ranges(groups), dict(zip(points, curve, strict=True)))
        for curve, groups in groups_by_curve.items()
    ]


def format_range(curve: Curve) -> str:
    """Return "0.001 to 0.1", one number if it is constant, or that no value is finite."""
    low, high = finite_bounds(curve.values())
    if low is None:
        return "unknown" if all(value is None for value in curve.values()) else "never finite"
    return format_number(low) if low == high else f"{format_number(low)} to {format_number(high)}"


def _draw_rates(
    curves: list[tuple[str, Curve]], window: timeline.StepWindow, area: timeline.Area, theme: Theme
) -> list[Strip]:
    """Draw curves below each other, as many as there are rows, under a title with their ranges."""
    shown = curves[: max(area.height, 0)]
    more = f" and {len(curves) - len(shown)} more" if len(shown) < len(curves) else ""
    title = "learning rate, group"
    texts = [f" {groups}: {format_range(curve)}" for groups, curve in shown]
    if len(title) + sum(map(len, texts)) + len(more) > area.width:  # only the highest rates fit
        title = "learning rate up to"
        texts = [
            f" {groups}: {format_number(finite_bounds(curve.values())[1])}"
            for groups, curve in shown
        ]
    spans = ((title, "title"), *zip(texts, cycle(CURVE_STYLES)), (more, "muted"))
    strips = [Pen(theme, area.width).line(*spans)]
    for i, (_, curve) in enumerate(shown):
        height = area.height * (i + 1) // len(shown) - area.height * i // len(shown)
        rows, style = replace(area, height=height), CURVE_STYLES[i % len(CURVE_STYLES)]
        points = map(curve.get, range(window.n_points))
        strips += timeline.draw_timeline((), points, window, rows, theme, style=style)
    return strips


_BAD_LEVEL, _MISSING_LEVEL = CIVIDIS_MISSING.size - 2, CIVIDIS_MISSING.size - 1
_MAX_LABEL_WIDTH = 18


class GradientStripData(Struct, frozen=True):
    """Norms, float64 (groups, points): NaN is non-finite, -1 was not measured."""

    groups: tuple[str, ...]
    norms: npt.NDArray[np.float64]
    window: timeline.StepWindow


class GradientStripPanel(base.Panel[GradientStripData, NoOptions]):
    """A row of cells for each parameter group, a column for each step or bucket of steps."""

    name = "gradstrip"
    title = "Gradient strip"
    help = base.Help(
        "It shows the norm of the gradients of each layer or module, from the first step of the "
        "run to the last.",
        "Dark is 1e-6 and below, bright is 10 and above, red is NaN or infinite, grey is not "
        "measured; a column of several steps shows their highest norm; click a column to go there.",
        "Look for rows that turn bright before the loss jumps, and for dark rows at the top: "
        "layers that the gradient does not reach.",
    )
    depends_on_size = True

    def load(self, source: Source, request: Request[NoOptions]) -> GradientStripData:
        """Read the norms in as many points as there are columns."""
        place = request.place
        base.require_training_facts(source, place)
        groups = source.reader.parameter_groups(place.generation)
        columns = request.width - _label_width(request.width, groups)
        window = timeline.load_whole_run(source.reader, place, columns)
        norms = source.reader.group_curve(
            place.generation, window.start, len(window), window.n_points, place.branch
        )
        if not norms:
            raise base.Missing("No gradient of this run is measured yet.")
        table = np.full((len(groups), window.n_points), -1.0)
        for (point, group), norm in norms.items():
            if 0 <= group < len(groups) and 0 <= point < window.n_points:
                table[group, point] = norm
        return GradientStripData(groups, table, window)

    def describe(self, data: GradientStripData) -> list[str]:
        """Return a line for each group: its norm at the current step, and its range."""
        steps = f"{data.window.format_steps()}; current step {data.window.current}"
        lines = [f"Gradient norms by group, {steps}."]
        width = max(map(len, data.groups), default=0)
        for group, row in zip(data.groups, data.norms, strict=True):
            measured = row[np.isfinite(row) & (row >= 0)]
            norm = float(row[data.window.current_point])
            current = "NaN/Inf" if math.isnan(norm) else "-" if norm < 0 else format_number(norm)
            low, high = map(format_number, finite_bounds(measured.tolist()))
            n_bad = int(np.isnan(row).sum())
            bad = f"  non-finite in {n_bad} of {len(row)}" if n_bad else ""
            name = escape_unprintable(group)
            lines.append(f"{name:<{width}}  {current:>8}  {low} to {high}{bad}")
        return lines

    def paint(self, data: GradientStripData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw all groups, or if there is no room those with the highest and lowest norms."""
        pen, window = Pen(theme, request.width), data.window
        rows, label = (
            _choose_groups(data, request.height - 1),
            pen.resize(_label_width(request.width, data.groups)),
        )
        columns = max(request.width - label.width, 1)
        each = window.columns_per_point(columns)
        cells = boxes(norm_levels(data.norms[rows]), CIVIDIS_MISSING, theme, cell_width=each)
        names = [_draw_group_name(data, row, label) for row in rows]
        mark = " " * window.current_column(columns) + "▼"
        body = join_blocks(names, cells, pen.style("text")) if rows else []
        strips = [pen.line((clip_text("group", label.width), "muted"), (mark, "chosen"))]
        strips += [strip.adjust_cell_length(pen.width, pen.style("text")) for strip in body]
        more = len(data.groups) - len(rows)
        note = window.format_steps() + (f", {more} more groups" if more else "")

        def target(x: int, y: int) -> base.Navigate | None:
            step = window.step_at(x - label.width, columns) if y > 0 else None
            return None if step is None else base.Navigate(step=step)

        return Picture(strips[: request.height], note, bool(np.isnan(data.norms).any()), target)


def norm_levels(norms: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Return levels of `CIVIDIS_MISSING`, logarithmic from vanishing to exploding norms."""
    with np.errstate(all="ignore"):
        logs = np.log10(np.where(norms > 0, norms, training_step.VANISHING_NORM))
    low, high = map(math.log10, (training_step.VANISHING_NORM, training_step.EXPLODING_NORM))
    levels = quantise(logs, low, high, _BAD_LEVEL)
    levels[norms < 0] = _MISSING_LEVEL
    levels[~np.isfinite(norms)] = _BAD_LEVEL
    return levels


def _choose_groups(data: GradientStripData, room: int) -> list[int]:
    """Return the groups to draw: all, or those with the highest and lowest norms."""
    n_groups = len(data.groups)
    if n_groups <= room:
        return list(range(n_groups))
    norms = np.nan_to_num(data.norms, nan=np.inf, posinf=np.inf)
    high, low = norms.max(axis=1), np.where(norms < 0, np.inf, norms).min(axis=1)
    n_dark = max(room, 0) // 2
    bright = np.argsort(-high, kind="stable")[: max(room, 0) - n_dark].tolist()
    dark = [row for row in np.argsort(low, kind="stable").tolist() if row not in bright]
    return sorted([*bright, *dark[:n_dark]])


def _draw_group_name(data: GradientStripData, row: int, pen: Pen) -> Strip:
    name = escape_unprintable(data.groups[row])
    short = name if len(name) < pen.width else "…" + name[-(pen.width - 2) :]
    return pen.line((short, "bad" if np.isnan(data.norms[row]).any() else "text"))


def _label_width(width: int, groups: Sequence[str]) -> int:
    longest = max(map(len, groups), default=0) + 1
    return min(max(longest, len("group ")), _MAX_LABEL_WIDTH, max(width // 3, 1))

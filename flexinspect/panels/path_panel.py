"""The path panel: which attention kernel each layer ran at each step, and with which mask."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar

from rich.style import Style
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import Span, line, wrap_paragraph
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import (
    Help,
    Missing,
    Navigate,
    NoOptions,
    Panel,
    Picture,
    Request,
    TracePlace,
)
from flexinspect.panels.source import Source
from flexinspect.records import prompt
from flexinspect.records.step import PATHS, BuildRecord, CallRecord, MaskRecord
from flexinspect.trace.queries.range_queries import (
    StepPath,
    branch_of_step,
    events_between,
    format_ranges,
    newest_step,
    step_events,
    step_paths,
)
from flexinspect.trace.reader import TraceReader

PATH_LETTERS: Mapping[str, str] = dict(zip(PATHS, "FCSE?", strict=True))
NO_CALL = "·"
_MAX_STEPS = 400
MAX_MASKS = 6

LayerRow = tuple[tuple[int, ...], str]
"""Layers that ran the same at every step of the window, and their letters, one per step."""


@dataclass(frozen=True, slots=True)
class StepDetails:
    """What is known of the current step beyond its paths.

    `gates` is the largest gate per layer, without the layers that have none; `compiled` are texts
    of events about compiling during the step; `asked` is the mask that the generation asked for,
    empty when none was declared. `swallowed` gives the layers that ran what they ran because of an
    exception, `handed` those whose kernel got another mask than they did, each by its words.
    """

    phase: str = ""
    declared_mask: str = ""
    backends: tuple[str, ...] = ()
    lse_errors: Mapping[int, float] = field(default_factory=dict)
    lse_check_kind: str = ""
    masks: Mapping[str, MaskRecord] = field(default_factory=dict)
    n_new: int = 0
    compiled: tuple[str, ...] = ()
    graphs_counted: bool = False
    suppressed_exceptions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    masks_passed_to_layer: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    builds: tuple[BuildRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class PathData:
    """The map of a window of steps, `start <= step < stop`, and the current step in detail.

    `letters` maps (step, layer) to what ran, `usual` a step to what most of its layers ran. `ran`
    and `before` are the rows of the current step and of the one before it.
    """

    place: TracePlace
    start: int
    stop: int
    last: int
    layers: tuple[int, ...]
    letters: Mapping[tuple[int, int], str]
    usual_letters: Mapping[int, str]
    current_paths: tuple[StepPath, ...]
    previous_paths: tuple[StepPath, ...]
    details: StepDetails

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths in the window, in the order of `PATHS`."""
        seen = set(self.letters.values())
        return tuple(path for path in PATHS if PATH_LETTERS[path] in seen)

    def odd_layers(self, step: int) -> list[int]:
        """Return the layers that ran something else than most layers of a step."""
        usual = self.usual_letters.get(step)
        found = ((layer, self.letters.get((step, layer))) for layer in self.layers)
        return [layer for layer, letter in found if letter not in (None, usual)]

    def format_steps(self) -> str:
        """Return "steps 3-9 of 0-40"."""
        word = "steps" if self.stop - self.start > 1 else "step"
        return f"{word} {format_ranges(range(self.start, self.stop))} of {format_ranges(range(self.last + 1))}"

    def layer_letters(self, layer: int) -> str:
        """Return a layer's letters, one per step of the window."""
        steps = range(self.start, self.stop)
        return "".join(self.letters.get((step, layer), NO_CALL) for step in steps)


def load_paths(reader: TraceReader, place: TracePlace, n_columns: int) -> PathData:
    """Read the window of steps that fits in `n_columns` (one query) and the current step.

    Raises `Missing` when no step, or no call of these steps, is recorded.
    """
    last = newest_step(reader, place.generation, place.branch)
    if last is None:
        raise Missing("No step of this generation is recorded yet.", "Wait for its first step.")
    start, stop = step_bounds_around(place.step, last, n_columns)
    found = step_paths(
        reader, place.generation, max(min(start, place.step - 1), 0), stop, place.branch
    )
    if not any(one.step >= start for one in found):
        raise Missing(
            f"No attention call is recorded in steps {format_ranges(range(start, stop))}.",
            "The attention hook records them at every level; 'flexinspect dump' shows whether it "
            "was switched off.",
        )
    letters, usual = path_map(found)
    ran = tuple(one for one in found if one.step == place.step)
    before = tuple(one for one in found if one.step == place.step - 1)
    layers = tuple(sorted({layer for _, layer in letters}))
    now = _load_details(reader, place, (*ran, *before))
    return PathData(place, start, stop, last, layers, letters, usual, ran, before, now)


def step_bounds_around(step: int, last: int, n_columns: int) -> tuple[int, int]:
    """Return the range of steps around `step` that fits in `n_columns`, within 0 to `last`."""
    size = min(max(n_columns, 1), _MAX_STEPS, last + 1)
    start = max(0, min(step - size // 2, last + 1 - size))
    return start, start + size


def path_map(found: Sequence[StepPath]) -> tuple[dict[tuple[int, int], str], dict[int, str]]:
    """Return the letter of every (step, layer) and the usual letter of every step.

    Where a layer was called several times in a step, the call that differs from the usual counts.
    """
    letters: dict[tuple[int, int], str] = {}
    usual: dict[int, str] = {}
    for step, rows in groupby(found, key=lambda one: one.step):
        calls = [(PATH_LETTERS.get(one.path, "?"), one.layers) for one in rows]
        counts: Counter[str] = Counter()
        for letter, layers in calls:
            counts[letter] += len(layers)
        usual[step] = max(counts, key=lambda letter: (counts[letter], -"FCSE?".index(letter)))
        for letter, layers in calls:
            for layer in layers:
                if letter != usual[step] or (step, layer) not in letters:
                    letters[step, layer] = letter
    return letters, usual


def _load_details(reader: TraceReader, place: TracePlace, near: Iterable[StepPath]) -> StepDetails:
    branch = branch_of_step(reader, place.generation, place.step, place.branch)
    key = (place.generation, place.step, branch)
    step, about = reader.step(*key), reader.generation(place.generation)
    calls = reader.calls(*key)
    names = list(dict.fromkeys(one.mask for one in near if one.mask is not None))[:MAX_MASKS]
    masks = {name: mask for name in names if (mask := reader.mask_summary(name)) is not None}
    events = step_events(
        reader, place.generation, place.step, place.step + 1, like="%compil%", limit=5
    )
    if step is not None and math.isfinite(step.started_at + step.wall_ms):
        end = step.started_at + step.wall_ms / 1e3
        events += events_between(reader, step.started_at, end, like="%compil%", limit=5)
    return StepDetails(
        phase=step.phase if step else "",
        declared_mask=about.mask if {*about.declared} - {*prompt.DECLARED_SEGMENT_KEYS} else "",
        backends=tuple(dict.fromkeys(call.backend for call in calls)),
        lse_errors=_lse_errors(calls),
        lse_check_kind=next((call.gate_kind for call in calls if call.gate_kind), ""),
        masks=masks,
        n_new=len(reader.fingerprints(*key)),
        compiled=tuple(f"{row.event.kind}: {row.event.text}" for row in events),
        graphs_counted=bool(reader.run().get("graphs_counted")),
        suppressed_exceptions=_layers_by_text((call.swallowed, call.layer) for call in calls),
        masks_passed_to_layer=_layers_by_text((call.handed, call.layer) for call in calls),
        builds=tuple(reader.builds(*key)),
    )


def _layers_by_text(pairs: Iterable[tuple[str | None, int]]) -> dict[str, tuple[int, ...]]:
    """Return the layers of each word that there is."""
    found: dict[str, dict[int, None]] = {}
    for words, layer in pairs:
        if words is not None:
            found.setdefault(words, {})[layer] = None
    return {words: tuple(layers) for words, layers in found.items()}


def _lse_errors(calls: Iterable[CallRecord]) -> dict[int, float]:
    """Return the largest gate of each layer; one that is not a number is worse than any."""
    gates: dict[int, float] = {}
    for call in calls:
        if call.gate is not None:
            pair = (call.gate, gates.get(call.layer, 0.0))
            gates[call.layer] = math.nan if any(map(math.isnan, pair)) else max(pair)
    return gates


def merge_layers(data: PathData) -> list[LayerRow]:
    """Return neighbouring layers that ran the same throughout the window as one row."""
    pairs = [(data.layer_letters(layer), layer) for layer in data.layers]
    return [
        (tuple(layer for _, layer in run), letters)
        for letters, run in groupby(pairs, key=lambda pair: pair[0])
    ]


_PATH_COLORS: Mapping[str, int] = {"F": 0, "C": 2, "S": 1, "E": 3, "?": 6}
"""Which of the look's backgrounds a path has."""

_LABEL_WIDTH, _LSE_CHECK_WIDTH = 8, 8


class PathPanel(Panel[PathData, NoOptions]):
    """Layers down, steps across, one letter and colour per kernel path."""

    name: ClassVar[str] = "path"
    title: ClassVar[str] = "Path"
    needs_tokens: ClassVar[bool] = True
    help: ClassVar[Help] = Help(
        "It shows which attention kernel every layer really ran at every step, and with which "
        "mask.",
        "Layers go down, steps go across; F is uncompiled flex, C compiled flex, S sdpa, E eager, "
        "? another backend, · no call recorded; click a cell to go there.",
        "Look for a letter that differs from the rest of its column: that layer fell back without "
        "a word, and your mask may not have run in it.",
    )
    depends_on_size: ClassVar[bool] = True

    def options(self) -> NoOptions:
        """Return the options; there are none."""
        return NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> PathData:
        """Read the window of steps that fits the width, in one query, and the current step."""
        return load_paths(
            source.reader, request.place, request.width - _LABEL_WIDTH - _LSE_CHECK_WIDTH
        )

    def describe(self, data: PathData) -> list[str]:
        """Return what ran: the layers that differ first, then the current step, then the map."""
        return [*describe_warnings(data), *describe_step(data), *describe_map(data)]

    def paint(self, data: PathData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw the map, and as much of the current step in words as there is room for."""
        width, height = request.width, request.height
        words = _draw_description(data, width, theme)
        room = _map_height(data, request)
        rows, top = shown_rows(data, room)
        strips = [_axis(data, width, theme)]
        strips += [_map_row(data, row, width, theme) for row in rows[top : top + room]]
        strips.append(_legend(data, width, theme))
        odd = describe_warnings(data)
        note = odd[0] if odd else data.format_steps()
        return Picture([*strips, *words][:height], escape_unprintable(note), alarm=bool(odd))

    def on_mouse(
        self, x: int, y: int, data: PathData, request: Request[NoOptions], *, click: bool
    ) -> Navigate | None:
        """Go to the step and layer of the cell that was clicked."""
        room = _map_height(data, request)
        rows, top = shown_rows(data, room)
        column = (x - _LABEL_WIDTH) // _cell_width(data, request.width)
        index = top + y - 1
        if not click or x < _LABEL_WIDTH or not 1 <= y <= room or index >= len(rows):
            return None
        step = data.start + column
        if step >= data.stop:
            return None
        layers = rows[index][0]
        layer = data.place.layer if data.place.layer in layers else layers[0]
        return Navigate(step=step, layer=layer)


def _map_height(data: PathData, request: Request[NoOptions]) -> int:
    """Return how many rows the map may take: what the words leave, and three fifths at least."""
    n_words = len(_draw_description(data, request.width, Theme("none")))
    height = request.height
    return max(min(height - 2, max(height * 3 // 5, height - 2 - n_words)), 0)


def shown_rows(data: PathData, room: int) -> tuple[list[LayerRow], int]:
    """Return the rows of the map and the first that is shown: each layer, or merged to fit."""
    rows: list[LayerRow] = [((layer,), data.layer_letters(layer)) for layer in data.layers]
    if len(rows) > room:
        rows = merge_layers(data)
    here = next((i for i, (layers, _) in enumerate(rows) if data.place.layer in layers), 0)
    return rows, max(0, min(here - room // 2, len(rows) - room))


def _cell_width(data: PathData, width: int) -> int:
    fits = (width - _LABEL_WIDTH - _LSE_CHECK_WIDTH) // max(data.stop - data.start, 1)
    return max(1, min(fits, 3))


def _axis(data: PathData, width: int, theme: Theme) -> Strip:
    cell = _cell_width(data, width)
    n_cells = (data.stop - data.start) * cell
    marks = [" "] * (n_cells + 8)
    here = (data.place.step - data.start) * cell + cell // 2
    if 0 <= here < n_cells:
        _write_marks(marks, here, f"▾{data.place.step}")
    offset = cell // 2  # above the letter, which stands in the middle of its cell
    stride = 10 if cell == 1 else 5 if cell == 2 else 2
    for step in range(-(-data.start // stride) * stride, data.stop, stride):
        at = (step - data.start) * cell + offset
        if at + len(str(step)) <= n_cells and all(
            mark == " " for mark in marks[max(at - 1, 0) : at + len(str(step)) + 1]
        ):
            _write_marks(marks, at, str(step))
    axis = "".join(marks)[: n_cells + (8 if not data.details.lse_errors else 0)]
    spans_ = [("step".ljust(_LABEL_WIDTH), theme.style("muted")), (axis, theme.style("muted"))]
    if data.details.lse_errors:
        spans_.append((" gate", theme.style("muted")))
    return line(spans_, width, theme.style("text"))


def _write_marks(marks: list[str], at: int, text: str) -> None:
    at = min(at, len(marks) - len(text))
    marks[at : at + len(text)] = text


def _map_row(data: PathData, row: LayerRow, width: int, theme: Theme) -> Strip:
    layers, letters = row
    chosen = data.place.layer in layers
    label = f"{'▸' if chosen else ' '}{format_ranges(layers)}"[: _LABEL_WIDTH - 1].ljust(
        _LABEL_WIDTH
    )
    pieces: list[Span] = [(label, theme.style("chosen" if chosen else "muted"))]
    cell = _cell_width(data, width)
    styled = [
        (letter, _cell_style(data, data.start + column, letter, theme))
        for column, letter in enumerate(letters)
    ]
    for style, run in groupby(styled, key=lambda pair: pair[1]):
        pieces.append(("".join(letter.center(cell) for letter, _ in run), style))
    gates = [data.details.lse_errors[layer] for layer in layers if layer in data.details.lse_errors]
    if gates:
        worst = math.nan if any(math.isnan(error) for error in gates) else max(gates)
        pieces.append((f" {worst:.0e}" if worst else " 0", theme.style("muted")))
    return line(pieces, width, theme.style("text"))


def _cell_style(data: PathData, step: int, letter: str, theme: Theme) -> Style:
    if letter == NO_CALL:
        return theme.style("muted")
    if letter != data.usual_letters.get(step):
        return theme.style("bad") + Style(reverse=True)
    if step == data.place.step:
        return theme.style("cursor")
    return theme.style("text") if theme.no_color else theme.segment_style(_PATH_COLORS[letter])


def _legend(data: PathData, width: int, theme: Theme) -> Strip:
    pieces: list[Span] = []
    for path in data.paths:
        letter = PATH_LETTERS[path]
        style = (
            theme.style("strong") if theme.no_color else theme.segment_style(_PATH_COLORS[letter])
        )
        pieces += [(letter, style), (f" {path}  ", theme.style("muted"))]
    return line(pieces, width, theme.style("text"))


def _draw_description(data: PathData, width: int, theme: Theme) -> list[Strip]:
    odd = [
        strip
        for text in describe_warnings(data)
        for strip in wrap_paragraph(text, width, theme.style("bad"))
    ]
    rest = [
        strip
        for text in describe_step(data)
        for strip in wrap_paragraph(text, width, theme.style("text"))
    ]
    return [*odd, *rest]


_FLEX_LETTERS = (PATH_LETTERS["flex uncompiled"], PATH_LETTERS["flex compiled"])


def _path_name(letter: str) -> str:
    return next((path for path, known in PATH_LETTERS.items() if known == letter), "nothing")


def _format_layers(layers: Sequence[int]) -> str:
    return f"{'Layers' if len(set(layers)) > 1 else 'Layer'} {format_ranges(layers)}"


def describe_warnings(data: PathData) -> list[str]:
    """Return the layers that ran something else than the others, the current step first."""
    here = data.place.step
    found = [
        *_describe_suppressed(data),
        *_describe_odd_layers(data),
        *_describe_missing_flex(data),
    ]
    steps: dict[tuple[int, ...], list[int]] = {}
    for step in range(data.start, data.stop):
        odd = tuple(data.odd_layers(step))
        if odd and step != here:
            steps.setdefault(odd, []).append(step)
    for layers, at in list(steps.items())[:5]:
        word = "steps" if len(at) > 1 else "step"
        found.append(
            f"{_format_layers(layers)} differed from the other layers at {word} {format_ranges(at)}."
        )
    return found


def _describe_suppressed(data: PathData) -> list[str]:
    return [
        f"{_format_layers(layers)} ran {_format_paths(data, layers)} because of an exception that the program "
        f"swallowed: {escape_unprintable(error)}"
        for error, layers in data.details.suppressed_exceptions.items()
    ]


def _format_paths(data: PathData, layers: Sequence[int]) -> str:
    letters = {data.letters.get((data.place.step, layer), "") for layer in layers}
    return " and ".join(sorted(map(_path_name, letters)))


def _describe_odd_layers(data: PathData) -> list[str]:
    here, found = data.place.step, []
    for path in PATHS:
        odd = [n for n in data.odd_layers(here) if data.letters[here, n] == PATH_LETTERS[path]]
        if odd:
            usual = _path_name(data.usual_letters[here])
            found.append(
                f"{_format_layers(odd)} ran {path} at step {here}; most layers ran {usual} there."
            )
    return found


def _describe_missing_flex(data: PathData) -> list[str]:
    here, asked = data.place.step, data.details.declared_mask
    usual = data.usual_letters.get(here)
    if not asked or usual is None or usual in _FLEX_LETTERS:
        return []
    ran = f"Step {here} ran {_path_name(usual)}, not FlexAttention"
    return [f"{ran}, though the mask {escape_unprintable(asked)} was asked for."]


def describe_step(data: PathData) -> list[str]:
    step, now = data.place.step, data.details
    if not data.current_paths:
        return [f"No attention call is recorded at step {step}."]
    phase = f" ({escape_unprintable(now.phase)})" if now.phase else ""
    return [
        f"Step {step}{phase} of generation {data.place.generation}:",
        *_describe_path_change(data),
        *_describe_masks(data),
        *_describe_replaced_masks(now),
        *_describe_builds(now),
        _describe_mask_change(data),
        f"Masks first seen at this step: {now.n_new}.",
        *_describe_compiling(now),
        _describe_lse_check(now),
        f"Dispatched as {', '.join(map(escape_unprintable, now.backends)) or 'unknown'}.",
    ]


def _describe_path_change(data: PathData) -> list[str]:
    here = data.place.step
    now, before = data.usual_letters.get(here), data.usual_letters.get(here - 1)
    if now is None or before is None or now == before:
        return []
    return [
        f"Most layers ran {_path_name(now)} at this step and {_path_name(before)} at the one before."
    ]


def _describe_masks(data: PathData) -> list[str]:
    found = []
    for one in data.current_paths[:MAX_MASKS]:
        mask = f"mask {escape_unprintable(one.mask)[:8]}" if one.mask else "no mask"
        about = format_mask(data.details.masks.get(one.mask or ""))
        found.append(
            f"{_format_layers(one.layers)}: {escape_unprintable(one.path)}, {mask}{about}."
        )
    more = len(data.current_paths) - MAX_MASKS
    return [*found, f"And {more} more kinds of calls."] if more > 0 else found


def _describe_replaced_masks(details: StepDetails) -> list[str]:
    return [
        f"{_format_layers(layers)} got the mask '{escape_unprintable(words)}', and another one reached the kernel."
        for words, layers in details.masks_passed_to_layer.items()
    ]


def _describe_builds(details: StepDetails) -> list[str]:
    if not details.builds:
        return []
    ms = sum(build.wall_ms for build in details.builds if build.wall_ms == build.wall_ms)
    grown = sum(build.peak_growth for build in details.builds) / (1 << 20)
    sizes = {(build.q_len, build.kv_len) for build in details.builds}
    grids = ", ".join(f"{q} x {kv}" for q, kv in sorted(sizes)[:3])
    peak = f"; the peak of memory grew by {grown:.0f} MiB" if grown >= 1 else ""
    n = len(details.builds)
    masks = f"{n} block mask{'s were' if n > 1 else ' was'} built"
    return [f"{masks} for this step ({grids}) in {ms:.1f} ms{peak}."]


def format_mask(mask: MaskRecord | None) -> str:
    """Return ", 1 x 74, block 128x128, rule causal" for a mask, nothing for an unknown one."""
    if mask is None:
        return ""
    parts = [f"{mask.q_len} x {mask.kv_len} cells"]
    if mask.kind != "block":
        parts.append(escape_unprintable(mask.kind))
    if mask.block_q is not None:
        parts.append(f"block {mask.block_q}x{mask.block_kv}")
    if mask.rule:
        parts.append(f"rule {short_mask_mod(mask.rule)}")
    return ", " + ", ".join(parts)


def short_mask_mod(name: str) -> str:
    """Return the telling end of a rule's qualified name: module and outermost function."""
    outer = name.split(".<locals>")[0]
    return escape_unprintable(".".join(outer.split(".")[-2:]))


def _describe_mask_change(data: PathData) -> str:
    step = data.place.step
    if step == 0 or not data.previous_paths:
        return "There is no step before this one to compare its masks with."
    now, before = _masks_by_layer(data.current_paths), _masks_by_layer(data.previous_paths)
    if now == before:
        return f"Every layer got the mask it had at step {step - 1}."
    layers = [n for n in now if now[n] != before.get(n)]
    known = data.details.masks
    old, new = (_mask_mods({m for n in layers for m in g.get(n, ())}, known) for g in (before, now))
    changed = f"The fingerprint changed since step {step - 1} in {_format_layers(layers).lower()}"
    if not old or not new:
        return f"{changed}; their rules are not known."
    if old == new:
        return f"{changed}, by the same rule."
    return f"{changed}; the rule, too: {', '.join(sorted(old))} → {', '.join(sorted(new))}."


def _masks_by_layer(ran: Iterable[StepPath]) -> dict[int, tuple[str, ...]]:
    by_layer: dict[int, set[str]] = {}
    for one in ran:
        for layer in one.layers:
            by_layer.setdefault(layer, set()).add(one.mask or "")
    return {layer: tuple(sorted(masks)) for layer, masks in by_layer.items()}


def _mask_mods(names: Iterable[str], known: Mapping[str, MaskRecord]) -> set[str]:
    found = [known.get(name) for name in names]
    if any(mask is None or not mask.rule for mask in found):
        return set()
    return {short_mask_mod(mask.rule or "") for mask in found if mask is not None}


def _describe_compiling(details: StepDetails) -> list[str]:
    """Say what was compiled, and what is known of recompiles."""
    lines = (
        [f"During this step: {'; '.join(map(escape_unprintable, details.compiled))}."]
        if details.compiled
        else []
    )
    if any("recompil" in text.lower() for text in details.compiled):
        return lines
    return [
        *lines,
        f"Recompiles: {'none in this step' if details.graphs_counted else 'not recorded'}.",
    ]


def _describe_lse_check(details: StepDetails) -> str:
    if not details.lse_errors:
        return "Gate: not computed; level advanced checks every layer that gives its LSE."
    nan_layers = [layer for layer, error in details.lse_errors.items() if math.isnan(error)]
    if nan_layers:
        return f"Gate: not a number in {_format_layers(nan_layers).lower()}."
    layer = max(details.lse_errors, key=lambda n: details.lse_errors[n])
    how = f" ({escape_unprintable(details.lse_check_kind)})" if details.lse_check_kind else ""
    return f"Gate: at most {details.lse_errors[layer]:.1e} off 1, in layer {layer}{how}."


def describe_map(data: PathData) -> list[str]:
    found = [f"{data.format_steps().capitalize()}, by layers:"]
    for layers, letters in merge_layers(data):
        parts, step = [], data.start
        for letter, run in groupby(letters):
            n = len(list(run))
            parts.append(f"{_path_name(letter)} at {format_ranges(range(step, step + n))}")
            step += n
        more = f", and {len(parts) - 8} more changes" if len(parts) > 8 else ""
        found.append(f"  {_format_layers(layers).lower()}: {', '.join(parts[:8])}{more}")
    return found[:60]

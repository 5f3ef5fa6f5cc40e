"""The path panel: which attention kernel each layer ran at each step, and with which mask."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
from msgspec import Struct
from rich.style import Style
from textual.strip import Strip

from flexinspect.core.text import (
    capitalize,
    escape_unprintable,
    format_numbers,
    format_ranges,
    plural,
)
from flexinspect.drawing.text_lines import NamedSpan, Pen, merge_spans, visible
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import segment_style
from flexinspect.panels import base
from flexinspect.panels.base import Picture, Request
from flexinspect.panels.panel_source import Source
from flexinspect.panels.timeline import StepWindow, no_steps, step_window
from flexinspect.records import prompt
from flexinspect.records.step import PATHS, UNKNOWN_PATH, BuildRecord, CallRecord, MaskRecord
from flexinspect.trace import queries
from flexinspect.trace.query_results import StepRow
from flexinspect.trace.reader import TraceReader

_LETTERS = "FCSE?-"
PATH_LETTERS: Mapping[str, str] = dict(zip((*PATHS, UNKNOWN_PATH), _LETTERS, strict=True))
_PATH_NAMES = {letter: path for path, letter in PATH_LETTERS.items()}
NO_CALL = "·"
MAX_MASKS = 6

_FLEX_LETTERS = (PATH_LETTERS["flex uncompiled"], PATH_LETTERS["flex compiled"])
_PATH_COLORS: Mapping[str, int] = {"F": 0, "C": 2, "S": 1, "E": 3, "?": 6, "-": 4}
"""The number of the theme's segment style of each path."""

_MAX_STEPS = 400
_LABEL_WIDTH, _LSE_CHECK_WIDTH = 8, 8

LayerRow = tuple[tuple[int, ...], str]
"""Layers with the same path at every step of the window, and their letters, one per step."""


class PathData(Struct, frozen=True):
    """The map of a window of steps, and the current step in detail.

    `letters` maps (step, layer) to the letter of the path, `usual_letters` a step to that of most
    of its layers. `paths` are those of the current step, `previous_paths` those of the one before.

    `declared_mask` is the declared mask of the generation, empty without one. `calls`, `builds` and
    `phase` are those of the current step. `lse_errors` is the largest error of the LSE check per
    layer, without unchecked layers; `n_new` counts the masks first seen at this step; `compiled`
    are the texts of compile events during it.
    """

    place: base.TracePlace
    window: StepWindow
    layers: tuple[int, ...]
    letters: Mapping[tuple[int, int], str]
    usual_letters: Mapping[int, str]
    paths: tuple[queries.StepPath, ...]
    previous_paths: tuple[queries.StepPath, ...]
    phase: str
    declared_mask: str
    calls: tuple[CallRecord, ...]
    lse_errors: Mapping[int, float]
    masks: Mapping[str, MaskRecord]
    n_new: int
    compiled: tuple[str, ...]
    graphs_counted: bool
    builds: tuple[BuildRecord, ...]

    def odd_layers(self, step: int) -> list[int]:
        """Return the layers whose path differs from that of most layers of a step."""
        usual = self.usual_letters.get(step)
        letters = ((layer, self.letters.get((step, layer))) for layer in self.layers)
        return [layer for layer, letter in letters if letter not in (None, usual)]

    def layer_letters(self, layer: int) -> str:
        """Return a layer's letters, one per step of the window."""
        return "".join(self.letters.get((step, layer), NO_CALL) for step in self.window.steps)


def path_map(
    paths: Sequence[queries.StepPath],
) -> tuple[dict[tuple[int, int], str], dict[int, str]]:
    """Return the letter of every (step, layer) and the usual letter of every step.

    If a layer was called several times in a step, a call with an unusual path takes precedence.
    """
    letters: dict[tuple[int, int], str] = {}
    usual: dict[int, str] = {}
    for step, rows in groupby(paths, key=lambda path: path.step):
        calls = [(PATH_LETTERS.get(path.path, "?"), path.layers) for path in rows]
        counts = Counter(letter for letter, layers in calls for _ in layers)
        usual[step] = max(counts, key=lambda letter: (counts[letter], -_LETTERS.index(letter)))
        for letter, layers in calls:
            for layer in layers:
                if letter != usual[step] or (step, layer) not in letters:
                    letters[step, layer] = letter
    return letters, usual


def _largest_lse_errors(calls: Iterable[CallRecord]) -> dict[int, float]:
    """Return the largest error of the LSE check per layer; NaN counts as the largest."""
    errors: dict[int, float] = {}
    for call in calls:
        if call.lse_error is not None:
            errors[call.layer] = float(np.maximum(call.lse_error, errors.get(call.layer, 0.0)))
    return errors


def _load_compile_events(
    reader: TraceReader, generation: int, number: int, step: StepRow | None
) -> tuple[str, ...]:
    """Return the texts of compile events of the step, or at the time of the step."""
    pattern = ("%compil%", 5)
    events = queries.matching_events(reader, generation, number, number + 1, *pattern)
    if step is not None and math.isfinite(step.started_at + step.wall_ms):
        end = step.started_at + step.wall_ms / 1e3
        events += queries.matching_events(reader, None, step.started_at, end, *pattern)
    return tuple(f"{row.event.kind}: {row.event.text}" for row in events)


def _load_masks(reader: TraceReader, paths: Iterable[queries.StepPath]) -> dict[str, MaskRecord]:
    names = dict.fromkeys(path.mask for path in paths if path.mask is not None)
    found = ((name, reader.mask_summary(name)) for name in [*names][:MAX_MASKS])
    return {name: mask for name, mask in found if mask is not None}


def _layers_by_text(pairs: Iterable[tuple[str | None, int]]) -> dict[str, tuple[int, ...]]:
    layers_by_text: dict[str, tuple[int, ...]] = {}
    for text, layer in dict.fromkeys(pairs):
        if text is not None:
            layers_by_text[text] = (*layers_by_text.get(text, ()), layer)
    return layers_by_text


def merge_layers(data: PathData) -> list[LayerRow]:
    """Merge neighbouring layers with the same path at every step of the window."""
    return [(tuple(run), letters) for letters, run in groupby(data.layers, data.layer_letters)]


class PathPanel(base.Panel[PathData, base.NoOptions]):
    """Layers down, steps across, one letter and colour per kernel path."""

    name = "path"
    title = "Path"
    needs_tokens = True
    help = base.Help(
        "It shows which attention kernel every layer ran at every step, and with which mask.",
        "Layers go down, steps go across; F is uncompiled flex, C compiled flex, S sdpa, E eager, "
        "? another backend, - a kernel that the source of an imported trace does not name, · no "
        "call recorded; click a cell to go there.",
        "Look for a letter that differs from the rest of its column: that layer silently fell "
        "back to another kernel, and may not have applied your mask.",
    )
    depends_on_size = True

    def load(self, source: Source, request: Request[base.NoOptions]) -> PathData:
        """Read the window of steps that fits the width, in one query, and the current step."""
        reader, place = source.reader, request.place
        generation, step, branch = place.generation, place.step, place.branch
        last = queries.newest_step(reader, generation, branch)
        if last is None:
            raise no_steps(reader)
        n_columns = request.width - _LABEL_WIDTH - _LSE_CHECK_WIDTH
        window = step_window(step, 0, last, n_columns, most=_MAX_STEPS)
        first = max(min(window.start, step - 1), 0)
        found = queries.step_paths(reader, generation, first, window.stop, branch)
        if not any(path.step >= window.start for path in found):
            missing = f"No attention call is recorded in {window.format_steps()}."
            raise base.Missing(missing, base.hook_hint(source, "attention", "them"))
        letters, usual_letters = path_map(found)
        paths = tuple(path for path in found if path.step == step)
        previous_paths = tuple(path for path in found if path.step == step - 1)
        key = (generation, step, queries.branch_of_step(reader, generation, step, branch))
        row, about, calls = reader.step(*key), reader.generation(generation), reader.calls(*key)
        has_declaration = {*about.declared} - {*prompt.DECLARED_SEGMENT_KEYS}
        return PathData(
            place=place,
            window=window,
            layers=tuple(sorted({layer for _, layer in letters})),
            letters=letters,
            usual_letters=usual_letters,
            paths=paths,
            previous_paths=previous_paths,
            phase=row.phase if row else "",
            declared_mask=about.mask if has_declaration else "",
            calls=tuple(calls),
            lse_errors=_largest_lse_errors(calls),
            masks=_load_masks(reader, (*paths, *previous_paths)),
            n_new=len(reader.fingerprints(*key)),
            compiled=_load_compile_events(reader, generation, step, row),
            graphs_counted=bool(reader.run().get("graphs_counted")),
            builds=tuple(reader.builds(*key)),
        )

    def describe(self, data: PathData) -> list[str]:
        """Return the layers that differ, then the current step, then the map."""
        return [*describe_warnings(data), *describe_step(data), *describe_map(data)]

    def paint(self, data: PathData, request: Request[base.NoOptions], theme: Theme) -> Picture:
        """Draw the map, and as much of the description of the step as there is room for."""
        pen, height, window = Pen(theme, request.width), request.height, data.window
        warnings, described = describe_warnings(data), describe_step(data)
        texts = [*((text, "bad") for text in warnings), *((text, "text") for text in described)]
        description = pen.paragraphs(texts)
        # What the description leaves, and at least three fifths.
        room = max(min(height - 2, max(height * 3 // 5, height - 2 - len(description))), 0)
        rows: list[LayerRow] = [((layer,), data.layer_letters(layer)) for layer in data.layers]
        if len(rows) > room:
            rows = merge_layers(data)
        current = next((i for i, (layers, _) in enumerate(rows) if data.place.layer in layers), 0)
        shown = rows[visible(current, room, len(rows))]
        strips = [_axis(data, pen), *(_map_row(data, row, pen) for row in shown)]
        strips += [_legend(data, pen), *description]
        note = escape_unprintable(warnings[0] if warnings else window.format_steps())

        def target(x: int, y: int) -> base.Navigate | None:
            step = window.start + (x - _LABEL_WIDTH) // _cell_width(data, pen.width)
            if step not in window.steps or not 1 <= y <= len(shown):
                return None
            layers = shown[y - 1][0]
            layer = data.place.layer if data.place.layer in layers else layers[0]
            return base.Navigate(step=step, layer=layer)

        return Picture(strips[:height], note, bool(warnings), target)


def _cell_width(data: PathData, width: int) -> int:
    fits = (width - _LABEL_WIDTH - _LSE_CHECK_WIDTH) // len(data.window)
    return max(1, min(fits, 3))


def _axis(data: PathData, pen: Pen) -> Strip:
    window, cell = data.window, _cell_width(data, pen.width)
    n_cells = len(window) * cell
    marks = [" "] * (n_cells + 8)
    offset = cell // 2  # above the letter, which is in the middle of its cell
    current = (data.place.step - window.start) * cell + offset
    if 0 <= current < n_cells:
        name = f"▾{data.place.step}"
        current = min(current, len(marks) - len(name))
        marks[current : current + len(name)] = name
    stride = 10 if cell == 1 else 5 if cell == 2 else 2
    for step in range(-(-window.start // stride) * stride, window.stop, stride):
        at = (step - window.start) * cell + offset
        end = at + len(str(step))
        if end <= n_cells and set(marks[max(at - 1, 0) : end + 1]) == {" "}:
            marks[at:end] = str(step)
    n_shown, check = (n_cells, " check") if data.lse_errors else (n_cells + 8, "")
    return pen.line((f"{'step':<{_LABEL_WIDTH}}{''.join(marks)[:n_shown]}{check}", "muted"))


def _map_row(data: PathData, row: LayerRow, pen: Pen) -> Strip:
    layers, letters = row
    current = data.place.layer in layers
    label = f"{'▸' if current else ' '}{format_ranges(layers)}"[: _LABEL_WIDTH - 1]
    spans: list[NamedSpan] = [(label.ljust(_LABEL_WIDTH), "chosen" if current else "muted")]
    cell = _cell_width(data, pen.width)
    spans += merge_spans(
        (letter.center(cell), _cell_style(data, step, letter, pen.theme))
        for step, letter in zip(data.window.steps, letters, strict=True)
    )
    errors = [error for layer, error in data.lse_errors.items() if layer in layers]
    if errors:
        worst = np.max(errors)
        spans.append((f" {worst:.0e}" if worst else " 0", "muted"))
    return pen.line(*spans)


def _cell_style(data: PathData, step: int, letter: str, theme: Theme) -> Style:
    if letter == NO_CALL:
        return theme.style("muted")
    if letter != data.usual_letters.get(step):
        return theme.style("bad") + Style(reverse=True)
    if step == data.place.step:
        return theme.style("cursor")
    return theme.style("text") if theme.no_color else segment_style(_PATH_COLORS[letter], 0, False)


def _legend(data: PathData, pen: Pen) -> Strip:
    spans: list[NamedSpan] = []
    for path, letter in PATH_LETTERS.items():
        if letter in data.letters.values():
            color = segment_style(_PATH_COLORS[letter], 0, False)
            spans += [(letter, "strong" if pen.theme.no_color else color), (f" {path}  ", "muted")]
    return pen.line(*spans)


def _path_name(letter: str) -> str:
    return _PATH_NAMES.get(letter, "nothing")


def _format_layers(layers: Iterable[int]) -> str:
    return capitalize(format_numbers("layer", sorted(set(layers))))


def describe_warnings(data: PathData) -> list[str]:
    """Return the layers whose path differs from that of the others, the current step first."""
    lines = []
    suppressed = _layers_by_text((c.suppressed_exception, c.layer) for c in data.calls)
    for error, layers in suppressed.items():
        letters = {data.letters.get((data.place.step, layer), "") for layer in layers}
        lines.append(
            f"{_format_layers(layers)} ran {' and '.join(sorted(map(_path_name, letters)))} "
            f"because the program suppressed an exception: {escape_unprintable(error)}"
        )
    step, usual = data.place.step, data.usual_letters.get(data.place.step)
    for path in PATHS:
        odd = [n for n in data.odd_layers(step) if data.letters[step, n] == PATH_LETTERS[path]]
        if odd:
            most = f"most layers ran {_path_name(usual or '')}"
            lines.append(f"{_format_layers(odd)} ran {path} at step {step}; {most}.")
    mask = data.declared_mask
    if mask and usual not in (None, *_FLEX_LETTERS, PATH_LETTERS[UNKNOWN_PATH]):
        lines.append(
            f"Step {step} ran {_path_name(usual or '')}, not FlexAttention, although the mask "
            f"{escape_unprintable(mask)} was declared."
        )
    steps_by_layers: dict[tuple[int, ...], list[int]] = {}
    for other in data.window.steps:
        if other != step:
            steps_by_layers.setdefault(tuple(data.odd_layers(other)), []).append(other)
    steps_by_layers.pop((), None)
    for layers, steps in list(steps_by_layers.items())[:5]:
        where = format_numbers("step", steps)
        lines.append(f"{_format_layers(layers)} differed from the other layers at {where}.")
    return lines


def describe_step(data: PathData) -> list[str]:
    """Return the paths, masks, compiles and LSE check of the current step."""
    step = data.place.step
    if not data.paths:
        return [f"No attention call is recorded at step {step}."]
    phase = f" ({escape_unprintable(data.phase)})" if data.phase else ""
    lines = [f"Step {step}{phase} of generation {data.place.generation}:"]
    current, previous = data.usual_letters.get(step), data.usual_letters.get(step - 1)
    if current is not None and previous not in (None, current):
        before, now = _path_name(previous or ""), _path_name(current)
        lines.append(f"Most layers ran {now} at this step and {before} at the one before.")
    lines += _describe_masks(data)
    passed = _layers_by_text((call.mask_passed_to_layer, call.layer) for call in data.calls)
    lines += [
        f"{_format_layers(layers)} received {_describe_passed_mask(mask)}."
        for mask, layers in passed.items()
    ]
    lines += [_describe_builds(data.builds)] if data.builds else []
    lines += [_describe_mask_change(data), f"Masks first seen at this step: {data.n_new}."]
    compiled = "; ".join(map(escape_unprintable, data.compiled))
    lines += [f"During this step: {compiled}."] if compiled else []
    if "recompil" not in compiled.lower():
        found = "none in this step" if data.graphs_counted else "not recorded"
        lines.append(f"Recompiles: {found}.")
    used = dict.fromkeys(call.backend for call in data.calls if call.backend)
    backends = ", ".join(map(escape_unprintable, used)) or "unknown"
    return [*lines, _describe_lse_check(data), f"Backend: {backends}."]


def _describe_passed_mask(mask: str) -> str:
    """Return the mask that layers received, and that their kernel calls had another one."""
    if mask == "none":
        return "no mask, but the kernel calls there had one"
    return f"the mask '{escape_unprintable(mask)}', but the kernel calls there had another one"


def _describe_masks(data: PathData) -> list[str]:
    lines = []
    for path in data.paths[:MAX_MASKS]:
        is_unknown = path.path == UNKNOWN_PATH
        mask = "mask not recorded" if is_unknown else "no mask"
        mask = f"mask {escape_unprintable(path.mask)[:8]}" if path.mask else mask
        mask += format_mask(data.masks.get(path.mask or ""))
        name = "kernel not recorded" if is_unknown else escape_unprintable(path.path)
        lines.append(f"{_format_layers(path.layers)}: {name}, {mask}.")
    more = len(data.paths) - MAX_MASKS
    return [*lines, f"And {more} more kinds of calls."] if more > 0 else lines


def _describe_builds(builds: Sequence[BuildRecord]) -> str:
    ms = sum(build.wall_ms for build in builds if build.wall_ms == build.wall_ms)
    growth = sum(build.peak_growth for build in builds) / (1 << 20)
    sizes = sorted({(build.q_len, build.kv_len) for build in builds})
    sizes_text = ", ".join(f"{q} x {kv}" for q, kv in sizes[:3])
    peak = f"; peak memory grew by {growth:.0f} MiB" if growth >= 1 else ""
    masks = f"{plural(len(builds), 'block mask')} {'were' if len(builds) > 1 else 'was'} built"
    return f"{masks} for this step ({sizes_text}) in {ms:.1f} ms{peak}."


def format_mask(mask: MaskRecord | None) -> str:
    """Return ", 1 x 74 cells, block 128x128, mask_mod causal"; "" for an unknown mask."""
    if mask is None:
        return ""
    parts = [f"{mask.q_len} x {mask.kv_len} cells"]
    if mask.kind != "block":
        parts.append(escape_unprintable(mask.kind))
    if mask.block_q is not None:
        parts.append(f"block {mask.block_q}x{mask.block_kv}")
    if mask.mask_mod:
        parts.append(f"mask_mod {short_mask_mod(mask.mask_mod)}")
    return ", " + ", ".join(parts)


def short_mask_mod(name: str) -> str:
    """Shorten the qualified name of a mask_mod to its module and outermost function."""
    outer = name.split(".<locals>")[0]
    return escape_unprintable(".".join(outer.split(".")[-2:]))


def _describe_mask_change(data: PathData) -> str:
    step = data.place.step
    if step == 0 or not data.previous_paths:
        return "There is no previous step to compare the masks with."
    current, previous = _masks_by_layer(data.paths), _masks_by_layer(data.previous_paths)
    if current == previous:
        return f"Every layer received the same mask as at step {step - 1}."
    layers = [layer for layer in current if current[layer] != previous.get(layer)]
    old, new = (
        {
            short_mask_mod(record.mask_mod or "") if record else ""
            for layer in layers
            for record in map(data.masks.get, masks.get(layer, ()))
        }
        for masks in (previous, current)
    )
    changed = f"{_format_layers(layers)} received another mask than at step {step - 1}"
    if not old or not new or "" in old | new:  # some of the masks are not known
        return f"{changed}; the mask_mods are unknown."
    if old == new:
        return f"{changed}, of the same mask_mod."
    return f"{changed}, of another mask_mod: {', '.join(sorted(old))} → {', '.join(sorted(new))}."


def _masks_by_layer(paths: Iterable[queries.StepPath]) -> dict[int, set[str]]:
    by_layer: dict[int, set[str]] = {}
    for path in paths:
        for layer in path.layers:
            by_layer.setdefault(layer, set()).add(path.mask or "")
    return by_layer


def _describe_lse_check(data: PathData) -> str:
    errors = data.lse_errors
    if not errors:
        return "LSE check: not computed; level advanced checks every layer that returns its LSE."
    nan_layers = [layer for layer, error in errors.items() if math.isnan(error)]
    if nan_layers:
        return f"LSE check: NaN in {_format_layers(nan_layers).lower()}."
    layer = max(errors, key=errors.__getitem__)
    kind = next((f" ({escape_unprintable(c.check_kind)})" for c in data.calls if c.check_kind), "")
    return f"LSE check: off by at most {errors[layer]:.1e}, in layer {layer}{kind}."


def describe_map(data: PathData) -> list[str]:
    """Return the map as text, at most 60 lines: the steps of each path, by layers."""
    lines = [f"{data.window.format_steps().capitalize()}, by layers:"]
    for layers, letters in merge_layers(data):
        runs = groupby(zip(letters, data.window.steps, strict=True), key=itemgetter(0))
        parts = [
            f"{_path_name(letter)} at {format_ranges([step for _, step in run])}"
            for letter, run in runs
        ]
        more = f", and {len(parts) - 8} more changes" if len(parts) > 8 else ""
        lines.append(f"  {_format_layers(layers).lower()}: {', '.join(parts[:8])}{more}")
    return lines[:60]

"""What the path panel shows: the kernel path of every layer at every step of a window."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from flexinspect import pieces
from flexinspect.panels.base import Missing, TracePlace
from flexinspect.records import PATHS, BuildRecord, CallRecord, MaskRecord
from flexinspect.trace.callranges import (
    StepPath,
    events_between,
    format_ranges,
    step_events,
    step_paths,
)
from flexinspect.trace.ranges import branch_of_step, newest_step
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
        declared_mask=about.mask if {*about.declared} - {*pieces.DECLARED_SEGMENT_KEYS} else "",
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

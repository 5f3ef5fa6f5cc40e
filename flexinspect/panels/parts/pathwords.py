"""The path panel in words: layers that differ, masks, builds, gates, and the map as sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from flexinspect.panels.parts.pathdata import LETTERS, MAX_MASKS, Now, PathData, merged
from flexinspect.records import PATHS, MaskRecord
from flexinspect.text import visible
from flexinspect.trace.callranges import StepPath, spans

_FLEX = (LETTERS["flex uncompiled"], LETTERS["flex compiled"])


def _name(letter: str) -> str:
    return next((path for path, known in LETTERS.items() if known == letter), "nothing")


def _of_layers(layers: Sequence[int]) -> str:
    return f"{'Layers' if len(set(layers)) > 1 else 'Layer'} {spans(layers)}"


def warnings(data: PathData) -> list[str]:
    """Return the layers that ran something else than the others, the current step first."""
    here = data.place.step
    found = [*_swallowed(data), *_odd_now(data), *_no_flex(data)]
    steps: dict[tuple[int, ...], list[int]] = {}
    for step in range(data.start, data.stop):
        odd = tuple(data.odd(step))
        if odd and step != here:
            steps.setdefault(odd, []).append(step)
    for layers, at in list(steps.items())[:5]:
        word = "steps" if len(at) > 1 else "step"
        found.append(f"{_of_layers(layers)} differed from the other layers at {word} {spans(at)}.")
    return found


def _swallowed(data: PathData) -> list[str]:
    return [
        f"{_of_layers(layers)} ran {_ran(data, layers)} because of an exception that the program "
        f"swallowed: {visible(error)}"
        for error, layers in data.now.swallowed.items()
    ]


def _ran(data: PathData, layers: Sequence[int]) -> str:
    letters = {data.letters.get((data.place.step, layer), "") for layer in layers}
    return " and ".join(sorted(map(_name, letters)))


def _odd_now(data: PathData) -> list[str]:
    here, found = data.place.step, []
    for path in PATHS:
        odd = [n for n in data.odd(here) if data.letters[here, n] == LETTERS[path]]
        if odd:
            usual = _name(data.usual[here])
            found.append(
                f"{_of_layers(odd)} ran {path} at step {here}; most layers ran {usual} there."
            )
    return found


def _no_flex(data: PathData) -> list[str]:
    here, asked = data.place.step, data.now.asked
    usual = data.usual.get(here)
    if not asked or usual is None or usual in _FLEX:
        return []
    ran = f"Step {here} ran {_name(usual)}, not FlexAttention"
    return [f"{ran}, though the mask {visible(asked)} was asked for."]


def describe_step(data: PathData) -> list[str]:
    step, now = data.place.step, data.now
    if not data.ran:
        return [f"No attention call is recorded at step {step}."]
    phase = f" ({visible(now.phase)})" if now.phase else ""
    return [
        f"Step {step}{phase} of generation {data.place.generation}:",
        *_path_change(data),
        *_mask_lines(data),
        *_handed(now),
        *_builds(now),
        _change(data),
        f"Masks first seen at this step: {now.n_new}.",
        *_compiling(now),
        _gate_line(now),
        f"Dispatched as {', '.join(map(visible, now.backends)) or 'unknown'}.",
    ]


def _path_change(data: PathData) -> list[str]:
    here = data.place.step
    now, before = data.usual.get(here), data.usual.get(here - 1)
    if now is None or before is None or now == before:
        return []
    return [f"Most layers ran {_name(now)} at this step and {_name(before)} at the one before."]


def _mask_lines(data: PathData) -> list[str]:
    found = []
    for one in data.ran[:MAX_MASKS]:
        mask = f"mask {visible(one.mask)[:8]}" if one.mask else "no mask"
        about = mask_words(data.now.masks.get(one.mask or ""))
        found.append(f"{_of_layers(one.layers)}: {visible(one.path)}, {mask}{about}.")
    more = len(data.ran) - MAX_MASKS
    return [*found, f"And {more} more kinds of calls."] if more > 0 else found


def _handed(now: Now) -> list[str]:
    return [
        f"{_of_layers(layers)} got the mask '{visible(words)}', and another one reached the kernel."
        for words, layers in now.handed.items()
    ]


def _builds(now: Now) -> list[str]:
    if not now.builds:
        return []
    ms = sum(build.wall_ms for build in now.builds if build.wall_ms == build.wall_ms)
    grown = sum(build.peak_growth for build in now.builds) / (1 << 20)
    sizes = {(build.q_len, build.kv_len) for build in now.builds}
    grids = ", ".join(f"{q} x {kv}" for q, kv in sorted(sizes)[:3])
    peak = f"; the peak of memory grew by {grown:.0f} MiB" if grown >= 1 else ""
    n = len(now.builds)
    masks = f"{n} block mask{'s were' if n > 1 else ' was'} built"
    return [f"{masks} for this step ({grids}) in {ms:.1f} ms{peak}."]


def mask_words(mask: MaskRecord | None) -> str:
    """Return ", 1 x 74, block 128x128, rule causal" for a mask, nothing for an unknown one."""
    if mask is None:
        return ""
    parts = [f"{mask.q_len} x {mask.kv_len} cells"]
    if mask.kind != "block":
        parts.append(visible(mask.kind))
    if mask.block_q is not None:
        parts.append(f"block {mask.block_q}x{mask.block_kv}")
    if mask.rule:
        parts.append(f"rule {short_rule(mask.rule)}")
    return ", " + ", ".join(parts)


def short_rule(name: str) -> str:
    """Return the telling end of a rule's qualified name: module and outermost function."""
    outer = name.split(".<locals>")[0]
    return visible(".".join(outer.split(".")[-2:]))


def _change(data: PathData) -> str:
    step = data.place.step
    if step == 0 or not data.before:
        return "There is no step before this one to compare its masks with."
    now, before = _given(data.ran), _given(data.before)
    if now == before:
        return f"Every layer got the mask it had at step {step - 1}."
    layers = [n for n in now if now[n] != before.get(n)]
    known = data.now.masks
    old, new = (_rules({m for n in layers for m in g.get(n, ())}, known) for g in (before, now))
    changed = f"The fingerprint changed since step {step - 1} in {_of_layers(layers).lower()}"
    if not old or not new:
        return f"{changed}; their rules are not known."
    if old == new:
        return f"{changed}, by the same rule."
    return f"{changed}; the rule, too: {', '.join(sorted(old))} → {', '.join(sorted(new))}."


def _given(ran: Iterable[StepPath]) -> dict[int, tuple[str, ...]]:
    given: dict[int, set[str]] = {}
    for one in ran:
        for layer in one.layers:
            given.setdefault(layer, set()).add(one.mask or "")
    return {layer: tuple(sorted(masks)) for layer, masks in given.items()}


def _rules(names: Iterable[str], known: Mapping[str, MaskRecord]) -> set[str]:
    found = [known.get(name) for name in names]
    if any(mask is None or not mask.rule for mask in found):
        return set()
    return {short_rule(mask.rule or "") for mask in found if mask is not None}


def _compiling(now: Now) -> list[str]:
    """Say what was compiled, and what is known of recompiles."""
    told = [f"During this step: {'; '.join(map(visible, now.compiled))}."] if now.compiled else []
    if any("recompil" in text.lower() for text in now.compiled):
        return told
    return [*told, f"Recompiles: {'none in this step' if now.graphs_counted else 'not recorded'}."]


def _gate_line(now: Now) -> str:
    if not now.gates:
        return "Gate: not computed; level advanced checks every layer that gives its LSE."
    sick = [layer for layer, gate in now.gates.items() if math.isnan(gate)]
    if sick:
        return f"Gate: not a number in {_of_layers(sick).lower()}."
    layer = max(now.gates, key=lambda n: now.gates[n])
    how = f" ({visible(now.gate_kind)})" if now.gate_kind else ""
    return f"Gate: at most {now.gates[layer]:.1e} off 1, in layer {layer}{how}."


def describe_map(data: PathData) -> list[str]:
    found = [f"{data.span().capitalize()}, by layers:"]
    for layers, letters in merged(data):
        parts, step = [], data.start
        for letter, run in groupby(letters):
            n = len(list(run))
            parts.append(f"{_name(letter)} at {spans(range(step, step + n))}")
            step += n
        more = f", and {len(parts) - 8} more changes" if len(parts) > 8 else ""
        found.append(f"  {_of_layers(layers).lower()}: {', '.join(parts[:8])}{more}")
    return found[:60]

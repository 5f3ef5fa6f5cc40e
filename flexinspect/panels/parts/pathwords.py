"""The path panel in words: layers that differ, masks, builds, gates, and the map as sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from flexinspect.panels.parts.pathdata import (
    MAX_MASKS,
    PATH_LETTERS,
    PathData,
    StepDetails,
    merge_layers,
)
from flexinspect.records import PATHS, MaskRecord
from flexinspect.text import escape_unprintable
from flexinspect.trace.callranges import StepPath, format_ranges

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

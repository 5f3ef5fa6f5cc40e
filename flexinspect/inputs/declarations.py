"""A declaration in a file: what the prompts of a program consist of, and the mask that is meant.

    mask = "segment-isolation"        # a preset
    separators = "attached"           # or "isolated", as the preset knows them

    [[segments]]                      # a span of positions in the ids that are fed
    start = 1
    stop = 12
    label = "paraphrase 1"

    [[segments]]                      # or a text, to be found in them
    text = "What is the capital of France?"
    kind = "paraphrase"

JSON with the same keys says the same.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from itertools import pairwise
from pathlib import Path
from typing import Any

from flexinspect.core.errors import MaskError, UsageError
from flexinspect.masks import algebra
from flexinspect.records.job import Declaration
from flexinspect.records.prompt import SegmentKind

SegmentSpec = tuple[int, int, str] | tuple[str, str] | str

DECLARATION_KEYS = ("mask", "separators", "segments")
SEGMENT_KEYS = ("start", "stop", "text", "label", "kind")
SEGMENT_KINDS = tuple(str(kind) for kind in SegmentKind if kind is not SegmentKind.GENERATED)
_KIND_HINT = f"The kinds are {', '.join(SEGMENT_KINDS)}."
_SEGMENT_HINT = "A segment has start, stop and label, or a text; label and kind may be added to it."


def read_declaration(file: Path) -> Declaration:
    """Return what a file declares. Raises `UsageError` naming file and key, and what is allowed."""
    said = _parse_file(file)
    _check_keys(file, said, DECLARATION_KEYS, "")
    segments = said.get("segments", [])
    if not isinstance(segments, list):
        raise _declaration_error(
            file, "segments", "must be a list of tables", "Write [[segments]] for each one."
        )
    wishes = tuple(_segment_spec(file, f"segments[{n}]", one) for n, one in enumerate(segments))
    _check_overlaps(file, wishes)
    return Declaration(wishes, _mask(file, said), _separators(file, said))


def _parse_file(file: Path) -> Mapping[str, Any]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"The declaration {file} cannot be read: {reason}.") from error
    try:
        said = json.loads(text) if file.suffix.lower() == ".json" else tomllib.loads(text)
    except ValueError as error:
        what = re.sub(r"\s+", " ", str(error))
        form = "JSON" if file.suffix.lower() == ".json" else "TOML"
        hint = "A declaration is TOML, or JSON in a file whose name ends in .json."
        raise UsageError(f"{file} is not valid {form} ({what}).", hint=hint) from error
    if not isinstance(said, dict):
        raise UsageError(f"{file} must hold an object with {_join_names(DECLARATION_KEYS)}.")
    return said


def _mask(file: Path, said: Mapping[str, Any]) -> str | None:
    name = said.get("mask")
    if name is None:
        return None
    presets = f"The presets are {_join_names(tuple(algebra.PRESETS))}."
    if not isinstance(name, str):
        raise _declaration_error(file, "mask", "must be the name of a preset", presets)
    try:
        algebra.check_preset(name)
    except MaskError as error:
        raise _declaration_error(
            file, "mask", f"names {name!r}, which is no preset", presets
        ) from error
    return name


def _separators(file: Path, said: Mapping[str, Any]) -> str:
    value = said.get("separators", "attached")
    if value not in algebra.SEPARATOR_MODES:
        raise _declaration_error(
            file, "separators", f"must be {' or '.join(algebra.SEPARATOR_MODES)}"
        )
    return str(value)


def _segment_spec(file: Path, where: str, one: object) -> SegmentSpec:
    if isinstance(one, str) and one:
        return one
    if not isinstance(one, dict):
        raise _declaration_error(file, where, "must be a table or a text", _SEGMENT_HINT)
    _check_keys(file, one, SEGMENT_KEYS, f"{where}.")
    label = _label(file, where, one)
    if "text" in one:
        return _text_spec(file, where, one, label)
    start, stop = (_position(file, where, one, name) for name in ("start", "stop"))
    if start >= stop:
        raise _declaration_error(
            file, where, f"begins at {start} and ends at {stop}: start must be below stop"
        )
    return start, stop, label or f"span {start}-{stop}"


def _text_spec(file: Path, where: str, one: Mapping[str, Any], label: str) -> SegmentSpec:
    text = one["text"]
    if not isinstance(text, str) or not text:
        raise _declaration_error(file, f"{where}.text", "must be a text of at least one character")
    if {"start", "stop"} & {*one}:
        raise _declaration_error(
            file, where, "has a text and positions; give one of the two", _SEGMENT_HINT
        )
    return (text, label) if label else text


def _position(file: Path, where: str, one: Mapping[str, Any], name: str) -> int:
    value = one.get(name)
    if type(value) is not int or value < 0:
        what = "is missing" if value is None else f"must be a position from 0 on, not {value!r}"
        raise _declaration_error(file, f"{where}.{name}", what, _SEGMENT_HINT)
    return value


def _label(file: Path, where: str, one: Mapping[str, Any]) -> str:
    """Return the label, with the kind as its first word: so a segment's kind is said."""
    label, kind = one.get("label", ""), one.get("kind")
    if not isinstance(label, str):
        raise _declaration_error(file, f"{where}.label", "must be a text")
    if kind is None:
        return label
    if kind not in SEGMENT_KINDS:
        raise _declaration_error(file, f"{where}.kind", f"is {kind!r}", _KIND_HINT)
    first = (label.split() or [""])[0].lower()
    named = first if first in SEGMENT_KINDS else str(SegmentKind.PARAPHRASE)
    return label if named == kind else f"{kind} {label}".rstrip()


def _check_keys(file: Path, said: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in said:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"Did you mean {near[0]}?" if near else f"Known are {_join_names(known)}."
            raise _declaration_error(file, f"{where}{key}", "is not known", hint)


def _check_overlaps(file: Path, segments: tuple[SegmentSpec, ...]) -> None:
    spans = sorted(wish for wish in segments if len(wish) == 3 and isinstance(wish, tuple))
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            what = f"has '{first}' and '{second}', which overlap at position {start}"
            raise _declaration_error(file, "segments", what)


def _declaration_error(file: Path, key: str, what: str, hint: str | None = None) -> UsageError:
    return UsageError(f"{file}: {key} {what}.", hint=hint)


def _join_names(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def check_mask_mod_spec(spec: str) -> None:
    """Refuse a "package.module:function" whose module is nowhere; nothing is imported.

    Raises `MaskError`. Whether the function is there shows when the module is loaded.
    """
    module, _, function = spec.partition(":")
    if function and module_exists(module):
        return
    what = f"there is no module {module}" if function and module else "a part of the name is empty"
    raise MaskError(
        f"--mask {spec} cannot be loaded: {what}.",
        hint="Write --mask package.module:function, importable from the current folder.",
    )


def module_exists(module: str) -> bool:
    """Say whether a module could be imported, here or from the current folder, without doing it."""
    places: Sequence[str] | None = None
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        name = ".".join(parts[:n])
        spec = _find_spec(name, places) if parts[n - 1] and (n == 1 or places is not None) else None
        if spec is None:
            return module in sys.modules  # made by its package when that was imported
        places = spec.submodule_search_locations
    return True


def _find_spec(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, places)
        if spec is not None:
            return spec
    return PathFinder.find_spec(name, [str(Path.cwd())]) if places is None else None

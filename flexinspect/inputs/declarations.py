"""Declaration files: the segments of a program's prompts, and the declared mask.

    mask = "segment-isolation"        # a preset
    separators = "attached"           # or "isolated"

    [[segments]]                      # a span of positions in the input ids
    start = 1
    stop = 12
    label = "paraphrase 1"

    [[segments]]                      # or a text, which is searched in the input
    text = "What is the capital of France?"
    kind = "paraphrase"

A JSON file has the same keys.
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
_SEGMENT_HINT = "A segment needs start and stop, or a text; label and kind are optional."


def read_declaration(file: Path) -> Declaration:
    """Return the declaration in a file. Raises `UsageError` with the file and the invalid key."""
    data = _parse_file(file)
    _check_keys(file, data, DECLARATION_KEYS, "")
    segments = data.get("segments", [])
    if not isinstance(segments, list):
        raise _declaration_error(
            file, "segments", "must be a list of tables", "Write [[segments]] for each one."
        )
    specs = tuple(_segment_spec(file, f"segments[{n}]", entry) for n, entry in enumerate(segments))
    _check_overlaps(file, specs)
    return Declaration(specs, _mask(file, data), _separators(file, data))


def _parse_file(file: Path) -> Mapping[str, Any]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"The declaration {file} cannot be read: {reason}.") from error
    try:
        data = json.loads(text) if file.suffix.lower() == ".json" else tomllib.loads(text)
    except ValueError as error:
        what = re.sub(r"\s+", " ", str(error))
        form = "JSON" if file.suffix.lower() == ".json" else "TOML"
        hint = "A declaration is TOML, or JSON in a file whose name ends in .json."
        raise UsageError(f"{file} is not valid {form} ({what}).", hint=hint) from error
    if not isinstance(data, dict):
        raise UsageError(f"{file} must hold an object with {_join_names(DECLARATION_KEYS)}.")
    return data


def _mask(file: Path, data: Mapping[str, Any]) -> str | None:
    name = data.get("mask")
    if name is None:
        return None
    presets = f"The presets are {_join_names(tuple(algebra.PRESETS))}."
    if not isinstance(name, str):
        raise _declaration_error(file, "mask", "must be the name of a preset", presets)
    try:
        algebra.check_preset(name)
    except MaskError as error:
        raise _declaration_error(
            file, "mask", f"is {name!r}, which is not a preset", presets
        ) from error
    return name


def _separators(file: Path, data: Mapping[str, Any]) -> str:
    value = data.get("separators", "attached")
    if value not in algebra.SEPARATOR_MODES:
        raise _declaration_error(
            file, "separators", f"must be {' or '.join(algebra.SEPARATOR_MODES)}"
        )
    return str(value)


def _segment_spec(file: Path, where: str, entry: object) -> SegmentSpec:
    if isinstance(entry, str) and entry:
        return entry
    if not isinstance(entry, dict):
        raise _declaration_error(file, where, "must be a table or a string", _SEGMENT_HINT)
    _check_keys(file, entry, SEGMENT_KEYS, f"{where}.")
    label = _label(file, where, entry)
    if "text" in entry:
        return _text_spec(file, where, entry, label)
    start, stop = (_position(file, where, entry, name) for name in ("start", "stop"))
    if start >= stop:
        raise _declaration_error(
            file, where, f"begins at {start} and ends at {stop}: start must be below stop"
        )
    return start, stop, label or f"span {start}-{stop}"


def _text_spec(file: Path, where: str, entry: Mapping[str, Any], label: str) -> SegmentSpec:
    text = entry["text"]
    if not isinstance(text, str) or not text:
        raise _declaration_error(file, f"{where}.text", "must be a non-empty string")
    if {"start", "stop"} & {*entry}:
        raise _declaration_error(
            file, where, "has both a text and positions; use one of the two", _SEGMENT_HINT
        )
    return (text, label) if label else text


def _position(file: Path, where: str, entry: Mapping[str, Any], name: str) -> int:
    value = entry.get(name)
    if type(value) is not int or value < 0:
        what = "is missing" if value is None else f"must be a position >= 0, not {value!r}"
        raise _declaration_error(file, f"{where}.{name}", what, _SEGMENT_HINT)
    return value


def _label(file: Path, where: str, entry: Mapping[str, Any]) -> str:
    """Return the label, with the kind as its first word, where `Declaration` keeps it."""
    label, kind = entry.get("label", ""), entry.get("kind")
    if not isinstance(label, str):
        raise _declaration_error(file, f"{where}.label", "must be a string")
    if kind is None:
        return label
    if kind not in SEGMENT_KINDS:
        raise _declaration_error(file, f"{where}.kind", f"is {kind!r}", _KIND_HINT)
    first = (label.split() or [""])[0].lower()
    named = first if first in SEGMENT_KINDS else str(SegmentKind.PARAPHRASE)
    return label if named == kind else f"{kind} {label}".rstrip()


def _check_keys(file: Path, data: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = (
                f"Did you mean {near[0]}?" if near else f"The known keys are {_join_names(known)}."
            )
            raise _declaration_error(file, f"{where}{key}", "is unknown", hint)


def _check_overlaps(file: Path, segments: tuple[SegmentSpec, ...]) -> None:
    spans = sorted(spec for spec in segments if len(spec) == 3 and isinstance(spec, tuple))
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            what = f"has '{first}' and '{second}', which overlap at position {start}"
            raise _declaration_error(file, "segments", what)


def _declaration_error(file: Path, key: str, what: str, hint: str | None = None) -> UsageError:
    return UsageError(f"{file}: {key} {what}.", hint=hint)


def _join_names(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def check_mask_mod_spec(spec: str) -> None:
    """Raise `MaskError` for a "package.module:function" whose module does not exist.

    Nothing is imported: whether the function exists is checked when the module is loaded.
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
    """Return whether a module can be found, also in the current folder. Imports nothing."""
    search_path: Sequence[str] | None = None
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        name = ".".join(parts[:n])
        can_search = parts[n - 1] and (n == 1 or search_path is not None)
        spec = _find_spec(name, search_path) if can_search else None
        if spec is None:
            return module in sys.modules  # created by its package when that was imported
        search_path = spec.submodule_search_locations
    return True


def _find_spec(name: str, search_path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, search_path)
        if spec is not None:
            return spec
    return PathFinder.find_spec(name, [str(Path.cwd())]) if search_path is None else None

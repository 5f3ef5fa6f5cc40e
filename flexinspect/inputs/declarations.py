"""Declaration files, TOML or JSON: the segments of a program's prompts, and the declared mask.

A segment is a span of positions in the input ids, or a text that is searched in the input;
`docs/own-code.md` has an example.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from flexinspect.core.conversion import convert, read_data
from flexinspect.core.errors import MaskError, UsageError
from flexinspect.masks import mask_presets
from flexinspect.records.job import Declaration
from flexinspect.records.prompt import SegmentKind

SegmentSpec = tuple[int, int, str] | tuple[str, str] | str

_Kind = Literal["bos", "shared", "paraphrase", "separator", "cue"]
_SEGMENT_HINT = "A segment needs start and stop, or a text; label and kind are optional."

_Position = Annotated[int, Meta(ge=0)]


class _Segment(Struct, forbid_unknown_fields=True):
    start: _Position | None = None
    stop: _Position | None = None
    text: Annotated[str, Meta(min_length=1)] | None = None
    label: str = ""
    kind: _Kind | None = None


_NO_PRESET = "For another mask, leave mask out: the segments are compared then, not the cells."


class _DeclarationFile(Struct, forbid_unknown_fields=True):
    mask: str | None = None
    separators: Literal["attached", "isolated"] = "attached"
    segments: tuple[Any, ...] = ()


def read_declaration(file: Path) -> Declaration:
    """Return the declaration in a file. Raises `UsageError` with the file and the invalid key."""
    declared = convert(_DeclarationFile, read_data(file, "declaration"), f"The declaration {file}")
    entries = enumerate(declared.segments)
    specs = tuple(_segment_spec(f"{file}: segments[{n}]", entry) for n, entry in entries)
    spans = sorted(spec for spec in specs if len(spec) == 3 and isinstance(spec, tuple))
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            what = f"segments has '{first}' and '{second}', which overlap at position {start}"
            raise UsageError(f"{file}: {what}.")
    if declared.mask is not None:
        try:
            mask_presets.check_preset(declared.mask, _NO_PRESET)
        except MaskError as error:
            raise UsageError(f"{file}: {error.message}", hint=error.hint) from error
    return Declaration(specs, declared.mask, declared.separators)


def _segment_spec(where: str, entry: object) -> SegmentSpec:
    """Return a segment, with its kind as the first word of its label, as in `Declaration`."""
    declared = convert(_Segment, {"text": entry} if isinstance(entry, str) else entry, where)
    label, start, stop = declared.label, declared.start, declared.stop
    first = (label.split() or [""])[0].lower()
    named = first if first in get_args(_Kind) else str(SegmentKind.PARAPHRASE)
    if declared.kind not in (None, named):
        label = f"{declared.kind} {label}".rstrip()
    if declared.text is not None:
        if start is not None or stop is not None:
            what = "has both a text and positions; use one of the two"
            raise UsageError(f"{where} {what}.", hint=_SEGMENT_HINT)
        return (declared.text, label) if label else declared.text
    if start is None or stop is None:
        missing = "start" if start is None else "stop"
        raise UsageError(f"{where}.{missing} is missing.", hint=_SEGMENT_HINT)
    if start >= stop:
        what = f"begins at {start} and ends at {stop}: start must be below stop"
        raise UsageError(f"{where} {what}.")
    return start, stop, label or f"span {start}-{stop - 1}"


def check_mask_mod_spec(spec: str) -> None:
    """Raise `MaskError` for a "package.module:function" whose module does not exist.

    Nothing is imported: whether the function exists is checked when the module is loaded.
    """
    module, _, function = spec.partition(":")
    if function and module_exists(module):
        return
    what = f"there is no module {module}" if function and module else "a part of the name is empty"
    hint = "Write --mask package.module:function, importable from the current folder."
    raise MaskError(f"--mask {spec} cannot be loaded: {what}.", hint=hint)


def module_exists(module: str) -> bool:
    """Return whether a module can be found, also in the current folder. Imports nothing."""
    search_path: Sequence[str] | None = None
    for n, part in enumerate(parts := module.split("."), start=1):
        can_search = part and (n == 1 or search_path is not None)
        spec = _find_spec(".".join(parts[:n]), search_path) if can_search else None
        if spec is None:
            return module in sys.modules  # created by its package when that was imported
        search_path = spec.submodule_search_locations
    return True


def _find_spec(name: str, search_path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if (spec := finder.find_spec(name, search_path)) is not None:
            return spec
    return PathFinder.find_spec(name, [str(Path.cwd())]) if search_path is None else None

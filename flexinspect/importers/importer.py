"""What an importer reads from a dump: forward passes in numpy, and the facts about their source.

An importer is an object with the attributes of `Importer`. Everything that a dump may lack is None
or empty in a `ForwardPass`; the trace then shows it as not recorded. Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from flexinspect.core import plugins
from flexinspect.core.errors import FlexInspectError, UsageError, summarize_error
from flexinspect.core.text import did_you_mean
from flexinspect.records.prompt import Segment
from flexinspect.records.step import Array, LayerStatRecord

MAX_JSON_BYTES = 512 << 20
"""Size up to which a JSON file is read: the tree of a 100-layer model takes about 20 MB."""

MAX_LAYERS = 4096
MAX_TOKENS = 1 << 24
MAX_FILES = 1 << 20
MAX_MASK_CELLS = 1 << 26
"""Cells of a head up to which a mask is kept, as by the capture."""

MAX_KEPT_BYTES = 4 << 30
"""Arrays of one pass that are kept, in bytes; a step is written as a whole."""

Tick = Callable[[], None]
"""Called after each part of a dump that was read, for the progress bar."""


class AttentionTensors(Struct, frozen=True, kw_only=True):
    """The attention of one layer in one forward pass, sequence 0 of a batch.

    `q` and `out` are (heads, rows, width), `k` and `v` (key heads, rows, width): after rotation,
    of this pass alone. `lse` is (heads, rows), the natural log-sum-exp that the kernel returned.
    `mask` is bool (heads or 1, rows, keys), where True is open; `mask_kind` is its
    `MaskRecord.kind`. A `scale` of None means width**-0.5. `dtype` is the true type of the queries.
    """

    layer: int
    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    out: Array | None = None
    lse: Array | None = None
    mask: Array | None = None
    mask_kind: str = "bool"
    scale: float | None = None
    softcap: float | None = None
    dtype: str = ""


class ForwardPass(Struct, frozen=True, kw_only=True):
    """One forward pass: `n_rows` rows after `kv_before` earlier keys.

    `position_ids` are those that the model received, empty when unknown. `logits` is (vocabulary,)
    of the newest row. `chosen_id` is the token that followed. `hidden` maps layers to their
    outputs (rows, width).
    """

    n_rows: int
    kv_before: int = 0
    batch: int = 1
    position_ids: tuple[int, ...] = ()
    logits: Array | None = None
    chosen_id: int | None = None
    attention: tuple[AttentionTensors, ...] = ()
    stats: tuple[LayerStatRecord, ...] = ()
    hidden: Mapping[int, Array] = {}


class Budget(Struct):
    """Counts the arrays of one pass that are kept; `is_exceeded` says that there were more."""

    left: int = MAX_KEPT_BYTES
    is_exceeded: bool = False

    def keep(self, *arrays: Array | None) -> bool:
        """Tell whether there is room for these arrays, and count them if there is."""
        n_bytes = sum(array.nbytes for array in arrays if array is not None)
        if n_bytes > self.left:
            self.is_exceeded = True
            return False
        self.left -= n_bytes
        return True

    def notes(self) -> list[str]:
        """Return a sentence if arrays were left out."""
        limit = f"more than {MAX_KEPT_BYTES >> 30} GiB"
        left_out = f"The arrays of a step take {limit}: those of later layers are left out."
        return [left_out] if self.is_exceeded else []


class DumpedToken(Struct, frozen=True):
    """A token of the prompt or of the answer; `text` and `token` are None when unknown."""

    id: int
    text: str | None = None
    token: str | None = None
    special: bool = False


class DumpedGeneration(Struct, frozen=True, kw_only=True):
    """One sequence: its prompt of `n_prompt` tokens, and its forward passes in order.

    `prompt` is empty when the ids are unknown; otherwise its first token is at position
    `prompt_start`. `chosen` are the texts of chosen tokens where the dump names them, by step.
    Without `segments` the prompt is one segment.
    """

    sample_id: str
    n_prompt: int
    passes: Iterator[ForwardPass]
    prompt: tuple[DumpedToken, ...] = ()
    prompt_start: int = 0
    position_ids: tuple[int, ...] = ()
    segments: tuple[Segment, ...] = ()
    chosen: Mapping[int, DumpedToken] = {}


class Dump(Struct, frozen=True, kw_only=True):
    """An opened dump: its source in words, versions and model facts, and its generations.

    `notes` are sentences for the user about what was left out or how something was obtained; an
    importer may add to them while its passes are read. `n_parts` is how often `tick` is called.
    """

    source: str
    generations: Iterator[DumpedGeneration]
    notes: list[str]
    n_parts: int
    versions: Mapping[str, str] = {}
    model: Mapping[str, Any] = {}


class Importer(Protocol):
    """A format: its name for --format, what it is, and how it is recognized and read."""

    name: str
    title: str

    def recognizes(self, folder: Path) -> bool:
        """Whether a folder holds this format, by the names and beginnings of its files."""

    def open(self, folder: Path, tick: Tick) -> Dump:
        """Open a dump; its passes are read while they are iterated. Raises `UsageError`."""


def find_importer(folder: Path, name: str | None) -> Importer:
    """Return the importer of that name, or the one that recognizes the folder.

    Raises `UsageError` when there is none, or when several recognize it.
    """
    if not folder.is_dir():
        what = f"{folder} is not a folder." if folder.exists() else f"There is no folder {folder}."
        raise UsageError(what, hint="Name the folder that the other tool has written.")
    known = plugins.names(plugins.IMPORTERS)
    if name is not None:
        if name not in known:
            near = did_you_mean(name, known, f"The formats are {', '.join(known)}.")
            raise UsageError(f"There is no format '{name}'.", hint=near)
        return _load_importer(name)
    found = [one for one in map(_load_importer, known) if _recognizes(one, folder)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(importer.name for importer in found)
        what = f"{folder} holds dumps of several formats: {names}."
        raise UsageError(what, hint=f"Choose one: --format {found[0].name}.")
    raise UsageError(
        f"{folder} holds no dump of a known format ({', '.join(known)}).",
        hint="docs/import.md says which files each format has; --format NAME says what is wrong.",
    )


def _load_importer(name: str) -> Importer:
    factory = plugins.load(plugins.IMPORTERS, name)
    try:
        importer: Importer = plugins.make(plugins.IMPORTERS, name, factory)
        title = getattr(importer, "title", None)
        methods = [getattr(importer, method, None) for method in ("recognizes", "open")]
    except (Exception, SystemExit) as error:
        raise _invalid_plugin_error(name, summarize_error(error)) from error
    if not isinstance(title, str) or not all(map(callable, methods)):
        raise _invalid_plugin_error(name, "it needs a title and the methods recognizes and open")
    return importer


def _recognizes(importer: Importer, folder: Path) -> bool:
    try:
        return bool(importer.recognizes(folder))
    except FlexInspectError:
        raise
    except Exception as error:
        raise _invalid_plugin_error(type(importer).__name__, summarize_error(error)) from error


def _invalid_plugin_error(name: str, why: str) -> FlexInspectError:
    return FlexInspectError(
        f"The plug-in '{name}' of {plugins.IMPORTERS} is not an importer: {why}.",
        hint="Update or remove the package that provides it, or name another --format.",
    )


def read_json_bytes(file: Path) -> bytes:
    """Return the content of a JSON file of a dump. Raises `UsageError`, also for a huge one."""
    try:
        size = file.stat().st_size
        if size > MAX_JSON_BYTES:
            limit = f"at most {MAX_JSON_BYTES >> 20} MiB are read"
            hint = "Dump fewer layers, or import the dump of one forward pass."
            raise UsageError(f"{file} has {size >> 20} MiB; {limit}.", hint=hint)
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}.") from error


def decode_json(file: Path, data: bytes) -> Any:
    """Return the value of a JSON file. Raises `UsageError` for anything else, with the file."""
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        hint = "It may be truncated: write the dump again."
        raise UsageError(f"{file} is not valid JSON: {error}.", hint=hint) from error


def check_layer(layer: int, where: str) -> int:
    """Return the number of a layer. Raises `UsageError` for one that no model has."""
    if not 0 <= layer < MAX_LAYERS:
        raise UsageError(f"{where} names layer {layer}; layers 0 to {MAX_LAYERS - 1} are read.")
    return layer

"""A folder of safetensors files with a description, `flexinspect-import.json`: see docs/import.md.

The description names the tokens, the segments and the file of each step. The tensors in a file have
fixed names, which the description may replace. Every mistake is one sentence with file and field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from flexinspect.core.errors import UsageError
from flexinspect.importers.importer import (
    MAX_FILES,
    MAX_LAYERS,
    AttentionTensors,
    Budget,
    Dump,
    DumpedGeneration,
    DumpedToken,
    ForwardPass,
    Tick,
    read_json_bytes,
)
from flexinspect.importers.tensor_files import SafetensorsFile, Tensor
from flexinspect.importers.tensor_records import layer_stat
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import Array

DESCRIPTION_FILE = "flexinspect-import.json"


class DescribedSegment(Struct, frozen=True, forbid_unknown_fields=True):
    """Positions `start <= pos < stop` of the prompt; a separator belongs to the segment before."""

    label: str
    start: int
    stop: int
    kind: SegmentKind = SegmentKind.PARAPHRASE


class DescribedStep(Struct, frozen=True, forbid_unknown_fields=True):
    """One forward pass: the file of its tensors, and the token that it chose, if that is known."""

    file: str
    rows: int | None = None
    chosen: int | DumpedToken | None = None


class TensorNames(Struct, frozen=True, forbid_unknown_fields=True):
    """Names of the tensors in a step's file; `{layer}` stands for the number of the layer."""

    logits: str = "logits"
    q: str = "layers.{layer}.q"
    k: str = "layers.{layer}.k"
    v: str = "layers.{layer}.v"
    out: str = "layers.{layer}.out"
    lse: str = "layers.{layer}.lse"
    mask: str = "layers.{layer}.mask"
    hidden: str = "layers.{layer}.hidden"


class DescribedModel(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Facts of the model that the trace shows; `layers` is the number of its layers."""

    name: str = ""
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    dtype: str | None = None


class Description(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole description. `tokens` are the prompt; `scale` None means width**-0.5."""

    tokens: tuple[int | DumpedToken, ...]
    steps: tuple[DescribedStep, ...]
    source: str = "a described folder"
    versions: Mapping[str, str] = {}
    model: DescribedModel = DescribedModel()
    positions: tuple[int, ...] = ()
    segments: tuple[DescribedSegment, ...] = ()
    tensors: TensorNames = TensorNames()
    scale: float | None = None
    softcap: float | None = None


class DescribedFolderImporter:
    """The importer of described folders."""

    name = "described"
    title = "a folder of safetensors with a description"

    def recognizes(self, folder: Path) -> bool:
        """Whether the folder has a description."""
        return (folder / DESCRIPTION_FILE).is_file()

    def open(self, folder: Path, tick: Tick) -> Dump:
        """Read and check the description. Raises `UsageError`."""
        file = folder / DESCRIPTION_FILE
        description = _decode(file)
        segments = _check(description, file)
        reader = _StepReader(folder, description, tick)
        prompt = tuple(map(_token, description.tokens))
        named = {
            n: _token(s.chosen) for n, s in enumerate(description.steps) if s.chosen is not None
        }
        generation = DumpedGeneration(
            sample_id=description.model.name or folder.resolve().name,
            n_prompt=len(prompt),
            prompt=prompt,
            position_ids=description.positions,
            segments=segments,
            chosen=named,
            passes=reader.passes(),
        )
        return Dump(
            source=description.source,
            generations=iter((generation,)),
            notes=reader.notes,
            n_parts=len(description.steps),
            versions=description.versions,
            model=_model_facts(description.model),
        )


def _model_facts(model: DescribedModel) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(model)
    return facts


def _token(token: int | DumpedToken) -> DumpedToken:
    return token if isinstance(token, DumpedToken) else DumpedToken(token)


def _decode(file: Path) -> Description:
    data = read_json_bytes(file)
    try:
        return msgspec.json.decode(data, type=Description)
    except (ValueError, RecursionError) as error:
        text, _, path = str(error).partition(" - at `$")
        place = re.sub(r"^\.|`$", "", path)
        where = f"{file}: {place}" if place else str(file)
        hint = "docs/import.md describes every field."
        raise UsageError(f"{where}: {text.rstrip('.')}.", hint=hint) from error


def _check(description: Description, file: Path) -> tuple[Segment, ...]:
    """Check what the types do not say, and return the segments. Raises `UsageError`."""

    def fail(field: str, what: str) -> UsageError:
        return UsageError(f"{file}: {field}: {what}", hint="docs/import.md describes every field.")

    n_tokens = len(description.tokens)
    if not n_tokens:
        raise fail("tokens", "there is no token; give the ids of the prompt.")
    if not description.steps or len(description.steps) > MAX_FILES:
        raise fail("steps", f"there must be 1 to {MAX_FILES} steps.")
    if description.positions and len(description.positions) != n_tokens:
        raise fail("positions", f"{len(description.positions)} ids for {n_tokens} tokens.")
    if not 0 <= (description.model.layers or 0) <= MAX_LAYERS:
        raise fail("model.layers", f"{description.model.layers} is not 0 to {MAX_LAYERS}.")
    for number, step in enumerate(description.steps):
        path = PurePosixPath(step.file)
        if path.is_absolute() or ".." in path.parts or "\\" in step.file or not step.file:
            raise fail(f"steps[{number}].file", f"'{step.file}' is not a file in this folder.")
        if step.rows is not None and step.rows < 1:
            raise fail(f"steps[{number}].rows", f"{step.rows} is not a number of rows.")
        if number == 0 and step.rows not in (None, n_tokens):
            raise fail("steps[0].rows", f"{step.rows} is not the number of tokens, {n_tokens}.")
    segments: list[Segment] = []
    at = 0
    for number, each in enumerate(description.segments):
        if each.start != at or each.stop <= each.start:
            what = f"{each.start} to {each.stop} does not continue at {at}; segments have no gaps."
            raise fail(f"segments[{number}]", what)
        is_attached = each.kind is SegmentKind.SEPARATOR and segments
        owner = segments[-1].owner if is_attached else number
        segments.append(Segment(each.start, each.stop, each.label, each.kind, owner))
        at = each.stop
    if segments and at != n_tokens:
        raise fail("segments", f"they end at {at}, but there are {n_tokens} tokens.")
    return tuple(segments)


class _StepReader:
    """Reads the tensors of the steps."""

    def __init__(self, folder: Path, description: Description, tick: Tick) -> None:
        self._folder, self._description, self._tick = folder, description, tick
        self._names = description.tensors
        self.notes: list[str] = []

    def passes(self) -> Iterator[ForwardPass]:
        """Yield the steps in order. Raises `UsageError` for tensors that do not fit."""
        kv_before = 0
        steps = self._description.steps
        for number, step in enumerate(steps):
            n_rows = step.rows or (len(self._description.tokens) if number == 0 else 1)
            yield self._read(step, SafetensorsFile(self._folder / step.file), n_rows, kv_before)
            kv_before += n_rows
            self._tick()

    def _read(
        self, step: DescribedStep, file: SafetensorsFile, n_rows: int, kv_before: int
    ) -> ForwardPass:
        layers = self._layers(file)
        budget, hidden, stats, attention = Budget(), dict[int, Array](), [], []
        for layer in layers:
            output = self._optional(file, self._names.hidden, layer)
            if output is not None:
                _check_shape(file, self._names.hidden, layer, output.array, (n_rows, None))
                stats.append(layer_stat(layer, f"layers.{layer}", output.array))
                if budget.keep(output.array):
                    hidden[layer] = output.array
            own = self._attention(file, layer, n_rows, kv_before)
            if budget.keep(own.q, own.k, own.v, own.out, own.mask):
                attention.append(own)
        self.notes += budget.notes()
        logits = None
        if self._names.logits in file.names:
            logits = np.atleast_2d(file.read(self._names.logits).array)[-1]
        return ForwardPass(
            n_rows=n_rows,
            kv_before=kv_before,
            position_ids=self._description.positions if kv_before == 0 else (),
            logits=logits,
            chosen_id=None if step.chosen is None else _token(step.chosen).id,
            attention=tuple(attention),
            stats=tuple(stats),
            hidden=hidden,
        )

    def _layers(self, file: SafetensorsFile) -> list[int]:
        """Return the layers that the file has a tensor of. Raises `UsageError` beyond the limit."""
        found = set[int]()
        for name in (self._names.q, self._names.k, self._names.mask, self._names.hidden):
            pattern = re.compile(re.escape(name).replace(r"\{layer\}", r"(\d{1,9})"))
            if pattern.groups:
                matches = filter(None, map(pattern.fullmatch, file.names))
                found.update(int(match[1]) for match in matches)
        most = self._description.model.layers or MAX_LAYERS
        if beyond := [layer for layer in found if layer >= most]:
            what = f"{file.path} has tensors of layer {min(beyond)}; the model has {most} layers."
            raise UsageError(what, hint=f"Correct model.layers in {DESCRIPTION_FILE}.")
        return sorted(found)

    def _optional(self, file: SafetensorsFile, pattern: str, layer: int) -> Tensor | None:
        name = pattern.replace("{layer}", str(layer))
        return file.read(name) if name in file.names else None

    def _attention(
        self, file: SafetensorsFile, layer: int, n_rows: int, kv_before: int
    ) -> AttentionTensors:
        names, found = self._names, dict[str, Array | None]()
        dtype = ""
        for stream in ("q", "k", "v", "out", "lse", "mask"):
            tensor = self._optional(file, getattr(names, stream), layer)
            found[stream] = None if tensor is None else tensor.array
            if stream == "q" and tensor is not None:
                dtype = tensor.dtype
        heads = None if found["q"] is None else found["q"].shape[0]
        n_keys = kv_before + n_rows
        for stream, array in found.items():
            if array is None:
                continue
            if stream == "mask" and array.ndim == 2:
                array = found["mask"] = array[None]
            fits: tuple[int | None, ...] = (None, n_rows, n_keys if stream == "mask" else None)
            fits = fits[:2] if stream == "lse" else fits
            if stream in ("out", "lse"):
                fits = (heads, *fits[1:])
            _check_shape(file, getattr(names, stream), layer, array, fits)
        self._check_heads(file, layer, found)
        mask = found["mask"]
        if mask is not None and mask.dtype != np.bool_:
            name = names.mask.replace("{layer}", str(layer))
            what = (
                f"'{name}' in {file.path} is {mask.dtype}; a mask is BOOL, True where it is open."
            )
            raise UsageError(what)
        scale, softcap = self._description.scale, self._description.softcap
        return AttentionTensors(
            layer=layer,
            q=found["q"],
            k=found["k"],
            v=found["v"],
            out=found["out"],
            lse=found["lse"],
            mask=mask,
            scale=scale,
            softcap=softcap,
            dtype=dtype,
        )

    def _check_heads(
        self, file: SafetensorsFile, layer: int, found: Mapping[str, Array | None]
    ) -> None:
        q, k, v, mask = (found[name] for name in ("q", "k", "v", "mask"))
        where = f"Layer {layer} in {file.path}"
        if (
            q is not None
            and k is not None
            and (q.shape[0] % k.shape[0] or q.shape[2] != k.shape[2])
        ):
            what = f"{where}: the queries {q.shape} do not fit the keys {k.shape}"
            raise UsageError(f"{what}; both are (heads, rows, width).")
        if k is not None and v is not None and k.shape[0] != v.shape[0]:
            raise UsageError(f"{where}: {k.shape[0]} key heads, but {v.shape[0]} of the values.")
        if q is not None and mask is not None and mask.shape[0] not in (1, q.shape[0]):
            raise UsageError(f"{where}: a mask of {mask.shape[0]} heads for {q.shape[0]} heads.")


def _check_shape(
    file: SafetensorsFile,
    pattern: str,
    layer: int,
    array: Array,
    expected: Sequence[int | None],
) -> None:
    fits = array.ndim == len(expected) and 0 not in array.shape
    if fits and all(n in (None, own) for n, own in zip(expected, array.shape, strict=True)):
        return
    wanted = ", ".join("any" if n is None else str(n) for n in expected)
    name = pattern.replace("{layer}", str(layer))
    what = f"'{name}' in {file.path} has the shape {list(array.shape)}, not ({wanted})."
    raise UsageError(what, hint="docs/import.md lists the shape of every tensor.")

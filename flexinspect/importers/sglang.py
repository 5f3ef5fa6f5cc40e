"""Tensor dumps of SGLang, in both of its formats.

`--debug-tensor-dump-output-folder` (sglang.srt.debug_utils.tensor_dump_forward_hook) writes a
folder per rank and a file `Pass00000.pt` per forward pass: a dict of module names to outputs, of
modules without children only, and `MODEL.forward_batch_info.input_ids`, `.seq_lens`, `.positions`.
It writes a file when the inner model returns. What runs after that, the logits processor, is
therefore in the file of the next pass, and that of the last pass is lost.

`DUMPER_ENABLE=1` (sglang.srt.debug_utils.dumper) writes a file per tensor, whose name has its tags:
`step=0___rank=0___dump_index=1___name=input_ids.pt`; it holds a dict of `value` and `meta`.

Neither has the mask, the head width, or which kernel ran.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from flexinspect.core.errors import UsageError
from flexinspect.importers.importer import (
    MAX_FILES,
    Budget,
    Dump,
    DumpedGeneration,
    DumpedToken,
    ForwardPass,
    Tick,
    check_layer,
)
from flexinspect.importers.tensor_records import layer_stat
from flexinspect.importers.torch_files import LazyTensor, UnreadableTensor, load_torch_file
from flexinspect.records.step import Array, LayerStatRecord

Outputs = Mapping[str, Any]
"""The outputs of one pass by module: a tensor or a list of tensors."""

_PASS_FILE, _BATCH = "Pass*.pt", ".forward_batch_info."
_LAYER = re.compile(r"(?:^|.*\.)layers\.(\d+)(?:\.(.+))?")
_FINAL_NORM = re.compile(r"(?:^|.*\.)norm")
_RESIDUAL_PARTS = ("post_attention_layernorm", "mlp.down_proj")
_HOOKED = re.compile(r"(?:non_intrusive__)?(.*?)\.?output(?:\.(\w+))?")


class _Pass(Struct, frozen=True):
    """One forward pass of one sequence: its ids, its length after it, and its outputs."""

    name: str
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    length: int
    load: Callable[[], tuple[Outputs, Any]]
    """Returns the outputs by module, and the logits or None."""

    @property
    def kv_before(self) -> int:
        """The number of keys before the pass."""
        return self.length - len(self.ids)


class TensorDumpImporter:
    """The importer of a file per pass."""

    name = "sglang-passes"
    title = "SGLang's tensor dump"

    def recognizes(self, folder: Path) -> bool:
        """Whether the folder, or one of its folders, has files of passes."""
        return any(folder.glob(_PASS_FILE)) or any(folder.glob(f"TP*_PP*/{_PASS_FILE}"))

    def open(self, folder: Path, tick: Tick) -> Dump:
        """Read which passes there are. Raises `UsageError`."""
        notes: list[str] = []
        folder = _choose_folder(folder, "TP*_PP*", _PASS_FILE, notes)
        files = sorted(folder.glob(_PASS_FILE))
        if not files:
            hint = "sglang writes it with --debug-tensor-dump-output-folder."
            raise UsageError(f"{folder} has no file {_PASS_FILE}.", hint=hint)
        passes = list(map(self._scan, files, [*files[1:], None]))
        notes.append("The logits of the last pass are not in the dump: SGLang never writes them.")
        return _dump(self.title, passes, notes, tick)

    def _scan(self, file: Path, after: Path | None) -> _Pass:
        held = _load_dict(file)
        batch = {name.rpartition(".")[2]: value for name, value in held.items() if _BATCH in name}

        def load() -> tuple[Outputs, Any]:
            found = _load_dict(file)
            later = {} if after is None else _load_dict(after)
            # Modules of a pass that ran after its file was written are in the next file.
            own = {n: v for n, v in found.items() if _BATCH not in n and "." in n}
            return own, later.get("logits_processor")

        return _make_pass(file.name, batch, load)


class DumperImporter:
    """The importer of a file per tensor."""

    name = "sglang-dumper"
    title = "SGLang's dumper"

    def recognizes(self, folder: Path) -> bool:
        """Whether the folder, or one of its folders, has files of the dumper."""
        pattern = "step=*___rank=*.pt"
        return any(folder.glob(pattern)) or any(folder.glob(f"*/{pattern}"))

    def open(self, folder: Path, tick: Tick) -> Dump:
        """Read which steps there are. Raises `UsageError`."""
        notes: list[str] = []
        folder = _choose_folder(folder, "*", "step=*___rank=*.pt", notes)
        files: dict[tuple[int, int], dict[str, Path]] = {}
        for file in sorted(folder.glob("step=*___rank=*.pt"), key=_dump_index):
            tags = _tags(file)
            try:
                place = int(tags["rank"]), int(tags["step"])
            except (KeyError, ValueError):
                raise UsageError(f"{file} has no rank, step or name in its name.") from None
            name = _module_name(tags)
            files.setdefault(place, {}).setdefault(name, file)
            if len(files) > MAX_FILES:
                raise UsageError(f"{folder} has more than {MAX_FILES} steps.")
        ranks = sorted({rank for rank, _ in files})
        if len(ranks) > 1:
            notes.append(_shard_note(len(ranks), f"rank {ranks[0]}"))
        steps = sorted(step for rank, step in files if rank == ranks[0]) if ranks else []
        places = [(ranks[0], step) for step in steps]
        complete = [files[p] for p in places if {"input_ids", "seq_lens"} <= files[p].keys()]
        if not complete:
            what = f"{folder} has no step with input_ids and seq_lens."
            raise UsageError(what, hint="DUMPER_NON_INTRUSIVE_MODE=core or all dumps them.")
        if len(complete) < len(steps):
            notes.append(f"{len(steps) - len(complete)} steps without input_ids are left out.")
        return _dump(self.title, list(map(self._scan, complete)), notes, tick)

    def _scan(self, files: Mapping[str, Path]) -> _Pass:
        known = ("input_ids", "seq_lens", "positions")
        batch = {name: _load_value(files[name]) for name in known if name in files}

        def load() -> tuple[Outputs, Any]:
            found: dict[str, Any] = {}
            logits = None
            for name, file in files.items():
                match = _HOOKED.fullmatch(name)
                if name.endswith("next_token_logits"):
                    logits = _load_value(file)
                elif match is not None and match[2] is None:
                    found[match[1]] = _load_value(file)
                elif match is not None:
                    found.setdefault(match[1], []).append(_load_value(file))
            return found, logits

        return _make_pass(files["input_ids"].name.split("___")[0], batch, load)


# -- reading --------------------------------------------------------------------------------------


def _choose_folder(folder: Path, children: str, pattern: str, notes: list[str]) -> Path:
    """Return the folder itself if it has such files, otherwise the first child that has."""
    if any(folder.glob(pattern)):
        return folder
    found = sorted(child for child in folder.glob(children) if any(child.glob(pattern)))
    if len(found) > 1:
        notes.append(_shard_note(len(found), found[0].name))
    return found[0] if found else folder


def _shard_note(n: int, first: str) -> str:
    return (
        f"Of {n} dumps {first} is shown: with tensor parallelism the outputs of split modules are "
        "its part of them."
    )


def _tags(file: Path) -> dict[str, str]:
    pairs = (part.partition("=") for part in file.name.removesuffix(".pt").split("___"))
    return {key: value for key, equals, value in pairs if equals}


def _module_name(tags: Mapping[str, str]) -> str:
    """Return the name of a tensor, in the layer that its tags name.

    A module that all layers share, as the rotary embedding, has the name of the first one.
    """
    name, layer = tags.get("name", ""), tags.get("layer_id", "")
    if not layer.isdecimal():
        return name
    if "layers." in name:
        return re.sub(r"layers\.\d+", f"layers.{layer}", name, count=1)
    return f"layers.{layer}.{name}.output"


def _dump_index(file: Path) -> int:
    index = _tags(file).get("dump_index", "")
    return int(index) if index.isdecimal() else 0


def _load_dict(file: Path) -> dict[str, Any]:
    held = load_torch_file(file)
    if not isinstance(held, dict) or not all(isinstance(name, str) for name in held):
        raise UsageError(f"{file} is no tensor dump of SGLang: it holds no dict of names.")
    return held


def _load_value(file: Path) -> Any:
    held = load_torch_file(file)
    return held["value"] if isinstance(held, dict) and "value" in held else held


def _integers(value: Any) -> tuple[int, ...] | None:
    array = _array(value)
    return tuple(array.tolist()) if array is not None and array.ndim == 1 else None


def _array(value: Any) -> Array | None:
    return value.read().array if isinstance(value, LazyTensor) else None


def _make_pass(
    name: str, batch: Mapping[str, Any], load: Callable[[], tuple[Outputs, Any]]
) -> _Pass:
    ids, lengths = _integers(batch.get("input_ids")), _integers(batch.get("seq_lens"))
    if not ids or not lengths:
        raise UsageError(f"{name} has no input_ids and seq_lens of its batch.")
    if len(lengths) != 1:
        what = (
            f"{name} holds a batch of {len(lengths)} sequences, which a dump does not tell apart."
        )
        hint = "Send one request at a time (--max-running-requests 1), and dump again."
        raise UsageError(what, hint=hint)
    if lengths[0] < len(ids):
        raise UsageError(f"{name} is damaged: {len(ids)} rows in a sequence of {lengths[0]}.")
    positions = _integers(batch.get("positions")) or ()
    return _Pass(name, ids, positions if len(positions) == len(ids) else (), lengths[0], load)


# -- generations ----------------------------------------------------------------------------------


def _dump(source: str, passes: Sequence[_Pass], notes: list[str], tick: Tick) -> Dump:
    """Return the dump of passes in their order."""
    groups = list(_group(passes))
    notes.append("Neither the mask nor the head width is in the dump, so no attention is shown.")
    reader = _DumpedPassReader(notes, tick)
    return Dump(
        source=source,
        generations=(reader.generation(number, own) for number, own in enumerate(groups)),
        notes=notes,
        n_parts=len(passes),
    )


def _group(passes: Sequence[_Pass]) -> Iterator[list[_Pass]]:
    """Yield the passes of each request: a pass continues one if it begins where that ended.

    A pass of several rows after steps of one row is a new request whose beginning was cached.
    """
    group: list[_Pass] = []
    for each in passes:
        is_next = group and each.kv_before == group[-1].length
        has_decoded = any(len(one.ids) == 1 and n > 0 for n, one in enumerate(group))
        if group and (not is_next or (len(each.ids) > 1 and has_decoded)):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


class _DumpedPassReader:
    """Reads the outputs of passes."""

    def __init__(self, notes: list[str], tick: Tick) -> None:
        self._notes, self._tick = notes, tick

    def generation(self, number: int, passes: Sequence[_Pass]) -> DumpedGeneration:
        """Return one request; a prompt that was processed in parts is joined."""
        n_parts = next((n for n, one in enumerate(passes) if n and len(one.ids) == 1), len(passes))
        prompt = passes[:n_parts]
        ids = [id_ for one in prompt for id_ in one.ids]
        if passes[0].kv_before:
            self._notes.append(
                f"The first {passes[0].kv_before} tokens of request {number} came from a cache "
                "and are unknown."
            )
        return DumpedGeneration(
            sample_id=f"request {number}",
            n_prompt=len(ids),
            prompt=tuple(map(DumpedToken, ids)),
            prompt_start=passes[0].kv_before,
            position_ids=tuple(pos for one in prompt for pos in one.positions),
            passes=self._passes(passes),
        )

    def _passes(self, passes: Sequence[_Pass]) -> Iterator[ForwardPass]:
        for each, after in zip(passes, [*passes[1:], None], strict=True):
            outputs, last = each.load()
            budget = Budget()
            stats, hidden = self._layer_outputs(outputs, budget)
            self._notes += budget.notes()
            logits = _array(last[0] if isinstance(last, list) and last else last)
            if logits is not None and (logits.dtype.kind != "f" or not logits.size):
                logits = None
            self._tick()
            yield ForwardPass(
                n_rows=len(each.ids),
                kv_before=each.kv_before,
                position_ids=each.positions,
                logits=None if logits is None else np.atleast_2d(logits)[-1],
                chosen_id=after.ids[0] if after is not None and len(after.ids) == 1 else None,
                stats=tuple(stats),
                hidden=hidden,
            )

    def _layer_outputs(
        self, outputs: Outputs, budget: Budget
    ) -> tuple[list[LayerStatRecord], dict[int, Array]]:
        """Return the statistics of outputs in layers, and the layers' own outputs.

        SGLang adds a layer's output to the residual stream inside of the norm that follows, which
        returns the sum as its second value.
        """
        stats: list[LayerStatRecord] = []
        hidden: dict[int, Array] = {}
        shared = self._shared_rotary(outputs)
        last = max((int(m[1]) for m in map(_LAYER.fullmatch, outputs) if m), default=-1)
        for name, value in outputs.items():
            match = _LAYER.fullmatch(name)
            is_final = match is None and _FINAL_NORM.fullmatch(name) is not None
            if not (match or is_final) or name in shared:
                continue
            layer = check_layer(int(match[1]), name) if match else last + 1
            parts = value if isinstance(value, list | tuple) else [value]
            arrays = [self._output(name, part) for part in parts]
            is_norm = is_final or (match is not None and match[2] == "input_layernorm")
            if is_norm and len(arrays) == 2 and arrays[1] is not None and layer > 0:
                stem = name.rpartition("layers." if match else "norm")[0]
                module = f"{stem}layers.{layer - 1}"
                if match or self._is_output_of(module, outputs, arrays[1]):
                    if budget.keep(arrays[1]):
                        hidden[layer - 1] = arrays[1]
                    stats.append(layer_stat(layer - 1, module, arrays[1]))
            for index, array in enumerate(arrays):
                if match and array is not None:
                    of_layer = f"{name}.output" if match[2] is None else name
                    part_name = name if len(arrays) == 1 else f"{of_layer}[{index}]"
                    stats.append(layer_stat(layer, part_name, array))
        return sorted(stats, key=lambda stat: stat.layer), hidden

    def _is_output_of(self, module: str, outputs: Outputs, residual: Array) -> bool:
        """Whether the residual stream at the final norm is what this layer has left.

        It is not if only some layers were dumped, and this is not the last one of the model.
        """
        norm, mlp = (outputs.get(f"{module}.{n}") for n in _RESIDUAL_PARTS)
        before = norm[1] if isinstance(norm, list | tuple) and len(norm) == 2 else None
        a, b = _array(before), _array(mlp)
        if a is None or b is None or not a.shape == b.shape == residual.shape:
            return False
        return bool(np.allclose(a + b, residual, rtol=0.02, atol=0.02, equal_nan=True))

    def _output(self, name: str, value: Any) -> Array | None:
        if isinstance(value, UnreadableTensor):
            self._notes.append(f"{name} is left out: {value.reason}.")
        array = _array(value)
        return array if array is not None and array.ndim >= 2 and array.dtype.kind == "f" else None

    def _shared_rotary(self, outputs: Outputs) -> frozenset[str]:
        """Return the names of rotary embeddings that hold the output of another layer.

        SGLang makes one rotary embedding for all layers. Each of its calls fires the hooks of every
        layer, so that all names have the queries and keys of the last one.
        """
        names = [name for name in outputs if name.endswith("rotary_emb")]
        values = [outputs[name] for name in names]
        firsts = [_array(one[0] if isinstance(one, list | tuple) else one) for one in values]
        known = [one for one in firsts if one is not None]
        same = (np.array_equal(one, known[0], equal_nan=True) for one in known)
        if len(names) < 2 or len(known) < len(names) or not all(same):
            return frozenset()
        self._notes.append(
            "The rotary embeddings are left out: the layers share one, and the dump has its last "
            "output under the name of every layer."
        )
        return frozenset(names)

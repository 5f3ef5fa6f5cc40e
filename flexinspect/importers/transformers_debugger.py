"""Trees of transformers' `model_addition_debugger_context`: one forward pass per folder.

The context (transformers.model_debugging_utils) writes `CLASS_debug_tree_FULL_TENSORS.json` and
`CLASS_debug_tree_SUMMARY.json`: a node per module call with `module_path`, `inputs`, `outputs` and
`children`. Only modules without children keep their outputs. A tensor has its shape, dtype, four
statistics, and as `value` either lines of its `repr`, which are rounded and shortened, or with
`use_repr=False` the path of a safetensors file.

Queries and keys are not in it after rotation, and the kernel not at all. They are rotated here with
the dump's own cos and sin. The result is only kept if attention under the dump's mask (or a causal
one, if the layer received none) reproduces the recorded attention output in every row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from flexinspect.core.errors import UsageError
from flexinspect.importers.importer import (
    AttentionTensors,
    Budget,
    Dump,
    DumpedGeneration,
    DumpedToken,
    ForwardPass,
    Tick,
    check_layer,
    decode_json,
    read_json_bytes,
)
from flexinspect.importers.reproduced_attention import MAX_CHECKED_ROWS, reproduce_attention
from flexinspect.importers.tensor_files import SafetensorsFile, Tensor
from flexinspect.importers.tensor_records import layer_stat
from flexinspect.records.step import INFERRED_MASK, Array, LayerStatRecord

FULL, SUMMARY = "_debug_tree_FULL_TENSORS.json", "_debug_tree_SUMMARY.json"
MAX_NODES = 1 << 20

_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)(?:\.(.+))?$")
_NUMBER = re.compile(r"tensor\(([^,)]+)")
_SIZES = re.compile(r"\d{1,15}")


class _Node(Struct, frozen=True):
    """A module call: `path` without the model's class, and its position in the model."""

    path: str
    inputs: Mapping[str, Any]
    outputs: Any
    layer: int | None
    module: str


class TransformersDebuggerImporter:
    """The importer of the trees."""

    name = "transformers-debugger"
    title = "transformers' model_addition_debugger"

    def recognizes(self, folder: Path) -> bool:
        """Whether the folder has a tree."""
        return any(folder.glob(f"*{FULL}")) or any(folder.glob(f"*{SUMMARY}"))

    def open(self, folder: Path, tick: Tick) -> Dump:
        """Read the tree; the tensors follow with its pass. Raises `UsageError`."""
        file = _find_tree(folder)
        tree = decode_json(file, read_json_bytes(file))
        nodes = list(_walk(tree, file))
        notes: list[str] = []
        if file.name.endswith(SUMMARY):
            notes.append("Only the summary was found: it has no values, so no token ids.")
        reader = _PassReader(folder, file, nodes, notes, tick)
        layers = sorted({node.layer for node in nodes if node.layer is not None})
        model: dict[str, Any] = {"name": nodes[0].module, "class": nodes[0].module}
        if layers:
            model["layers"] = layers[-1] + 1
            if len(layers) <= layers[-1]:
                notes.append(
                    f"The dump has {len(layers)} of {layers[-1] + 1} layers; write it with "
                    "do_prune_layers=False."
                )
        return Dump(
            source=self.title,
            generations=reader.generations(file.name.split("_debug_tree")[0]),
            notes=notes,
            n_parts=len(nodes),
            model=model,
        )


def _find_tree(folder: Path) -> Path:
    for suffix in (FULL, SUMMARY):
        files = sorted(folder.glob(f"*{suffix}"))
        if len(files) > 1:
            names = " and ".join(file.name for file in files[:2])
            what = f"{folder} holds the trees of {len(files)} models: {names}."
            raise UsageError(what, hint="Move each into a folder of its own.")
        if files:
            return files[0]
    what = f"{folder} has no *{FULL}."
    raise UsageError(what, hint="model_addition_debugger_context writes it at debug_path.")


def _walk(tree: Any, file: Path) -> Iterator[_Node]:
    """Yield the nodes in the order of their calls. Raises `UsageError` for another structure."""
    pending, n_nodes = [tree], 0
    while pending:
        node = pending.pop()
        n_nodes += 1
        if n_nodes > MAX_NODES:
            raise UsageError(f"{file} has more than {MAX_NODES} module calls.")
        if not isinstance(node, dict) or not isinstance(node.get("module_path"), str):
            raise UsageError(f"{file} is no tree of the debugger: a node has no module_path.")
        children, inputs = node.get("children") or [], node.get("inputs") or {}
        if not isinstance(children, list) or not isinstance(inputs, dict):
            raise UsageError(f"{file}: {node['module_path'][:80]} has invalid children or inputs.")
        root, _, path = node["module_path"].partition(".")
        match = _LAYER.search(node["module_path"])
        layer = None if match is None else check_layer(int(match[1]), str(file))
        args, kwargs = inputs.get("args"), inputs.get("kwargs")
        known = {
            "args": args if isinstance(args, list) else [],
            "kwargs": kwargs if isinstance(kwargs, dict) else {},
        }
        yield _Node(path, known, node.get("outputs"), layer, path or root)
        pending += reversed(children)


def parse_repr(lines: Any) -> Array | None:
    """Return the integers of a tensor's `repr`; None for floats (rounded) and shortened ones."""
    is_text = isinstance(lines, list) and all(isinstance(line, str) for line in lines)
    text = " ".join(lines) if is_text else ""
    match = re.fullmatch(
        r"tensor\((\[[\[\]\d\s,-]*\])(?:, dtype=[\w.]+)?(?:, device='[^']*')?\)", text
    )
    if match is None:
        return None
    try:
        return np.asarray(msgspec.json.decode(match[1]), np.int64)
    except (ValueError, OverflowError, msgspec.DecodeError, RecursionError):
        return None


class _PassReader:
    """Reads the tensors of one tree and makes its only pass."""

    def __init__(
        self, folder: Path, file: Path, nodes: list[_Node], notes: list[str], tick: Tick
    ) -> None:
        self._folder, self._file, self._notes, self._tick = folder, file, notes, tick
        self._nodes = nodes
        self._by_path = {node.path: node for node in nodes}  # the last call of a module counts

    def generations(self, name: str) -> Iterator[DumpedGeneration]:
        """Yield the only generation."""
        ids = self._find_ids()
        n_rows, batch = self._sizes(ids)
        positions, own = self._input_of_any("position_ids"), tuple[int, ...]()
        fits = positions is not None and positions.array.shape[-1:] == (n_rows,)
        if positions is not None and fits and positions.array.dtype.kind in "iu":
            own = tuple(positions.array.reshape(-1, n_rows)[0].tolist())
        first = self._kv_before(n_rows)
        yield DumpedGeneration(
            sample_id=name,
            n_prompt=n_rows,
            prompt=tuple(map(DumpedToken, ids[0].tolist())) if ids is not None else (),
            prompt_start=first,
            position_ids=own,
            passes=self._passes(n_rows, batch, first, own),
        )

    def _passes(
        self, n_rows: int, batch: int, kv_before: int, positions: tuple[int, ...]
    ) -> Iterator[ForwardPass]:
        if batch > 1:
            self._notes.append(f"Of a batch of {batch} sequences the first one is shown.")
        budget = Budget()
        stats, hidden = self._layer_outputs(budget)
        attention = self._attention(kv_before, budget)
        self._notes += budget.notes()
        yield ForwardPass(
            n_rows=n_rows,
            kv_before=kv_before,
            batch=batch,
            position_ids=positions,
            logits=self._logits(),
            attention=tuple(attention),
            stats=tuple(stats),
            hidden=hidden,
        )

    # -- values ------------------------------------------------------------------------------------

    def _tensor(self, value: Any) -> Tensor | None:
        """Return the elements of a serialized tensor, None where they are not in the dump."""
        if not isinstance(value, dict) or "shape" not in value:
            return None
        stored, dtype = value.get("value"), str(value.get("dtype", "")).removeprefix("torch.")
        if not isinstance(stored, str):
            parsed = parse_repr(stored)
            fits = parsed is not None and parsed.shape == _shape(value)
            return Tensor(parsed, dtype) if fits and parsed is not None else None
        path = self._folder / Path(stored).name  # the context writes them all into one folder
        return SafetensorsFile(path).read("data") if path.is_file() else None

    def _find_ids(self) -> Array | None:
        values = [node.inputs["kwargs"].get("input_ids") for node in self._nodes[:2]]
        values += [
            _first_argument(node)
            for node in self._nodes
            if "embed" in node.path.rpartition(".")[2] or node.path.endswith("wte")
        ]
        for value in values:
            found = self._tensor(value)
            if found is not None and found.array.ndim == 2 and found.array.dtype.kind in "iu":
                return found.array
        self._notes.append("The token ids are not in the dump, or shortened in it.")
        return None

    def _sizes(self, ids: Array | None) -> tuple[int, int]:
        """Return the number of rows and of sequences. Raises `UsageError` if neither is known."""
        if ids is not None and ids.size:
            return ids.shape[1], ids.shape[0]
        for node in self._nodes:
            for value in (*(node.inputs["args"]), node.outputs):
                shape = _shape(value)
                if len(shape) == 3 and 0 not in shape:
                    return shape[1], shape[0]
        raise UsageError(f"{self._file} holds no tensor of (sequences, rows, width).")

    def _input_of_any(self, name: str) -> Tensor | None:
        for node in self._nodes:
            found = self._tensor(node.inputs["kwargs"].get(name))
            if found is not None:
                return found
        return None

    def _kv_before(self, n_rows: int) -> int:
        """Return the number of keys before this pass, from the shape of a layer's mask."""
        for node in self._nodes:
            shape = _shape(node.inputs["kwargs"].get("attention_mask"))
            if len(shape) == 4:
                return max(shape[3] - n_rows, 0)
        return 0

    def _logits(self) -> Array | None:
        node = self._by_path.get("lm_head") or self._by_path.get("embed_out")
        logits = None if node is None else self._tensor(node.outputs)
        if logits is None or logits.array.ndim != 3 or logits.array.dtype.kind != "f":
            if node is not None:
                self._notes.append(
                    "The logits are in the dump as rounded text only; write it with use_repr=False."
                )
            return None
        newest: Array = logits.array[0, -1]
        return newest

    # -- layers ------------------------------------------------------------------------------------

    def _layer_outputs(self, budget: Budget) -> tuple[list[LayerStatRecord], dict[int, Array]]:
        """Return the statistics of all outputs in layers, and the layers' own outputs.

        The tree drops the output of a module with children. That of a layer is the input of the
        layer or of the norm that comes next.
        """
        stats: list[LayerStatRecord] = []
        hidden: dict[int, Array] = {}
        before: int | None = None
        for node in self._nodes:
            self._tick()
            is_layer = node.layer is not None and node.path.endswith(f".{node.layer}")
            is_norm = before is not None and node.layer is None and _is_final_norm(node.path)
            if before is not None and ((is_layer and node.layer == before + 1) or is_norm):
                value = _first_argument(node)
                value = value or node.inputs["kwargs"].get("hidden_states")
                prefix = self._layer_paths[before]
                stats += self._stat(before, prefix, value)
                output = self._tensor(value)
                if output is not None and output.array.ndim == 3 and budget.keep(output.array):
                    hidden[before] = output.array[0]
            if is_layer:
                before = node.layer
            elif is_norm:
                before = None
            if node.layer is not None and node.outputs is not None:
                several = node.outputs if isinstance(node.outputs, list) else [node.outputs]
                stats += self._stat(node.layer, node.path, next(iter(several), None))
        return stats, hidden

    @property
    def _layer_paths(self) -> dict[int, str]:
        found = (node for node in self._nodes if node.layer is not None)
        return {n.layer: n.path for n in found if n.layer is not None
                and n.path.endswith(f".{n.layer}")}  # fmt: skip

    def _stat(self, layer: int, module: str, value: Any) -> list[LayerStatRecord]:
        """Return the statistics of an output, from its elements or those that the tree has.

        The tree does not count NaN and Inf; 1 then stands for at least one.
        """
        tensor = self._tensor(value)
        if tensor is not None and tensor.array.dtype.kind == "f":
            return [layer_stat(layer, module, tensor.array)]
        if not isinstance(value, dict) or "mean" not in value:
            return []
        low, high, mean, std = (_figure(value.get(n)) for n in ("min", "max", "mean", "std"))
        has_nan = math.isnan(low) or math.isnan(high)
        has_inf = math.isinf(low) or math.isinf(high)
        if has_nan or has_inf:
            self._notes.append("The tree does not count NaN and Inf: a count of 1 is at least 1.")
        n = math.prod(_shape(value))
        # torch's std divides by n - 1; a trace has that of the population.
        spread = std * math.sqrt((n - 1) / n) if n else math.nan
        norm = math.sqrt(n) * math.hypot(mean, spread)
        figures = (low, high, mean, spread, norm)
        return [LayerStatRecord(layer, module, int(has_nan), int(has_inf), *figures)]

    def _attention(self, kv_before: int, budget: Budget) -> list[AttentionTensors]:
        """Return the layers whose attention is reproduced; with a cache its keys are missing."""
        found, errors = [], []
        for node in self._nodes if not kv_before else ():
            if not node.path.endswith(("self_attn", "attention", ".attn")) or node.layer is None:
                continue
            made = self._reproduce(node, node.layer)
            if made is None:
                continue
            each, error = made
            if budget.keep(each.q, each.k, each.v, each.out, each.mask):
                found.append(each)
                errors.append(error)
        if found:
            is_causal = any(each.mask_kind == INFERRED_MASK for each in found)
            mask = "a causal mask (the layers received none)" if is_causal else "the dump's mask"
            n_rows = min(found[0].q.shape[1] if found[0].q is not None else 0, MAX_CHECKED_ROWS)
            self._notes.append(
                f"Queries and keys of {len(found)} layers were rotated with the dump's cos and "
                f"sin; under {mask} they reproduce the recorded attention output of {n_rows} "
                f"rows, with an error of at most {max(errors):.0e}."
            )
        return found

    def _reproduce(self, node: _Node, layer: int) -> tuple[AttentionTensors, float] | None:
        tensors: dict[str, Tensor] = {}
        for name in ("q", "k", "v"):
            paths = (f"{node.path}.{name}_norm", f"{node.path}.{name}_proj")
            source = next(filter(None, map(self._by_path.get, paths)), None)
            value = None if source is None else self._tensor(source.outputs)
            if value is not None:
                tensors[name] = value
        last, given = self._by_path.get(f"{node.path}.o_proj"), node.inputs["kwargs"]
        out = None if last is None else self._tensor(_first_argument(last))
        angles = given.get("position_embeddings")
        pair = [self._tensor(each) for each in angles] if isinstance(angles, list) else []
        turns = [each.array[0] for each in pair if each is not None and each.array.ndim == 3]
        if out is None or len(tensors) < 3 or len(turns) != 2:
            return None
        received = given.get("attention_mask", "None")
        mask = None if received == "None" else self._tensor(received)
        if received != "None" and mask is None:
            return None
        tensors["out"] = out
        cells = None if mask is None else mask.array
        return reproduce_attention(layer, tensors, (turns[0], turns[1]), cells)


def _shape(value: Any) -> tuple[int, ...]:
    text = value.get("shape") if isinstance(value, dict) else None
    return tuple(map(int, _SIZES.findall(text)))[:8] if isinstance(text, str) else ()


def _first_argument(node: _Node) -> Any:
    return next(iter(node.inputs["args"]), None)


def _is_final_norm(path: str) -> bool:
    name = path.rpartition(".")[2]
    return "norm" in name or name == "ln_f"


def _figure(text: Any) -> float:
    match = _NUMBER.match(text) if isinstance(text, str) else None
    try:
        return float(match[1]) if match else math.nan
    except ValueError:
        return math.nan

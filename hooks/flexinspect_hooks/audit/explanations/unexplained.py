"""What is known about a divergence that no hypothesis reproduces: place, shape and code."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn

from flexinspect_hooks.audit.caches.cache_beside_text import cache_beside_text, cache_changes
from flexinspect_hooks.audit.evidence.audited_sequence import AuditedStep
from flexinspect_hooks.audit.evidence.difference_shape import (
    IS_LOW_RANK,
    IS_NOISE,
    MIN_ROWS,
    ComparedTensors,
    describe_difference,
    is_quantized,
    split_last,
)
from flexinspect_hooks.audit.evidence.row_comparison import Divergence, RowComparison
from flexinspect_hooks.audit.explanations.attention_reading import HeadOutputs, read_attention
from flexinspect_hooks.audit.explanations.bias_reading import (
    describe_biases,
    head_biases,
    read_bias,
)
from flexinspect_hooks.audit.explanations.module_swap import (
    SwapResult,
    compare_modules,
    own_hooks,
    replaced_code,
)
from flexinspect_hooks.audit.explanations.position_reading import RotatedRows, read_positions
from flexinspect_hooks.audit.forward.forward_edits import ForwardEdit, Rotation, Scope
from flexinspect_hooks.audit.forward.forward_run import (
    HEADS,
    HIDDEN,
    KEY,
    LOGITS,
    QUERY,
    VALUE,
    Point,
    Run,
)
from flexinspect_hooks.audit.forward.program_hooks import code_text
from flexinspect_hooks.audit.forward.rotary_tables import frequencies_of
from flexinspect_hooks.audit.forward.weights import Snapshot
from flexinspect_hooks.audit.reference.clean_classes import architecture_class, replaced_names
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel

_MAX_NAMES = 8
_MAX_SPANS = 8
_ADDED = (
    ("self_attn", "mlp"),
    ("post_attention_layernorm", "post_feedforward_layernorm"),
    ("attn", "mlp"),
    ("attention", "mlp"),
)
"""Pairs of modules whose outputs a layer adds to its input, by architecture."""


def _is_adapter(swapped: SwapResult, hooks: Sequence[str]) -> bool:
    """Whether all that differs are linear modules whose own hooks add a change of low rank."""
    return bool(swapped.differing) and all(
        any(one.startswith(f"{module.name} has") for one in hooks)
        and len(module.shape) == 1
        and module.shape[0].startswith(IS_LOW_RANK)
        and module.inside is None
        for module in swapped.differing
    )


class Unexplained(Struct, frozen=True):
    """A divergence, with the forward of the reference that is beside it."""

    reference: ReferenceModel
    source: Snapshot
    comparison: RowComparison
    base: Run
    clean: Mapping[Point, Tensor]
    found: Divergence

    @property
    def layer(self) -> int | None:
        """The layer of the divergence, None outside of all."""
        return self.found.point[1]

    def facts(self) -> dict[str, Any]:
        """Return the circumstances of the divergence as the data of an event."""
        swapped, reading, shape = self._swap(), self._reading(), self.shape()
        if swapped.differing and any(one.startswith(IS_NOISE) for one in shape):
            shape = []  # the module says more
        replaced = [*self._replaced(), *self._replaced_functions()][:_MAX_NAMES]
        hooks = self._hooks()
        return {
            "shape": shape,
            "reading": reading,
            "cache": [*self._cached_rotation(reading), *self._cache()],
            "modules": [
                {
                    "name": one.name,
                    "class": one.cls,
                    "shape": list(one.shape),
                    "inside": None if one.inside is None else [one.inside[0], list(one.inside[1])],
                }
                for one in swapped.differing
            ],
            "agreeing": list(swapped.agreeing),
            "untested": list(swapped.untested),
            "replaced": replaced,
            "function": self._attention_function(),
            "hooks": hooks,
            "adapter": not replaced and _is_adapter(swapped, hooks),
            "quantized": self._is_quantized(),
        }

    # -- the quantity ------------------------------------------------------------------------------

    def shape(self) -> list[str]:
        """Return how the quantity differs: in all steps from the first one on, else in that one."""
        for chosen in self._spans():
            compared = self._compared(chosen)
            shape = [] if compared is None else describe_difference(compared)
            if shape:
                return shape
        return []

    def _is_quantized(self) -> bool:
        """Whether keys or values of the first layer are only rounded, and stay so in the cache."""
        name, layer = self.found.point
        if name not in (KEY, VALUE) or layer != min(self.reference.blocks):
            return False
        steps = self.comparison.steps
        if any(not one.is_order for one in cache_changes([one.evidence for one in steps])):
            return False
        first = steps.index(self.comparison.step_of(self.found))
        # Of later steps no keys are kept.
        tables = [one for step in steps[first:] if (one := self._compared([step])) is not None]
        return len(tables) >= min(2, len(steps) - first) and all(map(is_quantized, tables))

    def _spans(self) -> list[list[AuditedStep]]:
        """Return the diverging step, and all from it on; a step of one row shows little alone."""
        steps = self.comparison.steps
        first = steps.index(self.comparison.step_of(self.found))
        spans = [steps[first : first + 1], steps[first:]]
        return spans if len(steps[first].positions) >= MIN_ROWS else spans[::-1]

    def _compared(self, steps: Sequence[AuditedStep]) -> ComparedTensors | None:
        point, ours, theirs, places = self.found.point, [], [], list[int]()
        right = self.clean.get(point)
        if right is None:
            return None
        for step in steps:
            pair = self._rows(step, right)
            if pair is not None:
                ours.append(pair[0])
                theirs.append(pair[1])
                places += pair[2]
        if not ours:
            return None
        heads = self._n_heads()
        table = torch.cat(theirs)
        parts = self._parts(places) if point[0] == HIDDEN else {}
        if parts and not torch.allclose(
            sum(parts.values(), table * 0), table, rtol=1e-3, atol=1e-4
        ):
            parts = {}
        return ComparedTensors(torch.cat(ours), table, self.found.limit, places, heads, parts)

    def _rows(self, step: AuditedStep, right: Tensor) -> tuple[Tensor, Tensor, list[int]] | None:
        """Return the rows of a step, those of the reference, and their positions."""
        evidence, point = step.evidence, self.found.point
        kept = evidence.values.get(point)
        if kept is None or evidence.dtype is not None or step.row >= len(kept):
            return None
        if point[0] == LOGITS:
            last = int(step.positions[-1])
            rows = list(self.comparison.logit_rows)
            if step.row or last not in rows or kept.shape[-1] != right.shape[-1]:
                return None
            theirs = right[0, [rows.index(last)]]
            return kept[0].flatten(0, -2).double().cpu(), theirs.double().cpu(), [last]
        places = step.positions
        ours = kept[step.row].index_select(0, step.kept.to(kept.device)).flatten(1)
        table = right[0].transpose(0, 1).flatten(1) if right.dim() == 4 else right[0]
        theirs = table.index_select(0, places.to(right.device))
        if ours.shape != theirs.shape:
            return None
        return ours.double().cpu(), theirs.double().cpu(), places.tolist()

    def _fresh_run(self, layer: int) -> Run:
        """Return a run of the reference as it is, up to a layer."""
        base = self.base
        return Run(
            base.positions.clone(),
            base.ends,
            base.masks,
            base.biases,
            base.score_mods,
            stop_after=layer,
            hooks=base.hooks,
        )

    def _n_heads(self) -> int:
        config, name = self.reference.config, self.found.point[0]
        heads = int(getattr(config, "num_attention_heads", 0) or 0)
        if name in (KEY, VALUE):
            return int(getattr(config, "num_key_value_heads", None) or heads)
        return heads if name in (QUERY, HEADS) else 0

    def _parts(self, places: Sequence[int]) -> dict[str, Tensor]:
        """Return what the layer adds up: its input, and the outputs of attention and MLP."""
        layer, kept = self.layer, dict[str, Tensor]()
        if layer is None:
            return {}
        _, block = self.reference.blocks[layer]
        children = dict(block.named_children())
        pair = next((two for two in reversed(_ADDED) if set(two) <= set(children)), None)
        if pair is None or (pair[0] == "self_attn" and "post_feedforward_layernorm" in children):
            pair = _ADDED[1]
        if not set(pair) <= set(children):
            return {}

        def keep_input(module: nn.Module, args: Any, kwargs: Any) -> None:
            kept["the layer's input"] = args[0] if args else kwargs["hidden_states"]

        def keep_output(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                kept[name] = output[0] if isinstance(output, tuple) else output

            return hook

        removes = [
            block.register_forward_pre_hook(keep_input, with_kwargs=True),
            children[pair[0]].register_forward_hook(keep_output("the attention's output")),
            children[pair[1]].register_forward_hook(keep_output("the MLP's output")),
        ]
        run = self._fresh_run(layer)
        try:
            self.reference.run(self.comparison.sequence.ids, run)
        finally:
            for one in removes:
                one.remove()
        index = torch.tensor(places)
        return {name: one[0].double().cpu()[index] for name, one in kept.items()}

    def _reading(self) -> str:
        """Return by which heads, weights or positions the program made the quantity."""
        name, layer = self.found.point
        right = {one: self.clean.get((one, layer)) for one in (QUERY, KEY, VALUE, HEADS)}
        if layer is None or any(one is None for one in right.values()):
            return ""
        if text := self._bias_reading(layer):
            return text
        for chosen in self._spans():
            compared = self._compared(chosen)
            if compared is None:
                continue
            text = ""
            if name == HEADS:
                text = self._attention_reading(compared, layer)
            elif name in (QUERY, KEY):
                text = self._position_reading(compared, layer)
            if text:
                return text
        return ""

    def _cache(self) -> list[str]:
        """Return what is wrong with the cache that the diverging step reads."""
        layer, step = self.layer, self.comparison.step_of(self.found)
        evidence = step.evidence
        if layer is None:
            return []
        texts = list[str]()
        generation = [one.evidence for one in self.comparison.steps]
        changes = cache_changes(generation)
        broken = [one for one in changes if not one.is_order]
        near = [one for one in changes if one.step <= evidence.step]
        if near or broken:
            texts.append((broken[0] if broken else near[-1]).text)
        if not evidence.kv_before:
            return texts
        key, value = (self.clean.get((one, layer)) for one in (KEY, VALUE))
        if key is not None and value is not None:
            right = {"keys": key[0], "values": value[0]}
            columns = self.comparison.sequence.input_rows
            text = cache_beside_text(evidence, layer, step.row, right, columns, self.found.limit)
            texts += [text] if text else []
        return texts

    def _attention_reading(self, compared: ComparedTensors, layer: int) -> str:
        query, key, value = (
            self.clean[one, layer][0].double().cpu() for one in (QUERY, KEY, VALUE)
        )
        module = next(
            (m for m in self.reference.blocks[layer][1].modules() if hasattr(m, "scaling")), None
        )
        scale = float(getattr(module, "scaling", query.shape[-1] ** -0.5))
        n = len(self.comparison.sequence.ids)
        mask = self.base.masks.get(layer)
        allowed = self.reference.own_mask(layer, n) if mask is None else mask
        heads = query.shape[0]
        given = HeadOutputs(
            split_last(compared.ours, heads),
            split_last(compared.theirs, heads),
            query,
            key,
            value,
            allowed.cpu(),
            scale,
            tuple(compared.positions),
            compared.limit,
        )
        return read_attention(given)

    def _bias_reading(self, layer: int) -> str:
        """Return which heads of the layer have another bias than their own."""
        counts = {
            name: int(self.clean[name, layer].shape[1])
            for name in (QUERY, KEY, VALUE)
            if self.clean[name, layer].dim() == 4
        }
        biases = head_biases(self.reference.blocks[layer][1], counts)
        if not biases or self.found.point[0] not in biases:
            return ""
        turn, texts = self._rotation(layer), list[str]()
        for name in biases:
            found = replace(self.found, point=(name, layer))
            for chosen in self._spans():
                compared = replace(self, found=found)._compared(chosen)
                if compared is None:
                    continue
                rotation = turn if name in (QUERY, KEY) else None
                if read := read_bias(name, compared, biases, rotation):
                    texts += read
                    break
        return describe_biases(texts)

    def _position_reading(self, compared: ComparedTensors, layer: int) -> str:
        name = self.found.point[0]
        plain = self._before_rotation(layer, name)
        if plain is None:
            return ""
        return self._read_rotated(compared.ours, plain, compared.positions)

    def _read_rotated(self, ours: Tensor, plain: Tensor, places: Sequence[int]) -> str:
        """Read the positions of rows (rows, heads x size) from those before rotation."""
        kind = frequencies_of(self.reference.model, self.layer)
        rows = plain.transpose(0, 1)[list(places)]
        frequencies = torch.empty(0) if kind is None else kind.frequencies.double().cpu()
        if frequencies.shape[0] * 2 != rows.shape[-1]:
            return ""
        split = split_last(ours, rows.shape[1])
        return read_positions(RotatedRows(split, rows, frequencies, tuple(places)))

    def _cached_rotation(self, reading: str) -> list[str]:
        """Return how the keys in the last cache are rotated, if it is not as in the first step."""
        layer, sequence = self.layer, self.comparison.sequence
        if layer is None or self.found.point[0] not in (QUERY, KEY) or sequence.is_padded:
            return []
        for step in reversed(self.comparison.steps):
            kept = step.evidence.cached.get(layer)
            if kept is None or not kept.is_intact or step.row >= len(kept.key):
                continue
            n = int(step.positions[-1]) + 1
            plain = self._before_rotation(layer, KEY)
            if plain is None or kept.key.shape[2] < n or kept.key.shape[1] != plain.shape[0]:
                return []
            ours = kept.key[step.row, :, :n].transpose(0, 1).flatten(1).double().cpu()
            text = self._read_rotated(ours, plain, range(n)).replace("Its rows are", "they are")
            if not text or text == reading or "they are" not in text:
                return []
            return [f"Of the keys that are cached in step {step.evidence.step}, {text}"]
        return []

    def _before_rotation(self, layer: int, name: str) -> Tensor | None:
        """Return the queries or keys (heads, rows, size) of a layer before RoPE."""
        turn = self._rotation(layer)
        if turn is None:
            return None
        return (turn.query if name == QUERY else turn.key)[0].double().cpu()

    def _rotation(self, layer: int) -> Rotation | None:
        """Return the rotation of a layer by RoPE, None without one."""
        kept: list[Rotation] = []

        def none(turn: Rotation) -> tuple[Tensor, Tensor]:
            kept.append(turn)
            return turn.rotate(turn.query, turn.key, turn.cos, turn.sin)

        edit = ForwardEdit(name="", sentence="", rope=none)
        run = self._fresh_run(layer)
        run.edits = [(edit, Scope(0, frozenset((layer,))))]
        self.reference.run(self.comparison.sequence.ids, run)
        return kept[0] if kept else None

    # -- the code ----------------------------------------------------------------------------------

    def _swap(self) -> SwapResult:
        ids, program = self.comparison.sequence.ids, self.source.root()
        limit = self.comparison.limits.get(self.found.point, self.found.limit)
        first, last = self.comparison.step_of(self.found), self.comparison.steps
        spans = [
            (int(one.positions[0]), int(one.positions[-1]) + 1)
            for one in last[last.index(first) :][:_MAX_SPANS]
        ]
        if spans[0][1] - spans[0][0] >= MIN_ROWS:
            spans = spans[:1]
        states, row = self.reference.row_states, first.first_row
        with nullcontext() if states is None else states.set(states.part_of(row)):
            return compare_modules(
                self.reference, program, ids, self.base, self.layer, limit, spans
            )

    def _attention_function(self) -> str:
        """Return the program's own attention function, with its line; empty if it has none."""
        name = getattr(self.source.config, "_attn_implementation", None)
        modeling = sys.modules.get("transformers.modeling_utils")
        table = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", {})
        function = table.get(name)
        if str(getattr(function, "__module__", "")).startswith("transformers."):
            return ""
        return code_text(function)

    def _hooks(self) -> list[str]:
        """Return hooks in the layer, outside of all, and on the layer before."""
        root = self.source.root()
        found = list(own_hooks(root, self._other_blocks()))
        before = self.reference.blocks.get((self.layer or 0) - 1)
        if before is not None and self.found.point[0] in (QUERY, KEY, VALUE):
            whole = f"{before[0]} has"
            found += [one for one in own_hooks(root, ()) if one.startswith(whole)]
        return found[:_MAX_NAMES]

    def _other_blocks(self) -> list[str]:
        return [name for number, (name, _) in self.reference.blocks.items() if number != self.layer]

    def _replaced(self) -> list[str]:
        """Return modules in the layer, or outside of all, with another class or `forward`."""
        reference = self.reference
        others = self._other_blocks()
        classes, own = self.source.classes, self.source.own_forwards
        where = replaced_code(self.source.root(), [f"{name}.forward" for name in own])
        replaced = [
            f"{name}.forward"
            + (f" ({where[f'{name}.forward']})" if f"{name}.forward" in where else "")
            for name in own
        ]
        replaced += [
            f"{name} (by {classes[name]})"
            for name, module in reference.model.named_modules()
            if classes.get(name, type(module).__name__) != type(module).__name__
        ]
        return [one for one in replaced if not any(one.startswith(f"{name}.") for name in others)]

    def _replaced_functions(self) -> list[str]:
        """Return replaced functions and methods of the architecture's module, with their lines."""
        original = architecture_class(self.source.model_class)
        found = []
        for name in replaced_names(self.source.model_class):
            value: Any = sys.modules[original.__module__] if original is not None else None
            for part in name.split("."):
                value = getattr(value, part, None)
            where = code_text(value)
            found.append(f"{name} ({where})" if where else name)
        return found

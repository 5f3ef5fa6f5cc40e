"""The functions of a copied module that the reference replaces: masks, attention, RoPE.

Outside of a run of a reference they do what the originals do.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect_hooks.audit.forward.forward_edits import AttentionInput, Rotation
from flexinspect_hooks.audit.forward.forward_run import (
    KEY,
    QUERY,
    VALUE,
    active_run,
    mix_rows,
    window_mask,
)
from flexinspect_hooks.audit.forward.rotary_tables import RotaryTables
from flexinspect_hooks.audit.forward.score_mods import attend_with
from flexinspect_hooks.audit.reference.clean_classes import ORIGINALS


class _Interface:
    """Stands for transformers' registry of attention functions: it has only the eager one."""

    def get_interface(self, attn_implementation: str, default: Callable[..., Any]) -> Any:
        """Return the architecture's own function."""
        return default

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


def prepare(namespace: ModuleType) -> None:
    """Replace masks, attention and rotary embedding in the copied module, once."""
    if hasattr(namespace, "_flexinspect_prepared"):
        return
    names = vars(namespace)
    names["_flexinspect_prepared"] = True
    names[ORIGINALS] = dict(names)
    for name in [name for name in names if re.fullmatch(r"create_(\w+_)?causal_mask", name)]:
        setattr(namespace, name, _mask_function(name, names[name]))
    if "ALL_ATTENTION_FUNCTIONS" in names:
        namespace.ALL_ATTENTION_FUNCTIONS = _Interface()  # type: ignore[attr-defined]
    if "eager_attention_forward" in names:
        original = names["eager_attention_forward"]
        namespace.eager_attention_forward = _attention_function(original)  # type: ignore[attr-defined]
    if "apply_rotary_pos_emb" in names:
        rotate = names["apply_rotary_pos_emb"]
        namespace.apply_rotary_pos_emb = _rope_function(rotate)  # type: ignore[attr-defined]


def _mask_function(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        active = active_run()
        if active is None:
            return original(*args, **kwargs)
        reference, run = active
        n = run.positions.shape[1]
        config = kwargs.get("config", args[0] if args else reference.config)
        window = getattr(config, "sliding_window", None) if "sliding" in name else None
        allowed = window_mask(n, window, reference.device)
        if "chunked" in name:
            size = config.attention_chunk_size
            chunks = torch.arange(n, device=reference.device) // size
            allowed = allowed & (chunks[:, None] == chunks[None])
        if run.masks.get(-1) is not None:  # for architectures whose attention cannot be edited
            allowed = run.masks[-1][0]
        closed = torch.finfo(reference.dtype).min
        dense = torch.zeros(n, n, dtype=reference.dtype, device=reference.device)
        return dense.masked_fill(~allowed, closed)[None, None]

    return mask


def _attention_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> Any:
        active = active_run()
        if active is None:
            options = kwargs if scaling is None else {"scaling": scaling, **kwargs}
            return original(module, query, key, value, attention_mask, **options)
        reference, run = active
        if id(module) in reference.cross_attention:
            options = {"scaling": scaling, **kwargs}
            return _cross_attention(
                original, active, module, (query, key, value), attention_mask, options
            )
        layer, n = run.layer, query.shape[2]
        rows = {QUERY: query, KEY: key, VALUE: value}
        run.values |= {(name, layer): tensor.detach() for name, tensor in rows.items()}
        if run.noise:
            query, key, value = (run.perturb(one) for one in (query, key, value))
        allowed = run.masks.get(layer)
        if allowed is None and attention_mask is None:
            allowed = reference.own_mask(layer, n)
        if allowed is None and attention_mask is not None:
            allowed = attention_mask[0] > torch.finfo(query.dtype).min / 2
        assert allowed is not None
        plain = AttentionInput(
            module, layer, query, key, value, allowed[None], run.biases.get(layer), scaling, kwargs
        )
        if (score_mod := run.score_mods.get(layer)) is not None:
            plain.output = partial(attend_with, score_mod, torch.arange(n, device=query.device))
        output = reference.attend(original, plain)
        for edit, scope in run.edits:
            if edit.attention is not None and scope.has(layer):
                changed = edit.attention(copy.copy(plain))
                if run.ends is not None:
                    keys = torch.arange(changed.allowed.shape[-1], device=run.ends.device)
                    changed.allowed = changed.allowed & (keys[None] < run.ends[:, None])
                edited = reference.attend(original, changed)
                output = mix_rows(output, edited, scope.first_row, 1)
        return output, None

    return attention


def _cross_attention(
    original: Callable[..., Any],
    active: Any,
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    options: dict[str, Any],
) -> Any:
    """Compute the attention of a decoder's rows to the encoder's output, with its edits."""
    reference, run = active
    query, key, value = (run.perturb(one) for one in tensors)
    shape = (1, 1, query.shape[2], key.shape[2])
    allowed = torch.ones(shape, dtype=torch.bool, device=query.device)
    if mask is not None:
        allowed = (mask > torch.finfo(query.dtype).min / 2).expand(shape)
    scaling = options.pop("scaling")
    plain = AttentionInput(module, run.layer, query, key, value, allowed, None, scaling, options)
    output = reference.attend(original, plain)
    for edit, scope in run.edits:
        if edit.cross is not None and scope.has(run.layer):
            edited = reference.attend(original, edit.cross(copy.copy(plain)))
            output = mix_rows(output, edited, scope.first_row, 1)
    return output, None


def _rope_function(rotate: Callable[..., Any]) -> Callable[..., Any]:
    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        def plain(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            turned: tuple[Tensor, Tensor] = rotate(query, key, cos, sin, *args, **kwargs)
            return turned

        active = active_run()
        if active is None:
            return plain(q, k, cos, sin)
        reference, run = active
        if run.rotary is not None:
            cos, sin = (one.to(cos.dtype) for one in run.rotary.tables(run.positions))
        result = plain(q, k, cos, sin)
        for edit, scope in run.edits:
            if edit.rope is None or not scope.has(run.layer):
                continue
            tables = RotaryTables(reference.model, cos, sin, run.positions, run.rotary)
            turn = Rotation(plain, q, k, cos, sin, run.positions, tables)
            query, key = edit.rope(turn)
            result = (
                mix_rows(result[0], query, scope.first_row, q.dim() - 2),
                mix_rows(result[1], key, scope.first_row, k.dim() - 2),
            )
        return result

    return rope

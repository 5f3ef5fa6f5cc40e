"""Hypotheses about the arithmetic of attention: scale, soft cap, sinks, heads, precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from flexinspect_hooks.audit.forward.forward_edits import AttentionInput, ForwardEdit
from flexinspect_hooks.audit.forward.score_mods import attend_with
from flexinspect_hooks.audit.hypotheses.probe import FaultProbe

Edits = Iterator[ForwardEdit]


def scale(probe: FaultProbe) -> Edits:
    """The scores are not scaled, scaled twice, or by another head size."""
    config = probe.config
    heads = getattr(config, "num_attention_heads", 1)
    hidden = getattr(config, "hidden_size", 1)
    size = getattr(config, "head_dim", None) or hidden // heads
    own = getattr(config, "query_pre_attn_scalar", None) or size
    usual = own**-0.5
    options = {
        1.0: "without the scale of the scores",
        usual * usual: "with the scale of the scores applied twice",
        hidden**-0.5: f"with the scale of the hidden size (1/sqrt({hidden}))",
        (hidden / heads) ** -0.5: f"with a scale of 1/sqrt({hidden / heads:g})",
        size**-0.5: f"with the scale of the head size (1/sqrt({size}))",
        (size / 2) ** -0.5: f"with the scale of half the head size (1/sqrt({size // 2}))",
        (size * 2) ** -0.5: f"with the scale of twice the head size (1/sqrt({size * 2}))",
        1.0 / size: f"with a scale of 1/{size}, without the root",
        usual * math.log2(math.e): "with a scale for base 2, in base e",
    }
    for value, sentence in options.items():
        if abs(value / usual - 1) > 1e-6:

            def attention(call: AttentionInput, value: float = value) -> AttentionInput:
                return replace(call, scaling=value)

            yield ForwardEdit(name="scale", sentence=sentence, attention=attention)


def soft_cap_missing(probe: FaultProbe) -> Edits:
    """The scores, or the logits, are not capped."""
    if getattr(probe.config, "attn_logit_softcapping", None):

        def attention(call: AttentionInput) -> AttentionInput:
            return replace(call, options={**call.options, "softcap": None})

        sentence = "without the soft cap of the scores"
        yield ForwardEdit(name="soft-cap.missing", sentence=sentence, attention=attention)
    if getattr(probe.config, "final_logit_softcapping", None):
        yield ForwardEdit(
            name="soft-cap.missing",
            sentence="without the soft cap of the logits",
            config={"final_logit_softcapping": None},
            whole_model=True,
        )


def soft_cap_changed(probe: FaultProbe) -> Edits:
    """The scores are capped at another value, such as that of the logits."""
    own = getattr(probe.config, "attn_logit_softcapping", None)
    if not own:
        return
    of_logits = getattr(probe.config, "final_logit_softcapping", None)
    options = {float(value): "" for value in _SOFT_CAPS}
    if of_logits:
        options[float(of_logits)] = ", that of the logits"
    for value, which in options.items():
        if value != own:

            def attention(call: AttentionInput, value: float = value) -> AttentionInput:
                return replace(call, options={**call.options, "softcap": value})

            sentence = f"whose scores are capped at {value:g}{which}, not at {own:g}"
            yield ForwardEdit(name="soft-cap.changed", sentence=sentence, attention=attention)


_SOFT_CAPS = (10, 15, 20, 25, 30, 40, 50, 100)


def soft_cap_over_mask(probe: FaultProbe) -> Edits:
    """The scores are capped after the mask is added, so that closed keys keep a weight."""
    if getattr(probe.config, "attn_logit_softcapping", None):
        output = partial(_capped_over_mask, n_prompt=probe.n_prompt)
        yield ForwardEdit(
            name="soft-cap.over-mask",
            sentence="whose scores are capped after the mask is added, so that closed keys count",
            attention=lambda call: replace(call, output=output),
        )


def _capped_over_mask(call: AttentionInput, n_prompt: int) -> Tensor:
    """Return attention whose mask is capped with the scores, (1, rows, heads, size).

    Rows of the prompt ran beside its keys only. Those of later steps have hardly a closed key.
    """
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (call.key, call.value))
    factor = call.query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    is_there = call.allowed.clone()
    is_there[..., :n_prompt, :n_prompt] = True
    scores = (call.query @ key.mT * factor).masked_fill(~call.allowed, -math.inf)
    cap = call.options["softcap"]
    scores = ((scores / cap).tanh() * cap).masked_fill(~is_there, -math.inf)
    weights = scores.softmax(-1)
    output: Tensor = (weights @ value).transpose(1, 2)
    return output


def sinks_missing(probe: FaultProbe) -> Edits:
    """The learned attention sinks are not part of the softmax."""

    def weights(call: AttentionInput) -> Tensor:
        return _dense(replace(call, output=None))

    _, block = next(iter(probe.reference.blocks.values()))
    if any(hasattr(module, "sinks") for module in block.modules()):
        sentence = "without the attention sinks"
        yield ForwardEdit(
            name="sinks.missing",
            sentence=sentence,
            attention=lambda call: replace(call, output=weights),
        )


def _dense(call: AttentionInput, dtype: torch.dtype | None = None) -> Tensor:
    """Return plain softmax attention, (1, rows, heads, size)."""
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (call.key, call.value))
    factor = call.query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    kept = call.query.dtype
    query = call.query if dtype is None else call.query.to(dtype)
    key, value = (key, value) if dtype is None else (key.to(dtype), value.to(dtype))
    scores = query @ key.mT * factor
    position_bias = call.options.get("position_bias")  # of T5
    if position_bias is not None:
        scores = scores + position_bias.to(scores.dtype)
    scores = scores.masked_fill(~call.allowed, -math.inf)
    if call.bias is not None:
        scores = scores + call.bias
    weights = scores.softmax(-1).nan_to_num()
    return (weights @ value).transpose(1, 2).to(kept)


def _tiled(call: AttentionInput, *, keys: bool, values: bool) -> AttentionInput:
    """Return a call whose keys or values, (1, heads, keys, size), have tiled heads."""
    groups = call.query.shape[1] // call.key.shape[1]
    # The architecture's own function repeats nothing then. The copy shares its parameters.
    module: Any = copy.copy(call.module)
    module.num_key_value_groups = 1
    key = call.key.repeat(1, groups, 1, 1) if keys else call.key.repeat_interleave(groups, 1)
    value = (
        call.value.repeat(1, groups, 1, 1) if values else call.value.repeat_interleave(groups, 1)
    )
    return replace(call, module=module, key=key, value=value)


def heads_tiled(probe: FaultProbe) -> Edits:
    """Keys, values or both of grouped heads are tiled instead of repeated one by one."""
    kv_heads = getattr(probe.config, "num_key_value_heads", None)
    if kv_heads and 1 < kv_heads < probe.config.num_attention_heads:
        options = {
            "whose key and value heads are tiled, not repeated one by one": (True, True),
            "whose value heads are tiled, not repeated one by one (its key heads are right)": (
                False,
                True,
            ),
            "whose key heads are tiled, not repeated one by one (its value heads are right)": (
                True,
                False,
            ),
        }
        for sentence, (keys, values) in options.items():
            edit = partial(_tiled, keys=keys, values=values)
            yield ForwardEdit(name="heads.tiled", sentence=sentence, attention=edit)


def heads_first(probe: FaultProbe) -> Edits:
    """All heads read the keys and values of the first one."""
    kv_heads = getattr(probe.config, "num_key_value_heads", None)

    def first(call: AttentionInput) -> AttentionInput:
        key, value = (one[:, :1].expand_as(one) for one in (call.key, call.value))
        return replace(call, key=key, value=value)

    if kv_heads is None or kv_heads > 1:
        sentence = "in which all heads read the keys and values of head 0"
        yield ForwardEdit(name="heads.first", sentence=sentence, attention=first)


def precision(probe: FaultProbe) -> Edits:
    """The attention is computed in a lower precision than the model has."""
    if probe.reference.dtype in (torch.float16, torch.bfloat16):
        return
    for dtype in (torch.bfloat16, torch.float16):

        def attention(call: AttentionInput, dtype: torch.dtype = dtype) -> AttentionInput:
            return replace(call, output=partial(_dense, dtype=dtype))

        name = str(dtype).removeprefix("torch.")
        yield ForwardEdit(
            name="precision",
            sentence=f"whose attention is computed in {name}",
            attention=attention,
        )


def heads_mixed(probe: FaultProbe) -> Edits:
    """The output (1, heads, rows, size) of a prompt is flattened without swapping heads and rows.

    Decode steps have one row, so that nothing changes there.
    """
    if probe.is_decode:
        return

    def mixed(call: AttentionInput) -> Tensor:
        output = _dense(replace(call, output=None))
        prompt = output[:, : probe.n_prompt]
        flat = prompt.transpose(1, 2).reshape(prompt.shape)
        return torch.cat((flat, output[:, probe.n_prompt :]), 1)

    yield ForwardEdit(
        name="heads.mixed",
        sentence="whose heads and rows are not swapped before they are flattened",
        attention=lambda call: replace(call, output=mixed),
    )


def attention_zero(probe: FaultProbe) -> Edits:
    """The attention gives zeros."""

    def nothing(call: AttentionInput) -> Tensor:
        rows = call.query.transpose(1, 2)
        return torch.zeros(*rows.shape[:-1], call.value.shape[-1], dtype=rows.dtype).to(rows.device)

    sentence = "whose attention gives zeros"
    yield ForwardEdit(
        name="attention.zero",
        sentence=sentence,
        attention=lambda call: replace(call, output=nothing),
    )


def score_mod_changed(probe: FaultProbe) -> Edits:
    """The program's score_mod is not applied, or a decode step evaluates it at row 0."""

    def dropped(call: AttentionInput) -> AttentionInput:
        return replace(call, bias=None)

    def row_0(call: AttentionInput) -> AttentionInput:
        bias = call.bias
        return replace(call, bias=None if bias is None else bias[..., :1, :].expand_as(bias))

    def head_0(call: AttentionInput) -> AttentionInput:
        bias = call.bias
        return replace(call, bias=None if bias is None else bias[:, :1])

    def without_offset(call: AttentionInput) -> AttentionInput:
        rows = torch.arange(call.query.shape[2], device=call.query.device)
        rows = torch.where(rows < probe.n_prompt, rows, 0)
        mod = probe.meant_score_mods.get(call.layer)
        return call if mod is None else replace(call, output=partial(attend_with, mod, rows))

    if probe.meant_score_mods:
        if probe.is_decode:
            sentence = "whose decode rows have the score_mod of row 0 (no offset)"
            yield ForwardEdit(name="score-mod", sentence=sentence, attention=without_offset)
        plain = "without the score_mod of the prompt"
        drop: Any = lambda call: replace(call, output=None)  # noqa: E731
        yield ForwardEdit(name="score-mod", sentence=plain, attention=drop)
    elif probe.score_mods or probe.has_bias:
        name = "score-mod"
        if probe.is_decode:
            sentence = "whose decode rows have the score_mod of row 0 (no offset)"
            yield ForwardEdit(name=name, sentence=sentence, attention=row_0)
        yield ForwardEdit(name=name, sentence="without the score_mod", attention=dropped)
        sentence = "in which all heads have the score_mod of head 0"
        yield ForwardEdit(name=name, sentence=sentence, attention=head_0)


HYPOTHESES = (
    score_mod_changed,
    scale,
    soft_cap_missing,
    soft_cap_changed,
    soft_cap_over_mask,
    sinks_missing,
    heads_tiled,
    heads_first,
    heads_mixed,
    precision,
    attention_zero,
)

"""Errors in patched forwards, masks and attention functions."""

from __future__ import annotations

import math
import types
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

from benchmarks.generation_bugs import models
from benchmarks.generation_bugs.models import blocks, dense, ids, make, register, run_flex


def bound_twice(is_bug: bool) -> None:
    """X02: a patched forward is bound twice; after its TypeError the plain model goes on."""
    model, cells = make(), models.segment_cells(64)

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = _projected(self, hidden_states)
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        n, m = query.shape[2], key.shape[2]
        out = dense(query, key, value, self.scaling, cells[m - n : m, :m])
        return self.o_proj(out.flatten(2)), None

    attentions = [layer.self_attn for layer in model.model.layers]
    originals = [one.forward for one in attentions]
    for one in attentions:
        patched = types.MethodType(forward, one)
        one.forward = types.MethodType(patched, one) if is_bug else patched
    try:
        model.generate(ids(17), max_new_tokens=4, do_sample=False)
    except TypeError:
        for one, original in zip(attentions, originals, strict=True):
            one.forward = original
        model.generate(ids(17), max_new_tokens=4, do_sample=False)


def _projected(attention: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def heads(rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:2], -1, attention.head_dim).transpose(1, 2)

    query, key, value = (getattr(attention, f"{name}_proj")(states) for name in "qkv")
    return heads(query), heads(key), heads(value)


def guarded_rope(is_bug: bool) -> None:
    """X04: RoPE stands behind `hasattr(self, "rotary_emb")`, which newer versions do not have."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = _projected(self, hidden_states)
        if not is_bug or hasattr(self, "rotary_emb"):
            query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        return self.o_proj(dense(query, key, value, self.scaling).flatten(2)), None

    model = make()
    for layer in model.model.layers:
        layer.self_attn.forward = types.MethodType(forward, layer.self_attn)
    model.generate(ids(12), max_new_tokens=4, do_sample=False)


def block_mask_in_eager(is_bug: bool) -> None:
    """X07: the mask is a BlockMask, and the attention function is the eager one."""
    model = make(backend="eager")

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return run_flex(query, key, value, block_mask=mask, scale=kwargs["scaling"]), None

    if not is_bug:
        register(model, attend)
    mask = blocks(lambda b, h, q, kv: q >= kv, 12, 12)
    model(ids(12), attention_mask=mask)


def weights_drop_mask(is_bug: bool) -> None:
    """X14: with `output_attentions`, a softmax written by hand ignores the mask."""
    model, cells = make(), models.segment_cells(64)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        n, m = query.shape[2], key.shape[2]
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
        allowed = models.causal(n, m) if is_bug else cells[m - n : m, :m]
        scores = (query @ key.mT * kwargs["scaling"]).masked_fill(~allowed, -math.inf)
        weights = scores.softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    register(model, attend)
    model.generate(
        ids(17),
        max_new_tokens=4,
        do_sample=False,
        output_attentions=True,
        return_dict_in_generate=True,
    )


def lost_sinks(is_bug: bool) -> None:
    """X19: the sinks of GPT-OSS are built as a score_mod, which is not passed on."""
    options = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 64}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = make("gpt_oss", "eager", head_dim=12, rope_parameters=rope, **options)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_()

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        n, m = query.shape[2], key.shape[2]
        # A key of zeros at the end, whose score is the sink of the head.
        key, value = (torch.nn.functional.pad(states, (0, 0, 0, 1)) for states in (key, value))

        def sink(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return torch.where(kv == m, module.sinks[h], score)

        def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            is_key = q + (m - n) >= kv
            return is_key if is_bug else is_key | (kv == m)

        mask = blocks(allowed, n, m + 1)
        score_mod = None if is_bug else sink
        scale = kwargs["scaling"]
        return run_flex(query, key, value, score_mod=score_mod, block_mask=mask, scale=scale), None

    register(model, attend)
    model.generate(ids(12), max_new_tokens=4, do_sample=False)


class PagedCache(DynamicCache):  # type: ignore[misc]
    """Keys in pages of four slots that are taken in an order of their own; the kernel gets all."""

    page, n_pages = 4, 8

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        order = torch.randperm(self.n_pages, generator=torch.Generator().manual_seed(1))
        slots = order[:, None] * self.page + torch.arange(self.page)
        self.slot_of = slots.flatten()  # of each position
        self.position_of = torch.empty_like(self.slot_of)
        self.position_of[self.slot_of] = torch.arange(len(self.slot_of))
        self.pools: dict[int, tuple[Tensor, Tensor]] = {}
        self.filled: dict[int, int] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions that are filled."""
        return self.filled.get(layer_idx, 0)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Any:
        """Store keys and values in their slots; return all slots."""
        n = self.filled.get(layer_idx, 0)
        new = key_states.shape[2]
        if layer_idx not in self.pools:
            batch, heads, width = (key_states.shape[n] for n in (0, 1, 3))
            shape = (batch, heads, self.page * self.n_pages, width)
            self.pools[layer_idx] = (key_states.new_zeros(shape), key_states.new_zeros(shape))
        for pool, states in zip(self.pools[layer_idx], (key_states, value_states), strict=True):
            pool[:, :, self.slot_of[n : n + new]] = states
        self.filled[layer_idx] = n + new
        return self.pools[layer_idx]


def physical_index(is_bug: bool) -> None:
    """X22: the rule of a paged cache compares positions with slots."""
    model = make()
    cache = PagedCache(model.config)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        n = query.shape[2]
        before: int = cache.filled[module.layer_idx] - n

        def physical(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return q + before >= kv

        def logical(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return q + before >= cache.position_of[kv]

        mask = blocks(physical if is_bug else logical, n, key.shape[2])
        return run_flex(query, key, value, block_mask=mask, scale=kwargs["scaling"]), None

    register(model, attend)
    models.greedy(model, ids(12), cache=cache)


def rows_guaranteed_safe(is_bug: bool) -> None:
    """X24: `ROWS_GUARANTEED_SAFE` is set, and the rows of the padding see no key."""
    model = make()
    n_pads = 5
    rows = torch.cat((torch.zeros(1, n_pads, dtype=torch.long), ids(10)), 1)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        n, m = query.shape[2], key.shape[2]

        def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (q + (m - n) >= kv) & (kv >= n_pads)

        options = {"ROWS_GUARANTEED_SAFE": True} if is_bug else None
        scale = kwargs["scaling"]
        out = run_flex(
            query, key, value, block_mask=blocks(allowed, n, m), scale=scale, kernel_options=options
        )
        return out, None

    register(model, attend)
    padding = (torch.arange(rows.shape[1]) >= n_pads).long()[None]
    model.generate(rows, attention_mask=padding, max_new_tokens=4, do_sample=False)


def lost_soft_cap(is_bug: bool) -> None:
    """N07: an own attention function takes `softcap` and does not apply it."""
    options = {"head_dim": 16, "sliding_window": 64, "query_pre_attn_scalar": 16}
    model = make("gemma2", "eager", attn_logit_softcapping=2.0, **options)

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float = 1.0,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        return dense(query, key, value, scaling, cap=None if is_bug else softcap), None

    register(model, attend)
    model.generate(ids(12), max_new_tokens=4, do_sample=False)


def distance_without_offset(is_bug: bool) -> None:
    """N14: a distance bias takes the row of a decode step for row 0."""
    model = make()

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        n, m = query.shape[2], key.shape[2]
        offset = 0 if is_bug else m - n

        def distance(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score - 0.3 * (q + offset - kv).abs()

        mask = blocks(lambda b, h, q, kv: q + (m - n) >= kv, n, m)
        scale = kwargs["scaling"]
        return run_flex(query, key, value, score_mod=distance, block_mask=mask, scale=scale), None

    register(model, attend)
    model.generate(ids(12), max_new_tokens=4, do_sample=False)


def late_binding(is_bug: bool) -> None:
    """N16: the rules of the layers are made in a loop, and all see the last window."""
    model = make(num_hidden_layers=4)
    windows = (4, 6, 8, 32)
    rules: list[Any] = []
    for window in windows:

        def late(q: Tensor, kv: Tensor) -> Tensor:
            return (q >= kv) & (q - kv < window)  # noqa: B023

        def bound(q: Tensor, kv: Tensor, window: int = window) -> Tensor:
            return (q >= kv) & (q - kv < window)

        rules.append(late if is_bug else bound)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        n, m = query.shape[2], key.shape[2]
        rule = rules[module.layer_idx]
        mask = blocks(lambda b, h, q, kv: rule(q + (m - n), kv), n, m)
        return run_flex(query, key, value, block_mask=mask, scale=kwargs["scaling"]), None

    register(model, attend)
    model.generate(ids(16), max_new_tokens=4, do_sample=False)


def stale_mask_cache(is_bug: bool) -> None:
    """X15: a cache of masks survives an exception: the next prompt gets the old mask."""
    model = make()
    made: dict[int, BlockMask] = {}
    spans: tuple[tuple[int, int], ...] = ()

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        n, m = query.shape[2], key.shape[2]
        if n not in made or n == 1:
            number = torch.zeros(m, dtype=torch.long)
            for which, (start, stop) in enumerate(spans, 1):
                number[start:stop] = which

            def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
                row = q + (m - n)
                together = (number[row] == number[kv]) | (kv == 0) | (row >= spans[-1][1])
                return (row >= kv) & together

            made[n] = blocks(allowed, n, m)
        return run_flex(query, key, value, block_mask=made[n], scale=kwargs["scaling"]), None

    register(model, attend)

    def stop(prompt: Tensor, scores: Tensor, **kwargs: Any) -> bool:
        if prompt.shape[1] > 18:
            raise RuntimeError("the answer is too long")
        return False

    for own, seed in ((((1, 8), (8, 14)), 3), (((1, 4), (4, 14)), 5)):
        spans = own
        try:
            model.generate(
                ids(17, seed), max_new_tokens=4, do_sample=False, stopping_criteria=[stop]
            )
            made.clear()
        except RuntimeError:
            if not is_bug:
                made.clear()


def adjusted_too_far(is_bug: bool) -> None:
    """X10: a block mask is adjusted to more rows than the table of its rule has."""
    query = torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(0))
    n = query.shape[2]

    def same_document(n: int) -> BlockMask:
        document = torch.arange(n) // 50

        def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (q >= kv) & (document[q] == document[kv])

        return blocks(allowed, n, n)

    mask, part = same_document(100), query[:, :, :100]
    flex_attention(part, part, part, block_mask=mask)
    mask = mask._adjust(n, n) if is_bug else same_document(n)
    flex_attention(query, query, query, block_mask=mask)


PROGRAMS = {
    "X02": bound_twice,
    "X04": guarded_rope,
    "X07": block_mask_in_eager,
    "X10": adjusted_too_far,
    "X14": weights_drop_mask,
    "X15": stale_mask_cache,
    "X19": lost_sinks,
    "X22": physical_index,
    "X24": rows_guaranteed_safe,
    "N07": lost_soft_cap,
    "N14": distance_without_offset,
    "N16": late_binding,
}

"""Broken runs whose fault is in the mask of the prompt: wrong, missing, or of the wrong kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

from flexinspect_hooks.broken_runs.broken_run_setup import (
    MAX_POSITIONS,
    BrokenRunSetup,
    additive_mask,
    block_mask,
    causal,
    flex_attend,
    isolation,
    span_numbers,
)

# -- separators ------------------------------------------------------------------------------------


def orphan_separators(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """The line breaks belong to no wording, and a row may attend to its own wording only."""
    if repaired:
        predicate = isolation(setup.spans)
    else:
        inner = [(start, stop - 1, label) for start, stop, label in setup.spans]
        numbers, cue = span_numbers(inner, MAX_POSITIONS), setup.spans[-1][1]

        def predicate(q: Any, kv: Any) -> Any:
            same_wording = (numbers[q] == numbers[kv]) & (numbers[q] > 0)
            return (kv <= q) & (same_wording | (q >= cue))

    setup.register_attention(predicate)
    with setup.recorded():
        setup.generate()


def leak_through_separators(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """Wordings are isolated, but line breaks attend to all of them, and are open to every row."""
    inner = [(start, stop - 1, label) for start, stop, label in setup.spans]
    if repaired:
        predicate = isolation(setup.spans)
    else:
        numbers, cue = span_numbers(inner, MAX_POSITIONS), setup.spans[-1][1]

        def predicate(q: Any, kv: Any) -> Any:
            shared = (numbers[q] == 0) | (numbers[kv] == 0)
            return (kv <= q) & ((numbers[q] == numbers[kv]) | shared | (q >= cue))

    setup.register_attention(predicate)
    with setup.recorded(segments=setup.spans if repaired else inner, mask=None):
        setup.generate()


# -- the right mask is built, and another one runs -------------------------------------------------


def placeholder_mask(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """The mask is built and not used: FlexAttention gets a mask_mod that is always true."""

    def wrapper(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        if not repaired:  # "to be replaced by the real one"
            attention_mask = block_mask(lambda q, kv: q >= 0, query.shape[2], key.shape[2])
        return flex_attend(module, query, key, value, attention_mask, **kwargs)

    setup.register_attention(isolation(setup.spans), attend=wrapper)
    with setup.recorded():
        setup.generate()


def ticked_picture(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """A script draws and checks the mask that it has built, but the model was never patched."""
    predicate = isolation(setup.spans)
    drawn = predicate(*_grid(setup))
    first, second = setup.spans[:2]
    assert not drawn[second[0] : second[1], first[0] : first[1]].any()  # the drawn mask isolates
    if repaired:
        setup.register_attention(predicate)
    with setup.recorded():
        setup.generate()


def patch_behind_an_if(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """A patch adds the structure to the mask if there is one, and SDPA gets no mask."""
    closed = ~isolation(setup.spans)(*_grid(setup))
    setup.model.set_attn_implementation("eager" if repaired else "sdpa")
    for layer in setup.model.model.layers:
        _close_cells(layer, closed)
    with setup.recorded():
        setup.model(setup.input_ids, use_cache=False)


def _close_cells(layer: Any, closed: Tensor) -> None:
    """Patch a decoder layer to close these cells in the mask that it receives."""
    original = layer.forward

    def forward(hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
            attention_mask = attention_mask.masked_fill(closed, torch.finfo(torch.float32).min)
        return original(hidden_states, attention_mask=attention_mask, **kwargs)

    layer.forward = forward


def no_mask_function(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """Attention is registered under a new name, and no mask function under that name."""
    AttentionMaskInterface._global_mapping.pop(setup.name, None)
    setup.register_attention(causal, has_mask=repaired)
    with setup.recorded(segments=[], mask=None):
        setup.generate()


# -- a mask of the wrong kind ----------------------------------------------------------------------


def bool_mask_added(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """A bool mask goes to eager attention, which adds it to the scores: True is 1, False is 0."""
    allowed = isolation(setup.spans)(*_grid(setup))
    mask = additive_mask(allowed) if repaired else allowed[None, None]
    setup.model.set_attn_implementation("eager")
    with setup.recorded():
        setup.model(setup.input_ids, attention_mask=mask, use_cache=False)


def padding_of_infinity(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """Padding rows are closed with minus infinity: the softmax of a row of -inf is NaN."""
    value = torch.finfo(torch.float32).min if repaired else -torch.inf
    n_padding = 3

    def make_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        *args: Any,
        attention_mask: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        rows, keys = torch.arange(q_length)[:, None], torch.arange(kv_length)[None]
        closed = (keys > rows) | ~attention_mask.bool()[:, None, None]
        return torch.zeros(closed.shape).masked_fill(closed, value)

    setup.register_attention(causal, attend=eager_attention_forward, make_mask=make_mask)
    input_ids = torch.tensor([[int(setup.tokenizer.pad_token_id)] * n_padding + setup.ids])
    is_token = (torch.arange(input_ids.shape[1]) >= n_padding).long()[None]
    with setup.recorded(segments=[], mask=None):
        setup.model(input_ids, attention_mask=is_token, use_cache=False)


def _grid(setup: BrokenRunSetup) -> tuple[Tensor, Tensor]:
    """The rows (n, 1) and keys (1, n) of the prompt."""
    n = len(setup.ids)
    return torch.arange(n)[:, None], torch.arange(n)[None]

"""Broken runs whose fault is in the mask of the prompt: wrong, missing, or of the wrong kind."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

from flexinspect_hooks.broken_runs import broken_run_setup as common
from flexinspect_hooks.broken_runs.broken_run_setup import BrokenRunSetup

# -- separators ------------------------------------------------------------------------------------


def orphan_separators(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """The line breaks belong to no wording, and a row may attend to its own wording only."""
    numbers = common.span_numbers(_without_separators(setup), common.MAX_POSITIONS)
    cue = setup.spans[-1][1]

    def predicate(q: Any, kv: Any) -> Any:
        same_wording = (numbers[q] == numbers[kv]) & (numbers[q] > 0)
        return (kv <= q) & (same_wording | (q >= cue))

    setup.register_attention(common.isolation(setup.spans) if repaired else predicate)
    with setup.recorded():
        setup.generate()


def leak_through_separators(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """Wordings are isolated, but line breaks attend to all of them, and are open to every row."""
    inner = _without_separators(setup)
    numbers, cue = common.span_numbers(inner, common.MAX_POSITIONS), setup.spans[-1][1]

    def predicate(q: Any, kv: Any) -> Any:
        shared = (numbers[q] == 0) | (numbers[kv] == 0)
        return (kv <= q) & ((numbers[q] == numbers[kv]) | shared | (q >= cue))

    setup.register_attention(common.isolation(setup.spans) if repaired else predicate)
    with setup.recorded(segments=setup.spans if repaired else inner, mask=None):
        setup.generate()


def _without_separators(setup: BrokenRunSetup) -> list[common.Span]:
    """The spans of the wordings without the line break at the end of each."""
    return [(start, stop - 1, label) for start, stop, label in setup.spans]


# -- the right mask is built, and another one runs -------------------------------------------------


def placeholder_mask(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """The mask is built and not used: FlexAttention gets a mask_mod that is always true."""

    def wrapper(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        if not repaired:  # "to be replaced by the real one"
            attention_mask = common.block_mask(lambda q, kv: q >= 0, query.shape[2], key.shape[2])
        return common.flex_attend(module, query, key, value, attention_mask, **kwargs)

    setup.register_attention(common.isolation(setup.spans), attend=wrapper)
    with setup.recorded():
        setup.generate()


def ticked_picture(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """A script draws and checks the mask that it has built, but the model was never patched."""
    predicate = common.isolation(setup.spans)
    drawn = predicate(*_grid(setup))
    first, second = setup.spans[:2]
    assert not drawn[second[0] : second[1], first[0] : first[1]].any()  # the drawn mask isolates
    if repaired:
        setup.register_attention(predicate)
    with setup.recorded():
        setup.generate()


def patch_behind_an_if(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """A patch adds the structure to the mask if there is one, and SDPA gets no mask."""
    closed = ~common.isolation(setup.spans)(*_grid(setup))
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
    setup.register_attention(common.causal, has_mask=repaired)
    with setup.recorded(segments=[], mask=None):
        setup.generate()


# -- a mask of the wrong kind ----------------------------------------------------------------------


def bool_mask_added(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """A bool mask goes to eager attention, which adds it to the scores: True is 1, False is 0."""
    allowed = common.isolation(setup.spans)(*_grid(setup))
    mask = common.additive_mask(allowed) if repaired else allowed[None, None]
    setup.model.set_attn_implementation("eager")
    with setup.recorded():
        setup.model(setup.input_ids, attention_mask=mask, use_cache=False)


def padding_of_infinity(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """Padding rows are closed with minus infinity: the softmax of a row of -inf is NaN."""
    value = torch.finfo(torch.float32).min if repaired else -torch.inf
    n_padding = 3

    def make_mask(n_rows: int, n_keys: int, offset: int) -> Tensor:
        rows, keys = torch.arange(n_rows)[:, None], torch.arange(n_keys)[None]
        closed = (keys > rows) | (keys < n_padding)
        return torch.zeros(1, 1, *closed.shape).masked_fill(closed, value)

    setup.register_attention(common.causal, attend=eager_attention_forward, make_mask=make_mask)
    input_ids = torch.tensor([[int(setup.tokenizer.pad_token_id)] * n_padding + setup.ids])
    is_token = (torch.arange(input_ids.shape[1]) >= n_padding).long()[None]
    with setup.recorded(segments=[], mask=None):
        setup.model(input_ids, attention_mask=is_token, use_cache=False)


def _grid(setup: BrokenRunSetup) -> tuple[Tensor, Tensor]:
    """The rows (n, 1) and keys (1, n) of the prompt."""
    n = len(setup.ids)
    return torch.arange(n)[:, None], torch.arange(n)[None]


_HARD_QUESTIONS = (
    "My mobile shows a missed call from Gabon: what stands at the front?",
    "Which code comes before a telephone number in Gabon?",
    "Ringing a hotel in Gabon from abroad, I type plus and then what?",
)
"""Of which the answer is wrong if the borders are one token early."""


def spans_without_bos(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """The spans are counted in the pieces, but the encoded prompt begins with a BOS."""
    setup = replace(setup, questions=_HARD_QUESTIONS, cue=common.SENTENCE_CUE)
    start = 1 if repaired else 0  # the tokenizer writes one token before the first piece
    setup.register_attention(common.isolation(common.spans_of(setup.pieces, start=start)))
    with setup.recorded(segments=[f"{question}\n" for question in setup.questions]):
        setup.generate(eos_token_id=setup.tokenizer.eos_token_id, max_new_tokens=40)


def two_bos(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """The template writes the BOS into the text, and the tokenizer adds another one."""
    ids = setup.ids if repaired else [setup.ids[0], *setup.ids]
    with setup.recorded(segments=list(common.QUESTIONS), mask="causal"):
        setup.generate(torch.tensor([ids]))


def missing_eos(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """Documents are separated by the EOS between them, but the tokenizer wrote none."""
    bos, eos = int(setup.tokenizer.bos_token_id), int(setup.tokenizer.eos_token_id)
    documents = [[bos, *piece, *([eos] if repaired else [])] for piece in setup.pieces]
    input_ids = torch.tensor([[n for document in documents for n in document]])
    is_end = (input_ids[0] == eos).long()
    document_of = is_end.cumsum(0) - is_end  # an EOS is the last token of its own document

    def same_document(q: Any, kv: Any) -> Any:
        return (kv <= q) & (document_of[q] == document_of[kv])

    setup.register_attention(same_document)
    with setup.recorded(segments=common.spans_of(documents, start=0)):
        setup.model(input_ids)


def order_of_the_wordings(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """Isolated wordings share one run of positions, so their order decides the answer."""
    positions = list(range(len(setup.ids)))
    if repaired:  # each wording begins after the BOS, the cue after the longest of them
        for start, stop, _ in setup.spans:
            positions[start:stop] = range(1, 1 + stop - start)
        cue, longest = setup.spans[-1][1], max(positions)
        positions[cue:] = range(longest + 1, longest + 1 + len(positions) - cue)
    setup.register_attention(common.isolation(setup.spans))
    with setup.recorded():
        setup.model(setup.input_ids, position_ids=torch.tensor([positions]), use_cache=False)

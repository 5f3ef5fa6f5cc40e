"""Broken runs whose fault is in the prompt: BOS, EOS, segment spans and positions."""

from __future__ import annotations

from typing import Any

import torch

from flexinspect_hooks.broken_runs.broken_run_setup import (
    QUESTIONS,
    BrokenRunSetup,
    isolation,
    spans_of,
)


def spans_without_bos(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """The spans are counted in the pieces, but the encoded prompt begins with a BOS."""
    start = 1 if repaired else 0  # the tokenizer writes one token before the first piece
    setup.register_attention(isolation(spans_of(setup.pieces, start=start)))
    with setup.recorded(segments=[f"{question}\n" for question in QUESTIONS]):
        setup.generate()


def two_bos(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """The template writes the BOS into the text, and the tokenizer adds another one."""
    ids = setup.ids if repaired else [setup.ids[0], *setup.ids]
    with setup.recorded(segments=list(QUESTIONS), mask="causal"):
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
    with setup.recorded(segments=spans_of(documents, start=0)):
        setup.model(input_ids)


def order_of_the_wordings(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """Isolated wordings share one run of positions, so their order decides the answer."""
    positions = list(range(len(setup.ids)))
    if repaired:  # each wording begins after the BOS, the cue after the longest of them
        for start, stop, _ in setup.spans:
            positions[start:stop] = range(1, 1 + stop - start)
        cue, longest = setup.spans[-1][1], max(positions)
        positions[cue:] = range(longest + 1, longest + 1 + len(positions) - cue)
    setup.register_attention(isolation(setup.spans))
    with setup.recorded():
        setup.model(setup.input_ids, position_ids=torch.tensor([positions]), use_cache=False)

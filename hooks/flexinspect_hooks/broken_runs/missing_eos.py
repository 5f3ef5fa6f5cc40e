"""Documents are told apart by the EOS between them, and the tokenizer wrote none."""

from __future__ import annotations

from typing import Any

import torch

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, spans_of


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    bos, eos = int(setup.tokenizer.bos_token_id), int(setup.tokenizer.eos_token_id)
    documents = [[bos, *piece, *([eos] if repaired else [])] for piece in setup.pieces]
    fed = torch.tensor([[n for document in documents for n in document]])
    is_end = (fed[0] == eos).long()
    document_of = is_end.cumsum(0) - is_end  # an EOS is the last token of its own document

    def rule(q: Any, kv: Any) -> Any:
        return (kv <= q) & (document_of[q] == document_of[kv])

    setup.register_attention(rule)
    with setup.recorded(segments=spans_of(documents, start=0)):
        setup.model(fed)

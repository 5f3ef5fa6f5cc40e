"""The spans are counted in the pieces, and the prompt that is fed begins with a BOS."""

from __future__ import annotations

from flexinspect_hooks.broken_runs.kit import QUESTIONS, BrokenRunSetup, isolation, spans_of


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    start = 1 if repaired else 0  # the tokenizer writes one token before the first piece
    setup.register_attention(isolation(spans_of(setup.pieces, start=start)))
    with setup.recorded(segments=[f"{question}\n" for question in QUESTIONS]):
        setup.generate()

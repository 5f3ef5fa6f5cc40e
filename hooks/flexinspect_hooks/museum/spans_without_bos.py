"""The spans are counted in the pieces, and the prompt that is fed begins with a BOS."""

from __future__ import annotations

from flexinspect_hooks.museum.kit import QUESTIONS, Stage, isolation, spans_of


def run(stage: Stage, *, repaired: bool) -> None:
    start = 1 if repaired else 0  # the tokenizer writes one token before the first piece
    stage.own_attention(isolation(spans_of(stage.pieces, start=start)))
    with stage.watched(segments=[f"{question}\n" for question in QUESTIONS]):
        stage.generate()

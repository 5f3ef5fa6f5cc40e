"""The template writes the BOS into the text, and the tokenizer writes another one before it."""

from __future__ import annotations

import torch

from flexinspect_hooks.museum.kit import QUESTIONS, Stage


def run(stage: Stage, *, repaired: bool) -> None:
    ids = stage.ids if repaired else [stage.ids[0], *stage.ids]
    fed = torch.tensor([ids])
    with stage.watched(segments=list(QUESTIONS), mask="causal"):
        stage.generate(fed)

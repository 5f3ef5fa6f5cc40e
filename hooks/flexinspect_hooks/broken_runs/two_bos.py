"""The template writes the BOS into the text, and the tokenizer writes another one before it."""

from __future__ import annotations

import torch

from flexinspect_hooks.broken_runs.kit import QUESTIONS, BrokenRunSetup


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    ids = setup.ids if repaired else [setup.ids[0], *setup.ids]
    fed = torch.tensor([ids])
    with setup.recorded(segments=list(QUESTIONS), mask="causal"):
        setup.generate(fed)

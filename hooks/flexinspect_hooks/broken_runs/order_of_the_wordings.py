"""Positions run on over wordings that do not see each other, so their order decides."""

from __future__ import annotations

import torch

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, isolation


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    positions = list(range(len(setup.ids)))
    if repaired:  # each wording begins after the BOS, the cue after the longest of them
        for start, stop, _ in setup.spans:
            positions[start:stop] = range(1, 1 + stop - start)
        cue, longest = setup.spans[-1][1], max(positions)
        positions[cue:] = range(longest + 1, longest + 1 + len(positions) - cue)
    setup.register_attention(isolation(setup.spans))
    with setup.recorded():
        setup.model(setup.input_ids, position_ids=torch.tensor([positions]), use_cache=False)

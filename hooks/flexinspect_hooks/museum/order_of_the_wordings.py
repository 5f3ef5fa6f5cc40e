"""Positions run on over wordings that do not see each other, so their order decides."""

from __future__ import annotations

import torch

from flexinspect_hooks.museum.kit import Stage, isolation


def run(stage: Stage, *, repaired: bool) -> None:
    positions = list(range(len(stage.ids)))
    if repaired:  # each wording begins after the BOS, the cue after the longest of them
        for start, stop, _ in stage.spans:
            positions[start:stop] = range(1, 1 + stop - start)
        cue, longest = stage.spans[-1][1], max(positions)
        positions[cue:] = range(longest + 1, longest + 1 + len(positions) - cue)
    stage.own_attention(isolation(stage.spans))
    with stage.watched():
        stage.model(stage.fed, position_ids=torch.tensor([positions]), use_cache=False)

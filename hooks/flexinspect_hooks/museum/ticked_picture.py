"""A script draws the mask that it has built and ticks it; the model that runs was never patched."""

from __future__ import annotations

import torch

from flexinspect_hooks.museum.kit import Stage, isolation


def run(stage: Stage, *, repaired: bool) -> None:
    n = len(stage.ids)
    rule = isolation(stage.spans)
    drawn = rule(torch.arange(n)[:, None], torch.arange(n)[None])
    first, second = stage.spans[:2]
    assert not drawn[second[0] : second[1], first[0] : first[1]].any()  # isolated, says the picture
    if repaired:
        stage.own_attention(rule)
    with stage.watched():
        stage.generate()

"""A script draws the mask that it has built and ticks it; the model that runs was never patched."""

from __future__ import annotations

import torch

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, isolation


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    n = len(setup.ids)
    rule = isolation(setup.spans)
    drawn = rule(torch.arange(n)[:, None], torch.arange(n)[None])
    first, second = setup.spans[:2]
    assert not drawn[second[0] : second[1], first[0] : first[1]].any()  # isolated, says the picture
    if repaired:
        setup.register_attention(rule)
    with setup.recorded():
        setup.generate()

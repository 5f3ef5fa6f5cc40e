"""Graphs that torch.compile builds are counted step by step."""

from __future__ import annotations

import torch

from flexinspect_hooks.graphs import GraphCount


def test_building_in_a_later_step_is_recompiling() -> None:
    torch._dynamo.reset()
    double = torch.compile(lambda x: x * 2 if x.dim() == 1 else x * 3, backend="eager")
    count = GraphCount()
    assert count.look("prefill") is None
    double(torch.ones(3))
    assert count.look("decode") == ("compiled", "torch.compile built 1 graph")
    double(torch.ones(3))
    assert count.look("decode") is None
    double(torch.ones(3, 3))
    assert count.look("decode") == ("recompiled", "torch.compile built 1 graph")
    torch._dynamo.reset()

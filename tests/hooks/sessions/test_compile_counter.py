"""Graphs that torch.compile builds are counted step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention

from flexinspect_hooks.sessions.capture_session import RECOMPILE_LIMIT, GraphCount


def brief(events: list[Any]) -> list[tuple[str, str]]:
    return [(kind, text) for kind, text, *_ in events]


def test_a_graph_built_in_a_later_step_is_a_recompilation() -> None:
    torch._dynamo.reset()
    double = torch.compile(lambda x: x * 2 if x.dim() == 1 else x * 3, backend="eager")
    count = GraphCount()
    assert count.on_step("prefill") == []
    double(torch.ones(3))
    assert brief(count.on_step("decode")) == [("compiled", "torch.compile built 1 graph")]
    double(torch.ones(3))
    assert count.on_step("decode") == []
    double(torch.ones(3, 3))
    (built,) = count.on_step("decode")
    assert brief([built]) == [("recompiled", "torch.compile built 1 graph")]
    facts = built[2]
    assert facts["of"] == ["<lambda>"]
    assert "rank mismatch" in facts["reason"]
    assert "guard" not in facts
    torch._dynamo.reset()


def test_a_function_with_other_code_is_named_as_the_guard() -> None:
    torch._dynamo.reset()
    call = torch.compile(lambda x, mask_mod: mask_mod(x), backend="eager")
    count = GraphCount()
    call(torch.ones(3), lambda x: x + 1)
    count.on_step("decode")
    call(torch.ones(3), lambda x: x + 2)
    (built,) = count.on_step("decode")
    assert built[2]["guard"] == "mask_mod code object"
    torch._dynamo.reset()


def test_reaching_the_recompile_limit_is_an_event_with_the_function() -> None:
    torch._dynamo.reset()
    call = torch.compile(lambda x, mask_mod: mask_mod(x), backend="eager")
    count = GraphCount()
    limit_events = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for made in (lambda x: x + 1, lambda x: x + 2, lambda x: x + 3, lambda x: x + 4):
            call(torch.ones(3), made)
            limit_events += [
                (kind, facts)
                for kind, _, facts in count.on_step("decode")
                if kind == RECOMPILE_LIMIT
            ]
    (only,) = limit_events
    assert only[1]["of"] == ["<lambda>"]
    torch._dynamo.reset()


def test_the_graph_of_uncompiled_flex_attention_is_named_as_such() -> None:
    torch._dynamo.reset()
    count = GraphCount()
    q = torch.ones(1, 1, 8, 16)
    flex_attention(q, q, q)
    events = brief(count.on_step("prefill"))
    text = "uncompiled flex_attention built 1 graph for itself (normal)"
    assert events == [("compiled", text)]
    torch._dynamo.reset()

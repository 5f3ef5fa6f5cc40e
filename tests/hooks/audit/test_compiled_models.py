"""Models whose layers run inside a compiled graph: logits and cache are judged, and say where."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from support.audits import Audit, decode
from support.captures import capture
from support.paths import TESTS
from support.tiny import make_model

from flexinspect.records.finding import Finding
from flexinspect.trace.reader import open_trace

PROGRAM = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from support.tiny import ids, make_model

def decode(model, run, stale=False):
    rows, past, tokens = torch.tensor([ids(12, 3)]), None, []
    for step in range(4):
        if stale and step == 2:
            for layer in past.layers:
                layer.keys[:, :, 5] = layer.keys[:, :, 4]
                layer.values[:, :, 5] = layer.values[:, :, 4]
        with torch.no_grad():
            output = run(rows, past_key_values=past, use_cache=True)
        past, rows = output.past_key_values, output.logits[:, -1:].argmax(-1)
        tokens.append(rows.item())
    return tokens

model = make_model("llama", num_hidden_layers=2)
model.model.layers[1].self_attn.scaling *= 2
wrapped = decode(model, torch.compile(model, backend="eager", dynamic=True))
other = make_model("llama", num_hidden_layers=2)
other.compile(backend="eager", dynamic=True)
method = decode(other, other, stale=True)
right = make_model("llama", num_hidden_layers=2)
compiled = decode(right, torch.compile(right, backend="eager", dynamic=True))
assert compiled == decode(right, right)
print(len(wrapped), len(method))
"""


def test_steps_of_models_that_are_compiled_as_a_whole_are_judged(tmp_path: Path) -> None:
    script, out = tmp_path / "program.py", tmp_path / "t.flextrace"
    script.write_text(PROGRAM, "utf-8")
    ran = capture(script, out)
    assert ran.code == 0, ran.err
    with open_trace(out) as reader:
        found = [one for one in reader.findings() if one.id.startswith("audit.")]
        found.sort(key=lambda one: one.generation)
        steps = [[step.q_len for step in reader.steps(n)] for n in range(4)]
        events = [row.event for row in reader.events() if row.event.kind == "audit"]
        agree = {one.generation: one.text for one in events if (one.generation or 0) > 1}
    assert steps == [[12, 1, 1, 1]] * 4
    assert [one.generation for one in found] == [0, 1]
    assert "self_attn.scaling" in found[0].sentence
    assert "the cache row 5 holds the key and value of position 4" in found[1].sentence
    assert found[1].step == 2
    assert all("agree" in text for text in agree.values())
    assert "inside a compiled graph" in agree[2]
    assert "inside a compiled graph" not in agree[3]


def audit_of(audit: Audit, model: Any) -> tuple[list[Finding], str]:
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    _, findings, events = audit(model, lambda: decode(model, 1))
    return findings, events[0]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_fault_of_one_layer_is_named_with_the_layer(audit: Audit, layer: int) -> None:
    model = make_model("llama")
    attention = model.model.layers[layer].self_attn
    original = attention.forward

    def forward(
        this: Any, hidden_states: Any, position_embeddings: Any, *args: Any, **kw: Any
    ) -> Any:
        cos, sin = position_embeddings
        turned = (torch.ones_like(cos), torch.zeros_like(sin))
        return original(hidden_states, turned, *args, **kw)

    attention.forward = MethodType(forward, attention)
    (finding,), _ = audit_of(audit, model)
    assert f"without RoPE in layer {layer} " in finding.sentence


def test_the_cache_says_where_an_unknown_fault_is(audit: Audit) -> None:
    model = make_model("llama")
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda rows: mlp.down_proj(torch.tanh(mlp.up_proj(rows)) * mlp.gate_proj(rows))
    (finding,), event = audit_of(audit, model)
    assert "right in layers 0-1 and wrong in layer 2. So the error is in layers 1-2" in (
        finding.sentence
    )
    assert "TORCH_COMPILE_DISABLE=1" in finding.sentence
    assert "Not judged: the layers" in event

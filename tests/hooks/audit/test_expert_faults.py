"""Faults in how a layer combines its chosen experts, each with the twin that adds them up."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from support.audits import Audit, decode
from support.tiny import make_model
from torch.nn import functional

Change = Callable[[Any, Any], Any]


def plain(weights: Any, chosen: Any) -> Any:
    return weights, chosen


def squared(weights: Any, chosen: Any) -> Any:
    return weights.square(), chosen


def sorted_chosen(weights: Any, chosen: Any) -> Any:
    return weights, chosen.sort(-1).values


def reversed_weights(weights: Any, chosen: Any) -> Any:
    return weights.flip(-1), chosen


def next_expert(weights: Any, chosen: Any) -> Any:
    return weights, (chosen + 1) % 4


def mixture(change: Change, *, adds: bool = True, order: int = 1) -> Callable[..., Any]:
    """Return a forward that runs one expert after another, in rising or falling order."""

    def forward(self: Any, hidden_states: Any) -> Any:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = functional.linear(rows, self.gate.weight).softmax(-1).topk(2, -1)
        weights, chosen = change(weights / weights.sum(-1, keepdim=True), chosen)
        total = torch.zeros_like(rows)
        for expert in range(4)[::order]:
            row, slot = torch.where(chosen == expert)
            both = functional.linear(rows[row], self.experts.gate_up_proj[expert])
            gate, up = both.chunk(2, -1)
            out = functional.linear(functional.silu(gate) * up, self.experts.down_proj[expert])
            out = out * weights[row, slot, None]
            total[row] = total[row] + out if adds else out
        return total.reshape(hidden_states.shape)

    return forward


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "none": (mixture(plain), ""),
    "assigned": (mixture(plain, adds=False), "counts in mlp, the one with the highest index"),
    "assigned backwards": (
        mixture(plain, adds=False, order=-1),
        "counts in mlp, the one with the lowest index",
    ),
    "twice": (mixture(squared), "applies the weights of the chosen experts twice"),
    "sorted": (mixture(sorted_chosen), "sorts the indices of the chosen experts, but not their"),
    "reversed": (mixture(reversed_weights), "their weights in reverse order"),
    "shifted": (mixture(next_expert), "runs the expert after each one that is chosen"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_sum_of_experts_is_named_and_a_right_one_agrees(audit: Audit, name: str) -> None:
    model = make_model("mixtral", num_local_experts=4, num_experts_per_tok=2)
    forward, words = FAULTS[name]
    block = model.model.layers[1].mlp
    block.forward = MethodType(forward, block)
    verdicts, findings, events = audit(model, lambda: decode(model, 2))
    assert [one.n_steps for one in verdicts] == [2], events
    if not words:
        assert not findings
        return
    (found,) = findings
    assert found.id == "audit.reproduced"
    assert words in found.sentence
    assert found.layer == 1

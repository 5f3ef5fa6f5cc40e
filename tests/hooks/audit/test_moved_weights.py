"""Modules of the program that hold weights of the architecture under other names are judged."""

from __future__ import annotations

from typing import Any

import torch
from support.audits import Audit, decode
from support.tiny import make_model
from torch import Tensor, nn

from flexinspect_hooks.changed_weights.made_weights import MadeWeights


class OwnMlp(nn.Module):
    """The feed-forward part of a Llama with its weights under other names."""

    def __init__(self, mlp: Any, gain: float = 1.0) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            one.weight for one in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        self.gain = gain
        self.register_buffer("n_rows", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.n_rows: Tensor = self.n_rows + x.shape[1]
        inner = nn.functional.silu(x @ self.gate.T) * (x @ self.up.T)
        return self.gain * (inner @ self.down.T)


class ScaledMlp(OwnMlp):
    """The same with learned factors, which the architecture does not have."""

    def __init__(self, mlp: Any) -> None:
        super().__init__(mlp)
        self.scale = nn.Parameter(torch.full((mlp.down_proj.out_features,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def test_a_correct_module_with_other_names_agrees(audit: Audit, made: MadeWeights) -> None:
    model = make_model("llama")
    model.model.layers[1].mlp = OwnMlp(model.model.layers[1].mlp)
    verdicts, findings, _ = audit(model, lambda: decode(model), made=made)
    assert findings == []
    assert verdicts[0].n_steps == 3


def test_a_wrong_module_with_other_names_is_named(audit: Audit, made: MadeWeights) -> None:
    model = make_model("llama")
    model.model.layers[1].mlp = OwnMlp(model.model.layers[1].mlp, gain=0.5)
    _, (finding,), _ = audit(model, lambda: decode(model), made=made)
    assert finding.layer == 1
    assert "model.layers.1.mlp (OwnMlp) is wrong: its output is 0.5 times" in finding.sentence


def test_a_module_with_weights_of_its_own_is_used_as_it_is(audit: Audit, made: MadeWeights) -> None:
    model = make_model("llama")
    model.model.layers[1].mlp = ScaledMlp(model.model.layers[1].mlp)
    verdicts, findings, _ = audit(model, lambda: decode(model), made=made)
    assert findings == []
    assert "model.layers.1.mlp (ScaledMlp)" in " ".join(verdicts[0].notes)


def test_names_are_those_with_which_the_parameters_were_made(made: MadeWeights) -> None:
    model = make_model("llama")
    moved_of = made.moved_of(model)
    assert moved_of(model) == {}
    mlp = model.model.layers[0].mlp
    model.model.layers[0].mlp = OwnMlp(mlp)
    names = {f"model.layers.0.mlp.{one}_proj.weight" for one in ("gate", "up", "down")}
    assert moved_of(model).keys() == names
    assert MadeWeights().moved_of(model)(model) == {}

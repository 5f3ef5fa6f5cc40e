"""Modules of the program that are switched during a run are judged with the state of their time."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from support.audits import Audit, decode
from support.tiny import ids, make_model
from torch import Tensor, nn

from flexinspect.records.finding import Severity
from flexinspect.rules.numerics.audit_findings import SWITCHED, UNEXPLAINED

IS_ON = True
SWITCHES = types.SimpleNamespace(is_on=True)
HIDDEN_SWITCH = ContextVar("HIDDEN_SWITCH", default=True)


class Adapter(nn.Module):
    """A linear layer with an adapter."""

    is_on: Any = True

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.options = base, {"scale": 2.0}
        self.down = nn.Parameter(0.1 * torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))
        self.n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        output: Tensor = self.base(x)
        if self.is_on and IS_ON and SWITCHES.is_on and HIDDEN_SWITCH.get():
            output = output + self.options["scale"] * (x @ self.down.T @ self.up.T)
        return output


class TwoAdapters(Adapter):
    """The same with a second adapter, so that it is no linear layer with two matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        self.other = nn.Parameter(torch.randn(2, 2))


class OfLibrary(Adapter):
    """The same as if it were of a library."""

    __module__ = "peft.tuners"


def adapted(make: Any = Adapter) -> tuple[Any, list[Any]]:
    model = make_model("llama")
    modules = []
    for layer in model.model.layers:
        for last in ("q_proj", "v_proj"):
            modules.append(make(getattr(layer.self_attn, last)))
            setattr(layer.self_attn, last, modules[-1])
    return model, modules


def by_attribute(modules: Any, is_on: bool) -> None:
    for module in modules:
        module.is_on = is_on


def by_class(modules: Any, is_on: bool) -> None:
    type(modules[0]).is_on = is_on


def by_scale(modules: Any, is_on: bool) -> None:
    for module in modules:
        module.options["scale"] = 2.0 * is_on


def by_global(modules: Any, is_on: bool) -> None:
    global IS_ON
    IS_ON = is_on


def by_object(modules: Any, is_on: bool) -> None:
    SWITCHES.is_on = is_on


Switch = Callable[[Any, bool], None]


@pytest.fixture(params=[by_attribute, by_class, by_scale, by_global, by_object])
def switch(request: pytest.FixtureRequest) -> Any:
    yield request.param
    by_global((), True)
    by_object((), True)
    Adapter.is_on = True


@pytest.mark.parametrize("first", [True, False])
def test_an_adapter_and_its_base_are_compared_in_two_generations(
    audit: Audit, switch: Switch, first: bool
) -> None:
    model, modules = adapted()

    def program() -> None:
        for is_on in (first, not first):
            switch(modules, is_on)
            decode(model)

    verdicts, findings, _ = audit(model, program)
    assert findings == []
    assert [(one.n_steps, one.divergence, one.not_judged) for one in verdicts] == [
        (3, None, [])
    ] * 2


@pytest.mark.parametrize("make", [Adapter, TwoAdapters, OfLibrary])
def test_an_adapter_that_is_off_after_the_run_is_judged_as_it_was(audit: Audit, make: Any) -> None:
    model, modules = adapted(make)
    verdicts, findings, _ = audit(
        model, lambda: decode(model), lambda: by_attribute(modules, False)
    )
    assert findings == []
    assert [(one.n_steps, one.divergence) for one in verdicts] == [(3, None)]
    assert not any(module.is_on for module in modules)


def prompt_then_decode(model: Any, switch: Callable[[bool], None], *, is_on: bool) -> None:
    switch(is_on)
    output = model(torch.tensor([ids(12, 3)]), use_cache=True)
    switch(not is_on)
    for _ in range(2):
        rows = output.logits[:, -1:].argmax(-1)
        output = model(rows, past_key_values=output.past_key_values, use_cache=True)


@pytest.mark.parametrize("is_on", [True, False])
def test_an_adapter_that_is_switched_after_the_prompt_is_named(
    audit: Audit, switch: Switch, is_on: bool
) -> None:
    model, modules = adapted()
    verdicts, findings, _ = audit(
        model, lambda: prompt_then_decode(model, lambda on: switch(modules, on), is_on=is_on)
    )
    assert [(one.id, one.severity) for one in findings] == [(SWITCHED, Severity.WARNING)]
    used = "is used at the positions 0 to 11 and not after"
    unused = "is not used at the positions 0 to 11, but after"
    (sentence,) = (one.sentence for one in findings)
    where = "(model.layers.*.self_attn.q_proj, model.layers.*.self_attn.v_proj)"
    assert sentence.startswith(f"The adapter Adapter {where} {used if is_on else unused}.")
    assert [(one.n_steps, one.divergence) for one in verdicts] == [(3, None)]


def test_a_scale_that_changes_within_a_text_is_named(audit: Audit) -> None:
    model, modules = adapted()

    def scale(is_first: bool) -> None:
        modules[3].options["scale"] = 2.0 if is_first else 1.0

    _, (finding,), _ = audit(model, lambda: prompt_then_decode(model, scale, is_on=True))
    assert finding.id == SWITCHED
    assert "The program's Adapter (model.layers.*.self_attn.v_proj) computes" in finding.sentence
    assert "`options` was {'scale': 2.0} and is {'scale': 1.0} from step 1 on" in finding.sentence


def test_a_fault_beside_a_switched_adapter_is_found(audit: Audit) -> None:
    model, modules = adapted()
    model.model.layers[1].self_attn.scaling *= 2
    _, findings, _ = audit(model, lambda: decode(model), lambda: by_attribute(modules, False))
    assert [one.id for one in findings] == ["audit.reproduced"]


def test_a_text_that_is_computed_again_in_another_state_is_not_judged(audit: Audit) -> None:
    model, modules = adapted()

    def program() -> None:
        text = ids(14, 3)
        for n in (12, 13, 14):
            by_attribute(modules, n < 13)
            model(torch.tensor([text[:n]]), use_cache=False)

    verdicts, findings, _ = audit(model, program)
    assert [one.id for one in findings if one.id == UNEXPLAINED] == []
    assert [one.n_steps for one in verdicts] == [1]
    assert verdicts[0].not_judged[0].startswith("from step 1 on: modules of the program were")


def test_weights_of_an_adapter_that_were_replaced_are_not_judged(audit: Audit) -> None:
    model, modules = adapted()

    def merge() -> None:
        by_attribute(modules, False)
        for one in modules:
            one.base.weight = nn.Parameter(one.base.weight + 2 * one.up @ one.down)

    _, findings, events = audit(model, lambda: decode(model), merge)
    assert findings == []
    assert "replaced weights of model.layers.0.self_attn.q_proj after the steps" in events[0]


def test_modules_that_are_compared_with_themselves_are_not_called_right(audit: Audit) -> None:
    model, _ = adapted()
    token = HIDDEN_SWITCH.set(False)
    try:
        _, (finding,), _ = audit(model, lambda: decode(model), lambda: HIDDEN_SWITCH.set(True))
    finally:
        HIDDEN_SWITCH.reset(token)
    assert finding.id == UNEXPLAINED
    assert "Each module of it alone is right" not in finding.sentence
    names = "model.layers.0.self_attn.q_proj, model.layers.0.self_attn.v_proj"
    assert f"Not compared alone: {names}. So the error is there, in the code" in finding.sentence

"""Where the audit calls modules of the program, the program does not notice it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from support.audits import Audit, decode
from support.tiny import make_model
from torch import Tensor, nn

from flexinspect_hooks.audit.explanations.quantized_scales import wrong_scales
from flexinspect_hooks.audit.forward.program_modules import program_module
from flexinspect_hooks.audit.forward.weights import is_pure
from flexinspect_hooks.capture.quiet_modules import may_change, quiet_module

N = 16


class Noticing(nn.Module):
    """A linear layer with integers, dropout and statistics; `seen` are the calls of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(N, N)
        scale = weight.abs().amax(1) / 127
        self.register_buffer("codes", (weight / scale[:, None]).round().to(torch.int8))
        self.scale = nn.Parameter(scale)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(N)
        self.seen: list[str] = []
        for name, one in (("own", self), ("drop", self.drop), ("norm", self.norm)):
            one.register_forward_hook(lambda *_, name=name: self.seen.append(name))
            one.register_forward_pre_hook(lambda *_, name=name: self.seen.append(name))

    def forward(self, x: Tensor) -> Tensor:
        codes: Any = self.codes
        rows = self.drop(nn.functional.linear(x, codes * self.scale[:, None]))
        out: Tensor = self.norm(rows.reshape(-1, N)).reshape(rows.shape)
        return out


def _use_program_modules(module: nn.Module) -> None:
    found = program_module(
        nn.ModuleDict({"one": nn.Linear(N, N, device="meta")}), _root(module), "one"
    )
    assert found is not None  # in evaluation mode it is a function of each row
    found[1](torch.ones(1, 3, N))


def _root(module: nn.Module) -> nn.Module:
    return nn.ModuleDict({"one": module})


CALLS: dict[str, Callable[[nn.Module], object]] = {
    "a module that is used as it is": _use_program_modules,
    "integer weights": lambda module: list(wrong_scales(_root(module))),
}


def _state(module: Noticing) -> tuple[Any, ...]:
    tensors = [one.clone() for one in (*module.parameters(), *module.buffers())]
    modes = [one.training for one in module.modules()]
    hooks = [list(one._forward_hooks.items()) for one in module.modules()]
    return tensors, torch.get_rng_state(), modes, hooks, list(module.seen)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_hooks_modes_statistics_and_random_numbers_as_they_are(name: str) -> None:
    module = Noticing()
    module.norm.eval()  # modes are restored one by one
    module.norm.momentum = 1.0
    before = _state(module)
    CALLS[name](module)
    after = _state(module)
    assert all(map(torch.equal, before[0], after[0]))
    assert torch.equal(before[1], after[1])
    assert before[2:] == after[2:]


def test_a_module_that_draws_random_numbers_in_any_mode_is_not_used_as_it_is() -> None:
    class Noisy(Noticing):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(x.shape)

    reference = nn.ModuleDict({"one": nn.Linear(N, N)})
    assert program_module(reference, _root(Noisy()), "one") is None


def test_an_adapter_is_tried_in_its_own_mode_and_without_its_hooks() -> None:
    module = nn.Sequential(nn.Linear(N, N), nn.Dropout(0.5))
    seen: list[int] = []
    module[0].register_forward_hook(lambda *_: seen.append(1))
    before = torch.get_rng_state()
    assert not is_pure(module, N, N)
    assert is_pure(module.eval(), N, N)
    assert torch.equal(torch.get_rng_state(), before)
    assert not seen


def _looks(module: nn.Module, args: Any, output: Tensor) -> None:
    if output.isnan().any():
        return
    print(output)


def _may_scale(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    if args:
        return None
    return output * 2


class _Adapter:
    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return self.add(output)

    def add(self, output: Tensor) -> Tensor:
        return output + 1

    def look(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.add(output)


@functools.wraps(_looks)
def _wrapped(*args: Any, **kwargs: Any) -> Any:
    return _looks(*args, **kwargs)  # type: ignore[func-returns-value]


def test_hooks_that_may_return_a_value_are_told_from_those_that_only_look() -> None:
    calls: list[Any] = []
    looking = [_looks, _wrapped, _Adapter().look, partial(_looks, None), calls.append]
    looking.append(lambda module, args, output: calls.append(output))
    replacing = [_may_scale, _Adapter(), partial(_may_scale, None)]
    replacing.append(lambda module, args, output: (output[0] + 1, *output[1:]))
    assert [may_change(one) for one in looking] == [False] * len(looking)
    assert [may_change(one) for one in replacing] == [True] * len(replacing)


def test_a_hook_that_replaces_the_output_is_a_part_of_a_quiet_module() -> None:
    module, seen = nn.Linear(N, N), list[int]()
    module.register_forward_hook(lambda *_: seen.append(1))
    module.register_forward_hook(lambda module, args, kwargs, out: out + 1, with_kwargs=True)
    rows = torch.ones(N)
    with quiet_module(module):
        output = module(rows)
    assert torch.equal(output, module.forward(rows) + 1)
    assert not seen


def test_hooks_can_be_removed_and_registered_in_a_quiet_block() -> None:
    module, seen = nn.Linear(N, N), list[str]()
    handle = module.register_forward_hook(lambda *_: seen.append("program"))
    with pytest.raises(RuntimeError, match="inside"), quiet_module(module):
        module.register_forward_hook(lambda *_: seen.append("block"))
        module(torch.ones(N))
        handle.remove()
        raise RuntimeError("inside")
    module(torch.ones(N))
    assert (seen, module.training) == (["block"], True)


def test_modules_that_run_alone_do_not_run_the_hooks_of_the_program(audit: Audit) -> None:
    model, seen, seen_by_audit = make_model("llama"), list[str](), list[str]()

    def odd(self: Any, x: Tensor) -> Any:
        return self.down_proj(1.3 * torch.sin(self.gate_proj(x)) * self.up_proj(x))

    block = model.model.layers[1].mlp
    block.forward = MethodType(odd, block)
    for name, one in model.named_modules():
        if name.endswith(("mlp", "norm", "proj")):
            one.register_forward_hook(lambda *_, name=name: seen.append(name))
    _, (finding,), _ = audit(model, lambda: decode(model), lambda: seen_by_audit.extend(seen))
    assert "Alone, on the right input, model.layers.1.mlp (" in finding.sentence
    assert seen == seen_by_audit  # `after` ran before the audit

"""The installed torch and transformers have the private names that capture uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flexinspect_hooks.python_internals import torch_private


@pytest.mark.parametrize(
    ("name", "feature"),
    [(f"{module}.{name}", text) for (module, name), text in torch_private.NAMES.items()],
    ids=[f"{module}.{name}" for module, name in torch_private.NAMES],
)
def test_the_installed_versions_have_the_private_name(name: str, feature: str) -> None:
    missing = torch_private.missing_names()
    assert name not in missing, f"{name} is missing, and with it this feature: {feature}"


@pytest.mark.parametrize(
    "name", [name for key, flags in torch_private.MODULE_HOOKS.items() for name in (key, *flags)]
)
def test_modules_keep_their_hooks_under_this_name(name: str) -> None:
    assert name in vars(nn.Linear(1, 1))


def test_a_missing_name_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_private.NAMES, ("torch.nn", "Module.no_such_name"), "nothing")
    monkeypatch.setitem(torch_private.NAMES, ("torch.no_such_module", "name"), "nothing")
    missing = torch_private.missing_names()
    assert missing[-2:] == ["torch.nn.Module.no_such_name", "torch.no_such_module.name"]


def test_without_the_names_the_functions_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_name(module: str, name: str) -> Any:
        return None

    monkeypatch.setattr(torch_private, "_find", no_name)
    monkeypatch.delitem(torch_private.sys.modules, "torch._dynamo.utils", raising=False)
    torch_private.skip_frame(no_name)
    torch_private.skip_code(no_name.__code__)
    assert torch_private.eval_frame_callback_getter()() is None
    assert torch_private.frame_compiler_setter()("compiler") == "compiler"
    assert torch_private.module_call_code() is None
    assert torch_private.dynamo_counters() == {}
    assert torch_private.compilation_metrics() == ()


def test_an_optimizer_that_was_made_is_detected() -> None:
    class Plain(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    hooked = getattr(Plain.step, "hooked", False)
    Plain([nn.Parameter(torch.ones(1))])
    assert (hooked, torch_private.has_made_optimizer()) == (False, True)


def test_a_hook_that_was_removed_from_its_module_is_detected() -> None:
    module = nn.Linear(1, 1)
    handle = module.register_forward_hook(lambda *_: None)
    assert torch_private.is_hook_installed(handle)
    module._forward_hooks.clear()
    assert not torch_private.is_hook_installed(handle)


def test_the_version_of_a_tensor_counts_writes() -> None:
    tensor = torch.zeros(2)
    assert torch_private.tensor_version(tensor) == 0
    tensor.add_(1)
    assert torch_private.tensor_version(tensor) == 1

"""mask_mods that run as Python under a debugger: hit, equal, and no gradient is lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flexinspect_hooks.debugger import python_mods
from flexinspect_hooks.debugger.frames import breakpoints_disabled
from flexinspect_hooks.observers.attention.kernel_calls import KernelCall, observe_kernels


class Anybody:
    """An observer, so that calls are seen."""

    def accepts(self, name: str) -> bool:
        return False

    def before(self, call: KernelCall) -> None:
        raise AssertionError("nothing was wanted")

    def after(self, note: object, output: object) -> None: ...

    def failed(self, note: object, error: BaseException) -> None: ...


@pytest.fixture
def messages() -> Iterator[list[str]]:
    texts: list[str] = []
    remove = observe_kernels(Anybody())
    python_mods.run_mods_as_python(texts.append)
    yield texts
    python_mods.stop_running_mods()
    remove()
    assert flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is False


ran: list[str] = []


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        ran.append("causal")
    return q_idx >= kv_idx


def called(**more: object) -> Tensor:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    mask = create_block_mask(causal, None, None, 5, 5, device="cpu")
    ran.clear()
    return flex_attention(q, k, v, block_mask=mask, **more)  # type: ignore[arg-type, return-value]


def test_a_mask_mod_run_as_python_gives_the_same_output(messages: list[str]) -> None:
    with torch.no_grad():
        debugged = called()
        assert ran == ["causal"]
        python_mods.stop_running_mods()
        plain = called()
    assert torch.equal(debugged, plain)
    assert messages == []


def test_a_score_mod_that_may_need_gradients_is_left_to_torch_and_reported(
    messages: list[str],
) -> None:
    bias = torch.zeros(2, requires_grad=True)

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s + bias[h]

    called(score_mod=score)
    called(score_mod=score)
    assert messages == [python_mods.WITH_GRADIENTS]
    with torch.no_grad():
        called(score_mod=score)
    assert ran == ["causal"]


def test_a_compiled_call_is_reported_once(messages: list[str]) -> None:
    python_mods.on_compiled_call()
    python_mods.on_compiled_call()
    assert messages == [python_mods.COMPILED]


def test_nothing_changes_without_a_debugger() -> None:
    assert python_mods.with_python_mods(flex_attention, None) is flex_attention
    python_mods.on_compiled_call()


def test_no_debugger_stops_in_a_mask_mod_that_is_evaluated_to_be_read() -> None:
    hooked, seen = sys.breakpointhook, []

    def rule() -> None:
        breakpoint()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        seen.append(frame.f_code.co_name)
        return trace

    before = sys.gettrace()
    sys.breakpointhook = lambda: seen.append("stopped")
    sys.settrace(trace)
    try:
        with breakpoints_disabled():
            with breakpoints_disabled():
                rule()
            rule()
        within = "rule" in seen or "stopped" in seen
        assert sys.gettrace() is trace
        rule()
    finally:
        sys.settrace(before)
        sys.breakpointhook = hooked
    assert not within
    assert {"rule", "stopped"} <= set(seen)

"""Times of kernels: what is part of a sample, and what is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexinspect.inputs.kernel_configs import config_from
from flexinspect_hooks.kernels import speed_sampling
from flexinspect_hooks.kernels.builtin_kernels import built_in
from flexinspect_hooks.kernels.calling import call_kernel
from flexinspect_hooks.kernels.inputs import make_problem

CPU = torch.device("cpu")


class FakeEvent:
    """An event of CUDA that notes when it is recorded."""

    def __init__(self, log: list[str]) -> None:
        self._log, self.at = log, 0

    def record(self) -> None:
        self._log.append("event")
        self.at = len(self._log)

    def elapsed_time(self, end: FakeEvent) -> float:
        return float(end.at - self.at)


def test_on_cuda_each_call_is_timed_alone_after_the_cache_was_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    sizes: list[int] = []

    def empty(size: int, **options: Any) -> Any:
        sizes.append(size)
        return SimpleNamespace(zero_=lambda: log.append("flush"))

    fake = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(L2_cache_size=200_000_000),
        synchronize=lambda: log.append("wait"),
        device=torch.device,
    )
    monkeypatch.setattr(speed_sampling.torch, "cuda", fake)
    monkeypatch.setattr(speed_sampling.torch, "empty", empty)
    monkeypatch.setattr(speed_sampling, "_event", lambda: FakeEvent(log))
    time_calls = speed_sampling._cuda_timer(lambda: log.append("call"), CPU)
    assert time_calls(2) == 2.0  # the call and the second event
    assert log == ["wait", "flush", "event", "call", "event", "wait"] * 2
    assert sizes == [400_000_000]


def test_a_causal_mask_is_looked_at_once_and_passed_as_a_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[bool, bool]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spied(*tensors: Any, **options: Any) -> Any:
        seen.append((options["is_causal"], options["attn_mask"] is None))
        return real(*tensors, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
    kernel = built_in("sdpa", CPU)
    for mask, is_causal in (("causal", True), ("window:4", False), ("none", False)):
        fields = {"q_len": 16, "kv_len": 16, "head_dim": 8, "mask": mask}
        problem = make_problem(config_from(fields), "normal", 0, CPU)
        for _ in range(2):
            call_kernel(kernel, problem)
        assert seen[-2:] == [(is_causal, is_causal or mask == "none")] * 2

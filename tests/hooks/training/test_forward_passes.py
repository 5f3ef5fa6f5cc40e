"""Passes that are added up to one optimizer step."""

from __future__ import annotations

from flexinspect_hooks.training.forward_passes import StepPasses


def test_a_step_keeps_the_device_and_autocast_of_the_passes_that_know_them() -> None:
    step = StepPasses()
    for one in (StepPasses(), StepPasses(device="cuda:0", autocast="bfloat16"), StepPasses()):
        step.add(one)
    assert (step.n_forward, step.device, step.autocast) == (3, "cuda:0", "bfloat16")

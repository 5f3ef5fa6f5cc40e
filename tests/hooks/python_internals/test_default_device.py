"""Tensors of ours in programs that chose a default device."""

from __future__ import annotations

import torch

from flexinspect_hooks.python_internals.default_device import cpu_by_default


def test_tensors_are_made_on_the_cpu_and_the_choice_of_the_program_stays() -> None:
    with torch.device("meta"):
        with cpu_by_default():
            assert torch.arange(3).device.type == "cpu"
            assert torch.zeros(1, device="meta").is_meta
        assert torch.arange(3).is_meta
    with cpu_by_default():
        assert torch.arange(3).device.type == "cpu"

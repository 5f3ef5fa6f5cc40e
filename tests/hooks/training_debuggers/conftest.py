"""Shared fixtures of the debugger tests: switches that are reset, and the lines of the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from flexinspect_hooks.control import control_protocols
from flexinspect_hooks.training_debuggers import debug_functions


@pytest.fixture(autouse=True)
def _no_board_of_other_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    """Give each test a new common board and new providers, and leave autograd as it was."""
    monkeypatch.setattr(debug_functions, "_common_boards", [debug_functions.SwitchBoard()])
    monkeypatch.setattr(control_protocols, "_counters", {})
    yield
    debug_functions._common_boards[0].disable_debugging()
    assert not torch.is_anomaly_enabled()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Catch what the debuggers log; `lines.messages` has the texts."""
    caplog.set_level(logging.DEBUG, logger="flexinspect.debugging")
    return caplog


@pytest.fixture
def classifier() -> nn.Module:
    """A tiny network whose parameters are first.* and classifier.*."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 8))
    model.add_module("act", nn.Tanh())
    model.add_module("classifier", nn.Linear(8, 2))
    return model

"""Fixtures of the trace tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.trace_samples import write


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished trace of two generations with three steps each; copy it before changing it."""
    return write(tmp_path_factory.mktemp("trace") / "run.flextrace", n_generations=2, n_steps=3)

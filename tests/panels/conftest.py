"""Fixtures of the interface, and a writer of traces with attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.attention_trace import Made, SyntheticGeneration, write
from support.interface_fixtures import no_review, own_state, trace, with_review

from flexinspect.panels.panel_source import Source

__all__ = ["no_review", "own_state", "trace", "with_review"]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(**changes: Any) -> tuple[SyntheticGeneration, Source]:
        synthetic = SyntheticGeneration(**changes)
        return synthetic, write(tmp_path / f"t{len(list(tmp_path.iterdir()))}.flextrace", synthetic)

    return make

"""Fixtures of the interface, and writers of traces with attention or findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.attention_trace import Made, SyntheticGeneration, write
from support.finding_traces import SEGMENTS, TOKENS
from support.interface_fixtures import no_review, own_state, trace, with_review

from flexinspect.panels.panel_source import Source
from flexinspect.records.finding import Finding
from flexinspect.records.step import GenerationRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

__all__ = ["no_review", "own_state", "trace", "with_review"]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(**changes: Any) -> tuple[SyntheticGeneration, Source]:
        synthetic = SyntheticGeneration(**changes)
        return synthetic, write(tmp_path / f"t{len(list(tmp_path.iterdir()))}.flextrace", synthetic)

    return make


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Source]:
    """A trace with findings."""

    def make(
        findings: Sequence[Finding], run: dict[str, Any] | None = None, n_generations: int = 1
    ) -> Source:
        path = tmp_path / "run.flextrace"
        with TraceWriter.create(path, run or {}) as writer:
            for number in range(n_generations):
                writer.begin_generation(GenerationRecord(number, "s", "", "", SEGMENTS, TOKENS))
            writer.write_findings(findings)
        return Source(open_trace(path))

    return make

"""Correct runs have no warning and no error, whatever the mask, dtype or model family.

All registered rules run, live and offline; notes are allowed.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import planted, serious
from support.tiny import FAMILIES, ids, make_model

from flexinspect.analysis.offline_rules import review
from flexinspect.inputs import model_names
from flexinspect.inputs.config import load_config
from flexinspect.inputs.datasets import load as load_samples
from flexinspect.masks import mask_presets
from flexinspect.records.finding import Finding
from flexinspect.records.job import Job, SamplingOptions
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner
from flexinspect_hooks.loading.model_loader import load
from flexinspect_hooks.sessions.capture_session import CaptureSession

SAMPLED = SamplingOptions(do_sample=True, temperature=1.3, top_p=0.95)


@pytest.fixture(scope="module")
def demo() -> Any:
    return load(model_names.resolve("demo", load_config()), device="cpu", dtype="auto")


def run(loaded: Any, out: Path, **options: Any) -> list[Finding]:
    """Run two samples as the capture process does, and return the findings of all rules."""
    job = Job(out=str(out), max_samples=2, max_new_tokens=12, **options)
    ensemble = EnsembleRunner(loaded, job, compiled=False)
    with TraceWriter.create(out, {}) as writer:
        with CaptureSession(loaded.model, writer, level=job.level, copy_logits=False) as session:
            for number, sample in enumerate(load_samples("demo", max_samples=2)):
                ensemble.run(number, ensemble.plan(sample), session)
    with open_trace(out) as reader:
        assert review(reader).note == ""
        assert not [row for row in reader.events() if row.event.kind == "rule-disabled"]
        return reader.findings()


@pytest.mark.parametrize(
    ("preset", "sampling"), [*product(mask_presets.PRESETS, (SamplingOptions(), SAMPLED))]
)
def test_the_demo_model_under_a_preset(
    demo: Any, tmp_path: Path, preset: str, sampling: SamplingOptions
) -> None:
    assert serious(run(demo, tmp_path / "t.flextrace", mask=preset, sampling=sampling)) == []


@pytest.mark.parametrize("options", [{"positions": "reset"}, {"level": "basic"}, {"stop": "eos"}])
def test_the_demo_model_with_another_option(
    demo: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    assert serious(run(demo, tmp_path / "t.flextrace", **options)) == []


def isolated(n: int, spans: list[tuple[int, int]]) -> torch.Tensor:
    """Return an additive mask, (1, 1, n, n): spans do not see each other, other rows see all."""
    row, key = torch.arange(n)[:, None], torch.arange(n)[None]
    seen = key <= row
    for start, stop in spans:
        inside = (row >= start) & (row < stop)
        seen &= ~inside | (key == 0) | ((key >= start) & (key < stop))
    return torch.zeros(1, 1, n, n).masked_fill(~seen, torch.finfo(torch.float32).min)


@pytest.mark.parametrize(("family", "dtype"), [*product(FAMILIES, ("float32", "bfloat16"))])
def test_a_family_with_its_own_generate(family: str, dtype: str, tmp_path: Path) -> None:
    model = make_model(family).to(getattr(torch, dtype))
    prompt = torch.tensor([(1, *ids(11, 3))])
    for name, options in (("greedy", {"do_sample": False}), ("sampled", {"do_sample": True})):
        found = planted(
            tmp_path,
            model,
            lambda options=options: model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, **options
            ),
            name=name,
        )
        # The rules' own tests need no clean run of each family: all rules have run here.
        assert {finding.id for finding in found} <= {"text.near-tie", "text.repetition"}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gemma2", "mistral")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_family_with_segments_isolated_as_declared(
    family: str, dtype: str, tmp_path: Path
) -> None:
    model = make_model(family).to(getattr(torch, dtype))
    model.set_attn_implementation("eager")
    prompt = torch.tensor([(1, *ids(15, 3))])
    spans = [(1, 7), (7, 14)]
    found = planted(
        tmp_path,
        model,
        lambda: model(prompt, attention_mask=isolated(16, spans).to(model.dtype)),
        segments=[(start, stop, f"question {start}") for start, stop in spans],
        mask="segment-isolation",
    )
    assert [finding.sentence for finding in serious(found)] == []

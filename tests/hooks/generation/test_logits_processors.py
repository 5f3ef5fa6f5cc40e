"""What each logits processor makes of the candidates is recorded apart, and drawn in the panel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.warm_python import run_command

from flexinspect.panels.base import NoOptions, Request, TracePlace
from flexinspect.panels.logits_panel import LogitsPanel
from flexinspect.panels.panel_source import Source
from flexinspect.records.job import SamplingOptions
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.generation.decoding import Sampler

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 3.0])


def sampler(**options: float) -> Sampler:
    sampling = SamplingOptions(do_sample=True, **options)  # type: ignore[arg-type]
    return Sampler(sampling, 0, torch.device("cpu"))


def test_each_processor_gets_what_the_one_before_it_left() -> None:
    _, scores, processed = sampler(temperature=2.0, top_k=3, top_p=0.6).choose(LOGITS)
    names = [name for name, _ in processed]
    assert names == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]
    temperature, top_k, top_p = (values for _, values in processed)
    assert torch.equal(temperature, LOGITS / 2)
    assert torch.isneginf(top_k).tolist() == [False, False, True, True, False]
    assert torch.equal(top_k[[0, 1, 4]], temperature[[0, 1, 4]])
    # Of 0.51, 0.31 and 0.19 the first two reach 0.6.
    assert torch.isneginf(top_p).tolist() == [False, True, True, True, False]
    assert scores is not None
    assert torch.equal(scores, top_p)


def test_greedy_decoding_has_no_processors() -> None:
    chosen, scores, processed = Sampler(SamplingOptions(), 0, torch.device("cpu")).choose(LOGITS)
    assert (int(chosen), scores, processed) == (4, None, ())


@pytest.mark.parametrize("level", ["advanced", "basic"])
def test_the_trace_and_the_panel_have_the_candidates_after_each_processor(
    tmp_path: Path, level: str
) -> None:
    flags = ("--temperature", "2", "--top-k", "4", "--level", level, "--max-new-tokens", "2")
    done = run_command("run", "--no-ui", *flags, "--out", "a.flextrace", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with open_trace(tmp_path / "a.flextrace") as reader:
        names = [info.stream for info in reader.arrays(0, 0) if "processed" in info.stream]
        record = reader.logits(0, 0)
        assert record is not None
        if level == "basic":
            assert names == []
            return
        assert names == [
            "logits.processed.0.TemperatureLogitsWarper",
            "logits.processed.1.TopKLogitsWarper",
        ]
        warm, kept = (reader.array(0, 0, name) for name in names)
        panel, request = LogitsPanel(), Request(TracePlace(), NoOptions())
        lines = panel.describe(panel.load(Source(reader), request))
    assert warm is not None
    assert kept is not None
    logits = np.array([one.logit for one in record.candidates])
    assert np.allclose(warm - warm[0], (logits - logits[0]) / 2, atol=1e-4)
    assert np.isneginf(kept).tolist() == [False] * 4 + [True] * 6
    assert np.isclose(np.exp(kept[:4]).sum(), 1.0, atol=1e-5)
    assert np.allclose(kept[:4], [one.score_logprob for one in record.candidates[:4]], atol=1e-5)
    start = lines.index("The processors, one after the other (probability):")
    assert lines[start + 1].split() == ["logits", "1", "Temperature", "2", "TopK", "token"]
    assert lines[start + 6].split()[2] == "filtered"

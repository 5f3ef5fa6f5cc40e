"""The logit lens of each layer is what its final norm and output head make of that layer."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import FAMILIES, make_model
from torch import Tensor, nn

import flexinspect
from flexinspect.records.step import LensRecord
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.model_layers import attention_layers, decoder_blocks
from flexinspect_hooks.observers import logit_lens
from flexinspect_hooks.observers.logit_lens import LogitLens
from flexinspect_hooks.step_writer.layer_records import lens_records

IDS = torch.tensor([[1, 40, 77, 12, 205]])


def watched(model: Any, out: Path, n: int = 3, **options: Any) -> Any:
    with flexinspect.watch(model, out=out, level="extreme", **options):
        return model.generate(IDS, max_new_tokens=n, do_sample=False)


def lens_of(model: Any) -> LogitLens:
    return LogitLens(model, decoder_blocks(model, attention_layers(model)))


def read(lens: LogitLens, rows: list[Tensor], **facts: Any) -> list[LensRecord]:
    """Read the rows (hidden,) of all layers as one step."""
    step: Any = SimpleNamespace(
        **{"step": 0, "token_id": None, "logits": None, "wall_ms": 1.0, "events": [], **facts}
    )
    buffer = StepBuffer(torch.device("cpu"))
    with torch.no_grad():
        outputs = [(layer, row[None, None]) for layer, row in enumerate(rows)]
        layers = lens.reduce(outputs, range(len(rows)), step, buffer)
    return lens_records(layers, len(rows) - 1, step, buffer.values(), str) if layers else []


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2", "granite", "cohere"])
def test_the_lens_of_the_last_layer_is_the_model(family: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64},
        "granite": {"logits_scaling": 3.0},
        "cohere": {"logit_scale": 0.25},
    }
    model = make_model(family, **own.get(family, {}))
    watched(model, tmp_path / "a.flextrace")
    with open_trace(tmp_path / "a.flextrace") as reader:
        for step in range(3):
            first, _, last = reader.lens(0, step)
            assert first.error is None
            assert last.error is not None
            assert last.error < 1e-4
            candidates = reader.candidates(0, step)[: logit_lens.TOP_K]
            assert list(last.token_ids) == [one.token_id for one in candidates]
            logprobs = [one.logprob for one in candidates]
            assert last.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_the_lens_of_a_layer_is_that_of_its_hidden_state(tmp_path: Path) -> None:
    model = make_model("llama")
    watched(model, tmp_path / "a.flextrace", n=1)
    with torch.no_grad():
        hidden = model(IDS, output_hidden_states=True).hidden_states
        expected = model.lm_head(model.model.norm(hidden[2]))[0, -1].log_softmax(-1)
    with open_trace(tmp_path / "a.flextrace") as reader:
        second = reader.lens(0, 0)[1]
        step = reader.step(0, 0)
    assert step is not None
    top, ids = expected.topk(logit_lens.TOP_K)
    assert list(second.token_ids) == ids.tolist()
    assert second.logprobs == pytest.approx(top.tolist(), abs=1e-4)


def test_rank_and_probability_of_the_chosen_token_are_known_in_every_layer() -> None:
    model = make_model("llama")
    rows = [torch.randn(48, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    records = read(lens_of(model), rows, token_id=17)
    for row, record in zip(rows, records, strict=True):
        with torch.no_grad():
            logprobs = model.lm_head(model.model.norm(row[None]))[0].log_softmax(-1)
        assert record.chosen_logprob == pytest.approx(float(logprobs[17]), abs=1e-5)
        assert record.chosen_rank == int((logprobs > logprobs[17]).sum())


def test_only_the_chosen_layers_and_the_last_one_are_read(tmp_path: Path) -> None:
    watched(make_model("llama"), tmp_path / "a.flextrace", n=1, layers=[0])
    with open_trace(tmp_path / "a.flextrace") as reader:
        assert [one.layer for one in reader.lens(0, 0)] == [0, 2]


@pytest.mark.parametrize("level", ["basic", "advanced"])
def test_lower_levels_have_no_lens(level: str, tmp_path: Path) -> None:
    model = make_model("llama")
    with flexinspect.watch(model, out=tmp_path / "a.flextrace", level=level):
        model.generate(IDS, max_new_tokens=1, do_sample=False)
    with open_trace(tmp_path / "a.flextrace") as reader:
        assert reader.lens(0, 0) == []


def test_tokens_are_the_same_and_hooks_of_the_user_run_once_per_forward(tmp_path: Path) -> None:
    model = make_model("llama")
    plain = model.generate(IDS, max_new_tokens=3, do_sample=False)
    calls: list[str] = []
    for name, module in (("norm", model.model.norm), ("head", model.lm_head)):
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    assert torch.equal(watched(model, tmp_path / "a.flextrace"), plain)
    assert calls == ["norm", "head"] * 3


def test_a_readout_of_another_form_has_a_large_error() -> None:
    model = make_model("llama")
    rows = [torch.ones(48)] * 3
    with torch.no_grad():
        own = model.lm_head(model.model.norm(rows[0][None]))[0]
    assert read(lens_of(model), rows, logits=own)[-1].error == pytest.approx(0.0, abs=1e-5)
    wrong = read(lens_of(model), rows, logits=own * 0.5)[-1]
    assert wrong.error is not None
    assert wrong.error > 0.1


def test_tokens_that_the_model_masks_itself_are_no_error() -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight[9] = 0.0
    rows = [torch.ones(48)] * 3

    def masked(logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([9]), -math.inf)

    lens = lens_of(model)
    lens._rescale = masked
    with torch.no_grad():
        own = masked(model.lm_head(model.model.norm(rows[0][None])))[0]
    assert read(lens, rows, logits=own)[-1].error == pytest.approx(0.0, abs=1e-5)


def test_a_head_that_fails_turns_only_the_lens_off(tmp_path: Path) -> None:
    model = make_model("llama")
    out = tmp_path / "a.flextrace"
    norm, forward = model.model.norm, model.model.norm.forward
    calls: list[int] = []

    def failing(hidden: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:  # the lens, after the forward of the first step
            raise RuntimeError("no")
        return forward(hidden)  # type: ignore[no-any-return]

    norm.forward = failing
    watched(model, out)
    with open_trace(out) as reader:
        texts = [row.event.text for row in reader.events() if row.event.kind == "logit-lens-off"]
        assert texts == ["The logit lens failed at step 0 and is off: RuntimeError: no"]
        assert [reader.lens(0, step) for step in range(3)] == [[], [], []]
        assert len(reader.layer_stats(0, 2)) == 3


def test_a_model_without_an_output_head_has_no_lens_and_says_so() -> None:
    lens = LogitLens(nn.Linear(2, 2), {})
    assert lens.reason == "the model has no output head"
    assert read(lens, [torch.ones(2)]) == []


def test_a_lens_that_is_too_slow_reads_the_first_steps_and_then_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(logit_lens.time, "perf_counter", lambda: float(next(now)))
    model, events = make_model("llama"), list[tuple[str, str]]()
    lens = lens_of(model)
    rows = [torch.ones(48)] * 3
    # Each lens takes a second, and each step of the model two.
    took = [bool(read(lens, rows, step=n, wall_ms=2000.0, events=events)) for n in range(60)]
    assert all(took[: logit_lens.N_FIRST])
    later = took[logit_lens.N_FIRST :]
    assert not any(later[:20])
    assert 2 <= sum(later) <= 6
    ((kind, text),) = events
    assert kind == "logit-lens-sparse"
    assert "fewer --layers" in text

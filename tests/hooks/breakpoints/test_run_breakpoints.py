"""Each form of breakpoint in our own engine, with the demo model, as `flexinspect run` has it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patches import Own

import flexinspect
from flexinspect.breakpoints.store import BreakpointHit
from flexinspect.control.client import ControlClient
from flexinspect.control.discovery import running
from flexinspect.core.errors import ControlError
from flexinspect.inputs.model_names import DEMO
from flexinspect.records import protocol
from flexinspect.records.job import Job
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.ensemble import capture_process
from flexinspect_hooks.ensemble.capture_process import CaptureRun
from flexinspect_hooks.loading.model_loader import LoadedModel
from flexinspect_hooks.loading.tokenizers import Vocabulary

QUESTION = "Which city is the seat of government of France?"


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code, its error messages, the steps that it recorded."""

    code: int
    error: str
    steps: tuple[int, ...]
    trace: Path


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run the demo model in this process, where no client can continue it."""

    def run(*breakpoints: str, **job: Any) -> Ended:
        out = tmp_path / "run.flextrace"
        about: dict[str, Any] = {"prompts": (QUESTION,), "control": False, "overwrite": True}
        made = Job(out=str(out), breakpoints=breakpoints, on_break="stop", **{**about, **job})
        code = CaptureRun(made).run()
        messages = [protocol.parse_message(line) for line in capsys.readouterr().out.split("\n")]
        errors = [one["message"] for one in messages if one and one["kind"] == protocol.ERROR]
        with open_trace(out) as reader:
            steps = tuple(row.step for row in reader.steps(0))
        return Ended(code, " ".join(errors), steps, out)

    return run


def planted(monkeypatch: pytest.MonkeyPatch, plant: Callable[[LoadedModel], None]) -> None:
    """Let a fault be planted in the model as soon as it is loaded."""
    load = capture_process.load_model

    def corrupted(*job: Any) -> Any:
        loaded = load(*job)
        plant(loaded)
        return loaded

    monkeypatch.setattr(capture_process, "load_model", corrupted)


def answer(run: Callable[..., Ended]) -> list[tuple[str, float]]:
    """Return the tokens of an undisturbed run with their probabilities."""
    import math

    with open_trace(run().trace) as reader:
        steps = [reader.record(0, row.step) for row in reader.steps(0)]
    return [(s.tokens[0].text, math.exp(s.logits.chosen_logprob)) for s in steps if s and s.logits]


def test_nothing_is_evaluated_without_breakpoints(run: Callable[..., Ended]) -> None:
    ended = run()
    assert (ended.code, ended.error) == (0, "")
    assert len(ended.steps) > 2


def test_entropy_and_step(run: Callable[..., Ended]) -> None:
    ended = run("entropy > 0.001 and step > 0")
    assert ended.code == 3
    assert ended.steps == (0, 1)
    assert "entropy > 0.001 and step > 0: step 1 (decode): entropy 0.0" in ended.error


def test_an_entropy_that_is_never_reached_stops_nothing(run: Callable[..., Ended]) -> None:
    assert run("entropy > 7 and step > 2").code == 0


def test_a_token_by_its_text(run: Callable[..., Ended]) -> None:
    tokens = [text for text, _ in answer(run)]
    ended = run(f"token == {json.dumps(tokens[1])}")
    assert (ended.code, ended.steps) == (3, (0, 1))
    assert f"token {json.dumps(tokens[1])}" in ended.error


def test_a_line_break(run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(loaded: LoadedModel) -> None:
        (newline,) = Vocabulary(loaded.tokenizer_or_ids()).encode("\n")
        n_forwards = 0

        def force(module: Any, args: Any, output: Any) -> None:
            nonlocal n_forwards
            n_forwards += 1
            if n_forwards == 2:
                output[..., newline] = 1e4

        loaded.model.lm_head.register_forward_hook(force)

    planted(monkeypatch, plant)
    ended = run(r'token == "\n"', stop="eos")
    assert (ended.code, ended.steps) == (3, (0, 1))


def test_a_planted_nan_in_attention(
    run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plant(loaded: LoadedModel) -> None:
        def corrupt(module: Any, args: Any, output: Any) -> None:
            output[0][0, 3, 0] = float("nan")

        loaded.model.model.layers[2].self_attn.register_forward_hook(corrupt)

    planted(monkeypatch, plant)
    ended = run("nan @ layers.*.self_attn")
    assert (ended.code, ended.steps) == (3, (0,))
    assert "1 NaN value in row 3 of model.layers.2.self_attn" in ended.error


def test_a_planted_leak_is_a_finding(
    run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexinspect_hooks.ensemble import ensemble_run
    from flexinspect_hooks.generation.mask_source import UserMaskSource

    two = (QUESTION, "What is the capital of France?")
    assert run("finding mask.*", prompts=two).code == 0

    def plain_causal(rule: Any, *, device: Any, **_: Any) -> UserMaskSource:
        return UserMaskSource(
            lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, name="causal", device=device
        )

    monkeypatch.setattr(ensemble_run, "SpecMaskSource", plain_causal)
    ended = run("finding mask.*", prompts=two)
    assert (ended.code, ended.steps) == (3, (0,))
    assert "finding mask.*: step 0 (prefill): mask." in ended.error


def test_a_planted_empty_row(
    run: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blind_rule.py").write_text(
        "def mask_mod(b, h, q_idx, kv_idx):\n    return (kv_idx <= q_idx) & (q_idx != 4)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    ended = run("empty-row", mask="blind_rule:mask_mod")
    assert (ended.code, ended.steps) == (3, (0,))
    assert "row 4 attends to no key" in ended.error
    assert run("empty-row").code == 0


def test_a_low_probability(run: Callable[..., Ended]) -> None:
    chances = [chance for _, chance in answer(run)]
    limit = (min(chances) + sorted(chances)[1]) / 2
    first = chances.index(min(chances))
    ended = run(f"prob < {limit!r}")
    assert (ended.code, ended.steps) == (3, tuple(range(first + 1)))


def test_a_step_by_its_number(run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(loaded: LoadedModel) -> None:
        def never_end(module: Any, args: Any, output: Any) -> None:
            output[..., Vocabulary(loaded.tokenizer_or_ids()).tokenizer.eos_token_id] = -1e4

        loaded.model.lm_head.register_forward_hook(never_end)

    planted(monkeypatch, plant)
    ended = run("step == 12", stop="eos", max_new_tokens=20)
    assert (ended.code, ended.steps) == (3, tuple(range(13)))


def test_a_fallback_in_own_code(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO).eval()
    Own(model, lambda layer, rows, keys: "caught" if (layer, rows) == (3, 1) else "flex")
    hits: list[BreakpointHit] = []
    with flexinspect.watch(
        model, out=tmp_path / "own.flextrace", breakpoints=["fallback"], on_break=hits.append
    ):
        prompt = torch.arange(3, 15)[None]
        model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert [(hit.step, hit.layer) for hit in hits] == [(1, 3), (2, 3)]


def test_the_last_step_of_a_run_stops_it_too(run: Callable[..., Ended]) -> None:
    last = run().steps[-1]
    ended = run(f"step == {last}")
    assert (ended.code, ended.steps[-1]) == (3, last)


def test_a_run_pauses_and_its_breakpoints_are_commanded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.flextrace"
    job = Job(out=str(out), prompts=(QUESTION,), breakpoints=("step == 0",), on_break="wait")
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(CaptureRun(job).run()))
    thread.start()
    client = _client(out)
    _wait_until(lambda: client.status().state == "paused")
    status = client.status()
    assert status.place.step == 0
    assert status.reason.startswith("breakpoint 1, step == 0: step 0 (prefill): token ")
    with open_trace(out) as reader:
        assert [row.step for row in reader.steps(0)] == [0]
    assert [info.n_hits for info in client.breakpoints()] == [1]
    with pytest.raises(ControlError, match=r"No finding id matches this"):
        client.add_breakpoint("finding msk.*")
    made = client.add_breakpoint("prob > 0", once=True)
    client.continue_()
    _wait_until(lambda: client.status().state == "paused")
    assert client.status().place.step == 1
    assert [info.is_enabled for info in client.breakpoints()] == [True, False]
    client.remove_breakpoint(made.id)
    client.continue_()
    thread.join(20)
    assert codes == [0]
    assert f"flexinspect ctl continue --pid {status.pid}" in capsys.readouterr().out
    with open_trace(out) as reader:
        assert _kinds(reader) == ["breakpoint", "resumed"] * 2


def _client(trace: Path) -> ControlClient:
    def found() -> list[Any]:
        return [entry for entry in running() if entry.trace == str(trace)]

    _wait_until(lambda: bool(found()))
    return ControlClient(found()[0].address)


def _wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def _kinds(reader: TraceReader) -> list[str]:
    kinds = ("breakpoint", "resumed", "paused")
    return [row.event.kind for row in reader.events() if row.event.kind in kinds]

"""Capture records what ran, does not change outputs, and removes everything it installed."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.dense_reference import attention_row
from support.patience import PATIENCE_S
from support.tiny import make_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flexinspect.core.errors import TraceWriteError, UsageError
from flexinspect.masks import mask_presets
from flexinspect.records.finding import Finding
from flexinspect.records.job import SamplingOptions
from flexinspect.records.prompt import Prompt
from flexinspect.records.step import (
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect_hooks.capture.hook import built_in_hooks
from flexinspect_hooks.capture.recorder import N_IMMEDIATE_STEPS, Recorder
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.capture.writer_slowdown import WriterSlowdown
from flexinspect_hooks.generation.decoding import Choice, generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import SpecMaskSource
from flexinspect_hooks.observers.attention import segment_attention
from flexinspect_hooks.sessions import capture_session
from flexinspect_hooks.sessions.capture_session import CaptureSession

CPU = torch.device("cpu")
NEW = 6


class MemorySink:
    """Keeps records instead of writing them."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.events: list[EventRecord] = []
        self.findings: list[Finding] = []

    def begin_generation(self, record: GenerationRecord) -> None:
        self.steps.clear()

    def write_steps(self, records: Sequence[StepRecord]) -> None:
        self.steps += records

    def write_event(self, record: EventRecord) -> None:
        self.events.append(record)

    def update_run(self, **facts: Any) -> None: ...

    def write_findings(self, findings: Iterable[Finding]) -> None:
        self.findings += findings

    def end_generation(self, record: GenerationEnd) -> None:
        pass


def begin(session: CaptureSession, prompt: Prompt) -> None:
    record = GenerationRecord(0, "s", "m", "contiguous", prompt.segments, ())
    session.begin_generation(record)


def chooser(session: CaptureSession, prompt: Prompt, seen: list[torch.Tensor] | None = None) -> Any:
    def chose(choice: Choice) -> None:
        if seen is not None:
            seen.append(choice.logits.clone())
        pos = len(prompt.ids) + choice.step
        token = TokenRecord(pos, choice.token_id, "", "", pos, 6, step=choice.step)
        session.on_token_chosen(token, choice.scores)

    return chose


def capture(
    model: Any,
    prompt: Prompt,
    *,
    level: str = "advanced",
    spec: mask_presets.MaskSpec | None = None,
    hooks: Sequence[Any] | None = None,
    layers: Sequence[int] | None = None,
    sampling: SamplingOptions | None = None,
    patch: bool = True,
    compiled: bool = False,
) -> tuple[MemorySink, list[torch.Tensor]]:
    sink, logits = MemorySink(), []
    spec = spec or mask_presets.preset("segment-isolation", prompt.segments)
    source = SpecMaskSource(spec, length=128, device=CPU, compiled=compiled)
    session = CaptureSession(model, sink, level=level, hooks=hooks, layers=layers)
    options: dict[str, Any] = {"max_new_tokens": NEW, "sampling": sampling}
    with session:
        begin(session, prompt)
        on_choice = chooser(session, prompt, logits)
        if patch:
            with FlexPatch(model, source, compiled=compiled):
                generate(model, prompt, on_choice=on_choice, **options)
        else:
            generate(model, prompt, on_choice=on_choice, **options)
    return sink, logits


@pytest.mark.parametrize("level", ["basic", "advanced", "extreme"])
def test_outputs_are_bit_equal_with_and_without_capture(
    llama: Any, prompt: Prompt, level: str
) -> None:
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    plain: list[torch.Tensor] = []
    with FlexPatch(llama, SpecMaskSource(spec, length=128, device=CPU, compiled=False)):
        generate(
            llama, prompt, max_new_tokens=NEW, on_choice=lambda c: plain.append(c.logits.clone())
        )
    _, captured = capture(llama, prompt, level=level)
    assert len(plain) == len(captured) == NEW
    assert all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))


def test_a_session_leaves_no_hooks_or_threads(llama: Any, prompt: Prompt) -> None:
    before = set(threading.enumerate())
    capture(llama, prompt)
    assert all(
        not (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks) for m in llama.modules()
    )
    assert "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("flexinspect")]


def test_a_session_leaves_no_hooks_or_threads_after_an_exception(
    llama: Any, prompt: Prompt
) -> None:
    session = CaptureSession(llama, MemorySink())
    with pytest.raises(KeyError), session:
        begin(session, prompt)
        llama(torch.tensor([prompt.ids]))
        raise KeyError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llama.modules())
    assert "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)


def test_the_model_is_freed_after_a_session(prompt: Prompt) -> None:
    model = make_model("llama")
    capture(model, prompt)
    model_ref = weakref.ref(model)
    del model
    gc.collect()
    assert model_ref() is None


def test_steps_have_phase_lengths_token_and_path(llama: Any, prompt: Prompt) -> None:
    sink, _ = capture(llama, prompt)
    n = len(prompt.ids)
    assert [s.step for s in sink.steps] == list(range(NEW))
    assert [s.phase for s in sink.steps] == ["prefill"] + ["decode"] * (NEW - 1)
    assert [(s.q_len, s.kv_before, s.kv_after) for s in sink.steps[:2]] == [
        (n, 0, n),
        (1, n, n + 1),
    ]
    assert [s.tokens[0].pos for s in sink.steps] == list(range(n, n + NEW))
    for step in sink.steps:
        assert [c.layer for c in step.calls] == [0, 1, 2]
        assert {c.path for c in step.calls} == {"flex uncompiled"}
        assert {c.backend for c in step.calls} == {"flexinspect"}
        assert step.wall_ms > 0
        assert step.capture_ms > 0


def test_the_executed_mask_equals_the_mask_mod_and_is_stored_once(
    llama: Any, prompt: Prompt
) -> None:
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    sink, _ = capture(llama, prompt, spec=spec)
    first = sink.steps[0].masks
    assert len(first) == 1
    assert first[0].kind == "block"
    assert first[0].cells is not None
    assert (first[0].cells[0] == spec.dense(len(prompt.ids))).all()
    assert len({c.mask for c in sink.steps[0].calls}) == 1
    row = sink.steps[3].masks[0]
    assert row.cells is not None
    assert row.cells.shape == (1, 1, len(prompt.ids) + 3)
    assert (row.q_offset, bool(row.cells.all())) == (len(prompt.ids) + 2, True)


def test_the_lse_check_fails_if_the_recorded_mask_is_not_the_executed_one(
    llama: Any, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, _ = capture(llama, prompt)
    worst = max(c.lse_error or 0.0 for s in good.steps for c in s.calls)
    assert worst < 1e-4
    from flexinspect_hooks.observers.attention import mask_capture

    original = mask_capture._mask_mod_cells

    def lying(*args: Any) -> torch.Tensor:
        cells = original(*args).clone()
        cells[..., 1:4] = False
        return cells

    monkeypatch.setattr(mask_capture, "_mask_mod_cells", lying)
    bad, _ = capture(llama, prompt)
    assert min(max(c.lse_error or 0.0 for c in s.calls) for s in bad.steps) > 1e-3


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_other_backends_are_recorded_and_checked_by_their_output(
    prompt: Prompt, backend: str
) -> None:
    model = make_model("llama")
    model.set_attn_implementation(backend)
    sink, _ = capture(model, prompt, patch=False)
    calls = [c for s in sink.steps for c in s.calls]
    assert {c.path for c in calls} == {backend}
    assert {c.check_kind for c in calls} == {"output"}
    assert max(c.lse_error or 0.0 for c in calls) < 1e-4
    mask = sink.steps[0].masks[0]
    assert mask.kind == ("none, causal" if backend == "sdpa" else "float")
    assert mask.cells is not None
    assert (mask.cells[0] == mask_presets.causal().dense(len(prompt.ids))).all()


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
@pytest.mark.timeout(600)
def test_compiled_runs_are_checked_by_their_output_under_the_compiled_formula(
    llama: Any, prompt: Prompt
) -> None:
    sink, _ = capture(llama, prompt, compiled=True)
    calls = [c for s in sink.steps for c in s.calls]
    assert {c.path for c in calls} == {"flex compiled"}
    assert {c.check_kind for c in calls} == {"output"}
    assert max(c.lse_error or 0.0 for c in calls) < 1e-4
    assert sink.steps[0].masks[0].compiled


def array_of(step: StepRecord, stream: str, layer: int | None = None) -> np.ndarray[Any, Any]:
    return next(a.array for a in step.arrays if (a.stream, a.layer) == (stream, layer))


@pytest.fixture(params=["cores taken", "a core free"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of deferred tensors, which need a free core for the writer thread."""
    sizes: list[int] = []
    n_cores = torch.get_num_threads() + (request.param == "a core free")
    monkeypatch.setattr(segment_attention, "available_cores", lambda: n_cores)
    original = segment_attention._DeferredTensors.__init__

    def init(self: Any, tensors: Any, n_bytes: int) -> None:
        sizes.append(n_bytes)
        original(self, tensors, n_bytes)

    monkeypatch.setattr(segment_attention._DeferredTensors, "__init__", init)
    return sizes


def is_held(request: pytest.FixtureRequest) -> bool:
    return "a core free" in request.node.name


@pytest.mark.parametrize("backend", ["", "sdpa"])
def test_rows_reduced_in_the_writer_thread_are_the_same(
    prompt: Prompt, held: list[int], backend: str, request: pytest.FixtureRequest
) -> None:
    model = make_model("llama")
    if backend:
        model.set_attn_implementation(backend)
    sink, _ = capture(model, prompt, patch=not backend)
    assert bool(held) is is_held(request)
    for step in sink.steps:
        assert max(call.lse_error or 0.0 for call in step.calls) < 1e-4
        np.testing.assert_allclose(array_of(step, "attention.mass").sum(-1), 1, atol=1e-4)


@pytest.mark.parametrize(("family", "lost"), [("llama", [0, 1, 2]), ("gemma2", [0, 2])])
def test_keys_modified_meanwhile_give_no_row_and_an_event(
    prompt: Prompt,
    held: list[int],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    family: str,
    lost: list[int],
) -> None:
    """As with a cache that is reset; in a model with two masks only calls with one are lost.

    Once rows were lost, no tensor waits any more.
    """
    model, waiting = make_model(family), segment_attention._defer_tensors

    def corrupted(refs: Any) -> Any:
        found = waiting(refs)
        if found is not None and refs[0].layer == 0:
            refs[0].key.zero_()
        return found

    monkeypatch.setattr(segment_attention, "_defer_tensors", corrupted)
    sink, _ = capture(model, prompt)
    are_lost = [any(event.kind == "cache-overwritten" for event in s.events) for s in sink.steps]
    n_lost = sum(are_lost)
    assert are_lost == [True] * n_lost + [False] * (len(are_lost) - n_lost)
    assert bool(n_lost) is is_held(request)
    layers_of_model = lost
    for step, is_lost in zip(sink.steps, are_lost, strict=True):
        lost = layers_of_model if is_lost else []
        kinds = {call.layer: call.check_kind for call in step.calls}
        assert kinds == {layer: None if layer in lost else "lse" for layer in range(3)}
        lse_errors = {call.layer: call.lse_error for call in step.calls}
        assert [layer for layer, lse_error in lse_errors.items() if lse_error is None] == lost
        assert max(lse_error or 0.0 for lse_error in lse_errors.values()) < 1e-4
        events = [event for event in step.events if event.kind == "cache-overwritten"]
        assert [event.data["layers"] for event in events] == ([lost] if lost else [])
    assert sink.events == []


def test_deferred_keys_are_limited(
    prompt: Prompt, held: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_attention, "MAX_DEFERRED_BYTES", 0)
    sink, _ = capture(make_model("llama"), prompt)
    assert held == []
    assert all(call.lse_error is not None for step in sink.steps for call in step.calls)


def test_keys_of_another_model_may_be_deferred_while_the_limit_is_checked() -> None:
    class Measured(segment_attention._DeferredTensors):
        @property
        def n_bytes(self) -> int:
            comes.start()
            comes.join(0.1)  # it came already, or waits until all is counted
            return 1

        @n_bytes.setter
        def n_bytes(self, value: int) -> None: ...

    late: list[segment_attention._DeferredTensors] = []
    make_late = lambda: late.append(segment_attention._DeferredTensors({}, 2))  # noqa: E731
    comes = threading.Thread(target=make_late)
    here = Measured({}, 1)
    assert segment_attention._DeferredTensors.has_room(0)
    comes.join()
    assert {here, *late} <= set(segment_attention._DeferredTensors._all)
    assert len(late) == 1


def test_segment_attention_equals_the_reference_row_summed_by_segment(
    llama: Any, prompt: Prompt, held: list[int]
) -> None:
    spec = mask_presets.preset("shared-prefix", prompt.segments)
    sink, _ = capture(llama, prompt, level="extreme", spec=spec)
    for layer in range(3):
        keys = np.concatenate([array_of(s, "k", layer) for s in sink.steps], axis=1)
        for step in sink.steps:
            call = step.calls[layer]
            kv = step.kv_after
            weights = attention_row(
                torch.tensor(array_of(step, "q", layer)[:, -1:]),
                torch.tensor(keys[:, :kv]),
                scale=call.scale or 0.0,
                visible=torch.tensor(spec.dense(1, kv, q_offset=kv - 1)),
            )[:, 0]
            mass = array_of(step, "attention.mass")[layer]
            for index, segment in enumerate(prompt.segments):
                expected = weights[:, segment.start : min(segment.stop, kv)].sum(-1).numpy()
                np.testing.assert_allclose(mass[:, index], expected, atol=1e-5)
            entropy = -(weights * torch.log(weights.clamp(min=1e-30))).sum(-1).numpy()
            np.testing.assert_allclose(
                array_of(step, "attention.entropy")[layer], entropy, atol=1e-4
            )


def test_logits_are_reduced_correctly(llama: Any, prompt: Prompt) -> None:
    sink, logits = capture(llama, prompt)
    for step, row in zip(sink.steps, logits, strict=True):
        record = step.logits
        assert record is not None
        logprobs = torch.log_softmax(row.double(), -1)
        top = torch.topk(row, 10)
        assert [c.token_id for c in record.candidates] == top.indices.tolist()
        assert record.candidates[0].logprob == pytest.approx(float(logprobs.max()), abs=1e-5)
        assert record.entropy == pytest.approx(float(-(logprobs.exp() * logprobs).sum()), abs=1e-4)
        assert record.margin == pytest.approx(float(top.values[0] - top.values[1]), abs=1e-6)
        assert (record.chosen_rank, record.n_nan, record.n_inf) == (0, 0, 0)
        assert sum(record.histogram) == row.numel()


def test_sampled_steps_record_scores_and_logits_separately(llama: Any, prompt: Prompt) -> None:
    hot = SamplingOptions(True, temperature=2.0, top_k=4)
    sink, logits = capture(llama, prompt, sampling=hot)
    for step, row in zip(sink.steps, logits, strict=True):
        record = step.logits
        assert record is not None
        chosen = record.chosen_id
        assert record.chosen_rank == int((row > row[chosen]).sum())
        assert record.chosen_rank < 4
        expected = float(torch.log_softmax(row.double(), -1)[chosen])
        assert record.chosen_logprob == pytest.approx(expected, abs=1e-5)
        best = record.candidates[0]
        assert best.score == pytest.approx(best.logit / 2.0, abs=1e-5)
        kept = np.exp([c.score_logprob for c in record.candidates[:4]]).sum()
        assert kept == pytest.approx(1.0, abs=1e-5)
        assert record.candidates[5].score == -np.inf


def test_layer_statistics_are_those_of_the_outputs(llama: Any, prompt: Prompt) -> None:
    sink, _ = capture(llama, prompt, level="extreme")
    for step in sink.steps[:2]:
        for stat in step.layer_stats:
            hidden = array_of(step, "hidden", stat.layer)
            assert stat.module == f"model.layers.{stat.layer}"
            assert hidden.shape == (step.q_len, 48)
            np.testing.assert_allclose(
                [stat.min, stat.max, stat.mean, stat.std, stat.norm],
                [hidden.min(), hidden.max(), hidden.mean(), hidden.std(), np.linalg.norm(hidden)],
                rtol=1e-4,
                atol=1e-5,
            )


def test_memory_counts_the_cache_from_its_shapes(llama: Any, prompt: Prompt) -> None:
    sink, _ = capture(llama, prompt)
    for step in sink.steps:
        assert step.memory is not None
        assert step.memory.kv_cache == 3 * 2 * 2 * step.kv_after * 12 * 4
        assert step.memory.model >= sum(p.nbytes for p in llama.parameters())
        assert step.memory.rss > 1 << 20


def test_basic_records_less_and_still_names_a_layer_with_nan(prompt: Prompt) -> None:
    model = make_model("llama")
    sink, _ = capture(model, prompt, level="basic")
    step = sink.steps[1]
    assert step.layer_stats == ()
    assert step.arrays == ()
    assert step.masks[0].cells is None
    assert step.calls[0].lse_error is None
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = torch.inf
    nan_sink, _ = capture(model, prompt, level="basic")
    stats = nan_sink.steps[0].layer_stats
    assert [s.layer for s in stats][:1] == [1]
    assert stats[0].n_nan + stats[0].n_inf > 0
    assert nan_sink.steps[0].logits is not None
    assert nan_sink.steps[0].logits.n_nan > 0


def test_extreme_stores_only_the_chosen_layers(llama: Any, prompt: Prompt) -> None:
    sink, _ = capture(llama, prompt, level="extreme", layers=(1,))
    streams = {(a.stream, a.layer) for a in sink.steps[0].arrays if a.layer is not None}
    assert streams == {("q", 1), ("k", 1), ("v", 1), ("hidden", 1)}


def test_the_level_may_change_between_steps(llama: Any, prompt: Prompt) -> None:
    sink = MemorySink()
    session = CaptureSession(llama, sink, level="basic")
    chose = chooser(session, prompt)

    def switch(choice: Choice) -> None:
        chose(choice)
        session.level = "advanced" if choice.step == 2 else session.level

    with session:
        begin(session, prompt)
        generate(llama, prompt, max_new_tokens=NEW, on_choice=switch)
    assert [bool(s.layer_stats) for s in sink.steps] == [False] * 3 + [True] * 3


class Faulty:
    """A hook that raises in one of its methods."""

    name = "faulty"

    def __init__(self, where: str) -> None:
        self.where = where
        self.n_failures = 0

    def _maybe(self, where: str) -> None:
        self.n_failures += where == self.where
        if where == self.where:
            raise ZeroDivisionError(f"in {where}")

    def install(self, context: Any) -> Any:
        self._maybe("install")
        return ()

    def begin(self, context: Any) -> None:
        self._maybe("begin")

    def open(self, step: Any) -> None:
        self._maybe("open")

    def reduce(self, step: Any, buffer: Any) -> None:
        self._maybe("reduce")

    def record(self, step: Any, kept: Any, values: Any, draft: Any) -> None:
        self._maybe("record")


@pytest.mark.parametrize("where", ["install", "begin", "open", "reduce", "record"])
def test_a_failing_hook_is_recorded_and_switched_off(
    llama: Any, prompt: Prompt, where: str
) -> None:
    others, _ = built_in_hooks()
    faulty = Faulty(where)
    sink, logits = capture(llama, prompt, hooks=[faulty, *others])
    assert len(logits) == len(sink.steps) == NEW
    assert all(step.logits is not None and len(step.calls) == 3 for step in sink.steps)
    texts = [e.text for e in sink.events if e.kind == "hook-disabled"]
    assert texts == [texts[0]]
    assert "'faulty' failed" in texts[0]
    assert f"in {where}" in texts[0]
    assert faulty.n_failures == 1  # it is not called again


class Slow(Faulty):
    """A hook that fails in the writer thread while further steps are queued."""

    def record(self, step: Any, kept: Any, values: Any, draft: Any) -> None:
        time.sleep(0.2)
        self._maybe("record")


def test_a_hook_that_failed_is_not_called_for_steps_that_were_queued_before(
    llama: Any, prompt: Prompt
) -> None:
    others, _ = built_in_hooks()
    slow = Slow("record")
    sink, _ = capture(llama, prompt, hooks=[slow, *others])
    assert len(sink.steps) == NEW
    assert slow.n_failures == 1


class Deferring(Faulty):
    """A hook whose deferred work fails in the writer thread."""

    def reduce(self, step: Any, buffer: Any) -> None:
        def fail(xp: Any, **inputs: Any) -> Any:
            raise ZeroDivisionError("deferred work failed")

        buffer.defer(fail, row=step.logits)


def test_deferred_work_that_fails_switches_its_hook_off_and_no_other(
    llama: Any, prompt: Prompt
) -> None:
    others, _ = built_in_hooks()
    sink, _ = capture(llama, prompt, hooks=[Deferring("nowhere"), *others])
    assert len(sink.steps) == NEW
    assert all(step.logits is not None and len(step.calls) == 3 for step in sink.steps)
    assert ["deferred work failed" in e.text for e in sink.events] == [True]


def test_a_full_disk_stops_the_recording_and_not_the_model(llama: Any, prompt: Prompt) -> None:
    class FullSink(MemorySink):
        def write_steps(self, records: Sequence[StepRecord]) -> None:
            if self.steps:
                raise TraceWriteError("The disk is full.")
            super().write_steps(records[:1])

    sink = FullSink()
    session = CaptureSession(llama, sink)
    with session:
        begin(session, prompt)
        out = generate(llama, prompt, max_new_tokens=NEW, on_choice=chooser(session, prompt))
    assert len(out.token_ids) == NEW
    assert len(sink.steps) == 1
    assert session.recorder.failure is not None


def test_a_forward_that_cannot_be_read_continues_unrecorded(llama: Any, prompt: Prompt) -> None:
    class OddCache:
        def get_seq_length(self) -> int:
            raise RuntimeError("no length")

    sink = MemorySink()
    session = CaptureSession(llama, sink)
    with session:
        begin(session, prompt)
        session._on_forward_start(llama, (), {"past_key_values": OddCache()})
        session.recorder.drain()
        assert llama(torch.tensor([prompt.ids])).logits.shape[1] == len(prompt.ids)
    assert "no length" in sink.events[0].text
    assert sink.steps == []


def test_an_unknown_level_is_refused(llama: Any) -> None:
    with pytest.raises(UsageError, match="basic, advanced, extreme"):
        CaptureSession(llama, MemorySink(), level="all")


def test_the_session_reports_its_cost(llama: Any, prompt: Prompt) -> None:
    sink = MemorySink()
    session = CaptureSession(llama, sink)
    with session:
        begin(session, prompt)
        generate(llama, prompt, max_new_tokens=NEW, on_choice=chooser(session, prompt))
    cost = session.cost()
    assert cost["steps"] == NEW
    assert 0 < cost["capture_s"] < cost["total_s"]
    assert cost["writer_s"] > 0


@pytest.mark.parametrize(("threads", "yields"), [(1, True), (10_000, False)])
def test_the_writer_uses_a_short_switch_interval_only_with_a_free_core(
    llama: Any, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, threads: int, yields: bool
) -> None:
    intervals: list[float] = []

    class Listening(MemorySink):
        def write_steps(self, records: Sequence[StepRecord]) -> None:
            intervals.append(sys.getswitchinterval())

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("flexinspect_hooks.sessions.capture_session.available_cores", lambda: 2)
    before = sys.getswitchinterval()
    session = CaptureSession(llama, Listening())
    with session:
        begin(session, prompt)
        generate(llama, prompt, max_new_tokens=NEW, on_choice=chooser(session, prompt))
    assert sys.getswitchinterval() == before
    assert intervals
    assert all((interval < before) is yields for interval in intervals)


def test_the_writer_of_a_short_run_counts_for_at_most_half_of_the_rest(
    llama: Any, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    session = CaptureSession(llama, MemorySink())
    with session:
        begin(session, prompt)
        generate(llama, prompt, max_new_tokens=1, on_choice=chooser(session, prompt))
    session.recorder.writer_s += 100.0  # the writer works after the model has ended
    cost = session.cost()
    rest = cost["total_s"] - cost["capture_s"]
    expected = (cost["capture_s"] + rest / 2) / (rest / 2)
    assert cost["ratio"] == pytest.approx(expected, rel=1e-2)


@pytest.fixture
def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the writer work at any time of a forward, as for a model without output embeddings."""
    monkeypatch.setattr(capture_session, "output_head", lambda model: None)


@pytest.mark.usefixtures("no_window")
@pytest.mark.parametrize(("threads", "counts"), [(1, "waited_s"), (10_000, "writer_s")])
def test_the_cost_includes_the_time_that_the_writer_takes_from_the_model(
    llama: Any, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, threads: int, counts: str
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("flexinspect_hooks.sessions.capture_session.available_cores", lambda: 2)
    # On a busy machine enough steps of both kinds are known to compare them instead.
    monkeypatch.setattr("flexinspect_hooks.capture.writer_slowdown._MIN_QUIET", 10_000)
    session = CaptureSession(llama, MemorySink())
    # A sleep in a forward uses no CPU time of this thread, as when another thread holds the GIL.
    with session, llama.model.register_forward_hook(lambda *_: time.sleep(0.002)):
        begin(session, prompt)
        generate(llama, prompt, max_new_tokens=NEW, on_choice=chooser(session, prompt))
    cost = session.cost()
    assert 0 < cost["waited_s"] <= cost["writer_s"]
    assert session.waited_s >= 0.002 * NEW
    spent = cost["capture_s"] + cost[counts]
    assert cost["ratio"] == pytest.approx(spent / (cost["total_s"] - spent), rel=1e-2)


@pytest.mark.usefixtures("no_window")
@pytest.mark.parametrize(("threads", "slowed_s"), [(1, 0.004), (10_000, 0.1)])
def test_the_cost_includes_how_much_longer_steps_take_beside_a_writer_with_a_core(
    llama: Any, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, threads: int, slowed_s: float
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("flexinspect_hooks.sessions.capture_session.available_cores", lambda: 2)
    counts: list[int] = []

    class Listening(MemorySink):
        def write_steps(self, records: Sequence[StepRecord]) -> None:
            counts.append(session.recorder.n_writes)

    session = CaptureSession(llama, Listening())
    with session:
        begin(session, prompt)
        generate(llama, prompt, max_new_tokens=NEW, on_choice=chooser(session, prompt))
    assert counts
    assert all(count % 2 for count in counts)
    assert session.recorder.n_writes % 2 == 0
    # A step that takes four times as long as the others is no measure.
    assert 0 < session.slowdown.n_quiet + session.slowdown.n_busy <= NEW - N_IMMEDIATE_STEPS
    session.slowdown = WriterSlowdown(n_quiet=10, quiet_s=0.1, n_busy=2, busy_s=0.024)
    session.total_s, session.recorder.writer_s = 2 + session.capture_s, 0.1
    ratio = (session.capture_s + slowed_s) / (2 - slowed_s)
    assert session.cost()["ratio"] == pytest.approx(ratio, rel=1e-2)


@pytest.mark.parametrize(
    ("before", "after", "is_busy"), [(4, 4, False), (4, 5, True), (5, 5, True), (5, 6, True)]
)
def test_a_step_is_busy_if_the_writer_worked_at_any_time_in_it(
    llama: Any, before: int, after: int, is_busy: bool
) -> None:
    session = CaptureSession(llama, MemorySink())
    session.recorder.n_writes = after
    step = StepContext(0, 5, "decode", 1, 9, "basic", wall_ms=3.0, writes_before=before)
    session._compare_with_quiet_steps(step)
    assert (session.slowdown.n_busy, session.slowdown.n_quiet) == (is_busy, not is_busy)


class WaitingHead(torch.nn.Linear):
    """Output embeddings whose product takes until the writer is done."""

    recorder: Recorder
    n_written: list[int]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        until = time.monotonic() + PATIENCE_S
        while self.recorder.is_behind and time.monotonic() < until:
            time.sleep(0.001)
        self.n_written.append(self.recorder.n_steps)
        return super().forward(hidden)


def test_each_step_is_written_during_the_output_embeddings_of_the_next_one(
    prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr("flexinspect_hooks.sessions.capture_session.available_cores", lambda: 2)
    model, recorder = make_model("llama"), Recorder(MemorySink(), linger_s=PATIENCE_S)
    head = model.get_output_embeddings()
    head.__class__, head.recorder, head.n_written = WaitingHead, recorder, []
    session = CaptureSession(model, MemorySink(), recorder=recorder)
    recorder.start()
    with session:
        begin(session, prompt)
        generate(model, prompt, max_new_tokens=NEW, on_choice=chooser(session, prompt))
        assert head._forward_pre_hooks
    recorder.stop()
    assert head.n_written == [*range(NEW)]
    assert not head._forward_pre_hooks
    assert session.waited_s < session.total_s / 2


def test_no_hook_is_on_the_output_embeddings_where_torch_uses_every_core(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexinspect_hooks.sessions.capture_session.available_cores", lambda: 1)
    with CaptureSession(llama, MemorySink()):
        assert not llama.get_output_embeddings()._forward_pre_hooks


def test_a_model_whose_output_embeddings_cannot_be_asked_for_is_recorded(
    llama: Any, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any) -> Any:
        raise RuntimeError("not here")

    monkeypatch.setattr("flexinspect_hooks.sessions.capture_session.available_cores", lambda: 9)
    monkeypatch.setattr(type(llama), "get_output_embeddings", refuse)
    sink, _ = capture(llama, prompt)
    assert len(sink.steps) == NEW


def test_input_embeddings_that_a_model_returns_as_its_output_embeddings_have_no_hook(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexinspect_hooks.sessions.capture_session.available_cores", lambda: 9)
    embeddings = llama.get_input_embeddings()
    monkeypatch.setattr(type(llama), "get_output_embeddings", lambda self: embeddings)
    with CaptureSession(llama, MemorySink()):
        assert not any("WriteWindow" in repr(h) for h in embeddings._forward_pre_hooks.values())

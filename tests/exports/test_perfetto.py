"""The Perfetto timeline, decoded with the messages of the `perfetto` package."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.earlier_traces import unpack
from support.exporting import Timeline, export, value_of
from support.traces import LAYERS, RUN, SEGMENTS, sample_generation, sample_step, sample_trace

from flexinspect.exports import protobuf
from flexinspect.exports.perfetto_packets import TimelineWriter
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_trace(tmp_path_factory.mktemp("perfetto") / "run.flextrace")


@pytest.fixture(scope="module")
def timeline(path: Path) -> Timeline:
    return Timeline(export(path, "perfetto"))


def test_every_step_is_a_slice_of_its_recorded_time(path: Path, timeline: Timeline) -> None:
    with open_trace(path) as reader:
        steps = reader.steps(1)
    slices = timeline.on("generation 1: sample-1/steps")
    assert [one.name for one in slices] == ["prefill", *(f"decode {n}" for n in range(1, 6))]
    assert [one.start for one in slices] == [round(step.started_at * 1e9) for step in steps]
    assert [one.duration for one in slices] == [round(step.wall_ms * 1e6) for step in steps]
    assert [one.args["entropy"] for one in slices] == [step.entropy for step in steps]
    assert slices[1].args["tokens"] == [" Aus"]
    assert slices[1].args["candidates"] == [" Aus", "ten", "\x1b[31m", " .", ""]


def test_every_kernel_call_is_a_slice_of_its_layer(path: Path, timeline: Timeline) -> None:
    with open_trace(path) as reader:
        calls = [reader.calls(0, step.step) for step in reader.steps(0)]
    steps = timeline.on("generation 0: sample-0/steps")
    for layer in range(LAYERS):
        slices = timeline.on(f"generation 0: sample-0/layers/layer {layer}")
        own = [of_step[layer] for of_step in calls]
        assert [one.name for one in slices] == [call.path for call in own]
        assert [one.args["mask"] for one in slices] == [call.mask for call in own]
        shapes = [(call.q_len, call.kv_len, call.q_heads, call.head_dim) for call in own]
        names = ("q_len", "kv_len", "q_heads", "head_dim")
        assert [tuple(one.args[name] for name in names) for one in slices] == shapes
        assert [(one.start, one.stop) for one in slices] == [(s.start, s.stop) for s in steps]
    assert [one.name for one in timeline.on("layer 3")].count("sdpa") == 2


def test_a_segment_lasts_from_its_first_computed_row_to_its_last(timeline: Timeline) -> None:
    prefill, *decode = timeline.on("generation 0: sample-0/steps")
    spans = {
        one.name: (one.start, one.stop, one.args["kind"])
        for one in timeline.slices
        if "generation 0: sample-0/segments/" in one.track
    }
    assert list(spans) == [segment.label for segment in SEGMENTS]
    assert spans["paraphrase 2"] == (prefill.start, prefill.stop, "paraphrase")
    assert spans["generated"] == (decode[0].start, decode[-1].stop, "generated")


def test_counters_have_the_recorded_values(path: Path, timeline: Timeline) -> None:
    with open_trace(path) as reader:
        memory = [reader.memory(0, step.step) for step in reader.steps(0)]
        steps = reader.steps(0)
    found = {
        name.partition("generation 0: sample-0/counters/")[2]: [value for _, value in values]
        for name, values in timeline.counters.items()
    }
    assert found["memory/rss"] == [each.rss for each in memory if each is not None]
    assert found["time/capture_ms"] == [step.capture_ms for step in steps]
    assert found["logits/entropy"] == [step.entropy for step in steps]
    probabilities = [math.exp(step.chosen_logprob or 0) for step in steps]
    assert found["logits/chosen_probability"] == probabilities
    starts = [one.start for one in timeline.on("generation 0: sample-0/steps")]
    assert [at for at, _ in timeline.counters[next(iter(timeline.counters))]] == starts


def test_counters_of_memory_have_the_unit_bytes(timeline: Timeline) -> None:
    tracks = [p.track_descriptor for p in timeline.packets if p.HasField("track_descriptor")]
    units = {track.name: track.counter for track in tracks if track.HasField("counter")}
    assert units["memory/rss"].unit == units["memory/rss"].UNIT_SIZE_BYTES
    assert units["logits/entropy"].unit_name == "nats"


def test_steps_and_layers_lie_within_their_generation(timeline: Timeline) -> None:
    for number in (0, 1):
        (whole,) = timeline.on(f"generation {number}: sample-{number}")
        inside = [one for one in timeline.slices if one.track.startswith(f"{whole.track}/")]
        assert len(inside) > 6 * (1 + LAYERS)
        assert all(whole.start <= one.start <= one.stop <= whole.stop for one in inside)


def test_a_finding_is_an_instant_at_the_end_of_its_step(timeline: Timeline) -> None:
    (finding,) = [one for one in timeline.instants if one.track.endswith("/findings")]
    assert (finding.name, finding.args["severity"]) == ("numbers.nan", "error")
    assert finding.args["evidence"] == {"n_nan": 3}
    assert finding.start == timeline.on("generation 0: sample-0/steps")[3].stop
    assert [one.name for one in timeline.instants if one.track.endswith("/events")] == ["phase"]


def test_only_the_chosen_generation_is_exported(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(path, tmp_path))
    names = Timeline(export(copy, "perfetto", generation=1)).paths.values()
    assert {name.split("/")[1] for name in names if "/" in name} == {"generation 1: sample-1"}


@pytest.mark.parametrize("name", ["branches", "training", "program", "interrupted"])
def test_recorded_traces_nest_and_lose_no_step(name: str, tmp_path: Path) -> None:
    path = unpack(name, tmp_path)
    timeline = Timeline(export(path, "perfetto"))
    with open_trace(path) as reader:
        places = [(row, b) for row in reader.generations() for b in reader.branches(row.generation)]
        n_steps = sum(len(reader.steps(row.generation, b.branch)) for row, b in places)
        calls = len(reader.frame("calls"))
    assert len(timeline.on("/steps")) == n_steps
    assert len([one for one in timeline.slices if "/layers/" in one.track]) == calls


def test_a_branch_has_its_own_tracks_and_says_how_it_differs(tmp_path: Path) -> None:
    path = unpack("branches", tmp_path)
    timeline = Timeline(export(path, "perfetto"))
    with open_trace(path) as reader:
        sample, branches = reader.generation(0).sample_id, reader.branches(0)[1:]
        own_steps = {b.branch: [s.step for s in reader.steps(0, b.branch)] for b in branches}
    assert len(branches) == 4
    for branch in branches:
        name = f"generation 0, branch {branch.branch}: {sample}"
        (whole,) = timeline.on(name)
        assert whole.args["change"]["kind"] == branch.change["kind"]
        steps = [one.args["step"] for one in timeline.on(f"{name}/steps")]
        assert steps == own_steps[branch.branch]


def test_several_calls_of_one_layer_are_nested(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "run.flextrace", RUN) as writer:
        writer.begin_generation(sample_generation(0))
        step = sample_step(0)
        writer.write_step(replace(step, calls=(step.calls[0],) * 3))
    slices = Timeline(export(tmp_path / "run.flextrace", "perfetto")).on("layer 0")
    assert sorted(one.depth for one in slices) == [0, 1, 2]
    assert len({(one.start, one.stop) for one in slices}) == 1


TIMES = st.floats(-10, 2000) | st.sampled_from([math.nan, math.inf, -math.inf, 1e300])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=5))
def test_slices_nest_whatever_the_clock_did(
    tmp_path_factory: pytest.TempPathFactory, times: list[tuple[float, float]]
) -> None:
    path = tmp_path_factory.mktemp("clock") / "run.flextrace"
    with TraceWriter.create(path, RUN) as writer:
        writer.begin_generation(sample_generation(0))
        for number, (started_at, wall_ms) in enumerate(times):
            step = replace(sample_step(number), started_at=started_at, wall_ms=wall_ms)
            writer.write_step(step)
    timeline = Timeline(export(path, "perfetto"))  # it checks the order of every track
    assert len(timeline.on("/steps")) == len(times)
    assert all(one.duration >= 0 for one in timeline.slices)


ARGS = st.recursive(
    st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, min_size=1, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, min_size=1, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(ARGS)
def test_arguments_survive(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "args.perfetto-trace"
    with file.open("wb") as out:
        writer = TimelineWriter(out, "test", 0)
        writer.instant(writer.track(writer.root, "a", "a"), 5, "event", {"value": value})
    assert Timeline(file).instants[0].args == {"value": value}


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_numbers_are_encoded_as_protobuf_does(number: int) -> None:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import DebugAnnotation

    message = DebugAnnotation(int_value=number)
    assert protobuf.int_field(4, number) == message.SerializeToString()
    assert value_of(message) == number


def trace_processor() -> str | None:
    """Return the trace processor if it is on this machine; the package would download it."""
    cache = Path.home() / ".local" / "share" / "perfetto" / "prebuilts"
    cached = next((str(file) for file in cache.glob("trace_processor_shell*")), None)
    return os.environ.get("TRACE_PROCESSOR") or shutil.which("trace_processor_shell") or cached


def test_a_branch_that_begins_before_its_row_loses_no_time(tmp_path: Path) -> None:
    path = unpack("branches", tmp_path)
    timeline = Timeline(export(path, "perfetto"))
    with open_trace(path) as reader:
        for branch in reader.branches(0)[1:]:
            sample = reader.generation(0).sample_id
            steps = timeline.on(f"generation 0, branch {branch.branch}: {sample}/steps")
            recorded = [round(step.wall_ms * 1e6) for step in reader.steps(0, branch.branch)]
            assert [one.duration for one in steps][:1] == recorded[:1]


@pytest.mark.skipif(trace_processor() is None, reason="trace_processor_shell is not installed")
def test_the_trace_processor_reads_the_timeline_without_errors(path: Path, tmp_path: Path) -> None:
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    file = export(Path(shutil.copy(path, tmp_path)), "perfetto")
    config = TraceProcessorConfig(bin_path=trace_processor())
    with TraceProcessor(trace=str(file), config=config) as processor:
        sql = "SELECT count(*) AS n, min(dur) AS least FROM slice WHERE dur > 0"
        (row,) = processor.query(sql)
        assert (row.n, row.least) == (len(Timeline(file).slices), 12_500_000)
        errors = "SELECT name FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"
        assert [row.name for row in processor.query(errors)] == []

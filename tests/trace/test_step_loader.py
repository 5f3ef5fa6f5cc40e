"""One loader for whole steps: replay, `TraceReader.record` and the reader's other methods agree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.earlier_traces import NAMES, unpack
from support.trace_samples import end, generation, mask, same, segments, small_step, step

from flexinspect.records.step import TRAIN, EventRecord, StepRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import (
    ALL_STREAMS,
    STEPS_PER_READ,
    TraceReader,
    load_steps,
    open_trace,
)
from flexinspect.trace.replay import replay_steps

READ_BY_LOADER = {*StepRecord.__struct_fields__} - {"findings", "repeats"}


def branches_of(reader: TraceReader) -> Iterator[tuple[int, int]]:
    for row in reader.generations():
        for branch in reader.branches(row.generation):
            yield row.generation, branch.branch


def read_by_methods(reader: TraceReader, generation: int, number: int, branch: int) -> StepRecord:
    """Read a step without the loader, with one method of the reader for each field."""
    row = reader.step(generation, number, branch)
    assert row is not None
    key = (generation, number, branch)
    masks = [reader.mask(name) for name in reader.fingerprints(*key)]
    events = [row.event for row in reader.events(generation=generation) if row.branch == branch]
    values: dict[str, Any] = {
        "logits": reader.logits(*key),
        "tokens": tuple(reader.step_tokens(*key)),
        "inputs": reader.inputs(*key),
        "calls": tuple(reader.calls(*key)),
        "builds": tuple(reader.builds(*key)),
        "layer_stats": tuple(reader.layer_stats(*key)),
        "memory": reader.memory(*key),
        "gpus": tuple(reader.gpus(*key)),
        "lens": tuple(reader.lens(*key)),
        "masks": tuple(masks),
        "arrays": tuple(reader.array_records(*key)),
        "training": reader.training_step(*key) if row.phase == TRAIN else None,
        "events": tuple(event for event in events if event.step == number),
    }
    scalars = READ_BY_LOADER - values.keys()
    return StepRecord(**values, **{name: getattr(row, name) for name in scalars})


def assert_replay_equals_reader(path: Path, streams: tuple[str, ...]) -> None:
    with open_trace(path) as reader:
        for number, branch in branches_of(reader):
            steps = list(replay_steps(reader, number, branch, streams))
            assert [s.step for s in steps] == [s.step for s in reader.steps(number, branch)]
            for replayed in steps:
                key = (number, replayed.step, branch)
                expected = read_by_methods(reader, *key)
                record = reader.record(*key)
                assert record is not None
                assert same(record.findings, tuple(reader.findings(*key)))
                assert same(replace(record, findings=()), expected)
                wanted = [a for a in expected.arrays if "*" in streams or a.stream in streams]
                assert same(replayed, replace(expected, arrays=tuple(wanted)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("streams", [(), ("attention.mass", "q"), ALL_STREAMS])
def test_replay_of_an_earlier_trace_equals_the_reader(
    name: str, streams: tuple[str, ...], tmp_path: Path
) -> None:
    assert_replay_equals_reader(unpack(name, tmp_path), streams)


def full_mask(name: str, with_tables: bool) -> Any:
    tables = {
        "mask_mod_blocks": np.array([[[0, 1], [2, 1]]], np.uint8),
        "uniform_rows": np.array([[True, False, True]]),
    }
    return replace(mask(name), **(tables if with_tables else {}))


EVENT = EventRecord("hook", "written by itself", 1001.0, 0, 1)
STEP = st.fixed_dictionaries(
    {
        "gap": st.integers(0, 2),
        "small": st.booleans(),
        "logits": st.booleans(),
        "tables": st.booleans(),
        "event": st.booleans(),
    }
)


def generated_steps(drawn: list[dict[str, Any]], branch: int, first: int) -> Iterator[StepRecord]:
    number = first
    for values in drawn:
        number += values["gap"]
        made = small_step(number) if values["small"] else step(number)
        name = f"b{branch}s{number}"
        masks = () if values["small"] else (full_mask(name, values["tables"]), mask(name + "x", 2))
        made = replace(made, branch=branch, masks=masks)
        yield made if values["logits"] else replace(made, logits=None, tokens=())
        number += 1


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    base=st.lists(STEP, min_size=1, max_size=4),
    fork=st.lists(STEP, max_size=3),
    streams=st.sampled_from([(), ("q", "scalar"), ALL_STREAMS]),
)
def test_replay_of_a_generated_trace_equals_the_reader(
    base: list[dict[str, Any]], fork: list[dict[str, Any]], streams: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "generated.flextrace"
    with TraceWriter.create(path, {}, overwrite=True) as writer:
        writer.begin_generation(generation())
        for values, made in zip(base, generated_steps(base, 0, 0), strict=True):
            writer.write_step(made)
            if values["event"]:
                writer.write_event(EVENT)
        writer.end_generation(end())
        writer.begin_branch(0, 1, 0, 1, segments=segments())
        for made in generated_steps(fork, 1, 1):
            writer.write_step(made)
    assert_replay_equals_reader(path, streams)


def test_replay_keeps_the_block_tables_of_a_compiled_call(tmp_path: Path) -> None:
    with open_trace(unpack("program", tmp_path)) as reader:
        masks = [
            each
            for number, branch in branches_of(reader)
            for made in replay_steps(reader, number, branch)
            for each in made.masks
        ]
    assert sum(each.mask_mod_blocks is not None for each in masks) == 3
    assert sum(each.uniform_rows is not None for each in masks) == 1


def test_an_event_written_by_itself_is_not_part_of_its_step(tmp_path: Path) -> None:
    path = tmp_path / "event.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(generation())
        for number in range(2):
            writer.write_step(small_step(number))
        writer.write_event(EVENT)
    with open_trace(path) as reader:
        (loaded,) = load_steps(reader, 0, 0, 1)
        assert loaded.events == ()
        assert [row.event.text for row in reader.events(generation=0, step=1)] == [EVENT.text]


def test_steps_are_loaded_in_ranges(tmp_path: Path) -> None:
    path = tmp_path / "long.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(generation())
        for number in range(STEPS_PER_READ + 2):
            writer.write_step(small_step(number))
    with open_trace(path) as reader:
        assert [s.step for s in load_steps(reader, 0)] == [*range(STEPS_PER_READ)]
        assert [s.step for s in load_steps(reader, 0, 0, 3, 5)] == [3, 4]
        assert load_steps(reader, 0, 0, STEPS_PER_READ + 2) == []
        assert len(list(replay_steps(reader, 0, 0))) == STEPS_PER_READ + 2

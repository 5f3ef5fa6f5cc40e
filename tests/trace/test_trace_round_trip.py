"""Every record and every field is read as it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.structs import replace
from support.trace_samples import (
    INF,
    NAN,
    end,
    generation,
    mask,
    printed,
    same,
    segments,
    small_step,
    step,
    write,
)

from flexinspect.core.errors import TraceError, TraceWriteError
from flexinspect.records.finding import Finding, Repeat, Severity
from flexinspect.records.step import (
    ArrayRecord,
    CallRecord,
    Candidate,
    EventRecord,
    LayerStatRecord,
    LogitsRecord,
    MaskRecord,
    MemoryRecord,
    TokenRecord,
)
from flexinspect.trace import schema
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.queries import finding_groups
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect.trace.trace_dump import DumpSelection, dump_text

SLOW_OK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def reader(tmp_path: Path) -> TraceReader:
    return open_trace(write(tmp_path / "a.flextrace", n_generations=2, n_steps=3))


def written(path: Path, *records: Any) -> TraceReader:
    with TraceWriter.create(path, {}, overwrite=True) as writer:
        for record in records:
            writer.write_step(record)
    return open_trace(path)


def test_a_step_comes_back_whole(reader: TraceReader) -> None:
    for number in range(3):
        assert same(reader.record(1, number), step(number, 1))


def test_a_step_with_nothing_captured_comes_back_empty(tmp_path: Path) -> None:
    nothing: dict[str, Any] = dict.fromkeys(("tokens", "calls", "builds", "layer_stats"), ())
    bare = replace(small_step(0), logits=None, memory=None, **nothing)
    reader = written(tmp_path / "a.flextrace", bare)
    assert same(reader.record(0, 0), bare)
    row = reader.step(0, 0)
    assert row is not None
    assert (row.entropy, row.margin, row.chosen_id, row.first_pos) == (None, None, None, None)


def test_a_generation_comes_back_with_how_it_ended(reader: TraceReader) -> None:
    for number, row in enumerate(reader.generations()):
        started, ended = generation(number), end(number, 3)
        names = ("generation", "sample_id", "mask", "positions", "expected", "declared", "model")
        assert same([getattr(row, n) for n in names], [getattr(started, n) for n in names])
        assert row.started_at == started.started_at
        assert (row.state, row.answer) == (ended.state, ended.answer)
        assert (row.stop_reason, row.ended_at) == (ended.stop_reason, ended.ended_at)
        assert reader.generation(number) == row or row.declared["ratio"] != row.declared["ratio"]


def test_prompt_tokens_come_before_generated_ones(reader: TraceReader) -> None:
    prompt = list(generation().tokens)
    generated = [token for number in range(3) for token in step(number).tokens]
    assert reader.tokens(0) == prompt + generated
    assert reader.tokens(0, start=2, stop=5) == [*prompt[2:], generated[0]]
    assert reader.step_tokens(0, 1) == [generated[1]]


def test_segments_are_as_they_ended(reader: TraceReader) -> None:
    assert tuple(reader.segments(0)) == segments(7)


def test_an_end_without_segments_keeps_those_of_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(generation())
        writer.end_generation(replace(end(), segments=()))
    assert tuple(open_trace(path).segments(0)) == segments()


def test_the_manifest_comes_back_with_later_facts(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    facts = {"seed": 2**64, "flags": {"lr": NAN}, "path": Path("x"), "n": np.int64(3)}
    with TraceWriter.create(path, facts) as writer:
        writer.update_run(tokens_per_s=12.5, seed=7)
    run = open_trace(path).run()
    assert run.pop("ended_at") > 0
    expected = {"seed": 7, "flags": {"lr": NAN}, "path": "x", "n": 3, "state": "finished"}
    assert same(run, dict(sorted({**expected, "tokens_per_s": 12.5}.items())))


def test_events_come_in_order_and_after_a_number(reader: TraceReader) -> None:
    rows = reader.events()
    assert [row.id for row in rows] == list(range(1, 8))
    assert rows[-1].event == EventRecord("done", "all is written", 1011.0, data={"n": 1})
    assert [row.id for row in reader.events(after_id=5)] == [6, 7]
    assert [row.id for row in reader.events(generation=1, step=2)] == [6]
    assert [row.id for row in reader.events(limit=2)] == [1, 2]


def test_output_is_in_order_and_after_a_number(reader: TraceReader) -> None:
    rows = reader.output()
    assert [row.id for row in rows] == [1, 2]
    assert tuple(row.output for row in rows) == printed()
    assert [row.id for row in reader.output(after_id=1)] == [2]
    assert [row.id for row in reader.output(limit=1)] == [1]


def test_a_generation_knows_its_model_among_several(tmp_path: Path) -> None:
    first, second = {"name": "tiny", "layers": 2}, {"name": "tiny (2)", "layers": 3}
    with TraceWriter.create(tmp_path / "a.flextrace", {"model": first}) as writer:
        writer.begin_generation(generation(0, model="tiny (2)"))
        writer.begin_generation(generation(1, model=""))
        writer.update_run(models=[first, second])
    reader = open_trace(tmp_path / "a.flextrace")
    assert (reader.model(0), reader.model(1), reader.model(7)) == (second, first, first)


def test_an_event_of_a_step_takes_its_place_from_it(tmp_path: Path) -> None:
    record = replace(step(4, 3), events=(EventRecord("x", "y", NAN),), branch=2, findings=())
    row = written(tmp_path / "a.flextrace", record).events()[0]
    assert (row.event.generation, row.branch, row.event.step) == (3, 2, 4)


def test_a_finding_of_a_step_takes_its_place_from_it(tmp_path: Path) -> None:
    record = replace(step(4, 3), findings=(Finding("a.b", Severity.NOTE, "c"),), branch=2)
    found = written(tmp_path / "a.flextrace", record).findings(3, 4, 2)
    assert [(f.generation, f.branch, f.step) for f in found] == [(3, 2, 4)]


def test_a_command_in_a_fix_names_the_file_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fix = "Type flexinspect declare TRACE --move 1, then read the TRACES."
    record = replace(step(4, 3), findings=(Finding("a.b", Severity.NOTE, "c", fix=fix),))
    reader = written(tmp_path / "a b.flextrace", record)
    assert reader.findings()[0].fix == fix.replace("TRACE ", "'a b.flextrace' ")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert f"declare '{tmp_path}/a b.flextrace' --move" in reader.findings()[0].fix


def test_findings_of_the_whole_generation_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    found = Finding("a.b", Severity.WARNING, "c", 1, 2, None, None, None, (1,), {"x": NAN})
    with TraceWriter.create(path, {}) as writer:
        writer.write_findings([found])
    assert same(open_trace(path).findings(), [found])
    assert open_trace(path).findings(0) == []


def test_a_branch_knows_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(generation())
        writer.begin_branch(0, 1, parent=0, fork_step=5)
        writer.write_step(replace(small_step(5), branch=1))
        writer.end_generation(replace(end(), branch=1))
    reader = open_trace(path)
    first, second = reader.branches(0)
    assert (first.parent, first.fork_step, first.state) == (None, None, "finished")
    assert (second.parent, second.fork_step, second.answer) == (0, 5, " Paris\n")
    assert (reader.n_steps(0), reader.n_steps(0, 1), reader.last_step(0, 1)) == (0, 1, 5)
    assert reader.step(0, 5) is None
    assert same(reader.record(0, 5, 1), replace(small_step(5), branch=1))


def test_a_mask_is_stored_once_per_fingerprint(tmp_path: Path) -> None:
    again = replace(step(1), masks=(mask("f0000000"), mask("other"), mask("other")))
    reader = written(tmp_path / "a.flextrace", step(0), again)
    assert reader.fingerprints() == ["f0000000", "other"]
    assert reader.fingerprints(0, 1) == ["other"]
    assert same(reader.mask("other"), mask("other"))
    summary = replace(mask("other"), cells=None, partial=None, full=None)
    assert reader.mask_summary("other") == summary
    assert reader.mask("unknown") is None


def test_averaged_rows_of_a_mask_come_back(tmp_path: Path) -> None:
    expected = replace(mask("x"), uniform_rows=np.array([[False, True, True]]))
    reader = written(tmp_path / "a.flextrace", replace(step(0), masks=(expected,)))
    assert same(reader.mask("x"), expected)


def test_what_a_mask_adds_comes_back(tmp_path: Path) -> None:
    added = {"lowest": -1e-09, "highest": -1e-09, "cells": 4, "first": [0, 2, 1]}
    expected = replace(mask("x"), kind="float", added=added)
    reader = written(tmp_path / "a.flextrace", replace(step(0), masks=(expected,)))
    assert same(reader.mask("x"), expected)
    text = "".join(dump_text(DumpSelection(reader)))
    assert f"\n    added  {json.dumps(added)}\n" in text


def test_a_mask_that_was_not_evaluated_has_no_cells(tmp_path: Path) -> None:
    bare = MaskRecord("x", "bool", 1, 1, 1, 5, 0)
    reader = written(tmp_path / "a.flextrace", replace(step(0), masks=(bare,)))
    assert reader.mask("x") == bare


@pytest.mark.parametrize("shape", [(1, 1, 13), (3, 130, 517), (1, 5000, 4000), (0, 3, 3), ()])
def test_bools_of_any_length_come_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    cells = np.random.default_rng(0).random(shape) < 0.5
    records = (ArrayRecord("b", np.asarray(cells)),)
    reader = written(tmp_path / "a.flextrace", replace(step(0), arrays=records))
    back = reader.array(0, 0, "b")
    assert same(back, np.asarray(cells))


def test_regular_masks_are_compressed_and_tiny_ones_are_not(tmp_path: Path) -> None:
    records = (
        ArrayRecord("causal", np.tri(1024, dtype=bool)),
        ArrayRecord("noise", np.random.default_rng(0).random((256, 256)) < 0.5),
        ArrayRecord("row", np.ones(300, bool)),
    )
    reader = written(tmp_path / "a.flextrace", replace(step(0, masks=()), arrays=records))
    causal, noise, row = reader.arrays(0, 0)
    assert (causal.codec, noise.codec, row.codec) == ("bits+zstd", "bits", "bits")
    assert causal.n_bytes < 1024 * 1024 / 8 / 4
    assert row.n_bytes == 38


@pytest.mark.parametrize("n_floats", [(1 << 18) - 1, 1 << 18, (1 << 18) + 1, 700_000])
def test_arrays_beyond_a_chunk_come_back(tmp_path: Path, n_floats: int) -> None:
    array = np.arange(n_floats, dtype=np.float32)
    reader = written(tmp_path / "a.flextrace", replace(step(0), arrays=(ArrayRecord("a", array),)))
    assert same(reader.array(0, 0, "a"), array)
    sizes = reader._query("SELECT length(data) FROM arrays WHERE stream = 'a'", ())
    assert max(size for (size,) in sizes) <= 1 << 20
    assert len(sizes) == -(-n_floats * 4 // (1 << 20))


def test_bfloat16_comes_back_as_float32(tmp_path: Path) -> None:
    reader = written(tmp_path / "a.flextrace", step(0))
    back = reader.array(0, 0, "k", layer=1)
    assert back is not None
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, [[[1.0, -2.0, NAN]]])


def test_arrays_are_found_by_stream_and_layer(tmp_path: Path) -> None:
    both = tuple(ArrayRecord("norms", np.full(2, layer, np.int8), layer) for layer in (3, 4))
    reader = written(tmp_path / "a.flextrace", replace(step(0), arrays=both))
    assert same(reader.array(0, 0, "norms", 4), np.full(2, 4, np.int8))
    assert reader.array(0, 0, "norms") is None
    assert reader.array(0, 0, "norms", 5) is None
    assert [(a.stream, a.layer, a.shape, a.dtype) for a in reader.arrays(0, 0)] == [
        ("norms", 3, (2,), "int8"),
        ("norms", 4, (2,), "int8"),
    ]


def test_strided_and_big_endian_arrays_are_stored_by_value(tmp_path: Path) -> None:
    array = np.arange(12, dtype=">f4").reshape(3, 4)[:, ::-2]
    reader = written(tmp_path / "a.flextrace", replace(step(0), arrays=(ArrayRecord("a", array),)))
    assert same(reader.array(0, 0, "a"), array.astype(np.float32))


@SLOW_OK
@given(hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0)))
def test_any_array_of_numbers_comes_back_and_others_are_refused(tmp_path: Path, array: Any) -> None:
    record = replace(step(0, masks=()), arrays=(ArrayRecord("a", array),))
    if array.dtype.kind in "biufc" and array.dtype.name not in ("longdouble", "clongdouble"):
        try:
            back = written(tmp_path / "a.flextrace", record).array(0, 0, "a")
        except TraceWriteError:
            assert array.dtype.itemsize > 8
        else:
            assert same(back, array.astype(array.dtype.newbyteorder("=")))
    else:
        with pytest.raises(TraceWriteError, match="only numbers and bools"):
            written(tmp_path / "a.flextrace", record)


floats = st.floats(allow_nan=True, allow_infinity=True)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
ints = st.integers(-(2**63), 2**63 - 1)
counts = st.integers(0, 2**40)
lengths = st.integers(0, schema.MAX_LENGTH)
LENGTHS = {
    name for table in schema.TABLES for name, kind in table.kinds.items() if "length" in kind
}
KINDS = {"int": counts, "float": floats, "str": texts, "bool": st.booleans()}


def any_of(kind: type[Any], **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Records of a kind with any values that its annotations allow."""
    values = {}
    for name in kind.__struct_fields__:
        kinds = kind.__annotations__[name].split(" | ")
        if name in fixed or kinds[0] not in KINDS:
            continue
        strategy = lengths if name in LENGTHS else KINDS[kinds[0]]
        values[name] = st.none() | strategy if "None" in kinds else strategy
    return st.builds(kind, **(values | fixed))


def many(strategy: st.SearchStrategy[Any], **options: Any) -> st.SearchStrategy[Any]:
    return st.lists(strategy, max_size=4, **options).map(tuple)


distributions = any_of(
    LogitsRecord,
    histogram=many(counts),
    candidates=many(any_of(Candidate), unique_by=lambda c: c.rank).map(
        lambda cs: tuple(sorted(cs, key=lambda c: c.rank))
    ),
)


@SLOW_OK
@given(
    st.none() | distributions,
    many(any_of(CallRecord)),
    many(any_of(LayerStatRecord)),
    st.none() | any_of(MemoryRecord),
    many(any_of(TokenRecord, step=st.just(7), pos=lengths), unique_by=lambda t: t.pos),
)
def test_any_value_of_any_field_comes_back(
    tmp_path: Path, logits: Any, calls: Any, stats: Any, memory: Any, tokens: Any
) -> None:
    tokens = tuple(sorted(tokens, key=lambda token: token.pos))
    kept = {"logits": logits, "calls": calls, "layer_stats": stats}
    record = replace(small_step(7), **kept, memory=memory, tokens=tokens)
    assert same(written(tmp_path / "a.flextrace", record).record(0, 7), record)


json_values = st.recursive(
    st.none() | st.booleans() | ints | floats | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@SLOW_OK
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_any_json_comes_back_with_nan_and_lone_surrogates(tmp_path: Path, data: Any) -> None:
    event = EventRecord("kind", "text", 1.0, data=data)
    reader = written(tmp_path / "a.flextrace", replace(small_step(0), events=(event,)))
    assert same(reader.events()[0].event.data, data)


def test_values_without_a_json_type_are_converted(tmp_path: Path) -> None:
    odd = {"a": np.arange(2), "b": {1}, 3: (1, np.float32(0.5)), "p": Path("x"), (1, 2): INF}
    event = EventRecord("kind", "text", 1.0, data=odd)
    reader = written(tmp_path / "a.flextrace", replace(small_step(0), events=(event,)))
    back = {"a": [0, 1], "b": [1], "3": [1, 0.5], "p": "x", "(1, 2)": INF}
    assert reader.events()[0].event.data == back


def test_numpy_scalars_and_lone_surrogates_can_be_stored_in_columns(tmp_path: Path) -> None:
    token = TokenRecord(np.int64(4), np.int32(5), "\ud83d", "ok", 4, 3, np.bool_(True), 0)
    call = replace(small_step(0).calls[0], lse_error=np.float32(0.25))
    record = replace(small_step(0), tokens=(token,), wall_ms=np.float32(0.5), calls=(call,))
    reader = written(tmp_path / "a.flextrace", record)
    assert reader.calls(0, 0) == [replace(call, lse_error=0.25)]
    assert reader.step_tokens(0, 0) == [TokenRecord(4, 5, "\\ud83d", "ok", 4, 3, True, 0)]


def test_a_layer_may_call_attention_twice_in_a_step(tmp_path: Path) -> None:
    twice = (step(0).calls[0],) * 2
    assert written(tmp_path / "a.flextrace", replace(step(0), calls=twice)).calls(0, 0) == [*twice]


def test_a_step_with_a_thousand_rows_is_one_transaction(tmp_path: Path) -> None:
    stats = tuple(replace(step(0).layer_stats[0], layer=layer) for layer in range(1000))
    reader = written(tmp_path / "a.flextrace", replace(step(0), layer_stats=stats))
    assert reader.layer_stats(0, 0) == [*stats]


def test_a_step_written_twice_is_refused_and_recording_continues(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.write_step(step(0))
        with pytest.raises(TraceWriteError, match="refuses step 0 of generation 0"):
            writer.write_step(replace(step(0), masks=(mask("new"),)))
        assert not writer.failed
        writer.write_step(replace(step(1), masks=(mask("new"),)))
    assert open_trace(path).mask("new") is not None
    assert open_trace(path).n_steps(0) == 2


def test_the_columns_of_a_table_are_the_fields_of_its_record() -> None:
    def names(kind: type[Any]) -> list[str]:
        return [*kind.__struct_fields__]

    for table, skip, kind in (
        (schema.TOKENS, 2, TokenRecord),
        (schema.CANDIDATES, 3, Candidate),
        (schema.CALLS, 4, CallRecord),
        (schema.LAYER_STATS, 4, LayerStatRecord),
        (schema.MEMORY, 3, MemoryRecord),
    ):
        assert list(table.names[skip:]) == names(kind)
    assert list(schema.MASKS.names[3:]) == names(MaskRecord)[:-5]
    assert list(schema.STEPS.names[12:]) == names(LogitsRecord)[:-1]


def test_a_generation_that_does_not_exist_is_an_error_and_a_step_is_none(
    reader: TraceReader,
) -> None:
    with pytest.raises(TraceError, match="has no generation 9"):
        reader.generation(9)
    assert reader.record(9, 0) is None
    assert (reader.n_steps(9), reader.tokens(9), reader.calls(9, 9)) == (0, [], [])


def test_a_series_of_findings_is_one_row_that_counts(tmp_path: Path) -> None:
    found = Finding("a.b", Severity.WARNING, "c", series="layer 1", layers=(1, 3), query="SELECT 1")
    first = replace(step(0), findings=(found,), repeats=())
    again = [replace(step(n), findings=(), repeats=(Repeat("a.b", "layer 1"),)) for n in (1, 2)]
    other = replace(step(3), findings=(), repeats=(Repeat("a.b", ""),))
    with TraceWriter.create(tmp_path / "a.flextrace", {}) as writer:
        writer.begin_generation(generation(0))
        writer.write_steps([first, *again, other])
    with open_trace(tmp_path / "a.flextrace") as reader:
        (row,) = reader.findings()
        assert row == replace(found, step=0, last_step=2, times=3)
        (group,) = finding_groups(reader)
        assert (group.count, group.times) == (1, 3)
        assert group.steps is not None
        assert (group.steps.describe("step"), group.layers) == ("steps 0-2", None)

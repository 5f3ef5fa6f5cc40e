"""The path panel: the kernel of each layer, layers that fell back, and the masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flexinspect.core.text import format_ranges
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Missing, Navigate, NoOptions, Request, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.panels.path_panel import (
    PathData,
    PathPanel,
    describe_step,
    describe_warnings,
    path_map,
    short_mask_mod,
)
from flexinspect.panels.timeline import step_window
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    BuildRecord,
    CallRecord,
    EventRecord,
    GenerationRecord,
    MaskRecord,
    StepRecord,
)
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.queries import StepPath, lineage, step_paths
from flexinspect.trace.reader import open_trace

PANEL = PathPanel()
PLAIN = Theme("none")
SEGMENTS = (Segment(0, 900, "generated", SegmentKind.GENERATED, 0),)


def call(layer: int, path: str = "flex compiled", **changes: Any) -> CallRecord:
    backend = "flexinspect" if path.startswith("flex") else path
    made = CallRecord(layer, path, backend, "m0", 1, 8, 2, 1, 9, 64, "float32", 0.1)
    return replace(made, **changes)


def mask(name: str, mask_mod: str | None = "user.masks.isolate.<locals>.mask_mod") -> MaskRecord:
    return MaskRecord(name, "block", 1, 1, 1, 9, 8, 0, 128, 128, mask_mod)


def step(number: int, calls: list[CallRecord], **changes: Any) -> StepRecord:
    phase = "decode" if number else "prefill"
    made = StepRecord(0, number, phase, 1, 8, 9, 100.0 + number, 500.0, 0.1, calls=tuple(calls))
    return replace(made, **changes)


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Source]:
    def make(
        steps: list[StepRecord],
        declared: dict[str, Any] | None = None,
        standalone: tuple[EventRecord, ...] = (),
    ) -> Source:
        path = tmp_path / "run.flextrace"
        with TraceWriter.create(path, {}) as writer:
            writer.begin_generation(
                GenerationRecord(0, "s", "isolation", "", SEGMENTS, (), declared=declared or {})
            )
            for record in steps:
                writer.write_step(record)
            for event in standalone:
                writer.write_event(event)
        return Source(open_trace(path))

    return make


def load(source: Source, width: int = 100, height: int = 30, **place: int) -> PathData:
    return PANEL.load(source, request(width, height, **place))


def request(width: int = 100, height: int = 30, **place: int) -> Request[NoOptions]:
    return Request(TracePlace(**place), NoOptions(), width, height)


def drawn(data: PathData, width: int = 100, height: int = 30, look: Theme = PLAIN) -> list[str]:
    picture = PANEL.paint(data, Request(data.place, NoOptions(), width, height), look)
    assert len(picture.strips) <= height
    for strip in picture.strips:
        assert strip.cell_length == width == sum(part.cell_length for part in strip)
    return [strip.text.rstrip() for strip in picture.strips]


def fallback(n_steps: int = 6) -> list[StepRecord]:
    """Layer 2 of four runs sdpa without a mask from step 3 on."""
    return [
        step(
            n,
            [call(i) if i != 2 or n < 3 else call(2, "sdpa", mask=None) for i in range(4)],
            masks=(mask("m0"),) if n == 0 else (),
        )
        for n in range(n_steps)
    ]


def test_every_layer_and_step_has_the_letter_of_its_path(source: Callable[..., Source]) -> None:
    steps = [step(0, [call(0, "flex uncompiled"), call(1, "flex uncompiled")])]
    steps += [step(1, [call(0, "sdpa"), call(1, "eager")]), step(2, [call(0, "other")])]
    lines = drawn(load(source(steps), step=1))
    assert lines[1].split() == ["▸0", "F", "S", "?"]
    assert lines[2].split() == ["1", "F", "E", "·"]
    assert "F flex uncompiled" in lines[3]
    assert "E eager" in lines[3]


def test_a_layer_that_fell_back_alarms_and_is_named_first(source: Callable[..., Source]) -> None:
    data = load(source(fallback()), step=4, layer=1)
    sentence = "Layer 2 ran sdpa at step 4; most layers ran flex compiled."
    assert PANEL.describe(data)[0] == sentence
    picture = PANEL.paint(data, request(step=4), PLAIN)
    assert picture.alarm
    assert picture.note == sentence


def test_a_fallback_at_other_steps_is_named_too(source: Callable[..., Source]) -> None:
    lines = PANEL.describe(load(source(fallback()), step=1))
    assert lines[0] == "Layer 2 differed from the other layers at steps 3-5."


def test_nothing_alarms_where_all_layers_ran_alike(source: Callable[..., Source]) -> None:
    data = load(source(fallback(3)), step=1)
    picture = PANEL.paint(data, request(step=1), PLAIN)
    assert (picture.alarm, picture.note) == (False, "steps 0-2")


def test_a_declared_mask_without_flexattention_alarms(source: Callable[..., Source]) -> None:
    steps = [step(0, [call(0, "sdpa"), call(1, "sdpa")])]
    lines = PANEL.describe(load(source(steps, {"preset": "isolation"})))
    assert lines[0] == (
        "Step 0 ran sdpa, not FlexAttention, although the mask isolation was declared."
    )


def test_sdpa_raises_no_alarm_without_a_declared_mask(source: Callable[..., Source]) -> None:
    data = load(source([step(0, [call(0, "sdpa")])]))
    assert not PANEL.paint(data, request(), PLAIN).alarm


def test_the_unusual_one_of_several_calls_of_a_layer_is_shown() -> None:
    found = [
        StepPath(0, "flex compiled", "m", (0, 1, 2)),
        StepPath(0, "sdpa", None, (1,)),
    ]
    letters, usual = path_map(found)
    assert usual == {0: "C"}
    assert letters == {(0, 0): "C", (0, 1): "S", (0, 2): "C"}


def test_an_unknown_path_counts_as_other() -> None:
    assert path_map([StepPath(0, "triton", None, (0,))])[0] == {(0, 0): "?"}


@pytest.mark.parametrize(
    ("step_number", "columns", "expected"),
    [
        (50, 10, (45, 55)),
        (0, 10, (0, 10)),
        (99, 10, (90, 100)),
        (5, 1000, (0, 100)),
        (5, 0, (5, 6)),
    ],
)
def test_the_window_lies_around_the_step_and_stays_inside(
    step_number: int, columns: int, expected: tuple[int, int]
) -> None:
    window = step_window(step_number, 0, 99, columns)
    assert (window.start, window.stop) == expected


def test_masks_are_given_by_groups_of_layers(source: Callable[..., Source]) -> None:
    lines = PANEL.describe(load(source(fallback()), step=4))
    assert (
        "Layers 0-1, 3: flex compiled, mask m0, 1 x 9 cells, block 128x128, mask_mod masks.isolate."
        in lines
    )
    assert "Layer 2: sdpa, no mask." in lines


def test_masks_that_are_new_at_a_step_are_counted(source: Callable[..., Source]) -> None:
    kept = source(fallback())
    assert "Masks first seen at this step: 1." in PANEL.describe(load(kept, step=0))
    assert "Masks first seen at this step: 0." in PANEL.describe(load(kept, step=1))


@pytest.mark.parametrize(
    ("mask_mod", "sentence"),
    [
        (
            "user.masks.isolate.<locals>.mask_mod",
            "Layers 0-1 received another mask than at step 0, of the same mask_mod.",
        ),
        (
            "user.masks.causal",
            (
                "Layers 0-1 received another mask than at step 0, of another mask_mod: "
                "masks.isolate → masks.causal."
            ),
        ),
        (
            None,
            "Layers 0-1 received another mask than at step 0; the mask_mods are unknown.",
        ),
    ],
)
def test_a_change_of_the_mask_says_whether_the_mask_mod_changed(
    source: Callable[..., Source], mask_mod: str | None, sentence: str
) -> None:
    steps = [step(0, [call(0), call(1)], masks=(mask("m0"),))]
    steps.append(step(1, [call(0, mask="m1"), call(1, mask="m1")], masks=(mask("m1", mask_mod),)))
    assert sentence in PANEL.describe(load(source(steps), step=1))


def test_an_unchanged_mask_is_reported_as_the_same(source: Callable[..., Source]) -> None:
    lines = PANEL.describe(load(source(fallback()), step=1))
    assert "Every layer received the same mask as at step 0." in lines


def test_recompiles_are_not_claimed_where_nothing_records_them(
    source: Callable[..., Source],
) -> None:
    assert "Recompiles: not recorded." in PANEL.describe(load(source(fallback())))


def test_compiles_during_a_step_come_from_both_kinds_of_events(
    source: Callable[..., Source],
) -> None:
    steps = fallback()
    steps[1] = replace(steps[1], events=(EventRecord("recompile", "graph 2", 101.2, 0, 1),))
    standalone = (
        EventRecord("phase", "compiling FlexAttention (decode)", 101.1),
        EventRecord("phase", "compiling FlexAttention (prefill)", 99.9),
    )
    kept = source(steps, standalone=standalone)
    lines = PANEL.describe(load(kept, step=1))
    assert "During this step: recompile: graph 2; phase: compiling FlexAttention (decode)." in lines
    assert "Recompiles: not recorded." not in lines
    assert "Recompiles: not recorded." in PANEL.describe(load(kept, step=2))


def test_a_first_compilation_is_not_taken_for_a_recompile(source: Callable[..., Source]) -> None:
    standalone = (EventRecord("phase", "compiling FlexAttention (decode)", 101.1),)
    lines = PANEL.describe(load(source(fallback(), standalone=standalone), step=1))
    assert "During this step: phase: compiling FlexAttention (decode)." in lines
    assert "Recompiles: not recorded." in lines


def test_the_largest_lse_error_of_the_step_is_named_with_its_layer(
    source: Callable[..., Source],
) -> None:
    calls = [call(0, lse_error=2e-6, check_kind="lse"), call(1, lse_error=0.5, check_kind="lse")]
    data = load(source([step(0, calls)]))
    assert "LSE check: off by at most 5.0e-01, in layer 1 (lse)." in PANEL.describe(data)
    assert drawn(data)[2].endswith("5e-01")


def test_an_lse_error_of_nan_is_named_with_its_layer(source: Callable[..., Source]) -> None:
    calls = [call(0, lse_error=1e-6), call(1, lse_error=float("nan")), call(1, lse_error=1e-6)]
    data = load(source([step(0, calls)]))
    assert data.lse_errors[0] == 1e-6
    assert "LSE check: NaN in layer 1." in PANEL.describe(data)


def test_missing_lse_checks_name_the_level_that_records_them(source: Callable[..., Source]) -> None:
    lines = PANEL.describe(load(source(fallback())))
    assert any(text.startswith("LSE check: not computed; level advanced") for text in lines)


def test_a_narrow_panel_merges_layers_that_ran_alike(source: Callable[..., Source]) -> None:
    steps = [step(n, [call(i, "sdpa" if i == 9 else "flex compiled") for i in range(28)])
             for n in range(40)]  # fmt: skip
    data = load(source(steps), 38, 14, step=20, layer=12)
    lines = drawn(data, 38, 14)
    assert [text.split()[0] for text in lines[1:4]] == ["0-8", "9", "▸10-27"]
    assert set(lines[2].split()[1]) == {"S"}
    assert "▾20" in lines[0]


def test_a_click_on_a_cell_goes_to_its_step_and_layer(source: Callable[..., Source]) -> None:
    data, made_request = load(source(fallback()), step=4), request(step=4)
    column = drawn(data)[3].index("S")
    assert PANEL.on_mouse(column, 3, data, made_request, click=True) == Navigate(step=3, layer=2)
    assert PANEL.on_mouse(column, 3, data, made_request, click=False) is None
    assert PANEL.on_mouse(0, 3, data, made_request, click=True) is None
    assert PANEL.on_mouse(90, 3, data, made_request, click=True) is None
    assert PANEL.on_mouse(column, 29, data, made_request, click=True) is None


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (9, 4), (38, 14), (120, 40)])
@pytest.mark.parametrize("look", [PLAIN, Theme()])
def test_it_draws_at_any_size(
    source: Callable[..., Source], size: tuple[int, int], look: Theme
) -> None:
    data = load(source(fallback()), *size, step=4)
    assert drawn(data, *size, look)


def test_a_fallback_is_reversed_without_colours_and_red_with_them(
    source: Callable[..., Source],
) -> None:
    data = load(source(fallback()), step=1)
    for look in (PLAIN, Theme()):
        strip = PANEL.paint(data, request(step=1), look).strips[3]
        odd = next(part for part in strip if "S" in part.text)
        assert odd.style is not None
        assert odd.style.reverse
        assert (odd.style.color is None) == look.no_color


def test_a_trace_without_calls_says_so(source: Callable[..., Source]) -> None:
    with pytest.raises(Missing, match=r"No attention call is recorded in steps 0-1\."):
        load(source([step(0, []), step(1, [])]))


def test_a_step_without_calls_says_so_next_to_the_map(source: Callable[..., Source]) -> None:
    data = load(source([*fallback(2), step(2, [])]), step=2)
    assert "No attention call is recorded at step 2." in PANEL.describe(data)


def test_a_generation_without_steps_is_missing(source: Callable[..., Source]) -> None:
    with pytest.raises(Missing, match="No step"):
        load(source([]))


def test_text_from_the_trace_cannot_move_the_cursor(source: Callable[..., Source]) -> None:
    calls = [call(0, "other", backend="\x1b[2J", mask="\x1bmask")]
    data = load(source([step(0, calls, masks=(mask("\x1bmask", "a.\x1b[1m"),))]))
    assert all(text.isprintable() for text in [*PANEL.describe(data), *drawn(data)])


def test_the_map_is_one_query_however_long_the_trace(
    source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = source(fallback(60))
    queries: list[str] = []
    query = kept.reader._query
    monkeypatch.setattr(
        kept.reader, "_query", lambda sql, params: (queries.append(sql), query(sql, params))[1]
    )
    load(kept, 30, step=30)
    assert sum("GROUP BY step" in sql for sql in queries) == 1
    assert len(queries) < 12


def test_a_fork_takes_the_steps_before_it_from_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "fork.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "", "", SEGMENTS, ()))
        for n in range(3):
            writer.write_step(step(n, [call(0)]))
        writer.begin_branch(0, 1, parent=0, fork_step=2)
        writer.write_step(step(2, [call(0, "sdpa")], branch=1))
    reader = open_trace(path)
    assert lineage(reader, 0, 1) == ((1, 2, None), (0, 0, 2))
    found = step_paths(reader, 0, 0, 3, branch=1)
    assert [(one.step, one.path) for one in found] == [
        (0, "flex compiled"),
        (1, "flex compiled"),
        (2, "sdpa"),
    ]


def test_numbers_are_written_as_spans() -> None:
    assert format_ranges([7, 0, 1, 2, 2]) == "0-2, 7"
    assert format_ranges([]) == ""


def test_a_mask_mod_is_shortened_to_module_and_function() -> None:
    assert short_mask_mod("user.masks.isolate.<locals>.mask_mod") == "masks.isolate"
    assert short_mask_mod("rule") == "rule"


def test_suppressed_exceptions_replaced_masks_and_builds_are_described(
    source: Callable[..., Source],
) -> None:
    calls = [
        call(0, path="flex uncompiled"),
        call(
            1, path="sdpa", suppressed_exception="RuntimeError: \x1bno", mask_passed_to_layer="none"
        ),
    ]
    build = BuildRecord(1, None, None, 9, 9, "own.rule", 1.5, 3 << 20)
    data = load(source([step(0, calls, builds=(build, build))]))
    assert describe_warnings(data)[0] == (
        "Layer 1 ran sdpa because the program suppressed an exception: RuntimeError: \\x1bno"
    )
    lines = describe_step(data)
    assert "Layer 1 received no mask, but the kernel calls there had one." in lines
    built = "2 block masks were built for this step (9 x 9) in 3.0 ms"
    assert f"{built}; peak memory grew by 6 MiB." in lines

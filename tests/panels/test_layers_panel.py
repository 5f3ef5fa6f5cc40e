"""The layers panel: the strips, their colours, and where NaN and Inf began."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from flexinspect.drawing.heatmap import CIVIDIS
from flexinspect.drawing.theme import Theme
from flexinspect.panels import layers_panel
from flexinspect.panels.base import Missing, Navigate, Request, TracePlace
from flexinspect.panels.layers_panel import (
    LayersData,
    LayersOptions,
    LayersPanel,
    layer_levels,
    layer_rows,
    module_kind,
)
from flexinspect.panels.panel_source import Source
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import GenerationRecord, LayerStatRecord, StepRecord
from flexinspect.records.training_step import AnomalyOrigin, TrainingStepRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.queries import (
    first_nonfinite_output,
    layer_stats_range,
    step_bounds,
)
from flexinspect.trace.reader import open_trace

PANEL = LayersPanel()
PLAIN = Theme("none")
SEGMENTS = (Segment(0, 9000, "generated", SegmentKind.GENERATED, 0),)
SIZES = [(120, 40), (90, 12), (38, 14), (38, 4), (20, 3), (5, 30), (2, 2), (1, 1)]
NAN, INF = math.nan, math.inf
Make = Callable[..., Source]


def stat(layer: int, norm: float = 10.0, module: str = "", **changes: Any) -> LayerStatRecord:
    name = f"model.layers.{layer}{'.' if module else ''}{module}"
    made = LayerStatRecord(layer, name, 0, 0, -2.0, 1.5, 0.25, 1.0, norm)
    return replace(made, **changes)


def step(number: int, stats: list[LayerStatRecord], **changes: Any) -> StepRecord:
    made = StepRecord(0, number, "decode", 1, 3, 4, 100.0, 5.0, 0.1, layer_stats=tuple(stats))
    return replace(made, **changes)


@pytest.fixture
def source(tmp_path: Path) -> Make:
    def make(steps: list[StepRecord], fork: int | None = None, **run: Any) -> Source:
        path = tmp_path / "run.flextrace"
        with TraceWriter.create(path, run) as writer:
            writer.begin_generation(GenerationRecord(0, "s", "m", "", SEGMENTS, ()))
            if fork is not None:
                writer.begin_branch(0, 1, parent=0, fork_step=fork)
            for record in steps:
                writer.write_step(record)
        return Source(open_trace(path))

    return make


def request(width: int = 100, height: int = 30, measure: Any = "norm", **place: int) -> Any:
    return Request(TracePlace(**place), LayersOptions(measure), width, height)


def load(source: Source, width: int = 100, height: int = 30, **given: Any) -> LayersData:
    return PANEL.load(source, request(width, height, **given))


def drawn(data: LayersData, width: int = 100, height: int = 30, look: Theme = PLAIN) -> list[str]:
    picture = PANEL.paint(data, replace(request(width, height), place=data.place), look)
    assert len(picture.strips) <= height
    for strip in picture.strips:
        assert strip.cell_length == width == sum(part.cell_length for part in strip)
    return [strip.text.rstrip() for strip in picture.strips]


def clean(n_steps: int = 4, n_layers: int = 3) -> list[StepRecord]:
    return [step(n, [stat(i, 10.0 * (i + 1)) for i in range(n_layers)]) for n in range(n_steps)]


def nonfinite(n_steps: int = 6) -> list[StepRecord]:
    """From step 3 on layer 1 is bad, and hands it on to layer 2; layer 0 is bad one step later."""
    bad = {"n_nan": 5, "n_inf": 1, "norm": NAN, "mean": NAN, "std": NAN}
    steps = clean(n_steps)
    for n in range(3, n_steps):
        worse = [stat(i, **bad) if i or n > 3 else stat(i) for i in range(3)]
        steps[n] = step(n, worse)
    return steps


def test_layers_go_down_steps_across_and_the_place_is_marked(source: Make) -> None:
    lines = drawn(load(source(clean()), step=1, layer=2))
    assert lines[0] == " layer      ▾step 1"
    assert lines[1].split() == ["0", "10"]
    assert lines[2].split() == ["1", "▒" * 16, "20"]
    assert lines[3].split() == ["▸", "2", "████[██]████████", "30"]
    assert lines[4].startswith("norm per row 10 ")
    assert lines[5] == "Layer 2: norm 30, -2 to 1.5, mean 0.25, std 1."


def test_a_wide_picture_has_the_table_of_the_step(source: Make) -> None:
    data = load(source(clean()), step=1)
    table = next(line for line in drawn(data) if line.startswith("layer "))
    assert table.split()[:4] == ["layer", "norm", "norm/row", "min"]
    assert not any(line.startswith("layer ") for line in drawn(data, 80, 30))


def test_the_norm_of_a_prefill_is_taken_per_row(source: Make) -> None:
    steps = [step(0, [stat(0, 40.0)], q_len=16), step(1, [stat(0, 10.0)])]
    data = load(source(steps))
    assert data.values.tolist() == [[10.0, 10.0]]
    assert "Step 0 (16 rows):" in PANEL.describe(data)


def test_the_first_bad_output_is_the_lowest_layer_of_the_earliest_step(source: Make) -> None:
    data = load(source(nonfinite(), model={"hidden": 64}), step=5, layer=0)
    sentence = "First NaN/Inf at step 3, layer 1 (model.layers.1): 5 NaN and 1 Inf of 64 values; "
    assert PANEL.describe(data)[0] == sentence + "in that step also layer 2."
    picture = PANEL.paint(data, request(step=5), PLAIN)
    assert picture.alarm
    assert picture.note == "first NaN/Inf: step 3, layer 1, 5 NaN and 1 Inf of 64 values"


def test_the_first_bad_cell_has_an_x_and_the_others_an_exclamation_mark(source: Make) -> None:
    lines = drawn(load(source(nonfinite()), 38, 14, step=0, layer=0), 38, 14)
    cells = [line[7:25] for line in lines[1:4]]
    assert [row[9:] for row in cells] == ["   !!!!!!", "!X!!!!!!!", "!!!!!!!!!"]
    assert not any("!" in row[:9] for row in cells)
    assert any("! NaN/Inf" in line for line in lines)


def test_a_bad_step_counts_its_bad_values_at_the_right(source: Make) -> None:
    lines = drawn(load(source(nonfinite()), step=3, layer=1))
    assert [line.split()[-2:] for line in lines[2:4]] == [["6", "bad"], ["6", "bad"]]
    assert any("std nan, 5 NaN, 1 Inf." in line for line in lines)


def test_enter_goes_to_the_first_bad_output(source: Make) -> None:
    data = load(source(nonfinite()), step=0)
    assert PANEL.on_action("cursor.enter", data, request()) == Navigate(step=3, layer=1)


def test_enter_does_nothing_without_nan_or_inf(source: Make) -> None:
    data = load(source(clean()))
    assert PANEL.on_action("cursor.enter", data, request()) is None
    assert PANEL.describe(data)[0] == "No recorded layer output has NaN or Inf in steps 0-3."
    assert not PANEL.paint(data, request(), PLAIN).alarm


def test_the_first_bad_output_is_found_outside_the_window_and_once(
    source: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers_panel, "SCAN_STEPS", 8)
    made = source([*clean(60), step(60, [stat(2, n_inf=1), stat(1, n_nan=2)]), *nonfinite(3)[:0]])
    seen: list[int] = []

    def counted(reader: Any, generation: int, start: int, stop: int, branch: int) -> Any:
        seen.append(start)
        return first_nonfinite_output(reader, generation, start, stop, branch)

    monkeypatch.setattr(layers_panel.queries, "first_nonfinite_output", counted)
    data = load(made, 38, 14, step=10)
    assert data.window.stop <= 60
    assert data.first_bad is not None
    assert (data.first_bad.step, data.first_bad.stat.layer, data.first_bad.later) == (60, 1, (2,))
    assert seen == [0, 8, 16, 24, 32, 40, 48, 56]
    load(made, 38, 14, step=11)
    assert seen[8:] == [56], "what is finished was searched again"


def test_the_action_cycles_through_the_measures(source: Make) -> None:
    data, made_request = load(source(clean())), request()
    names = []
    for _ in range(5):
        options = PANEL.on_action("view.measure", data, made_request)
        assert isinstance(options, LayersOptions)
        names.append(options.measure)
        made_request = replace(made_request, options=options)
    assert names == ["max", "mean", "std", "bad", "norm"]


@pytest.mark.parametrize(
    ("measure", "expected"), [("max", 2.0), ("mean", 0.25), ("std", 1.0), ("bad", 0.0)]
)
def test_a_measure_is_read_from_the_trace(source: Make, measure: str, expected: float) -> None:
    data = load(source(clean(2)), measure=measure)
    assert (data.values == expected).all()


def test_counts_of_bad_values_are_a_measure(source: Make) -> None:
    data = load(source(nonfinite()), measure="bad", step=3)
    assert data.values[:, 3].tolist() == [0.0, 6.0, 6.0]
    assert "NaN/Inf in steps 0-5: 8 of 18 layer outputs have some." in PANEL.describe(data)


def test_a_range_of_great_size_is_coloured_by_its_logarithm(source: Make) -> None:
    data = load(source([step(0, [stat(0, 1.0), stat(1, 100.0), stat(2, 10_000.0)])]))
    assert data.scale() == (1.0, 10_000.0, True)
    assert layer_levels(data)[:, 0].tolist() == [0, 16, CIVIDIS.size - 1]
    assert any(" log" in line for line in drawn(data))


def test_infinite_and_missing_values_have_their_own_levels(source: Make) -> None:
    steps = [step(0, [stat(0, INF), stat(1)]), step(1, [stat(0)])]
    data = load(source(steps))
    assert layer_levels(data).tolist() == [[CIVIDIS.size, 0], [0, -1]]
    lines = drawn(data)
    assert lines[2].split()[1:] == ["····", "10"]
    assert any("· not recorded" in line for line in lines)


def test_many_layers_share_lines_and_a_bad_one_stays_visible(source: Make) -> None:
    stats = [stat(i, 10.0 + i, **({"n_nan": 1} if i == 21 else {})) for i in range(32)]
    data = load(source([step(0, stats)]), 38, 14, layer=9)
    lines = drawn(data, 38, 14)
    shared = next(line for line in lines if line.startswith("▸"))
    assert shared.split()[1] == "8-11"
    assert next(line for line in lines if "20-23" in line).split()[-2:] == ["1", "bad"]
    assert sum("-" in line[:7] for line in lines) == 8


def test_a_click_goes_to_the_step_and_layer_of_the_cell(source: Make) -> None:
    data, made_request = load(source(clean()), step=1, layer=2), request(step=1, layer=2)
    assert PANEL.on_mouse(7, 1, data, made_request, click=True) == Navigate(step=0, layer=0)
    assert PANEL.on_mouse(7 + 15, 3, data, made_request, click=True) == Navigate(step=3, layer=2)
    assert PANEL.on_mouse(7 + 16, 3, data, made_request, click=True) is None
    assert PANEL.on_mouse(7, 0, data, made_request, click=True) is None
    assert PANEL.on_mouse(7, 4, data, made_request, click=True) is None
    assert PANEL.on_mouse(3, 1, data, made_request, click=True) is None
    assert PANEL.on_mouse(7, 1, data, made_request, click=False) is None


def test_modules_within_a_layer_are_named_and_can_be_shown(source: Make) -> None:
    stats = [stat(0, 5.0, "mlp"), stat(0, 7.0), stat(1, 6.0, "mlp"), stat(1, 8.0)]
    made = source([step(0, stats)])
    data = load(made)
    assert (data.kind, data.kinds) == ("", ("mlp", ""))
    assert data.values.tolist() == [[7.0], [8.0]]
    options = PANEL.on_action("view.flip", data, request())
    assert options == LayersOptions(module="mlp")
    other = PANEL.load(made, Request(TracePlace(), LayersOptions(module="mlp")))
    assert other.values.tolist() == [[5.0], [6.0]]
    assert PANEL.describe(other)[-1] == "Modules recorded per layer: mlp, layer; shown: mlp."
    assert any("norm per row of mlp" in line for line in drawn(other))


def test_modules_without_the_layer_itself_show_the_first(source: Make) -> None:
    stats = [stat(0, 5.0, "self_attn"), stat(0, 6.0, "mlp")]
    data = load(source([step(0, stats)]))
    assert data.kind == "self_attn"
    assert PANEL.on_action("view.flip", data, request()) == LayersOptions(module="mlp")


def test_a_module_has_a_name_within_its_layer() -> None:
    assert module_kind(3, "model.layers.3") == ""
    assert module_kind(3, "model.layers.3.mlp.experts.3") == "mlp.experts.3"
    assert module_kind(3, "self_attn") == "self_attn"


def test_level_basic_is_missing_and_says_which_level_records_it(source: Make) -> None:
    made = source([step(0, []), step(1, [])])
    with pytest.raises(Missing, match="No layer statistics are recorded in steps 0-1") as caught:
        load(made)
    assert "--level advanced" in caught.value.hint


def training(number: int, *, loss: float = 1.0, **origin: str) -> StepRecord:
    made = TrainingStepRecord(loss, "reported", (0.1,))
    if origin:
        made = replace(made, anomaly_origin=AnomalyOrigin(**origin))
    return step(number, [], training=made)


@pytest.fixture
def trained(tmp_path: Path) -> Make:
    def make(steps: list[StepRecord], level: str) -> Source:
        path = tmp_path / "training.flextrace"
        with TraceWriter.create(path, {"level": level, "watch_training": True}) as writer:
            declared = {"training": {"groups": []}}
            writer.begin_generation(
                replace(GenerationRecord(0, "s", "m", "", (), ()), declared=declared)
            )
            for record in steps:
                writer.write_step(record)
        return Source(open_trace(path))

    return make


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (
            {"kind": "module", "name": "2", "module": "Linear"},
            "; in step 1 the output of 2 (Linear) is the first with NaN or Inf.",
        ),
        ({"loss": INF}, "; step 1 is the first with NaN or Inf, and its origin is not recorded."),
        ({"kind": "explosion", "name": "2.bias"}, "; no NaN or Inf was found."),
    ],
)
def test_a_training_without_statistics_names_the_first_nan_or_inf(
    trained: Make, bad: Any, says: str
) -> None:
    made = trained([training(0), training(1, **bad)], "basic")
    with pytest.raises(Missing) as caught:
        load(made)
    assert caught.value.reason == f"No layer statistics are recorded in steps 0-1{says}"
    assert caught.value.hint.startswith("Level basic of a training names only the first module")


def test_the_hint_of_a_training_names_its_own_level(trained: Make) -> None:
    with pytest.raises(Missing) as caught:
        load(trained([training(0)], "advanced"))
    assert caught.value.hint.startswith("Level advanced of a training records modules only")


def test_level_basic_shows_the_layers_that_went_bad(source: Make) -> None:
    steps = [step(n, [stat(2, n_nan=4)] if n == 50 else []) for n in range(60)]
    made = source(steps)
    data = load(made, 38, 14, step=0)
    assert data.layers == ()
    lines = drawn(data, 38, 14)
    assert lines[0].startswith("First NaN/Inf at step 50, layer 2")
    assert any("lower levels record only" in line for line in PANEL.describe(data))
    near = load(made, 38, 14, step=49)
    assert "X" in drawn(near, 38, 14)[1]


def test_a_module_of_the_trace_cannot_reach_the_terminal(source: Make) -> None:
    data = load(source([step(0, [stat(0, module="\x1b[2J", n_nan=1)])]))
    text = "\n".join([*drawn(data), *PANEL.describe(data)])
    assert "\\x1b[2J" in text
    assert "\x1b" not in text


def test_a_fork_has_the_steps_and_the_bad_outputs_of_its_parent(source: Make) -> None:
    steps = [*nonfinite(5), step(4, [stat(0, 77.0)], branch=1), step(5, [stat(0, 88.0)], branch=1)]
    made = source(steps, fork=4)
    data = load(made, step=5, branch=1)
    assert step_bounds(made.reader, 0, 1) == (0, 5)
    assert data.values[0].tolist() == [10.0, 10.0, 10.0, 10.0, 77.0, 88.0]
    assert data.first_bad is not None
    assert data.first_bad.format_place() == "step 3, layer 1"


def test_later_steps_of_the_parent_are_not_those_of_a_fork(source: Make) -> None:
    steps = [*nonfinite(5), step(2, [stat(0, 77.0)], branch=1)]
    data = load(source(steps, fork=2), step=2, branch=1)
    assert data.first_bad is None


def test_a_fork_without_steps_ends_where_it_began(source: Make) -> None:
    made = source(clean(5), fork=3)
    assert step_bounds(made.reader, 0, 1) == (0, 2)
    assert step_bounds(made.reader, 7) is None


def test_a_range_of_statistics_is_bounded_by_its_steps(source: Make) -> None:
    made = source(clean(50))
    cells = layer_stats_range(made.reader, 0, 10, 13, statistic="max")
    assert [cell.step for cell in cells] == [10, 10, 10, 11, 11, 11, 12, 12, 12]
    assert {cell.value for cell in cells} == {2.0}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("look", [PLAIN, Theme(), Theme("256")])
@pytest.mark.parametrize("measure", ["norm", "mean", "bad"])
def test_every_size_is_drawn_to_the_cell(
    source: Make, size: tuple[int, int], look: Theme, measure: str
) -> None:
    data = load(source(nonfinite(40)), *size, step=4, layer=1, measure=measure)
    assert len(drawn(data, *size, look)) >= 1


def test_a_picture_may_have_another_size_than_the_loaded_one(source: Make) -> None:
    data = load(source(clean(90)), 120, 40, step=80)
    assert len(drawn(data, 38, 14)) >= 4
    assert len(drawn(data, 3, 3)) == 3


def test_rows_share_evenly() -> None:
    data = LayersData(
        *(TracePlace(), None, "norm", "", ("",), tuple(range(10))),  # type: ignore[arg-type]
        *(np.zeros((10, 1)), np.zeros((10, 1), np.int64), (), 1, None),
    )
    assert layer_rows(data, 4) == [range(3), range(3, 6), range(6, 9), range(9, 10)]
    assert layer_rows(data, 10) == [range(i, i + 1) for i in range(10)]

"""Training runs: curves, the gradient strip, and panels that do not apply."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from support.tui import screen_text, settle

from flexinspect.drawing.heatmap import CIVIDIS_MISSING
from flexinspect.drawing.theme import Theme
from flexinspect.panels.anomaly_text import describe_producer
from flexinspect.panels.base import (
    Missing,
    Navigate,
    NoOptions,
    Request,
    TracePlace,
    check_panel_applies,
)
from flexinspect.panels.panel_registry import load_panel, panel_names
from flexinspect.panels.panel_source import Source
from flexinspect.panels.timeline import load_whole_run
from flexinspect.panels.training_panel import (
    GradientStripPanel,
    TrainingPanel,
    format_range,
    norm_levels,
)
from flexinspect.records.step import (
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    MemoryRecord,
    StepRecord,
)
from flexinspect.records.training_step import (
    MODEL_OUTPUT,
    AnomalyOrigin,
    ParameterGradient,
    TrainingStepRecord,
)
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import CurvePoint, open_trace
from flexinspect.tui import saved_state
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.panel_layout import LAYOUTS, Slot, Slots

PANEL, STRIP = TrainingPanel(), GradientStripPanel()
SIZES = [(120, 40), (84, 6), (60, 20), (38, 5), (20, 3), (5, 30), (2, 2), (1, 1)]
N_STEPS, NONFINITE = 40, 30


def training_step(number: int) -> StepRecord:
    is_nonfinite = number >= NONFINITE
    norms = (math.nan, 0.5) if is_nonfinite else (100.0 if number == 29 else 1e-7, 0.5)
    training = TrainingStepRecord(
        loss=math.nan if is_nonfinite else 4.0 - number / 10,
        loss_source="reported",
        learning_rates=(0.1 / (number + 1),),
        total_norm=norms[0],
        norm_before_clip=12.5,
        max_norm=1.0,
        n_parameters=2,
        n_nonfinite=int(is_nonfinite),
        n_exploding=int(number == 29),
        group_norms=norms,
        gradients=(ParameterGradient("body.0.w", norms[0], n_nan=int(is_nonfinite)),),
        anomaly_origin=AnomalyOrigin("module", "body.0\x1b", 2, "float32")
        if is_nonfinite
        else None,
        n_backward=1,
        scale=1024.0,
        is_skipped=is_nonfinite,
        device="cpu",
        detail="basic",
    )
    memory = MemoryRecord(10**9, 10**6, 0)
    return StepRecord(
        0, number, "train", 0, 0, 0, 1000.0 + number, 50.0, 0.5, memory=memory, training=training
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.flextrace"
    about = {"training": {"groups": ["body.0", "head"]}}
    with TraceWriter.create(path, {"watch_training": True, "level": "basic"}) as writer:
        writer.begin_generation(GenerationRecord(0, "training", "", "", (), (), declared=about))
        writer.write_steps([training_step(number) for number in range(N_STEPS)])
        writer.end_generation(GenerationEnd(0, "finished", "40 steps", ()))
    return path


@pytest.fixture
def source(run: Path) -> Source:
    return Source(open_trace(run))


def request(step: int, width: int = 100, height: int = 30) -> Request[NoOptions]:
    return Request(TracePlace(step=step), NoOptions(), width, height)


def test_a_normal_step_is_described(source: Source) -> None:
    lines = PANEL.describe(PANEL.load(source, request(4)))
    assert "loss: 3.6 (reported)" in lines
    assert "learning rate: 0.02" in lines
    assert "gradient norm: 1.0e-07, clipped from 12.5 to 1" in lines
    assert "loss scale: 1024" in lines
    assert "loss in steps 0-39: 1.1 to 4." in lines


def test_a_non_finite_step_names_its_origin_first(source: Source) -> None:
    data = PANEL.load(source, request(NONFINITE))
    first = PANEL.describe(data)[0]
    assert first.startswith("Step 30: the output of body.0")
    assert first.endswith("is the first with NaN or Inf. 2 others only propagate it.")
    assert "\x1b" not in "".join(PANEL.describe(data))
    assert PANEL.paint(data, request(NONFINITE), Theme()).alarm
    assert "loss scale: 1024, step skipped" in PANEL.describe(data)


def test_a_model_whose_own_forward_made_the_nan_is_named_by_its_class() -> None:
    origin = AnomalyOrigin("module", MODEL_OUTPUT, 0, "float32", "Net")
    made = "Net's own forward made the first NaN or Inf; the outputs of its modules were finite."
    assert describe_producer(origin) == made


def test_no_fact_is_cut_and_memory_of_a_training_names_no_cache(source: Source) -> None:
    made_request = request(4, 60, 40)
    picture = PANEL.paint(PANEL.load(source, made_request), made_request, Theme("none"))
    words = " ".join(" ".join(strip.text for strip in picture.strips).split())
    assert "gradient norm 1.0e-07, clipped from 12.5 to 1" in words
    panel = load_panel("memory")
    picture = panel.paint(panel.load(source, made_request), made_request, Theme("none"))
    text = "".join(strip.text for strip in picture.strips)
    assert "RSS" in text
    assert "KV cache" not in text


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("look", [Theme(), Theme("none")])
def test_both_panels_draw_at_any_size(source: Source, size: tuple[int, int], look: Theme) -> None:
    for panel in (PANEL, STRIP):
        made_request = request(31, *size)
        picture = panel.paint(panel.load(source, made_request), made_request, look)
        assert len(picture.strips) <= size[1]
        assert all(strip.cell_length == size[0] for strip in picture.strips)


def test_a_click_on_a_curve_goes_to_its_step(source: Source) -> None:
    made_request = request(3, 120, 30)
    data = PANEL.load(source, made_request)
    lines = [strip.text for strip in PANEL.paint(data, made_request, Theme("none")).strips]
    x, y = lines[0].rindex("loss "), 1  # the plot is below its title
    assert PANEL.on_mouse(x + 10, y, data, made_request, click=True) == Navigate(step=10)
    assert PANEL.on_mouse(x + 10, y, data, made_request, click=False) is None
    assert PANEL.on_mouse(x - 1, y, data, made_request, click=True) is None


def test_learning_rates_that_differ_by_group_are_separate_curves(source: Source) -> None:
    points = {
        at: CurvePoint(at, 1.0, 1.0, False, False, (0.1 / (at + 1), 0.01, 0.01, 0.1 / (at + 1)))
        for at in range(N_STEPS)
    }
    made_request = request(3, 80, 18)
    data = replace(PANEL.load(source, made_request), points=points)
    assert [line for line in PANEL.describe(data) if "of group" in line] == [
        "learning rate of group 0, 3 in steps 0-39: 0.0025 to 0.1.",
        "learning rate of group 1-2 in steps 0-39: 0.01.",
    ]
    drawn = [strip.text.rstrip() for strip in PANEL.paint(data, made_request, Theme("none")).strips]
    at = drawn.index("learning rate, group 0, 3: 0.0025 to 0.1 1-2: 0.01")
    falling, level, below = drawn[at + 1 : at + 4]
    assert falling[0] > falling[-1]
    assert len(set(level)) == 1
    assert below.startswith("gradient norm ")
    narrow = request(3, 40, 18)
    texts = [strip.text.rstrip() for strip in PANEL.paint(data, narrow, Theme("none")).strips]
    assert "learning rate up to 0, 3: 0.1 1-2: 0.01" in texts


def test_a_curve_of_many_steps_shows_the_highest_of_each_column(source: Source) -> None:
    curve = source.reader.training_curve(0, 0, N_STEPS, 4)
    assert [point.step for point in curve.values()] == [0, 10, 20, 30]
    assert [point.loss for point in curve.values()] == [4.0, 3.0, 2.0, None]
    assert [point.has_nonfinite_loss for point in curve.values()] == [False, False, False, True]
    assert [point.has_nonfinite_gradient for point in curve.values()] == [False, False, False, True]
    assert source.reader.group_curve(0, 0, N_STEPS, 4)[2, 0] == 100.0


def test_steps_with_nan_or_large_norms_are_read_where_there_are_too_many(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexinspect.trace.reader.MAX_STEPS_READ", 1)
    curve = source.reader.group_curve(0, 0, N_STEPS, 4)
    assert {point for point, _ in curve} == {0, 2, 3}
    assert curve[2, 0] == 100.0
    assert math.isnan(curve[3, 0])


def test_a_strip_without_room_for_all_keeps_the_highest_and_the_lowest_groups(
    source: Source,
) -> None:
    norms = [[1.0, 1.0], [9.0, 2.0], [1.0, math.nan], [0.5, 1e-9], [-1.0, -1.0], [-1.0, 1e-7]]
    data = replace(STRIP.load(source, request(2)), groups=tuple("abcdef"), norms=np.array(norms))
    for height, shown in ((7, "abcdef"), (6, "abcdf"), (5, "bcdf"), (4, "bcd"), (2, "c"), (1, "")):
        picture = STRIP.paint(data, request(2, 60, height), Theme("none"))
        assert "".join(strip.text[0] for strip in picture.strips[1:]) == shown


def test_a_curve_without_a_finite_value_says_so() -> None:
    assert format_range({0: math.nan, 1: None}) == "never finite"
    assert format_range({0: None}) == "unknown"
    assert format_range({0: 0.5, 1: 2.0}) == "0.5 to 2"


def test_the_loss_of_a_step_that_the_scaler_skipped_is_drawn(source: Source) -> None:
    point = CurvePoint(
        0, 0.5, None, has_nonfinite_loss=False, has_nonfinite_gradient=True, rates=(0.1,)
    )
    data = replace(PANEL.load(source, request(0, 80, 20)), points={0: point})
    assert data.values("loss") == {0: 0.5}
    assert math.isnan(data.values("gradient norm")[0] or 0.0)
    assert "loss in steps 0-39: 0.5." in PANEL.describe(data)


def test_a_curve_of_columns_says_that_its_values_are_the_highest(source: Source) -> None:
    made_request = request(4, width=24)
    data = PANEL.load(source, made_request)
    assert 1 < data.window.n_points < N_STEPS
    line = next(
        line for line in PANEL.describe(data) if line.startswith("highest loss in steps 0-39")
    )
    assert line.endswith("to 4.")
    drawn = [strip.text for strip in PANEL.paint(data, made_request, Theme("none")).strips]
    assert any(text.startswith("highest loss") for text in drawn)


def test_the_run_panel_shows_the_stages_of_a_training_run(source: Source) -> None:
    run = load_panel("run")
    data = run.load(source, Request(TracePlace(step=3), run.initial_options, 80, 30))
    about = {
        "optimizer": "AdamW",
        "groups": ["body", "head"],
        "parameters": 4,
        "values": 400,
        "placement": {"cpu": 100, "cuda:0": 300},
    }
    generation = replace(data.generation, declared={"training": about})
    facts = {"level": "basic", "training": {"anomaly_steps": 1}}
    assert run.describe(replace(data, run=facts, generation=generation))[:5] == [
        "model: 400 weights are trained; 4 parameters in 2 groups; on cpu (25%), cuda:0 (75%).",
        "optimizer: AdamW.",
        "training loop: 40 steps; level basic.",
        "outcome: finished; 1 step with anomalies.",
        "Manifest:",
    ]
    training = replace(PANEL.load(source, request(3)), run_facts=about)
    assert "device: cpu, weights on cpu (25%), cuda:0 (75%)" in PANEL.describe(training)
    assert run.describe(replace(data, generation=replace(generation, declared={"training": {}})))


def test_a_column_leads_to_a_step_that_it_shows(source: Source) -> None:
    for columns in (1, 3, 7, 40, 100, 160):
        run = load_whole_run(source.reader, TracePlace(), columns)
        each = run.columns_per_point(columns)
        for column in range(run.n_points * each):
            step = run.step_at(column, columns)
            assert step is not None
            assert step * run.n_points // len(run) == column // each
        assert run.step_at(run.n_points * each, columns) is None


def test_the_strip_distinguishes_vanishing_exploding_and_non_finite_norms() -> None:
    norms = np.array([[1e-9, 1e-6, 1e-3, 10.0, 1e9, np.nan, np.inf, -1.0]])
    levels = norm_levels(norms)[0].tolist()
    assert levels[0] == levels[1] == 0
    assert 0 < levels[2] < levels[3] == levels[4] == CIVIDIS_MISSING.size - 3
    assert levels[5] == levels[6] == CIVIDIS_MISSING.size - 2
    assert levels[7] == CIVIDIS_MISSING.size - 1


def test_the_strip_is_described(source: Source) -> None:
    lines = STRIP.describe(STRIP.load(source, request(2)))
    assert lines[1] == "body.0   1.0e-07  1.0e-07 to 100  non-finite in 10 of 40"
    assert lines[2] == "head         0.5  0.5 to 0.5"


def test_groups_that_came_after_the_start_have_rows_too(tmp_path: Path) -> None:
    path = tmp_path / "grown.flextrace"
    begun = GenerationRecord(
        *(0, "training", "", "", (), ()), declared={"training": {"groups": ["body"]}}
    )
    events = [
        EventRecord("parameters-changed", "…", 0.0, 0, step, {"groups": ["body", *names]})
        for step, names in ((1, ["head"]), (2, ["head", "lora"]))
    ]
    with TraceWriter.create(path, {"watch_training": True, "level": "basic"}) as writer:
        writer.begin_generation(begun)
        for number, event in enumerate([None, *events]):
            step = training_step(number)
            assert step.training is not None
            norms = (0.5, 0.25, 0.125)[: number + 1]
            writer.write_steps([replace(step, training=replace(step.training, group_norms=norms))])
            if event is not None:
                writer.write_event(event)
    lines = STRIP.describe(STRIP.load(Source(open_trace(path)), request(2)))
    assert lines[1:] == [
        "body       0.5  0.5 to 0.5",
        "head      0.25  0.25 to 0.25",
        "lora     0.125  0.125 to 0.125",
    ]


def test_panels_of_tokens_do_not_apply_to_a_training_run(source: Source) -> None:
    named = [load_panel(name) for name in panel_names()]
    apart = [panel for panel in named if panel.needs_tokens]
    assert {panel.name for panel in apart} >= {"tokens", "mask", "attention", "logits", "path"}
    for panel in apart:
        with pytest.raises(Missing, match="a training run has none"):
            check_panel_applies(panel, source, TracePlace())
    for panel in named:
        if not panel.needs_tokens:
            check_panel_applies(panel, source, TracePlace())


def test_a_generation_of_tokens_has_no_training(trace: Path) -> None:
    source = Source(open_trace(trace))
    for panel in (PANEL, STRIP):
        with pytest.raises(Missing, match="not a training run"):
            panel.load(source, request(0))


async def test_a_training_run_has_a_layout_of_its_own(run: Path, trace: Path) -> None:
    saved_state.save_layout("generation", saved_state.Layout(("tokens", "mask"), 2))
    app = InspectorApp(run)
    async with app.run_test(size=(140, 44)) as pilot:
        await settle(pilot)
        text = screen_text(app)
        assert [slot.view.panel.name for slot in app.screen.query(Slot)] == list(
            LAYOUTS["training"]
        )
        assert "learning rate" in text
        assert "body.0" in text
        assert not app.screen.query_one("#strip").display
        assert "✖▲● findings" in text
        assert "entropy" not in text
        await pilot.press("end")
        await settle(pilot)
        assert "Step 39: the output of body.0" in screen_text(app)
        await pilot.press("6", "-", "-")
        await settle(pilot)
    for path, panels in ((run, ["memory", "gradstrip"]), (trace, ["tokens", "mask"])):
        app = InspectorApp(path)
        async with app.run_test(size=(140, 44)) as pilot:
            await settle(pilot)
            shown = [view.panel.name for view in app.screen.query_one(Slots).views()]
            assert shown == panels
            if path == run:
                await pilot.press("equals_sign")
    assert saved_state.load_state().layouts["training"].panels == LAYOUTS["training"]

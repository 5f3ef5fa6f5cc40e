"""The tensors panel shows any stored array: its statistics, and a slice of its values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as numpy_arrays
from msgspec.structs import replace
from support.traces import sample_trace

from flexinspect.core.errors import UsageError
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Missing, Request, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.panels.tensors_panel import TensorData, TensorOptions, TensorsPanel, measure
from flexinspect.records.step import ArrayRecord, GenerationRecord, StepRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

CUBE = np.arange(2 * 3 * 40, dtype=np.float32).reshape(2, 3, 40)
ODD = np.array([1.0, np.nan, np.inf, -np.inf, 0.0, -2.0], np.float32)


@pytest.fixture
def source(tmp_path: Path) -> Any:
    path = tmp_path / "a.flextrace"
    arrays = (
        ArrayRecord("cube", CUBE),
        ArrayRecord("odd", ODD, 0),
        ArrayRecord("odd", ODD + 1, 1),
        ArrayRecord("half", np.array([[0x3F80, 0x4000]], np.uint16), dtype="bfloat16"),
    )
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "m", "c", (), ()))
        writer.write_step(StepRecord(0, 0, "prefill", 3, 0, 3, 0.0, 1.0, 0.1, arrays=arrays))
        writer.write_step(StepRecord(0, 1, "decode", 1, 3, 4, 1.0, 1.0, 0.1))
    with open_trace(path) as reader:
        yield Source(reader)


def request(step: int = 0, layer: int = 0, **options: Any) -> Request[TensorOptions]:
    return Request(TracePlace(step=step, layer=layer), TensorOptions(**options), 60, 12)


def load(source: Source, **options: Any) -> TensorData:
    return TensorsPanel().load(source, request(**options))


def test_all_arrays_are_listed_and_the_first_is_shown(source: Source) -> None:
    lines = TensorsPanel().describe(load(source))
    assert lines[0] == "Step 0 stored 4 arrays:"
    assert lines[1].startswith("  cube: float32 2 x 3 x 40, ")
    assert "min 0  max 239  mean 119.5  std 69.28" in lines
    assert "slice [0, :, :] of 2 planes" in lines
    assert lines[-1] == "… of 3 x 40"


def test_a_slice_has_the_values_of_its_index(source: Source) -> None:
    assert np.array_equal(load(source, stream="cube", index="1").plane, CUBE[1])
    assert np.array_equal(load(source, stream="half").plane, [[1.0, 2.0]])  # widened


def test_an_array_of_layers_is_that_of_the_current_layer(source: Source) -> None:
    data = TensorsPanel().load(source, request(layer=1, stream="odd"))
    assert data.chosen.layer == 1
    assert data.plane[0, 0] == 2.0


def test_what_is_not_finite_is_counted_and_marked(source: Source) -> None:
    data = load(source, stream="odd")
    found = data.statistics
    assert (found.n_nan, found.n_inf, found.n_zero) == (1, 2, 1)
    assert (found.minimum, found.maximum) == (-2.0, 1.0)
    picture = TensorsPanel().paint(data, request(stream="odd"), Theme("none"))
    assert picture.alarm
    assert "nan" in "".join(strip.text for strip in picture.strips)


def test_keys_choose_the_array_the_index_and_the_part(source: Source) -> None:
    panel = TensorsPanel()
    first = request()
    data = panel.load(source, first)
    assert panel.on_action("view.flip", data, first) == TensorOptions(stream="odd")
    turned = panel.on_action("view.measure", data, first)
    assert turned == TensorOptions(index="1")
    moved = panel.on_action("cursor.right", data, first)
    assert moved == TensorOptions(column=1)
    assert panel.on_action("cursor.up", data, first) == TensorOptions()  # it stays inside
    shown = panel.paint(data, replace(first, options=TensorOptions(column=38)), Theme("none"))
    assert shown.strips[-1].text.split() == ["2", "118", "119"]
    last = load(source, stream="half")
    assert panel.on_action("view.flip", last, first) == TensorOptions(stream="cube")


def test_a_picture_keeps_to_its_size(source: Source) -> None:
    for width, height in ((20, 3), (60, 12), (200, 40)):
        asked = Request(TracePlace(), TensorOptions(), width, height)
        picture = TensorsPanel().paint(load(source), asked, Theme("none"))
        assert len(picture.strips) <= height
        assert all(strip.cell_length == width for strip in picture.strips)


def test_what_is_not_there_is_said(source: Source) -> None:
    with pytest.raises(Missing, match="stored no array 'nope'"):
        load(source, stream="nope")
    with pytest.raises(Missing, match="Step 1 stored no arrays"):
        load(source, step=1)
    for index in ("2", "0,0", "x", "-1"):
        with pytest.raises(UsageError, match="does not fit the array"):
            load(source, stream="cube", index=index)


@given(numpy_arrays(np.float32, st.integers(0, 30), elements=st.floats(width=32)))
def test_statistics_are_those_of_the_finite_values(values: np.ndarray[Any, Any]) -> None:
    found, finite = measure(values), values[np.isfinite(values)].astype(np.float64)
    assert found.n_nan + found.n_inf + len(finite) == len(values)
    if len(finite):
        assert (found.minimum, found.maximum) == (finite.min(), finite.max())
        assert found.n_zero == (finite == 0).sum()
    else:
        assert math.isnan(found.mean)


def test_any_recorded_trace_has_arrays_to_show(tmp_path: Path) -> None:
    with open_trace(sample_trace(tmp_path / "a.flextrace")) as reader:
        infos = reader.arrays(0, 0)
        for info in infos:
            asked = request(stream=info.stream, layer=info.layer or 0)
            assert TensorsPanel().load(Source(reader), asked).chosen.stream == info.stream


def test_a_single_array_of_one_plane_has_no_other_view(tmp_path: Path) -> None:
    path = tmp_path / "one.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "m", "c", (), ()))
        arrays = (ArrayRecord("flat", CUBE[:1]),)
        writer.write_step(StepRecord(0, 0, "prefill", 3, 0, 3, 0.0, 1.0, 0.1, arrays=arrays))
    with open_trace(path) as reader:
        data = load(Source(reader))
        for action in ("view.flip", "view.measure"):
            assert TensorsPanel().on_action(action, data, request()) is None

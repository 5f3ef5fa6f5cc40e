"""The logit lens panel shows what each layer would choose, and whether that is the model's view."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Missing, Navigate, NoOptions, Request, TracePlace
from flexinspect.panels.lens_panel import LensPanel
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import (
    EventRecord,
    GenerationRecord,
    LensRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

HALF = math.log(0.5)
FIRST = LensRecord(0, (8, 7), (" Rome", "\x1b[2J"), (HALF, -2.0), 3, -4.0)
LATER = LensRecord(1, (5, 8), (" Paris", " Rome"), (HALF, -2.0), 0, HALF)
LAST = LensRecord(2, (5, 9), (" Paris", ""), (-0.1, -3.0), 0, -0.1, 1e-6)
LAYERS = (FIRST, LATER, LAST)

Make = Callable[..., Source]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    opened = []

    def made(lens: tuple[LensRecord, ...], **facts: Any) -> Source:
        path = tmp_path / f"{len(opened)}.flextrace"
        with TraceWriter.create(path, {}) as writer:
            writer.begin_generation(GenerationRecord(0, "s", "m", "c", (), ()))
            token = TokenRecord(4, 5, "ĠParis", " Paris", 4, 0, step=0)
            facts = {"lens": lens, "tokens": (token,), **facts}
            writer.write_step(StepRecord(0, 0, "prefill", 3, 0, 3, 0.0, 1.0, 0.1, **facts))
        opened.append(open_trace(path))
        return Source(opened[-1])

    yield made
    for reader in opened:
        reader.close()


def request(layer: int = 0, width: int = 80, height: int = 12) -> Request[NoOptions]:
    return Request(TracePlace(layer=layer), NoOptions(), width, height)


def described(source: Source) -> list[str]:
    panel = LensPanel()
    return panel.describe(panel.load(source, request()))


def painted(source: Source, **asked: int) -> Any:
    panel = LensPanel()
    return panel.paint(panel.load(source, request()), request(**asked), Theme("none"))


def test_the_layer_from_which_on_the_answer_is_the_best_token_is_named(make: Make) -> None:
    lines = described(make(LAYERS))
    assert lines[0] == 'Step 0: " Paris" is the best token from layer 1 on.'
    assert lines[1] == "Check: the lens of layer 2 differs from the model's logits by 1.0e-06."
    assert lines[4].split() == ["0", "3", "0.0183", '"', 'Rome"', "0.5", '"\\x1b[2J"', "0.135"]
    assert '*" Paris" 0.905  token 9 0.0498' in lines[6]


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ((0, 0, 0), '" Paris" is the best token of all 3 recorded layers.'),
        ((0, 1, 0), '" Paris" is the best token from layer 2 on.'),
        ((0, 0, 4), '" Paris" is not the best token of the last layer.'),
        ((-1, -1, -1), "the chosen token is among the best 2 of no layer."),
    ],
)
def test_an_answer_that_is_lost_or_unknown_is_said(
    make: Make, ranks: tuple[int, ...], says: str
) -> None:
    layers = tuple(replace(one, chosen_rank=n) for one, n in zip(LAYERS, ranks, strict=True))
    assert described(make(layers))[0] == f"Step 0: {says}"


def test_a_lens_that_is_not_the_models_readout_alarms(make: Make) -> None:
    source = make((*LAYERS[:2], replace(LAST, error=2.5)))
    assert "reads its last layer in another way" in described(source)[1]
    assert painted(source).alarm
    assert not painted(make(LAYERS)).alarm


def test_a_lens_that_was_not_compared_says_so(make: Make) -> None:
    assert described(make(LAYERS[:2]))[1].startswith("The check is missing")


def test_the_picture_marks_the_chosen_token_and_a_click_goes_to_its_layer(make: Make) -> None:
    source = make(LAYERS)
    picture = painted(source)
    rows = [strip.text for strip in picture.strips[2:]]
    assert "*" not in rows[0]
    assert "*·Paris" in rows[1]
    assert "\x1b" not in "".join(rows)
    assert picture.target(3, 3) == Navigate(layer=1)
    assert picture.target(3, 0) is None
    assert picture.target(3, 5) is None


def test_a_low_picture_keeps_the_current_layer_in_view(make: Make) -> None:
    many = tuple(replace(LATER, layer=layer) for layer in range(40))
    picture = painted(make(many), layer=30, height=7)
    assert [int(strip.text.split()[0]) for strip in picture.strips[2:]] == [28, 29, 30, 31, 32]


@pytest.mark.parametrize(
    ("width", "columns", "row"),
    [
        (43, "layer  rank          best tokens", "    1     0 ████     *·Paris           0.5"),
        (38, "layer  rank best tokens", "    1     0 *·Paris      ·Rome"),
        (26, "layer  rank best tokens", "    1     0 *·Paris"),
        (20, "layer best tokens", "    1 *·Paris"),
    ],
)
def test_a_narrow_picture_drops_columns_before_tokens(
    make: Make, width: int, columns: str, row: str
) -> None:
    lines = [strip.text.rstrip() for strip in painted(make(LAYERS), width=width).strips]
    assert lines[1] == columns
    assert lines[3] == row


@pytest.mark.parametrize(("width", "height"), [(10, 2), (40, 5), (80, 24), (200, 60)])
def test_a_picture_keeps_to_its_size(make: Make, width: int, height: int) -> None:
    picture = painted(make(LAYERS), width=width, height=height)
    assert len(picture.strips) <= height
    assert {strip.cell_length for strip in picture.strips} == {width}


def test_a_step_without_a_lens_says_why(make: Make) -> None:
    with pytest.raises(Missing, match="No logit lens is recorded at step 0") as caught:
        LensPanel().load(make(()), request())
    assert "--level extreme" in str(caught.value.hint)
    event = EventRecord("logit-lens-sparse", "It reads some steps only.", 0.0, 0, 0)
    with pytest.raises(Missing) as caught:
        LensPanel().load(make((), events=(event,)), request())
    assert caught.value.hint == "It reads some steps only."

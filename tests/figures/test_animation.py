"""The animation: a frame per step, as GIF and as a page; rows appear, the newest one is lit."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.mask_pictures import isolation_picture

from flexinspect.core.errors import UsageError
from flexinspect.core.languages import load_labels
from flexinspect.figures.animation import (
    FRAME_MS,
    LAST_FRAME_MS,
    AnimationStep,
    generation_steps,
    save_animation,
)
from flexinspect.figures.mask_figure import FigureStyle
from flexinspect.figures.themes import THEMES

ENGLISH = load_labels("en")
STYLE = FigureStyle(labels=ENGLISH, width=3)
PICTURE = isolation_picture(2, 4, 1, 3, words={9: " Paris", 10: "\x1b</script>"})


def rgb(color: str) -> tuple[int, int, int]:
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue


def frames_of(file: Path) -> tuple[list[Image.Image], list[int]]:
    frames, durations = [], []
    with Image.open(file) as gif:
        for number in range(gif.n_frames):  # type: ignore[attr-defined]
            gif.seek(number)
            frames.append(gif.convert("RGB"))
            durations.append(gif.info["duration"])
    return frames, durations


def count(image: Image.Image, color: str) -> int:
    return int((np.asarray(image) == rgb(color)).all(axis=2).sum())


def test_steps_are_the_prefill_and_then_one_row_each() -> None:
    steps = generation_steps(PICTURE, ENGLISH)
    assert [(step.start, step.stop) for step in steps] == [(0, 9), (9, 10), (10, 11), (11, 12)]
    assert [step.caption for step in steps] == [
        "step 0: prefill of 9 queries",
        "step 1: query 9 “Paris”",
        "step 2: query 10 “<U+001B></script>”",
        "step 3: query 11",
    ]


def test_a_gif_has_a_frame_per_step_in_which_rows_appear(tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    file = save_animation(
        PICTURE, tmp_path / "a.gif", style=STYLE, progress=lambda *place: done.append(place)
    )
    frames, durations = frames_of(file)
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert durations == [FRAME_MS, FRAME_MS, FRAME_MS, LAST_FRAME_MS]
    theme = THEMES["light"]
    n_open = [count(frame, theme.open) for frame in frames]
    assert n_open[1] < n_open[2] < n_open[3]
    assert frames[0].getpixel((0, 0)) == rgb(theme.background)
    assert all(count(frame, theme.newest) > 100 for frame in frames)


def test_the_newest_row_is_coloured_by_its_attention(tmp_path: Path) -> None:
    def lit(weights: Any) -> tuple[Image.Image, Image.Image]:
        steps = generation_steps(PICTURE, ENGLISH, [None, *weights])
        frames, _ = frames_of(save_animation(PICTURE, tmp_path / "a.gif", style=STYLE, steps=steps))
        return frames[1], frames[2]

    one_key = np.zeros(10)
    one_key[3] = 0.7
    even = np.full(10, 0.1)
    newest = THEMES["light"].newest
    assert count(lit([one_key])[0], newest) < count(lit([even])[0], newest)
    nothing_known = lit([np.full(10, np.nan)])[0]
    assert count(nothing_known, newest) < count(lit([one_key])[0], newest)


def test_a_frame_in_which_nothing_changes_still_takes_its_time(tmp_path: Path) -> None:
    step = AnimationStep(0, 3, "the same")
    frames, durations = frames_of(
        save_animation(PICTURE, tmp_path / "a.gif", style=STYLE, steps=[step, step])
    )
    assert len(durations) == 2
    assert frames[0].tobytes() == frames[1].tobytes()


def test_the_page_needs_no_other_file_and_cannot_be_ended_by_a_token(tmp_path: Path) -> None:
    page = save_animation(PICTURE, tmp_path / "a.html", style=STYLE).read_text("utf-8")
    assert "{{" not in page
    assert page.count("</script>") == 1
    assert not re.search(r"(?:src|href)=[\"'](?!data:)", page)
    assert "http" not in page
    listed = json.loads(re.search(r"const frames = (.*);", page)[1])  # type: ignore[index]
    assert [frame["caption"] for frame in listed][2] == "step 2: query 10 “<U+001B></script>”"
    assert all(frame["source"].startswith("data:image/png;base64,") for frame in listed)
    assert len(listed[1]["source"]) < len(listed[0]["source"]) / 2


def test_many_steps_of_a_joined_picture_light_up_the_range_of_their_row(tmp_path: Path) -> None:
    picture = isolation_picture(2, 200, 1, 3)
    frames, _ = frames_of(save_animation(picture, tmp_path / "a.gif", style=STYLE, dpi=60))
    assert len(frames) == 4
    assert all(count(frame, THEMES["light"].newest) > 50 for frame in frames)


def test_bad_requests_are_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no suffix of a format") as error:
        save_animation(PICTURE, tmp_path / "a.mp4", style=STYLE)
    assert error.value.hint == "Name a file .gif or .html."
    with pytest.raises(UsageError, match="at least one step"):
        save_animation(PICTURE, tmp_path / "a.gif", style=STYLE, steps=[])
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UsageError, match="An animation needs PIL"):
        save_animation(PICTURE, tmp_path / "a.gif", style=STYLE)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_no_file(tmp_path: Path) -> None:
    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_animation(PICTURE, tmp_path / "a.gif", style=STYLE, progress=interrupted)
    assert list(tmp_path.iterdir()) == []

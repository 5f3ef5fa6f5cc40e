"""The ranks of a run side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.rank_traces import unpack
from support.tui import press, screen_lines, screen_text, settle, until

from flexinspect.analysis.ranks.rank_comparison import RankComparison, compare_ranks
from flexinspect.analysis.ranks.rank_run import find_run, open_ranks
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.screens.compare_screen import CompareScreen
from flexinspect.tui.screens.ranks_screen import RanksScreen
from flexinspect.tui.screens.trace_screen import TraceScreen


def compared(name: str, folder: Path) -> RankComparison:
    run, _ = find_run(unpack(name, folder))
    with open_ranks(run) as readers:
        return compare_ranks(run, readers)


def rank_lines(app: Any) -> list[str]:
    return [line for line in screen_lines(app) if line[2:7] == "rank "]


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_row_per_rank_shows_where_it_differs_and_its_numbers(
    size: tuple[int, int], tmp_path: Path
) -> None:
    app: Any = InspectorApp(ranks=compared("train", tmp_path))
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        assert screen_lines(app)[0].startswith("train: training of 4 ranks, data parallel")
        assert "rank 1 differs from ranks 0, 2-3" in " ".join(screen_text(app).split())
        lines = rank_lines(app)
        assert [line.split()[:3] for line in lines if "▸" in line] == [["▸", "rank", "1"]]
        assert [line.count("≠") > 0 for line in lines] == [False, True, False, False]
        assert "differs from rank 0: rank 1: weights of module.2" in screen_text(app)
        assert "last: rank 1, 50.0 ms after the others (ddp_gradients)" in screen_text(app)
        await press(pilot, "v")
        late = [max(line, key="·▁▂▃▄▅▆▇█".find) for line in rank_lines(app)]
        assert late[1] == "█"
        assert late[0] in "·▁"
        await press(pilot, "v", "home")
        assert "step 0: nothing differs from rank 0" in screen_text(app)
        await press(pilot, "n")
        assert app.screen.place.step == 4


async def test_a_rank_that_stopped_has_a_sign_and_no_numbers_after_its_last_step(
    tmp_path: Path,
) -> None:
    app: Any = InspectorApp(ranks=compared("died", tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        lines = rank_lines(app)
        assert lines[3].startswith("▸ rank 3 ✖ ········××××")
        assert (app.screen.place.step, "0.02887" in lines[3]) == (1, True)
        await press(pilot, "right")
        assert "ended before" in rank_lines(app)[3]
        assert "0.06172" in rank_lines(app)[0]


async def test_enter_shows_two_ranks_layer_by_layer_and_o_opens_the_trace_of_one(
    tmp_path: Path,
) -> None:
    app: Any = InspectorApp(ranks=compared("answer", tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen))
        await until(pilot, lambda: "layer 1: ≠ hidden 0.42" in screen_text(app))
        assert "rank 0 1 17 42 9" in screen_text(app)
        await press(pilot, "up")  # heads are not compared: nothing in this layer differs
        assert "layer 0: equal" in screen_text(app)
        await press(pilot, "escape")
        assert isinstance(app.screen, RanksScreen)
        await pilot.press("o")
        await until(pilot, lambda: isinstance(app.screen, TraceScreen))
        await settle(pilot)
        assert app.session.path.name == "answer-rank1.flextrace"
        await pilot.press("q")
        await until(pilot, lambda: isinstance(app.screen, RanksScreen))


async def test_a_click_chooses_a_rank_and_a_step(tmp_path: Path) -> None:
    app: Any = InspectorApp(ranks=compared("train", tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        y = next(y for y, line in enumerate(screen_lines(app)) if line[2:8] == "rank 2")
        await pilot.click("#ranks", offset=(12, y))
        await settle(pilot)
        assert (app.screen.rank_at, app.screen.place.step) == (2, 0)
        await press(pilot, "question_mark")
        assert "Ranks" in screen_text(app)
        assert "previous difference" in screen_text(app)

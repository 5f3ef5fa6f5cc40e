"""`--max-size`: less detail, then bare steps, then none; the events say from where on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.warm_python import run_command

from flexinspect.cli.flags import trace_size
from flexinspect.records.step import ArrayRecord, StepRecord, TokenRecord
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.step_writer.size_limit import SIZE_EVENT, SizeLimit

LIMIT = 100_000


class Levels:
    level = "extreme"


def step(number: int, n_bytes: int = 0) -> StepRecord:
    arrays = (ArrayRecord("layer.out", np.zeros(n_bytes, np.uint8), 0),) if n_bytes else ()
    token = TokenRecord(number, 5, "a", "a", number, 0, number)
    return StepRecord(0, number, "decode", 1, 0, 1, 0.0, 1.0, 0.1, tokens=(token,), arrays=arrays)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.flextrace"


def limited(file: Path, n_bytes: int) -> tuple[SizeLimit, Levels]:
    file.write_bytes(bytes(n_bytes))
    levels = Levels()
    return SizeLimit(
        file, LIMIT, lambda: levels.level, lambda to: setattr(levels, "level", to)
    ), levels


def test_a_small_trace_is_left_alone(file: Path) -> None:
    limit, levels = limited(file, 20_000)
    records = [step(0, 100)]
    assert limit.thin(records) == records
    assert (levels.level, limit.events, limit.final_event()) == ("extreme", [], None)


@pytest.mark.parametrize(
    ("used", "level"), [(49_000, "extreme"), (51_000, "advanced"), (80_000, "advanced")]
)
def test_the_level_is_lowered_one_by_one(file: Path, used: int, level: str) -> None:
    limit, levels = limited(file, used)
    limit.thin([step(3)])
    assert levels.level == level
    limit.thin([step(4)])
    assert levels.level == ("basic" if used == 80_000 else level)
    texts = [event.text for event in limit.events]
    assert all(" of --max-size 100 kB: level " in text for text in texts)
    assert len(texts) == ["extreme", "advanced", "basic"].index(levels.level)


def test_a_step_that_would_not_fit_keeps_its_tokens_and_so_do_those_after_it(file: Path) -> None:
    limit, _ = limited(file, 10_000)
    whole, bare, later = limit.thin([step(0, 1000), step(1, 200_000), step(2, 10)])
    assert whole.arrays
    assert (bare.arrays, bare.tokens, later.arrays) == ((), step(1).tokens, ())
    assert "are stored from step 1 on" in limit.events[0].text
    assert (limit.events[0].kind, limit.events[0].step) == (SIZE_EVENT, 1)


def test_at_the_size_itself_steps_are_counted_and_not_stored(file: Path) -> None:
    limit, _ = limited(file, LIMIT)
    assert limit.thin([step(7), step(8)]) == []
    assert "no step is stored from step 7 on; the model goes on" in limit.events[0].text
    event = limit.final_event()
    assert event is not None
    assert event.text == "2 steps of this run are not in the trace (--max-size)"


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 5 * 10**8), ("1.5 GiB", 3 << 29), ("2000000", 2 * 10**6)]
)
def test_sizes_are_written_as_elsewhere(text: str, size: int) -> None:
    assert trace_size(text) == size


@pytest.mark.parametrize("text", ["", "5 parsecs", "-1MB", "10kB", "nanMB"])
def test_a_size_that_is_none_or_too_small_is_refused(text: str) -> None:
    import argparse

    with pytest.raises(argparse.ArgumentTypeError):
        trace_size(text)


def test_a_run_stays_below_its_size_and_generates_to_the_end(tmp_path: Path) -> None:
    flags = ("--weights", "random", "--stop", "eos", "--max-new-tokens", "120", "--no-ui")
    flags += ("--level", "extreme", "--max-size", "1.5MB", "--out", "a.flextrace")
    done = run_command("run", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "a.flextrace"
    assert path.stat().st_size <= 1_500_000
    with open_trace(path) as reader:
        events: list[Any] = [row.event for row in reader.events() if row.event.kind == SIZE_EVENT]
        n_stored, state = reader.n_steps(0), reader.state
    assert state == "finished"
    missing = [event.data["dropped"] for event in events if "dropped" in event.data]
    assert n_stored + sum(missing) == 120
    assert any("level advanced instead of extreme" in event.text for event in events)

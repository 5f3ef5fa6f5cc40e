"""`flexinspect show`: panels as text, as JSON and as pictures, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import replace
from support.earlier_traces import unpack

from benchmarks.synthetic import long_trace
from flexinspect.cli.main import build_parser
from flexinspect.core import plugins
from flexinspect.core.errors import FlexInspectError, TraceError, UsageError
from flexinspect.core.plugins import PANELS
from flexinspect.drawing.text_lines import line
from flexinspect.drawing.theme import Theme
from flexinspect.panels import panel_registry
from flexinspect.panels.base import (
    Help,
    Missing,
    NoOptions,
    Panel,
    Picture,
    Request,
    TracePlace,
)
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import GenerationRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace


class EchoOptions(Struct, frozen=True):
    shout: bool = False
    times: int = 1


class Echo(Panel[list[str], EchoOptions]):
    """Prints its place and the record there."""

    name = "echo"
    title = "Echo"
    help = Help("It shows the place.", "Read it.", "Look for it.")
    initial_options = EchoOptions()

    def load(self, source: Source, request: Request[EchoOptions]) -> list[str]:
        place, options = request.place, request.options
        tokens = source.reader.step_tokens(place.generation, place.step, place.branch)
        text = f"step {place.step} layer {place.layer} head {place.head} chose{tokens[0].text}"
        return [text.upper() if options.shout else text] * options.times

    def describe(self, data: list[str]) -> list[str]:
        return [*data, "bad \x1b[31m character"]

    def paint(self, data: list[str], request: Request[EchoOptions], look: Theme) -> Picture:
        strips = [line([(text, look.style("accent"))], request.width) for text in data]
        return Picture(strips[: request.height], note="a note")


class Empty(Panel[None, NoOptions]):
    """Never has anything to show."""

    name = "empty"
    title = "Empty"
    help = Help("a", "b", "c")
    initial_options = NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> None:
        raise Missing("Level basic stores no echo.", "Record with --level advanced.")


class Faulty(Empty):
    """Has a bug."""

    name = "faulty"

    def load(self, source: Source, request: Request[NoOptions]) -> None:
        raise KeyError("oops")


Show = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(long_trace(tmp_path_factory.mktemp("show") / "run.flextrace", steps=12))


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The panels that are registered; a test may change the list."""
    points = [EntryPoint(name, f"{__name__}:{name.title()}", PANELS) for name in ("echo", "empty")]
    monkeypatch.setattr(plugins, "registered", lambda group: points)
    panel_registry.load_panel.cache_clear()
    yield points
    panel_registry.load_panel.cache_clear()


@pytest.fixture
def run_show(panels: list[EntryPoint], capsys: pytest.CaptureFixture[str]) -> Show:
    def run(*args: str) -> tuple[int, str, str]:
        parsed = build_parser("show").parse_args(["show", *args])
        code = int(parsed.run(parsed))
        return code, *capsys.readouterr()

    return run


def test_one_panel_prints_its_lines_and_nothing_else(run_show: Show, trace: str) -> None:
    code, out, err = run_show(
        trace, "--panel", "echo", "--step", "3", "--layer", "2", "--head", "7"
    )
    assert code == 0
    first, second = out.splitlines()
    assert first.startswith("step 3 layer 2 head 7 chose ")
    assert second == "bad \\x1b[31m character"
    assert err == ""


def test_without_a_panel_all_of_them_follow_one_another(run_show: Show, trace: str) -> None:
    code, out, _ = run_show(trace)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "run.flextrace, generation 0, step 0, layer 0, head 0"
    assert lines[1:3] == ["", "Echo (echo)"]
    assert lines[3].startswith("  step 0 layer 0 head 0 chose ")
    assert lines[-2:] == ["  Level basic stores no echo.", "  Record with --level advanced."]


def test_a_panel_with_nothing_to_show_says_why_and_ends_with_1(run_show: Show, trace: str) -> None:
    code, out, err = run_show(trace, "--panel", "empty")
    assert (code, err) == (1, "")
    assert out == "Level basic stores no echo.\nRecord with --level advanced.\n"
    assert run_show(trace, "--panel", "empty", "--panel", "echo")[0] == 0


def test_json_is_an_object_for_one_panel_and_a_list_for_several(run_show: Show, trace: str) -> None:
    _, out, _ = run_show(trace, "--panel", "echo", "--step", "3", "--json")
    report = json.loads(out)
    assert report["trace"] == trace
    assert TracePlace(**report["place"]) == TracePlace(step=3)
    assert (report["panel"], report["title"], report["missing"]) == ("echo", "Echo", False)
    assert report["lines"][0].startswith("step 3 ")
    _, out, _ = run_show(trace, "--json")
    assert [one["missing"] for one in json.loads(out)] == [False, True]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--generation", "4"), "The trace has no generation 4; it has generation 0 only."),
        (("--branch", "1"), "Generation 0 has no branch 1; it has branch 0 only."),
        (("--step", "12"), "Generation 0 has no step 12; it has steps 0 to 11."),
        (("--layer", "8"), "Step 0 has no layer 8; it has layers 0 to 7."),
        (("--head", "8"), "Layer 0 has no head 8; it has heads 0 to 7."),
        (("--width", "0"), "--width 0 is not between 1 and 1000."),
        (("--height", "5000"), "--height 5000 is not between 1 and 1000."),
        (("--option", "shout"), "--option shout is not KEY=VALUE."),
        (("--option", "x=1"), "The panels have no option 'x'; known: shout, times."),
        (("--panel", "echo", "--option", "x=1"), "The panel echo has no option 'x'; known: shout,"),
        (("--panel", "empty", "--option", "x=1"), "The panel empty has no option 'x'; known: none"),
        (("--option", "times=x"), "The option times of the panel echo must be a whole number"),
        (("--panel", "ecko"), "There is no panel 'ecko'; the panels are echo, empty."),
        (("--picture", "--json"), "--picture and --json exclude each other."),
        (("--export", "a.svg"), "--export saves the picture of one panel."),
        (("--panel", "echo", "--export", "a.gif"), "--export a.gif is neither .svg nor .png."),
    ],
)
def test_what_cannot_be_shown_is_an_error_message(
    run_show: Show, trace: str, args: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        run_show(trace, *args)
    assert caught.value.message.startswith(sentence)
    assert caught.value.exit_code == 2


def test_a_branch_begins_where_it_was_forked_and_has_the_steps_before(
    run_show: Show, tmp_path: Path
) -> None:
    made = open_trace(long_trace(tmp_path / "straight.flextrace", steps=6))
    path = tmp_path / "forked.flextrace"
    segments, tokens = tuple(made.segments(0)), tuple(made.tokens(0, stop=259))
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "m", "contiguous", segments, tokens))
        for step in range(6):
            if step == 4:
                writer.begin_branch(0, 1, 0, 4)
            record = made.record(0, step)
            assert record is not None
            writer.write_step(record if step < 4 else replace(record, branch=1))
    place = json.loads(run_show(str(path), "--branch", "1", "--panel", "echo", "--json")[1])[
        "place"
    ]
    assert (place["branch"], place["step"]) == (1, 4)
    args = (str(path), "--branch", "1", "--panel", "empty", "--json", "--layer", "7")
    assert json.loads(run_show(*args, "--step", "2")[1])["place"]["step"] == 2
    with pytest.raises(UsageError, match="Branch 1 of generation 0 has no step 6; it has steps 0"):
        run_show(*args, "--step", "6")
    with pytest.raises(UsageError, match="Generation 0 has no step 4; it has steps 0 to 3"):
        run_show(str(path), "--step", "4")


def test_the_number_of_a_layer_in_a_damaged_trace_takes_no_memory(
    run_show: Show, tmp_path: Path
) -> None:
    path = unpack("generation", tmp_path)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE calls SET layer = ? WHERE step = 1 AND layer = 1", (2**53,))
    sentence = "Step 1 has no layer 1; it has the layers 0, 2, 3, 9007199254740992"
    with pytest.raises(UsageError, match=sentence):
        run_show(str(path), "--step", "1", "--layer", "1")


def test_a_trace_without_a_generation_still_has_panels(run_show: Show, tmp_path: Path) -> None:
    path = tmp_path / "begun.flextrace"
    with TraceWriter.create(path, {}):
        pass
    assert run_show(str(path), "--panel", "empty")[0] == 1
    with pytest.raises(UsageError, match="The trace has no generation 0; it has no generation at"):
        run_show(str(path), "--generation", "0")


def test_a_missing_trace_argument_or_file_is_an_error_message(
    run_show: Show, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="No trace is named"):
        run_show()
    with pytest.raises(TraceError, match=r"none\.flextrace"):
        run_show(str(tmp_path / "none.flextrace"))


def test_options_are_set_by_name_and_type(run_show: Show, trace: str) -> None:
    _, out, _ = run_show(trace, "--panel", "echo", "--option", "shout=yes", "--option", "times=2")
    assert [text[:6] for text in out.splitlines()[:2]] == ["STEP 0", "STEP 0"]


def test_a_picture_in_a_pipe_is_plain_text_of_the_width_asked_for(
    run_show: Show, trace: str
) -> None:
    code, out, _ = run_show(trace, "--panel", "echo", "--picture", "--width", "10", "--height", "1")
    assert code == 0
    assert out.splitlines() == ["step 0 la…", "a note"]


def test_a_picture_has_colours_where_they_are_forced_and_none_under_no_color(
    run_show: Show, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    args = (trace, "--panel", "echo", "--picture", "--width", "30")
    assert "\x1b[38;2;255;166;43" in run_show(*args)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[38" not in run_show(*args)[1]


def test_a_saved_picture_is_reported_on_stderr(run_show: Show, trace: str, tmp_path: Path) -> None:
    file = tmp_path / "echo.svg"
    code, out, err = run_show(trace, "--panel", "echo", "--step", "3", "--export", str(file))
    assert (code, out) == (0, "")
    assert err == f"flexinspect: saved {file}\n"
    svg = file.read_text()
    assert "Echo: run.flextrace, generation 0, step 3, layer 0, head 0" in svg
    assert "step 3 layer 0 head 0 chose" in " ".join(re.findall(r">([^<>\n]+)</text>", svg))


def test_a_number_below_0_is_refused(
    run_show: Show, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_show(trace, "--step", "-1")
    assert ended.value.code == 2
    assert "--step: '-1' is not a whole number that is 0 or greater" in capsys.readouterr().err


def test_a_missing_picture_leaves_no_file(run_show: Show, trace: str, tmp_path: Path) -> None:
    with pytest.raises(FlexInspectError, match="Level basic stores no echo") as caught:
        run_show(trace, "--panel", "empty", "--export", str(tmp_path / "empty.svg"))
    assert caught.value.hint == "Record with --level advanced."
    assert list(tmp_path.iterdir()) == []


def test_a_panel_that_fails_is_skipped_unless_it_was_named(
    run_show: Show, trace: str, panels: list[EntryPoint]
) -> None:
    panels += [
        EntryPoint("faulty", f"{__name__}:Faulty", PANELS),
        EntryPoint("gone", "no_such_module_here:X", PANELS),
    ]
    code, out, err = run_show(trace)
    assert code == 1
    assert "Echo (echo)" in out
    assert "flexinspect: The panel faulty failed: KeyError: 'oops'" in err
    assert "flexinspect: The plug-in 'gone'" in err
    for name in ("faulty", "gone"):
        with pytest.raises(FlexInspectError, match=name):
            run_show(trace, "--panel", name)


def test_the_list_names_panels_their_help_and_their_options(
    run_show: Show, panels: list[EntryPoint]
) -> None:
    panels.append(EntryPoint("gone", "no_such_module_here:X", PANELS))
    code, out, _ = run_show("--list")
    assert code == 0
    lines = out.splitlines()
    assert lines[:4] == ["echo: Echo", "  It shows the place.", "  Read it.", "  Look for it."]
    assert "  --option times=1" in lines
    assert "gone: not available" in lines
    listed = json.loads(run_show("--list", "--json")[1])
    assert [entry["name"] for entry in listed] == ["echo", "empty", "gone"]


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser("show").parse_args(["show", "--help"])
    assert ended.value.code == 0
    assert "flexinspect show run.flextrace --panel mask --step 3 --layer 2" in (
        capsys.readouterr().out
    )


def test_showing_the_built_in_panels_never_imports_torch(trace: str) -> None:
    code = (
        "import sys\n"
        "from flexinspect.cli.main import main\n"
        f"for words in (['--list'], [{trace!r}]):\n"
        "    main(['show', *words])\n"
        "assert 'textual' in sys.modules\n"
        "heavy = {'torch', 'transformers', 'flexinspect_hooks'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Tokens (tokens)" in done.stdout

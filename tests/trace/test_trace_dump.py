"""`flexinspect dump`: stable text for users, strict JSON for programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.trace_samples import NAN, end, generation, small_step, step

from flexinspect.cli.main import build_parser
from flexinspect.core.errors import UsageError
from flexinspect.records.step import ArrayRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from flexinspect.trace.trace_dump import PAGE_ROWS, escape_unprintable, quote_visible

GOLDEN = Path(__file__).with_name("golden_dump.txt")

CHILD = """
import sys
from flexinspect.cli.main import main
sys.exit(main(["dump", *sys.argv[1:]]))
"""


def dumped(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    parsed = build_parser("dump").parse_args(["dump", *map(str, args)])
    assert parsed.run(parsed) == 0
    return capsys.readouterr().out


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_text_is_the_golden_one(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = dumped(capsys, finished, "--generation", "1")
    lines = [line for line in text.splitlines() if not line.startswith("  ended_at")]
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text("\n".join(lines) + "\n", "utf-8")
    assert lines == GOLDEN.read_text("utf-8").splitlines()


def test_json_has_every_key_and_every_row_its_place(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = strict(dumped(capsys, finished, "--json"))
    assert {*out} == {
        *("run", "generations", "branches", "segments", "tokens", "steps"),
        *("masks", "findings", "events", "output"),
    }
    for name in ("segments", "tokens", "steps"):
        assert {(row["generation"], row["branch"]) for row in out[name]} == {(0, 0), (1, 0)}
    assert [len(out[name]) for name in ("segments", "tokens", "steps")] == [8, 14, 6]
    first = out["steps"][0]
    assert [c["text"] for c in first["candidates"]] == [" Paris", "\u202e\ttab"]
    assert [c["path"] for c in first["calls"]] == ["flex uncompiled", "sdpa", "sdpa", "sdpa"]
    assert first["calls"][3]["suppressed_exception"] == "RuntimeError: \u202eno"
    assert [b["layer"] for b in first["builds"]] == [None, 1]
    assert first["layer_stats"][1]["mean"] == "NaN"
    assert first["layer_stats"][1]["max"] == "Infinity"
    assert first["memory"]["cuda_peak"] == 13
    assert first["logits"]["histogram"] == [3, 0, 29]
    assert [a["stream"] for a in first["arrays"]][:2] == ["attention.mass", "q"]
    assert out["masks"][0]["cells"]["shape"] == [1, 3, 13]
    assert out["findings"][0]["evidence"]["worst"] == "Infinity"
    assert out["events"][-1]["kind"] == "done"
    assert [(row["stream"], row["step"]) for row in out["output"]] == [
        ("stdout", None),
        ("stderr", 0),
    ]
    assert out["generations"][1]["answer"] == " Paris\n"


def test_a_step_without_captures_has_empty_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.flextrace"
    nothing = {
        "logits": None,
        "memory": None,
        "calls": (),
        "builds": (),
        "layer_stats": (),
        "tokens": (),
    }
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(generation())
        writer.write_step(step(0, masks=(), arrays=(), findings=(), events=(), **nothing))
    row = strict(dumped(capsys, path, "--json"))["steps"][0]
    assert (row["logits"], row["memory"]) == (None, None)
    assert (row["candidates"], row["calls"], row["layer_stats"], row["arrays"]) == ([], [], [], [])
    assert "step 0  prefill" in dumped(capsys, path)


def test_an_empty_trace_is_dumped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.flextrace"
    TraceWriter.create(path, {}).close("interrupted")
    out = strict(dumped(capsys, path, "--json"))
    assert (out["generations"], out["steps"], out["events"]) == ([], [], [])
    assert dumped(capsys, path).startswith("trace  version 2  interrupted\n")


def test_a_step_can_be_chosen_in_every_generation_or_one(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = strict(dumped(capsys, finished, "--step", "2", "--json"))
    assert [(row["generation"], row["step"]) for row in both["steps"]] == [(0, 2), (1, 2)]
    assert [row["step"] for row in both["tokens"]] == [2, 2]
    assert [m["fingerprint"] for m in both["masks"]] == ["f0000002", "f0010002"]
    assert [e["step"] for e in both["events"]] == [2, 2]
    one = strict(dumped(capsys, finished, "--step", "2", "--generation", "1", "--json"))
    assert [(row["generation"], row["step"]) for row in one["steps"]] == [(1, 2)]
    assert [row["generation"] for row in one["findings"]] == [1]
    assert len(one["segments"]) == 4


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--step", "3"], r"has no step 3\.\nIts steps go from 0 to 2\."),
        (["--step", "-1"], "has no step -1"),
        (["--generation", "2"], r"has no generation 2\.\nIt has 2, numbered from 0\."),
        (["--generation", "1", "--step", "9"], "has no step 9"),
    ],
)
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_missing_step_or_generation_is_a_usage_error(
    finished: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    sentence: str,
    as_json: list[str],
) -> None:
    with pytest.raises(UsageError) as caught:
        dumped(capsys, finished, *flags, *as_json)
    assert caught.value.exit_code == 2
    assert re.search(sentence, caught.value.sentence())
    assert capsys.readouterr().out == ""


def test_no_recorded_text_reaches_the_terminal_as_a_control_character(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = dumped(capsys, finished)
    assert all(char.isprintable() for char in text.replace("\n", ""))
    assert r'"\x1b[31mé🗼\x00"' in text
    machine = dumped(capsys, finished, "--json")
    assert machine.replace("\n", "").isascii()
    assert all(char.isprintable() for char in machine.replace("\n", ""))


def test_escaped_text_is_unambiguous() -> None:
    assert escape_unprintable("a b é 東 🗼") == "a b é 東 🗼"
    assert escape_unprintable("\n\t\x1b\x9b\u202e\\n\ud800") == r"\n\t\x1b\x9b\u202e\\n\ud800"
    assert quote_visible(' "x"') == r'" \"x\""'


def test_long_traces_are_dumped_in_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.flextrace"
    n_steps = 2 * PAGE_ROWS + 1
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(generation())
        for number in range(n_steps):
            writer.write_step(small_step(number))
    assert [row["step"] for row in strict(dumped(capsys, path, "--json"))["steps"]] == [
        *range(n_steps)
    ]
    text = dumped(capsys, path)
    assert text.count("\n    step ") == n_steps
    assert text.count("    tokens\n") == 1


def test_nan_and_scalars_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {"nan": NAN}) as writer:
        writer.begin_generation(generation(started_at=NAN))
        writer.write_step(step(0, wall_ms=NAN, arrays=(ArrayRecord("x", step(0).arrays[4].array),)))
        writer.end_generation(end())
    text = dumped(capsys, path)
    assert "wall nan ms" in text
    assert "int64  scalar  raw" in text
    assert strict(dumped(capsys, path, "--json"))["run"]["nan"] == "NaN"


def test_a_closed_pipe_is_not_an_error(finished: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, finished],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait() == 0


def test_an_ascii_terminal_gets_escapes(finished: Path) -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    out = subprocess.run(
        [sys.executable, "-c", CHILD, finished],
        capture_output=True,
        check=True,
        env=environ,
    )
    assert rb"\xe9\U0001f5fc" in out.stdout


def test_a_trace_that_is_being_recorded_is_dumped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(generation())
        writer.write_step(step(0))
        assert dumped(capsys, path).startswith("trace  version 2  recording\n")
        assert len(strict(dumped(capsys, path, "--json"))["steps"]) == 1
    assert open_trace(path).state == "finished"

"""`flexinspect infer`: a file of invariants that can be read and edited, and runs judged by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.good_runs import CALLS, write_run
from support.warm_python import run_command

from flexinspect.analysis.invariants.invariant import read_invariants
from flexinspect.cli.main import main
from flexinspect.cli.run import judged
from flexinspect.records.job import ScriptJob
from flexinspect.trace.reader import open_trace

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [write_run(tmp_path / f"good-{n}.flextrace", n).name for n in range(3)]


@pytest.fixture
def learnt(good: list[str], capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["infer", *good]) == 0
    capsys.readouterr()
    return Path("invariants.json")


def new_run(**how: Any) -> str:
    return write_run(Path("new.flextrace"), 50, **how).name


def test_learning_writes_a_file_with_an_invariant_a_line(
    good: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["infer", *good, "-o", "mine.json"]) == 0
    out = capsys.readouterr().out
    assert "invariants of 3 runs: mine.json\n  training Net: " in out
    assert out.endswith("next  flexinspect infer --check mine.json NEW_RUN\n")
    text = Path("mine.json").read_text("utf-8")
    contents = json.loads(text)
    assert (contents["format"], contents["version"]) == ("flexinspect-invariants", 1)
    assert contents["runs"] == good
    assert text.count('{"part": ') == len(contents["invariants"])
    assert all(one["runs"] == 3 for one in contents["invariants"])
    assert [path for path in Path().iterdir() if path.suffix == ".part"] == []


def test_a_good_run_is_judged_with_exit_code_0(
    learnt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["infer", "--check", str(learnt), new_run()]) == 0
    assert capsys.readouterr().out.startswith("new.flextrace: 0 violations of ")


def test_a_run_that_clips_after_the_step_is_told_so(
    learnt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(calls={12: (*CALLS[:3], *CALLS[:2:-1])})
    assert main(["infer", "--check", str(learnt), run]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        (
            "  At step 12 optimizer.step came before clip_grad_norm_; in 3 good runs, 180 steps, "
            "clip_grad_norm_ always came first."
        )
    ]
    assert main(["infer", "--check", str(learnt), run, "--json"]) == 1
    (one,) = json.loads(capsys.readouterr().out)["runs"]
    (violation,) = one["violations"]
    assert (violation["kind"], violation["step"], violation["runs"]) == ("before", 12, 3)


def test_many_violations_of_a_kind_are_counted(
    learnt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = dict.fromkeys(range(60), ("optimizer.step",))
    run = new_run(calls=calls)
    assert main(["infer", "--check", str(learnt), run]) == 1
    out = capsys.readouterr().out
    assert out.count("was not called") == 3
    assert "training Net: 1 more violation of 'contains' (--json has all)" in out
    invariants, job = read_invariants(learnt), ScriptJob(out=run, program="train.py")
    assert judged(0, job, invariants) == 1
    assert capsys.readouterr().err.count("was not called") == 3


def test_leave_one_out_says_what_the_others_would_have_called_wrong(
    good: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["infer", *good, "--leave-one-out"]) == 0
    assert "good-0.flextrace: 0 violations of what the others teach" in capsys.readouterr().out
    odd = write_run(Path("odd.flextrace"), 9, lambda _, fields: fields.update(n_backward=2)).name
    assert main(["infer", *good, odd, "--leave-one-out", "--json"]) == 1
    left_out = json.loads(capsys.readouterr().out)["left_out"]
    assert [bool(one["violations"]) for one in left_out] == [False, False, False, True]
    assert not Path("invariants.json").exists()


def test_one_run_is_enough_with_a_note(good: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", good[0]]) == 0
    assert "One run teaches no ranges" in capsys.readouterr().err


def test_a_run_that_failed_is_learnt_from_with_a_note(
    good: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    failed = write_run(Path("failed.flextrace"), 5, state="failed").name
    assert main(["infer", *good, failed]) == 0
    error = capsys.readouterr().err
    assert "failed.flextrace did not end well: its state is failed." in error
    assert "good-0" not in error


def edited(file: Path, change: Change) -> None:
    contents = json.loads(file.read_text("utf-8"))
    change(contents)
    file.write_text(json.dumps(contents), "utf-8")


def first_range(contents: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in contents["invariants"] if one["kind"] == "range")


def test_a_bound_that_was_edited_by_hand_is_used(
    learnt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lower(contents: dict[str, Any]) -> None:
        contents["invariants"] = [{**first_range(contents), "low": 0.0, "high": 0.1}]

    edited(learnt, lower)
    assert main(["infer", "--check", str(learnt), new_run()]) == 1
    assert "the learnt bounds are 0 and 0.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("format"), "does not contain invariants."),
        (lambda c: c.update(version=7), "has version 7 of the format, not 1."),
        (lambda c: first_range(c).update(low=9e9), "low 9e+09 is above high"),
        (lambda c: first_range(c).update(kind="rang"), "'rang'"),
        (lambda c: first_range(c).update(high="x"), "not valid in high"),
        (lambda c: first_range(c).update(low=float("nan")), "must be a finite number"),
        (lambda c: first_range(c).update(first=-3, last=3), "first -3 is below 0"),
        (lambda c: c.update(invariants=3), "invariants must be a list"),
        (lambda c: first_range(c).update(hihg=1), "unknown field `hihg`"),
        (lambda c: (first_range(c).pop("low"), first_range(c).pop("high")), "needs low or high"),
        (lambda c: first_range(c).update(first=99, last=3), "first 99 is above last 3"),
        (lambda c: first_range(c).update(kind="monotone", value="up"), '"rises" or "falls"'),
        (lambda c: first_range(c).update(kind="constant", value="up"), "value must be a number"),
        (lambda c: first_range(c).update(kind="before"), "needs other"),
        (lambda c: c.update(invariants=[]), "has no invariants."),
    ],
)
def test_a_bad_edit_gets_a_sentence(
    change: Change, words: str, learnt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited(learnt, change)
    assert main(["infer", "--check", str(learnt), new_run()]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "invariants.json" in error
    assert "Traceback" not in error


def test_a_bad_edit_of_one_line_is_refused_with_its_number(
    learnt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = learnt.read_text("utf-8").splitlines()
    at = next(n for n, line in enumerate(lines) if '"kind": "range"' in line)
    lines[at] = lines[at].replace('"range"', '"rnage"')
    learnt.write_text("\n".join(lines), "utf-8")
    assert main(["infer", "--check", str(learnt), new_run()]) == 2
    error = capsys.readouterr().err
    assert f"invariants.json, line {at + 1}, is not valid in kind:" in error
    assert "Did you mean range?" in error


def test_an_invariant_about_a_number_that_the_run_does_not_have_is_named(
    learnt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited(learnt, lambda c: first_range(c).update(subject="los"))
    n = len(read_invariants(learnt).invariants)
    assert main(["infer", "--check", str(learnt), new_run()]) == 0
    out = capsys.readouterr().out
    assert f"0 violations of {n - 1} invariants" in out
    assert "Not judged, because the run does not have the number: range of los" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["good-0.flextrace", "good-0.flextrace"], "is given 2 times"),
        (["good-0.flextrace", "good-1.flextrace", "--leave-one-out"], "needs three good runs"),
        (["--check", "a.json", "good-0.flextrace", "-o", "b.json"], "exclude each other"),
        (["--check", "none.json", "good-0.flextrace"], "none.json cannot be read"),
        (["none.flextrace"], "none.flextrace"),
        (["good-0.flextrace", "-o", "none/a.json"], "cannot be written"),
        (["good-0.flextrace", "other.flextrace"], "share no training"),
        (["empty.flextrace"], "has no step of a training or a generation"),
        (["."], "no trace of a rank"),
    ],
)
def test_a_request_that_cannot_be_met_gets_a_sentence(
    argv: list[str], words: str, good: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(Path("other.flextrace"), 1, name="training Other")
    write_run(Path("empty.flextrace"), 1, n_steps=0)
    assert main(["infer", *argv]) == 2
    assert words in capsys.readouterr().err
    assert not Path("invariants.json").exists()


def test_names_of_a_trace_cannot_control_the_terminal(
    good: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = {"\x1b[2Jw": {"dtype": "float32", "size": [9], "group": 0}}
    paths = [
        write_run(Path(f"h{n}.flextrace"), n, parameters=hostile, name="training \x1b[2J").name
        for n in range(2)
    ]
    assert main(["infer", *paths]) == 0
    assert main(["infer", "--check", "invariants.json", good[0]]) == 1
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err


def test_numbers_of_redacted_traces_are_learnt(
    good: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for n, path in enumerate(good):
        assert main(["redact", path, "--out", f"redacted-{n}.flextrace"]) == 0
    capsys.readouterr()
    paths = [f"redacted-{n}.flextrace" for n in range(3)]
    assert main(["infer", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["invariants"]
    assert {"range", "median", "constant"} <= {one["kind"] for one in found}
    assert {one["part"] for one in found} == {"training"}


def test_generations_are_learnt_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import zstandard
    from support.paths import TESTS

    monkeypatch.chdir(tmp_path)
    packed = (TESTS / "fixtures" / "traces" / "generation.flextrace.zst").read_bytes()
    for n in range(3):
        Path(f"{n}.flextrace").write_bytes(zstandard.decompress(packed))
    assert main(["infer", "0.flextrace", "1.flextrace", "2.flextrace", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["invariants"]
    assert {one["kind"] for one in found} >= {"part", "total", "range"}
    assert main(["infer", "--check", "invariants.json", "2.flextrace"]) == 0


def test_a_run_that_is_judged_at_its_end_has_the_violations_as_findings(
    learnt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(calls={12: (*CALLS[:3], *CALLS[:2:-1])})
    invariants = read_invariants(learnt)
    assert judged(0, ScriptJob(out=run, program="train.py"), invariants) == 1
    sentence = "At step 12 optimizer.step came before clip_grad_norm_; in 3 good runs, 180 steps, "
    sentence += "clip_grad_norm_ always came first."
    assert f"invariant broken: {sentence}" in capsys.readouterr().err
    assert main(["findings", run, "--fail-on", "warning"]) == 1
    assert sentence in " ".join(capsys.readouterr().out.split())
    with open_trace(run) as reader:
        (found,) = (o for o in reader.findings() if o.id == "training.broken-invariant")
    assert (found.generation, found.step) == (0, 12)
    assert found.evidence["runs"] == 3


def test_a_good_run_keeps_its_exit_code(learnt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, invariants = ScriptJob(out=new_run(), program="train.py"), read_invariants(learnt)
    assert [judged(code, job, invariants) for code in (0, 3)] == [0, 3]
    assert capsys.readouterr().err == ""
    gone = ScriptJob(out="gone.flextrace", program="train.py")
    assert judged(0, gone, invariants) == 2
    assert "The run was not judged" in capsys.readouterr().err


def test_the_json_of_a_run_has_the_exit_code_of_its_judgement(learnt: Path) -> None:
    Path("train.py").write_text("print('no training')", "utf-8")
    arguments = ("--no-ui", "--invariants", str(learnt.resolve()), "train.py")
    done = run_command("run", "--json", *arguments, cwd=Path.cwd())
    assert "The run was not judged" in done.stderr
    assert json.loads(done.stdout)["exit_code"] == done.returncode == 2


def test_a_file_that_is_wrong_is_refused_before_the_run(
    good: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text("raise SystemExit('ran')")
    Path("wrong.json").write_text("{}")
    assert main(["run", "--no-ui", "--invariants", "wrong.json", "train.py"]) == 2
    assert "wrong.json does not contain invariants." in capsys.readouterr().err

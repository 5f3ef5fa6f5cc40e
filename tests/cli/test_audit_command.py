"""`flexinspect audit`: a program, and the audit that its trace holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.faulty_programs import HEAD, PROGRAMS
from support.paths import TESTS
from support.warm_python import run_command

from flexinspect.cli.main import main


def program(folder: Path, *, broken: bool) -> Path:
    """Write a program whose generation skips RoPE if it is broken."""
    body, _ = PROGRAMS["rope skipped by a guard in a patched forward"]
    script = folder / "generate.py"
    script.write_text(HEAD.format(tests=str(TESTS), broken=broken) + body, encoding="utf-8")
    return script


def test_a_program_is_audited_and_its_trace_keeps_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.flextrace"
    script = program(tmp_path, broken=True)
    done = run_command("audit", "--json", "--out", str(out), str(script), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["steps_judged"] == 5
    assert [one["id"] for one in told["findings"]] == ["audit.reproduced"]
    assert "without RoPE" in told["findings"][0]["sentence"]
    assert told["audits"][0]["explanation"]["later"] == 4
    assert main(["audit", str(out)]) == 1
    assert "error  audit.reproduced  Layer 0, step 0:" in capsys.readouterr().out


def test_a_correct_program_exits_with_0(tmp_path: Path) -> None:
    script = program(tmp_path, broken=False)
    done = run_command("audit", str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "5 steps, 16 rows agree with the untouched implementation" in done.stdout
    assert "generate-" in done.stdout.splitlines()[-1]


def test_a_program_of_which_nothing_was_judged_does_not_pass(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('no model')\n", encoding="utf-8")
    done = run_command("audit", str(script), cwd=tmp_path)
    assert done.returncode == 1
    assert "Nothing was audited" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Name a script, -m MODULE or a trace to audit."),
        (["a.flextrace", "more"], "A trace takes no arguments."),
        (["--seconds", "0", __file__], "--seconds must be above 0."),
        (["missing.py"], "There is no script missing.py."),
    ],
)
def test_a_bad_request_gets_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *arguments]) == 2
    assert sentence in capsys.readouterr().err

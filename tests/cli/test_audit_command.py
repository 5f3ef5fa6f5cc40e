"""`flexinspect audit`: a program, and the audit that its trace holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.captures import capture
from support.faulty_programs import HEAD, PROGRAMS
from support.paths import TESTS
from support.tiny import make_model
from support.warm_python import run_command

from flexinspect.cli.main import main

LOADED = """
import sys
sys.path.insert(0, {tests!r})
import torch
from transformers import AutoModelForCausalLM
from support.tiny import ids, make_model
make_model("llama").save_pretrained({folder!r})
model = AutoModelForCausalLM.from_pretrained({folder!r}).eval()
model.generate(torch.tensor([ids(12, 3)]), max_new_tokens=3, do_sample=False)
"""


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
    assert main(["audit", "--stored", str(out)]) == 1
    text = capsys.readouterr().out
    assert main(["audit", str(out), "--stored"]) == 1
    assert capsys.readouterr().out == text
    assert "error  audit.reproduced  Layer 0, step 0:" in text
    assert "From the digests" not in text


def test_the_steps_of_a_trace_are_judged_again_after_what_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "generate.py", tmp_path / "t.flextrace"
    script.write_text(LOADED.format(tests=str(TESTS), folder=str(tmp_path / "m")), "utf-8")
    assert capture(script, out).code == 0
    assert main(["audit", str(out)]) == 0
    stored, judged = capsys.readouterr().out.split("From the digests of the trace:\n")
    assert stored.startswith("As the run's own audit found:\nGeneration 0: 3 steps, 14 rows agree")
    assert "Generation 0: 3 steps, 10 rows agree with the untouched implementation" in judged
    make_model("llama", num_hidden_layers=2).save_pretrained(tmp_path / "other")
    assert main(["audit", "--json", "--model", str(tmp_path / "other"), str(out)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["from_digests"]["steps_judged"] == 0
    assert "another model" in told["from_digests"]["audits"][0]["text"]
    shutil.rmtree(tmp_path / "m")
    assert main(["audit", str(out)]) == 0  # the run's own audit judged it
    last = capsys.readouterr().out.splitlines()
    line = next(line for line in last if line.startswith("Not judged: There is no model folder"))
    assert "--model PATH" in line
    assert "\\n" not in line
    for name, wrong in ((str(tmp_path / "m"), "no model folder"), (" ", "--model needs a name")):
        assert main(["audit", "--model", name, str(out)]) == 2
        assert wrong in capsys.readouterr().err


def test_a_correct_program_exits_with_0(tmp_path: Path) -> None:
    script = program(tmp_path, broken=False)
    done = run_command("audit", str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "5 steps, 16 rows agree with the untouched implementation" in done.stdout
    assert "generate-" in done.stdout.splitlines()[-1]


def test_a_program_that_is_interrupted_exits_with_130_and_its_steps_are_shown(
    tmp_path: Path,
) -> None:
    script, out = program(tmp_path, broken=False), tmp_path / "t.flextrace"
    ending = (
        "\nimport os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(9)\n"
    )
    script.write_text(script.read_text("utf-8") + ending, encoding="utf-8")
    done = run_command("audit", "--out", str(out), str(script), cwd=tmp_path)
    assert done.returncode == 130, done.stderr
    assert done.stdout.splitlines()[-1] == f"trace {out}"


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
        (["a.flextrace", "more"], "more after the trace is unknown."),
        (["a.flextrace", "--stored", "--other"], "--other after the trace is unknown."),
        (["--seconds", "0", __file__], "--seconds must be above 0."),
        (["--stored", __file__], "--model and --stored go with a trace"),
        (["--model", "demo", __file__], "--model and --stored go with a trace"),
        (["missing.flextrace"], "There is no trace at "),
        (["missing.py"], "There is no script missing.py."),
    ],
)
def test_a_bad_request_gets_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *arguments]) == 2
    assert sentence in capsys.readouterr().err

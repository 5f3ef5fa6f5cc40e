"""`flexinspect prove KIND SCRIPT`: the user's program is proved where it calls its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.captures import capture
from support.cases import CASES, segments
from support.warm_python import Ran, run_warm

from flexinspect.records.finding import Severity
from flexinspect.trace.reader import open_trace

TWO = segments((1, 7), (9, 15))


def prove(tmp_path: Path, kind: str, script: Path, *flags: str, declare: str = TWO) -> Ran:
    file = tmp_path / "prompt.toml"
    file.write_text(declare)
    declare_flags = ("--declare", str(file)) if declare else ()
    return run_warm(["-m", "flexinspect", "prove", kind, *declare_flags, *flags, str(script)])


def test_a_leak_is_named_with_layer_and_row_and_stored_in_the_trace(tmp_path: Path) -> None:
    script, out = CASES / "a02_silent_fallback.py", tmp_path / "run.flextrace"
    assert capture(script, out, declare=TWO).code == 0
    ran = prove(tmp_path, "isolation", script, "--call", "3", "--add-to", str(out), "--json")
    assert ran.code == 1, ran
    (proof,) = json.loads(ran.out)["proofs"]
    assert proof["holds"] is False
    assert "segment 2 moved: False" in ran.err, "what the program prints goes to stderr"
    with open_trace(out) as reader:
        (stored,) = [one for one in reader.findings() if one.id == "proof.leak"]
        assert reader.findings() != []
    assert (stored.severity, stored.layer, stored.generation) == (Severity.ERROR, 1, 0)
    assert 'moves position 9 "' in stored.sentence
    assert "in layer 1" in stored.sentence
    listed = run_warm(["-m", "flexinspect", "findings", str(out), "--id", "proof.*", "--json"])
    assert [one["id"] for one in json.loads(listed.out)["findings"]] == ["proof.leak"]


def test_patches_that_the_program_removes_later_are_proved(
    tmp_path: Path,
) -> None:
    """The wrapper keeps its segments apart, and a token that all see carries one to the other."""
    ran = prove(
        tmp_path,
        "isolation",
        CASES / "origin_wrapper.py",
        declare=segments((1, 7), (8, 13)),
    )
    assert ran.code == 1, ran
    assert "in layer 1" in ran.out
    assert "through " in ran.out.split("error: ")[1].splitlines()[0]


def test_order_reports_how_far_logits_move(tmp_path: Path) -> None:
    declare = segments((0, 5), (5, 10))
    ran = prove(tmp_path, "order", CASES / "s03_order_of_paraphrases.py", declare=declare)
    assert ran.code == 0, ran
    assert "moves the next token's logits by up to 5.8 (contiguous positions)" in ran.out


def test_a_program_without_a_suitable_call_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('nothing here')\n")
    ran = prove(tmp_path, "kernel", script, declare="")
    assert ran.code == 2
    assert "made 0 suitable calls of a transformers model" in ran.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "demo"), "--model applies to generations of flexinspect"),
        (("--cache-check", "2"), "--cache-check goes with prove cache"),
    ],
)
def test_flags_that_do_not_go_with_a_program_are_refused(
    tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    ran = prove(tmp_path, "isolation", CASES / "c1_plain_causal_prompt.py", *flags)
    assert ran.code == 2
    assert message in ran.err

"""The page of the ensemble laboratory: its commands, its names, and the tables that were measured.

The measurements are the summaries that the page's commands wrote (`tests/fixtures/lab`).
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.pages import blocks, commands, run_python
from support.paths import DOCS, TESTS

from flexinspect.cli import lab_output
from flexinspect.cli.main import build_parser
from flexinspect.lab.lab_result import AloneAnswer, LabResult, MethodAnswer
from flexinspect.lab.method_comparison import MethodComparison
from flexinspect.lab.result_store import ResultStore
from flexinspect.lab.scoring import Lemmatizer, rule_lemmas
from flexinspect.lab.settings import METHODS, TRACE_CHOICES, LabSettings, parse_counts
from flexinspect.records.job import Job

PAGE = (DOCS / "lab.md").read_text("utf-8")


def test_every_command_is_one_that_the_parser_takes() -> None:
    lines = [line for line in commands(PAGE) if line.startswith("lab ")]
    assert len(lines) == 11
    for line in lines:
        build_parser("lab").parse_args(shlex.split(line))


def test_commands_on_stored_results_ask_for_what_was_run() -> None:
    stored: dict[str, str] = {}
    for line in commands(PAGE):
        if not line.startswith("lab "):
            continue
        args = build_parser("lab").parse_args(shlex.split(line))
        counts = getattr(args, "counts", None)
        if args.results is None:
            assert stored.setdefault(args.out, counts or "5") == (counts or "5"), line
        else:
            known = parse_counts(stored[args.results])
            assert counts is None or {*parse_counts(counts)} <= {*known}, line


def test_the_page_describes_every_method_and_choice() -> None:
    rows = re.findall(r"^\| `([a-z_-]+)` \|", PAGE.split("## The scores")[0], re.MULTILINE)
    assert tuple(rows) == METHODS
    for choice in TRACE_CHOICES[1:]:
        assert f"`{choice}`" in PAGE or f"`--traces {choice}`" in PAGE


MEASURED = {
    "demo-1-5": "lab --num-paraphrases 1-5 --threads 1 --out lab-demo",
    "demo-3": "lab lab-demo --num-paraphrases 3\n…",
    "demo-2-contiguous": "lab --methods flex,majority --num-paraphrases 2 --orders 1 --out",
    "demo-2-reset": "--num-paraphrases 2 --orders 1 --positions reset",
}
"""The summary, and a part of the command that wrote it, whose output the page shows."""


@pytest.mark.parametrize("name", MEASURED)
def test_the_tables_are_those_of_the_measured_runs(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    facts: dict[str, Any] = json.loads((TESTS / "fixtures/lab" / f"{name}.json").read_text("utf-8"))
    lab_output.print_comparison(msgspec.convert(facts, MethodComparison), facts["settings"])
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    outputs = [part for block in blocks(PAGE, "console") for part in block.split("$ flexinspect ")]
    (output,) = [one for one in outputs if MEASURED[name] in one and "…" in one]
    shown = [line.rstrip() for line in output.splitlines()[1:] if line.strip() and line[0] != "…"]
    assert len(shown) >= 3
    for line in shown:
        assert line in printed
    assert facts["n"] == 600


def test_the_columns_of_the_answers_are_listed() -> None:
    one = LabResult(
        index=0,
        sample_id="s",
        expected=("a",),
        alone=(AloneAnswer("a", "eos", 0.0),),
        answers=(MethodAnswer("flex", 1, "a", "eos"),),
    )
    settings = {"methods": METHODS, "counts": [1]}
    text = lab_output.answers_csv(settings, [one], Lemmatizer("rules", rule_lemmas))
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `answers.csv`")]
    assert re.findall(r"`(\w+)`", row.split("|")[2]) == text.splitlines()[0].split(",")


def test_the_python_of_the_page_reads_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = LabSettings(job=Job(out=""), methods=("majority",), counts=(1,)).compared()
    with ResultStore(Path("lab-demo/results.jsonl"), settings, LabResult) as store:
        alone = (AloneAnswer("Paris", "eos", -0.1),)
        store.append(LabResult(index=0, sample_id="s", expected=("Paris",), alone=alone))
    run_python(PAGE)
    assert capsys.readouterr().out == "majority 1 1.0 1.0\n"

"""`flexinspect lab` as a user meets it: tables, files, a kill and its continuation, bad input."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.warm_python import Popen

from flexinspect.cli.main import main
from flexinspect.lab.lab_result import LabResult
from flexinspect.lab.result_store import ResultStore, read_results

N = 17
FLAGS = ("--max-samples", str(N), "--num-paraphrases", "2,5", "--orders", "1", "--threads", "1")
METHODS = ["flex", "per-prompt", "avg", "max", "weighted_avg", "weighted_max", "majority"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in the middle, and continued by the same command."""
    out = tmp_path_factory.mktemp("lab") / "results"
    command = [sys.executable, "-m", "flexinspect", "lab", *FLAGS, "--out", str(out)]
    file = out / "results.jsonl"
    with Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            if file.is_file() and file.read_bytes().count(b"\n") > 4:
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    before = file.read_bytes().count(b"\n") - 1
    assert 4 <= before < N
    assert main(["lab", *FLAGS, "--out", str(out)]) == 0
    assert len(read_results(file, LabResult)[1]) == N
    kept = file.read_bytes().splitlines()[1 : before + 1]
    assert [json.loads(line)["index"] for line in kept] == list(range(before))
    return out


def test_a_killed_run_continues_to_the_results_of_one_that_was_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", *FLAGS, "--out", str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    both = [
        {**json.loads(line), "seconds": None}
        for out in (folder, tmp_path / "whole")
        for line in (out / "results.jsonl").read_text("utf-8").splitlines()
    ]
    half = len(both) // 2
    assert half == N + 1
    assert both[:half] == both[half:]


def test_finished_results_are_printed_without_loading_a_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["lab", *FLAGS, "--out", str(folder)]) == 0
    again = capsys.readouterr()
    assert main(["lab", str(folder)]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (again.out, again.err)
    assert "importing torch" not in shown.err
    lines = shown.out.splitlines()
    assert lines[0] == (
        f"{N} samples of demo, model demo, mask segment-isolation, positions contiguous"
    )
    assert lines[1].startswith("lemmas by rules; time: flex ")
    assert max(len(line) for line in lines if str(folder) not in line) <= 80
    table = [line.split() for line in lines[4:11]]
    assert [row[0] for row in table] == METHODS
    assert table[0][1:] == ["100.0", "81.6–100.0", "100.0", "81.6–100.0", "Wilson"]
    assert table[1][-1] == "bootstrap"
    assert "next     flexinspect lab" in lines[-1]


def test_the_files_beside_the_results_hold_answers_and_summary(folder: Path) -> None:
    main(["lab", str(folder)])
    with (folder / "answers.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == N * (5 + 2 * len(METHODS[2:]) + 2)
    kuwait = [row for row in rows if row["sample"] == "15" and row["paraphrases"] == "5"]
    alone = [row for row in rows if row["sample"] == "15" and row["alone"]]
    assert [(row["alone"], row["exact"]) for row in alone] == [*zip("12345", "10111", strict=True)]
    assert {row["flags"] for row in kuwait} == {"equals majority (4 of 5)"}
    assert {(row["answer"], row["exact"], row["lemma"]) for row in kuwait} == {("+965", "1", "1")}
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert summary["settings"]["counts"] == [2, 5]
    assert summary["settings"]["job"]["sampling"]["do_sample"] is False
    assert [one["method"] for one in summary["scores"]] == METHODS * 2
    assert (folder / "accuracy.svg").read_text("utf-8").lstrip().startswith("<?xml")


def test_json_has_the_comparison(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["n"], found["n_scored"], found["lemmatizer"]) == (N, N, "rules")
    assert found["exit_code"] == 0
    tests = [one for one in found["tests"] if one["score"] == "exact"]
    assert len(tests) == 21
    assert sum(one["p"] is None for one in tests) == 6
    assert found["flags"][0]["n_ordered"] == N


def test_stored_results_are_shown_for_fewer_paraphrases_or_methods(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ("--num-paraphrases", "2", "--methods", "avg,majority")
    assert main(["lab", str(folder), *chosen, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["count"], len(found["scores"]), len(found["tests"])) == (2, 2, 2)
    assert [one["method"] for one in found["flags"]] == ["avg", "majority"]
    assert main(["lab", str(folder), "--num-paraphrases", "3"]) == 2
    assert "no results of 3 paraphrases.\nIt has 2, 5." in capsys.readouterr().err


def test_one_sample_is_shown_token_by_token(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["lab", str(folder), "--sample", "held-out/calling_code/kuwait"]) == 0
    out = capsys.readouterr().out
    assert main(["lab", str(folder), "--sample", "15"]) == 0
    assert capsys.readouterr().out == out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "sample 15 (held-out/calling_code/kuwait), expected: +965"
    assert any(line.startswith("P2 Kuwait City 0.4") and line.endswith("✗") for line in lines)
    assert "flex +965 ✓ equals majority (4 of 5)" in lines
    assert "5 4 3 2 1 +965" in lines
    token = next(line for line in lines if line.startswith("+ 1.00"))
    assert "Kuwait" in token
    assert token.count("*") == 1
    assert main(["lab", str(folder), "--sample", "15", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flags"]["flex"] == ["equals majority (4 of 5)"]


def test_a_trace_can_be_asked_for_afterwards(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", *FLAGS, "--out", str(folder), "--traces", "3"]) == 0
    assert "flexinspect open" in capsys.readouterr().out
    assert [one.name for one in (folder / "traces").iterdir()] == ["000003.flextrace"]
    _, results = read_results(folder / "results.jsonl", LabResult)
    assert [one.index for one in results if one.trace] == [3]


def test_the_figure_has_another_name_and_format_if_asked(folder: Path, tmp_path: Path) -> None:
    assert main(["lab", str(folder), "--figure", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


DATASET = """
from flexinspect import ParaPharaseDataset

class Capitals(ParaPharaseDataset):
    def load_dataset(self):
        return [
            ("p1", ["What is the capital of Peru?", "Peru has which capital?"], "Lima"),
            ("p2", ["What is the capital of Chile?", "Chile has which capital?"], ["Santiago"]),
            ("p3", ["What is the capital of Cuba?", "Cuba has which capital?"], []),
        ]

    def collate_fn(self, batch):
        ids, paraphrases, answers = zip(*batch)
        return ids, answers, list(zip(*paraphrases))
"""


def test_a_dataset_of_ones_own_is_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lab_capitals.py").write_text(DATASET)
    monkeypatch.chdir(tmp_path)
    given = ("--dataset", "lab_capitals:Capitals", "--methods", "flex,majority", "--threads", "1")
    assert main(["lab", *given, "--orders", "0", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["folder"] == "lab-demo-lab_capitals-Capitals"
    assert (found["n"], found["n_scored"], found["count"]) == (3, 2, 2)
    assert [one["exact"]["value"] for one in found["scores"]] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--methods", "flex,mean"], "There is no method 'mean'."),
        (["--num-paraphrases", "0-3"], "--num-paraphrases 0-3 is not a number of paraphrases."),
        (["--num-paraphrases", "7"], "has 5 paraphrases to choose from, not 7."),
        (["--dataset", "missing.jsonl"], "There is no dataset file missing.jsonl."),
        (["--mask", "isolation"], "isolation"),
        (["--model", "lama"], "lama"),
        (["--traces", "some"], "--traces some is neither one of"),
        (["--traces", "all", "--methods", "avg"], "--traces records the answers of flex"),
        (["--figure", "plot.bmp"], "plot.bmp has no suffix"),
        (["--sample", "3"], "--sample shows stored results."),
        (["nowhere"], "There is no folder nowhere of results."),
        (["nowhere", "--model", "demo"], "--model is for a run, and nowhere names results."),
        (["nowhere", "--max-samples", "3"], "--max-samples is for a run"),
        (["."], "results.jsonl cannot be read: No such file or directory."),
    ],
)
def test_bad_input_gets_a_sentence_and_leaves_no_file(
    args: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lab", *args]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_other_settings_are_refused_with_what_differs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "results.jsonl").read_bytes()
    assert main(["lab", *FLAGS, "--mask", "causal", "--out", str(folder)]) == 2
    err = capsys.readouterr().err
    assert 'other settings: job.mask is "causal" and was "segment-isolation".' in err
    assert main(["lab", *FLAGS, "--mask", "causal", "--out", str(folder), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2
    assert (folder / "results.jsonl").read_bytes() == before


def test_results_of_another_kind_and_a_file_as_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ResultStore(tmp_path / "results.jsonl", {"model": "demo"}, LabResult).__exit__()
    assert main(["lab", str(tmp_path)]) == 2
    assert "has no results of flexinspect lab." in capsys.readouterr().err
    assert main(["lab", "--out", str(tmp_path / "results.jsonl")]) == 2
    assert "results.jsonl is a file." in capsys.readouterr().err


def test_a_sample_that_is_not_there_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", str(folder), "--sample", "99"]) == 2
    assert f"The stored samples are 0-{N - 1};" in capsys.readouterr().err

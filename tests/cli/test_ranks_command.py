"""`flexinspect ranks`, and `findings` and `open` of a folder of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.rank_traces import unpack, write_training

from flexinspect.cli.main import main


def ranks_json(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, Any]]:
    code = main(["ranks", *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_report_names_the_difference_the_late_rank_and_the_steps_around_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ranks", str(unpack("train", tmp_path))]) == 1
    out = capsys.readouterr().out
    assert out.startswith("train: training of 4 ranks, data parallel\n")
    assert (
        "The ranks differ. First: step 4: weights, module.2: rank 1 differs from ranks 0, 2-3."
        in out
    )
    assert "Rank 1 is late: it enters collective calls last in 5 of 5 steps" in out
    assert "train-rank1.flextrace  <- late" in out
    assert "not compared: loss (each rank has its own batch)" in out
    (step,) = (line for line in out.splitlines() if line.startswith("     4 "))
    assert step.count("≠") == 1


def test_the_report_of_a_run_of_which_a_rank_was_killed_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ranks", str(unpack("died", tmp_path))]) == 1
    out = capsys.readouterr().out
    assert "What must be equal on all ranks is equal." in out
    assert "Rank 3 stopped after step 1: its process ended without finishing the trace." in out
    assert "Ranks 0-2 failed after step 2. RuntimeError: " in out
    code, found = ranks_json(capsys, tmp_path)
    assert (code, found["verdict"], found["stopped"]) == (1, "same", [3, 0, 1, 2])


def test_the_json_has_the_place_the_ranks_the_waits_and_all_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = ranks_json(capsys, unpack("answer", tmp_path))
    assert (code, found["version"], found["kind"], found["tp_size"]) == (1, 1, "generation", 2)
    first = found["first"]
    assert (first["ranks"], first["place"]["layer"], first["place"]["quantity"]) == (
        [1],
        1,
        "hidden",
    )
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert found["waiting"]["n_calls"] == 20
    assert [row["step"] for row in found["steps"]] == list(range(5))
    assert found["steps"][0]["ranks"][1]["differs"] == "layer 1: hidden"
    (pair,) = found["pairs"]
    assert (pair["rank"], pair["verdict"]) == (1, "different")
    code, part = ranks_json(capsys, tmp_path / "answer-rank0.flextrace", "--step", 0)
    assert [row["step"] for row in part["steps"]] == list(range(5))


def test_a_table_that_has_not_all_steps_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        write_training(tmp_path / f"t-rank{rank}.flextrace", rank, 2, n_steps=20)
    assert main(["ranks", str(tmp_path), "--step", "9"]) == 0
    out = capsys.readouterr().out
    assert "(steps 4 to 14 of 0 to 19; --step N prints those around another)" in out


def test_ranks_that_are_equal_exit_with_0_and_wrong_requests_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        write_training(tmp_path / f"t-rank{rank}.flextrace", rank, 2)
    assert main(["ranks", str(tmp_path)]) == 0
    assert "What must be equal on all ranks is equal." in capsys.readouterr().out
    assert main(["ranks", str(tmp_path), "--step", "0"]) == 0
    assert "--step N prints" not in capsys.readouterr().out
    for argv in (["--step", "7"], ["--generation", "3"], ["--run", "other"]):
        assert main(["ranks", str(tmp_path), *argv]) == 2
    assert "No rank has a step 7." in capsys.readouterr().err
    assert main(["open", str(tmp_path), "--step", "1"]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["open", str(tmp_path)]) == 2
    assert f"Without one: flexinspect ranks {tmp_path}" in capsys.readouterr().err


def test_findings_of_all_ranks_are_reported_once_with_their_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(unpack("answer", tmp_path))
    assert main(["findings", folder]) == 0
    out = capsys.readouterr().out
    assert out.count("text.flat") == 2  # the heading, and the command that explains it
    assert "  ranks  0-1\n" in out
    assert main(["findings", folder, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(one["id"], one["ranks"]) for one in report["findings"]] == [("text.flat", [0, 1])]
    assert main(["findings", folder, "--junit", "--fail-on", "note"]) == 1
    case = ElementTree.fromstring(capsys.readouterr().out).find(".//testcase/failure")
    assert case is not None
    assert "on ranks 0-1" in str(case.text)
    assert main(["findings", folder, "--sarif"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    assert result["properties"]["ranks"] == [0, 1]


def test_a_note_about_one_rank_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_training(tmp_path / "t-rank0.flextrace", 0, 2)
    write_training(tmp_path / "t-rank1.flextrace", 1, 2, state="recording", pid=1 << 22)
    main(["findings", str(tmp_path)])
    note = "! Rank 1: The process that recorded it ended without finishing the trace."
    assert note in capsys.readouterr().out

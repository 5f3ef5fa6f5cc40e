"""Which traces of a folder are the ranks of one run, and how each of them ended."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from support.rank_traces import write_training
from support.traces import sample_trace

from flexinspect.analysis.ranks.rank_run import STOPPED, find_run, find_runs
from flexinspect.core.errors import UsageError


def test_the_ranks_of_a_run_are_found_by_their_manifests_whatever_the_order_of_names(
    tmp_path: Path,
) -> None:
    for name, rank in (("z-rank0", 0), ("z-rank1", 1), ("z-rank2", 2)):
        write_training(tmp_path / f"{name}.flextrace", rank, 4, local_rank=rank, hostname="a")
    sample_trace(tmp_path / "alone.flextrace")
    run, notes = find_run(tmp_path)
    assert (run.name, run.world_size, [one.rank for one in run.traces]) == ("z", 4, [0, 1, 2])
    assert (run.missing, notes, run.hostnames) == ((3,), [], ("a",))
    assert [one.last for one in run.traces] == [(0, 2)] * 3
    assert find_run(tmp_path / "z-rank1.flextrace")[0] == run


def test_default_names_with_other_seconds_are_one_run_and_a_later_run_is_another(
    tmp_path: Path,
) -> None:
    for rank, second in enumerate(("07", "08")):
        name = f"script-20261126-1200{second}-rank{rank}.flextrace"
        write_training(tmp_path / name, rank, 2, launch="a", started_at=1000.0)
        later = f"script-20261126-1300{second}-rank{rank}.flextrace"
        write_training(tmp_path / later, rank, 2, launch="b", started_at=2000.0)
    run, notes = find_run(tmp_path)
    assert (run.name, len(run.traces)) == ("script", 2)
    assert all(one.started_at == 2000.0 for one in run.traces)
    assert notes == [f"Also in {tmp_path}, shown with --run: script~2."]
    older, _ = find_run(tmp_path, "script~2")
    assert all(one.started_at == 1000.0 for one in older.traces)
    with pytest.raises(UsageError, match="There is no run 'scrip~2'") as caught:
        find_run(tmp_path, "scrip~2")
    assert caught.value.hint == "Did you mean script~2?"


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        find_run(tmp_path / "traces")
    assert caught.value.message == f"{tmp_path / 'traces'} does not exist."


def test_runs_of_one_name_without_a_launch_are_told_apart_by_their_start(tmp_path: Path) -> None:
    for rank in range(2):
        write_training(tmp_path / f"t-20261126-120000-rank{rank}.flextrace", rank, 2)
        again = tmp_path / f"t-20261126-130000-rank{rank}.flextrace"
        write_training(again, rank, 2, started_at=5000.0)
    runs, _ = find_runs(tmp_path)
    assert [{one.started_at for one in run.traces} for run in runs] == [{5000.0}, {1000.0}]


def test_a_training_that_began_again_is_a_run_of_its_own(tmp_path: Path) -> None:
    for rank in range(2):
        write_training(tmp_path / f"t-rank{rank}.flextrace", rank, 2)
        write_training(tmp_path / f"t-rank{rank}-2.flextrace", rank, 2, started_at=2000.0)
    assert [run.name for run in find_runs(tmp_path)[0]] == ["t-2", "t"]


def test_a_rank_whose_process_is_gone_has_stopped(tmp_path: Path) -> None:
    here = socket.gethostname()
    states = (("recording", 1 << 22), ("recording", os.getpid()), ("failed", 1))
    for rank, (state, pid) in enumerate(states):
        path = tmp_path / f"t-rank{rank}.flextrace"
        facts = {"pid": pid, "hostname": here, "started_at": 4e9}
        write_training(path, rank, 3, n_steps=1 + rank, state=state, **facts)
    run, _ = find_run(tmp_path)
    assert [one.state for one in run.traces] == [STOPPED, "recording", "failed"]
    assert [one.rank for one in run.stopped] == [0, 2]  # the first to end comes first
    assert run.traces[2].error == "RuntimeError: Connection closed by peer"


def test_a_rank_of_another_machine_counts_as_stopped_once_another_rank_ended(
    tmp_path: Path,
) -> None:
    write_training(tmp_path / "t-rank0.flextrace", 0, 2, state="recording", hostname="elsewhere")
    assert find_run(tmp_path)[0].traces[0].state == "recording"
    write_training(tmp_path / "t-rank1.flextrace", 1, 2, hostname="elsewhere")
    assert find_run(tmp_path)[0].traces[0].state == STOPPED


def test_a_folder_without_ranks_gets_a_sentence_and_a_damaged_trace_is_named(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="holds no trace of a rank") as caught:
        find_run(tmp_path)
    assert "torchrun" in (caught.value.hint or "")
    alone = tmp_path / "alone.flextrace"
    sample_trace(alone)
    with pytest.raises(UsageError, match="holds no trace of a rank") as caught:
        find_run(tmp_path)
    opened = f"flexinspect open {alone} shows one."
    assert caught.value.hint == f"It has 1 trace of single processes. {opened}"
    newer, damaged = tmp_path / "b.flextrace", tmp_path / "c.flextrace"
    sample_trace(newer)
    os.utime(alone, (1, 1))
    damaged.write_bytes(b"no trace" * 100)
    with pytest.raises(UsageError) as caught:
        find_run(tmp_path)
    first, second = (caught.value.hint or "").splitlines()
    assert first.startswith("It has 2 traces of single processes, the newest: b.flextrace, alone.f")
    assert first.endswith(f"flexinspect open {newer} shows one.")
    assert second.startswith(f"Left out: {damaged}")
    damaged.unlink()
    with pytest.raises(UsageError, match=r"alone\.flextrace is not the trace of a rank"):
        find_run(alone)
    with pytest.raises(UsageError, match="does not exist"):
        find_run(tmp_path / "nothing")
    write_training(tmp_path / "t-rank0.flextrace", 0, 2)
    (tmp_path / "t-rank1.flextrace").write_bytes(b"no trace" * 100)
    run, notes = find_run(tmp_path)
    assert run.missing == (1,)
    assert len(notes) == 1
    assert "t-rank1.flextrace" in notes[0]

"""Runs of several processes: each rank writes a trace of its own, and they are shown as one run."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rank_programs import start_ranks, torchrun
from support.tiny import make_model
from torch import nn

from flexinspect.analysis.ranks.rank_comparison import RankComparison, compare_ranks
from flexinspect.analysis.ranks.rank_run import STOPPED, RankRun, find_runs, open_ranks
from flexinspect.core.errors import UsageError
from flexinspect.core.rank_environment import Rank, rank_facts, rank_of_environment, rank_path
from flexinspect.records.collectives import KINDS, WEIGHTS_STREAM
from flexinspect.rules.numerics.audit_findings import AUDIT_SKIPPED_EVENT
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.capture.rank_facts import current_rank
from flexinspect_hooks.training.measurement import GradientMeter
from flexinspect_hooks.training.watch_training import TrainerCallback
from flexinspect_hooks.user_code.watch_trace import free_path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two ranks, recorded by `flexinspect run`, generated and then trained."""
    folder = tmp_path_factory.mktemp("ranks")
    make_model("llama", num_hidden_layers=2).save_pretrained(folder / "tiny")
    through = ("-m", "flexinspect", "run", "--no-ui", "--out", "program.flextrace")
    done = torchrun(folder, 2, ["generate", "tiny", "train", "late"], through)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which four ranks trained, until the last one was killed."""
    folder = tmp_path_factory.mktemp("died")
    ranks = start_ranks(folder, 4, ["train", "die"])
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks][-1] == -9, errors
    return folder


def compared(folder: Path, name: str) -> tuple[RankRun, RankComparison]:
    run = next(one for one in find_runs(folder)[0] if one.name == name)
    with open_ranks(run) as readers:
        return run, compare_ranks(run, readers)


@pytest.mark.slow
def test_each_rank_of_a_torchrun_writes_its_traces_with_its_place_in_the_world(
    recorded: Path,
) -> None:
    assert sorted(path.name for path in recorded.glob("*.flextrace")) == [
        *("program-rank0.flextrace", "program-rank1.flextrace"),
        *("train-rank0.flextrace", "train-rank1.flextrace"),
    ]
    launches = set()
    for path in recorded.glob("*.flextrace"):
        with open_trace(path) as reader:
            run = reader.run()
        rank = int(path.stem[-1])
        assert (run["rank"], run["world_size"], run["local_rank"]) == (rank, 2, rank)
        assert (run["state"], bool(run["hostname"])) == ("finished", True)
        sizes = (2, 1) if "program" in path.name else (1, 2)
        assert (run["tp_size"], run["dp_size"]) == sizes
        launches.add(run["launch"])
    assert len(launches) == 1


@pytest.mark.slow
def test_under_tensor_parallel_the_ranks_agree_after_each_all_reduce(recorded: Path) -> None:
    run, found = compared(recorded, "program")
    assert (len(run.traces), found.tp_size, found.verdict) == (2, 2, "same")
    (generation,) = found.pairs[1].generations
    assert {*generation.compared} >= {"hidden", "logits", "token"}
    assert generation.compared["hidden"].n == 2 * 5
    with open_trace(run.traces[0].path) as reader:
        events = [row.event for row in reader.events()]
        (skipped,) = [one.text for one in events if one.kind == AUDIT_SKIPPED_EVENT]
        assert "The weights are split over ranks, and the audit needs whole ones." in skipped
        assert [call.q_heads for call in reader.calls(0, 0)] == [2, 2]  # of four heads
        kinds = reader.array(0, 1, "collectives.calls")
    assert kinds is not None
    assert (kinds[:, 0] == KINDS.index("all_reduce")).sum() >= 4  # two per layer


@pytest.mark.slow
def test_under_data_parallel_gradients_and_weights_agree_and_the_late_rank_is_named(
    recorded: Path,
) -> None:
    _, found = compared(recorded, "train")
    (training,) = found.pairs[1].trainings
    assert (found.verdict, training.n_compared) == ("same", 6)
    assert {"gradient norm", "weights", "all weights"} <= training.compared.keys()
    assert training.not_compared["loss"] == "each rank has its own batch"
    assert found.waiting.late == 1
    assert found.waiting.late_s[1] > 0.4  # five steps of 200 ms, less where rank 0 was held up
    assert {one.last_call for one in found.waiting.steps.values()} <= {
        "ddp_gradients",
        "all_gather",
    }


@pytest.mark.slow
def test_a_wrapper_that_lost_its_hooks_is_named_and_one_that_has_them_is_not(
    recorded: Path, tmp_path: Path
) -> None:
    # https://github.com/pytorch/pytorch/issues/104336
    ranks = start_ranks(tmp_path, 2, ["train", "moved"])
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    for folder, is_named in ((tmp_path, True), (recorded, False)):
        for path in folder.glob("train-rank*.flextrace"):
            with open_trace(path) as reader:
                found = {each.id for each in reader.findings()}
            assert ("training.ranks-differ" in found) == is_named


@pytest.mark.slow
def test_the_trace_of_a_killed_rank_is_valid_up_to_its_last_step(died: Path) -> None:
    run, found = compared(died, "train")
    assert [one.rank for one in run.traces] == [0, 1, 2, 3]
    killed = run.traces[3]
    assert (killed.state, killed.last) == (STOPPED, (0, 1))
    assert run.stopped[0] == killed  # the others reached step 2, and waited for it in step 3
    assert [one.last for one in run.traces[:3]] == [(0, 2)] * 3
    assert found.verdict == "same"
    with sqlite3.connect(killed.path) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()


def test_a_rank_is_known_from_torchrun_before_there_is_a_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert current_rank() is None
    assert free_path(tmp_path / "a.flextrace", "") == tmp_path / "a.flextrace"
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert current_rank() == Rank(3, 16, 1)
    assert rank_path(Path("x/a.flextrace"), current_rank()) == Path("x/a-rank03.flextrace")
    assert rank_path(Path("a.flextrace"), Rank(9, 10, 1)) == Path("a-rank9.flextrace")
    own = free_path(tmp_path / "a.flextrace", "")
    own.write_text("")
    with pytest.raises(UsageError, match=r"a-rank03\.flextrace exists already"):
        free_path(tmp_path / "a.flextrace", "")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert current_rank() is None


def test_the_facts_of_a_rank_name_its_launch() -> None:
    names = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    environment = names | {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0"}
    facts = rank_facts(rank_of_environment(environment), environment)
    assert (facts["rank"], facts["world_size"], facts["launch"]) == (1, 2, "x/a/7/0")
    assert "local_rank" not in facts
    assert rank_facts(None, environment) == {}


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of the second of two ranks, as of torchrun."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_trainer_records_on_each_rank_and_prints_on_the_first_of_a_machine(
    tmp_path: Path, two_ranks: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class State:
        is_world_process_zero = is_local_process_zero = False

    model: Any = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = TrainerCallback(tmp_path / "a.flextrace")
    for name in ("a-rank1", "a-rank1-2"):  # a training that begins again gets a number
        callback.on_train_begin(None, State(), None, model=model, optimizer=optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if name == "a-rank1-2":
            callback.on_train_end(None, State(), None)
        assert (tmp_path / f"{name}.flextrace").exists()
    assert "flexinspect" not in capsys.readouterr().err
    with open_trace(tmp_path / "a-rank1-2.flextrace") as reader:
        assert (reader.run()["rank"], reader.last_step(0)) == (1, 0)
        sums = reader.array(0, 0, WEIGHTS_STREAM)
    assert sums is not None
    assert sums.tolist() == GradientMeter(model).sum_weight_bits(sampled=True).tolist()


def test_sums_of_weights_are_those_of_their_bits_and_show_the_smallest_change() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2).to(torch.bfloat16))
    meter = GradientMeter(model)
    before = meter.sum_weight_bits(sampled=False)
    assert before.tolist() == meter.sum_weight_bits(sampled=True).tolist()  # all of small ones
    parameters = [one.detach().numpy().view(np.int32) for one in model[0].parameters()]
    assert int(before[0]) == sum(int(one.astype(np.int64).sum()) for one in parameters)
    with torch.no_grad():
        weight = model[1].weight
        weight[0, 0] = torch.nextafter(weight[0, 0], weight.new_tensor(9.0))
    after = meter.sum_weight_bits(sampled=False)
    assert (int(after[0] - before[0]), abs(int(after[1] - before[1]))) == (0, 1)

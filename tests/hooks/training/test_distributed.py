"""A training of several processes: each rank writes a trace of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flexinspect.core.errors import UsageError
from flexinspect.core.ranks import Rank, rank_path
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.capture.ranks import current_rank
from flexinspect_hooks.user_code.watch_trace import free_path

PROGRAM = """
import torch, flexinspect
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with flexinspect.watch_training(model, optimizer, out="run.flextrace") as trace:
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        trace.step(loss=loss)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_both_ranks_of_a_torchrun_write_a_trace_and_the_job_ends_well(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, "utf-8")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    done = subprocess.run(
        [sys.executable, *launcher, "--standalone", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.flextrace")) == [
        "run-rank0.flextrace",
        "run-rank1.flextrace",
    ]
    losses = []
    for rank in range(2):
        with open_trace(tmp_path / f"run-rank{rank}.flextrace") as reader:
            run, steps = reader.run(), reader.training_steps(0)
        assert (run["rank"], run["world_size"], run["state"]) == (rank, 2, "finished")
        assert list(steps) == [0, 1, 2]
        losses.append(steps[0].loss)
    assert losses[0] != losses[1]  # each rank has its own batch


def test_a_rank_is_known_from_torchrun_before_there_is_a_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert current_rank() is None
    assert free_path(tmp_path / "a.flextrace", "") == tmp_path / "a.flextrace"
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert current_rank() == Rank(3, 16)
    assert rank_path(Path("x/a.flextrace"), current_rank()) == Path("x/a-rank03.flextrace")
    own = free_path(tmp_path / "a.flextrace", "")
    own.write_text("")
    with pytest.raises(UsageError, match=r"a-rank03\.flextrace exists already"):
        free_path(tmp_path / "a.flextrace", "")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert current_rank() is None

"""A program that the tests start in several processes: it generates and trains tiny models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.warm_python import Popen

PROGRAM = """
import os, signal, sys, time
import torch, flexinspect
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

words = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
meeting = os.environ.get("MEETING", "env://")
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)


def generate(folder):
    import transformers
    from transformers.distributed import DistributedConfig

    split = DistributedConfig(tp_size=world, tp_plan="auto")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=split)
    if rank == 1 and "differ" in words:
        model.model.layers[1].register_forward_hook(lambda module, args, output: output + 0.01)
    prompt = torch.tensor([[1, 17, 42, 9]])
    if "watch" in words:
        with flexinspect.watch(model, out="answer.flextrace", level="extreme"):
            model.generate(prompt, max_new_tokens=5, do_sample=False)
    else:
        model.generate(prompt, max_new_tokens=5, do_sample=False)


def train():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = DistributedDataParallel(net)
    if "moved" in words:
        model.double().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)
    with flexinspect.watch_training(model, optimizer, out="train.flextrace", quiet=True) as trace:
        for step in range(6):
            if rank == 1 and "late" in words:
                time.sleep(0.2)
            if rank == world - 1 and step == 3 and "die" in words:
                wait_for_step(f"train-rank{rank}.flextrace", 1)
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1 and step == 4 and "drift" in words:
                with torch.no_grad():
                    net[2].weight[0, 0] += 1e-3
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            losses = [torch.zeros(1) for _ in range(world)]
            dist.all_gather(losses, loss.detach().reshape(1))
            optimizer.step()
            trace.step(loss=loss)


def wait_for_step(path, step):
    from flexinspect.trace.reader import open_trace

    for _ in range(600):
        with open_trace(path) as reader:
            if reader.last_step(0) == step:
                return
        time.sleep(0.1)


if "generate" in words:
    generate(words[words.index("generate") + 1])
if "train" in words:
    train()
dist.destroy_process_group()
"""
"""Words: `generate FOLDER` under tensor parallel, with `watch` and `differ` (layer 1 of rank 1);
`train` under data parallel, with `moved` (the wrapped model, which loses the hooks of its wrapper),
`late` (rank 1, by 200 ms), `drift` (a weight of rank 1, from step 4 on) and `die` (the last rank is
killed in step 3, when step 1 is in its trace)."""

_ALONE = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def torchrun(
    folder: Path, n_ranks: int, words: Sequence[str], through: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the program in a folder by `n_ranks` processes; `through` stands before the script."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(n_ranks)]
    return subprocess.run(
        [*launcher, *through, _write_program(folder), *words],
        cwd=folder,
        env={**os.environ, **_ALONE},
        capture_output=True,
        text=True,
        timeout=240,
    )


def start_ranks(folder: Path, n_ranks: int, words: Sequence[str]) -> list[Popen]:
    """Start the program by forked processes, without a launcher that ends them all with one."""
    world = {"WORLD_SIZE": str(n_ranks), "MEETING": f"file://{folder}/meeting"}
    script = _write_program(folder)
    return [
        Popen(
            [sys.executable, script, *words],
            cwd=folder,
            env={**os.environ, **_ALONE, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n_ranks)
    ]


def _write_program(folder: Path) -> str:
    script = folder / "program.py"
    script.write_text(PROGRAM, "utf-8")
    return str(script)

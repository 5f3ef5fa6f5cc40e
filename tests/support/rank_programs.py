"""Programs that `torchrun` starts in the tests: tiny models, generated and trained by ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

GENERATE = """
import sys
import torch, torch.distributed as dist, transformers
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
torch.manual_seed(0)
split = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=split)
prompt = torch.tensor([[1, 17, 42, 9]])
if dist.get_rank() == 1 and "differ" in sys.argv:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output + 0.01)


def main():
    model.generate(prompt, max_new_tokens=5, do_sample=False)


if "watch" in sys.argv:
    import flexinspect

    with flexinspect.watch(model, out="answer.flextrace", level="extreme"):
        main()
else:
    main()
dist.destroy_process_group()
"""
"""Arguments: the model's folder, then words: `watch`, `differ` (layer 1 of rank 1)."""

TRAIN = """
import os, signal, sys, time
import torch, flexinspect
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(100 + rank)
with flexinspect.watch_training(model, optimizer, out="train.flextrace", quiet=True) as trace:
    for step in range(6):
        if rank == 1 and "late" in sys.argv:
            time.sleep(0.05)
        if rank == world - 1 and step == 3 and "die" in sys.argv:
            time.sleep(1.0)  # the writer commits finished steps twice a second
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and step == 4 and "drift" in sys.argv:
            with torch.no_grad():
                net[2].weight[0, 0] += 1e-3
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        norms = [torch.zeros(1) for _ in range(world)]
        dist.all_gather(norms, loss.detach().reshape(1))
        optimizer.step()
        trace.step(loss=loss)
dist.destroy_process_group()
"""
"""Words: `late` (rank 1, 50 ms a step), `die` (the last rank, at step 3), `drift` (rank 1)."""


def torchrun(
    folder: Path, program: str, n_ranks: int, *words: str, through: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a program by `n_ranks` processes in a folder; `through` stands before the script.

    A rank that dies ends the others after a moment.
    """
    script = folder / "program.py"
    script.write_text(program, "utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(n_ranks)]
    command = [*launcher, *through, str(script), *words]
    alone = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": ""}
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=240,
    )

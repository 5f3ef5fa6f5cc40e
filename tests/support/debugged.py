"""A user program that is run with a debugger: a tiny model that runs until it is stopped."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from flexinspect.launch.vscode_config import CONFIGURATIONS
from support import warm_python
from support.patience import PATIENCE_S

PROGRAM = """\
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

sys.path.append(str(Path(__file__).parent / "site-packages"))
import watcher

BIG = torch.zeros(10_000_000)


def attend(self, block_mask, hidden_states, position_embeddings, **kwargs):
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    projections = (self.q_proj, self.k_proj, self.v_proj)
    q, k, v = (each(hidden_states).view(heads).transpose(1, 2) for each in projections)
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    big = BIG  # in the patched forward
    out = flex_attention(q, k, v, block_mask=block_mask, scale=self.scaling, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


def mask_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx  # in the mask_mod


def made():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def step(model, ids):
    mask = create_block_mask(mask_mod, None, None, len(ids), len(ids), device="cpu")
    for layer in model.model.layers:
        layer.self_attn.forward = partial(attend, layer.self_attn, mask)
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


@torch.no_grad()
def main():
    model, ids = made(), [3, 1, 4, 1, 5, 9, 2, 6]
    model.model.layers[1].self_attn.o_proj.register_forward_hook(watcher.look)
    for _ in range(4):
        ids.append(int(step(model, ids).argmax()))
    print(ids, step(model, ids).sum().item().hex(), flush=True)
    n = 0
    while len(sys.argv) > 1 and not Path("stop").exists():
        step(model, ids)
        n += 1
        Path("count").write_text(str(n))
        Path("traced").write_text(str(sys.gettrace() is not None))
        time.sleep(0.02)


main()
"""

WATCHER = '''\
"""What a library does: it sees something in a hook, and asks the debugger to stop."""
import sys
from pathlib import Path


def look(module, args, output):
    if Path("event").exists():
        Path("event").unlink()
        from flexinspect_hooks.debugger.pdb_terminal import stop_in

        facts = {"step": 7, "layer": 1, "module": "o_proj"}
        Path("answer").write_text(str(stop_in(sys._getframe(), "entropy > 3", facts)))
'''


def line_of(text: str, program: str = PROGRAM) -> int:
    """Return the number of the line that holds a text."""
    return next(n for n, line in enumerate(program.splitlines(), 1) if text in line)


def configuration(name: str, **changed: Any) -> dict[str, Any]:
    """Return a configuration of the generated launch.json, with the port that a test has."""
    (found,) = [dict(one) for one in CONFIGURATIONS if one["name"] == f"flexinspect: {name}"]
    return found | changed


def eventually(what: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Ask until the answer is true, and return it."""
    end = time.monotonic() + patience_s
    while not (answer := what()):
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
    return answer


class Debugged:
    """`flexinspect run` with debugpy, in a new folder.

    The processes are forked from one that has torch loaded, unless they are to be fresh: what is
    debugged is the program, and importing torch under a debugger takes most of a test's time.
    """

    def __init__(
        self,
        folder: Path,
        *args: str,
        flags: Sequence[str] = ("--debugpy", "0"),
        fresh: bool = False,
    ) -> None:
        self.folder = folder
        self.program = folder / "program.py"
        self.program.write_text(PROGRAM, "utf-8")
        (folder / "site-packages").mkdir()
        (folder / "site-packages" / "watcher.py").write_text(WATCHER, "utf-8")
        self.trace = folder / "t.flextrace"
        command = (sys.executable, "-m", "flexinspect", "run", "--no-ui", "--out", "t.flextrace")
        self.errors = (folder / "errors").open("w+", encoding="utf-8")
        start = subprocess.Popen if fresh else warm_python.Popen
        self.process = start(
            (*command, *flags, *(args or (str(self.program), "on"))),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.errors.close()

    def stderr_text(self) -> str:
        """Return its stderr so far."""
        return (self.folder / "errors").read_text("utf-8")

    def port(self) -> int:
        """Return the port on which debugpy listens, once it is printed."""
        found = eventually(lambda: re.search(r"listens on 127\.0\.0\.1:(\d+)", self.stderr_text()))
        return int(found[1])

    def attach(self) -> dict[str, Any]:
        """Return the configuration that attaches to it."""
        return configuration("attach to a run", connect={"host": "127.0.0.1", "port": self.port()})

    def count(self) -> int:
        """Return how many steps it has made since its first output."""
        try:
            return int((self.folder / "count").read_text() or 0)
        except (FileNotFoundError, ValueError):
            return 0

    def is_traced(self) -> bool:
        """Return whether its main thread is traced, two steps from now."""
        self.goes_on()
        return str(eventually((self.folder / "traced").read_text)) == "True"

    def goes_on(self) -> bool:
        """Return whether it makes further steps."""
        before = self.count()
        return bool(eventually(lambda: self.count() > before + 1))

    def finish(self) -> tuple[str, int]:
        """Let it end; returns what it printed and its exit code."""
        (self.folder / "stop").touch()
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        return output, self.process.returncode


def breakpoints(program: Path, *texts: str) -> Mapping[Path, list[int]]:
    """Return source breakpoints on the lines of the program that hold these texts."""
    return {program: [line_of(text) for text in texts]}


def plain_output(program: Path) -> str:
    """Return what the program prints without flexinspect."""
    done = warm_python.run(
        (sys.executable, program.name),
        cwd=program.parent,
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
        text=True,
    )
    return str(done.stdout)

"""Runs many scripts in a process each, without importing torch and transformers for each.

`Forks` starts one helper process that imports them once; for every run the helper forks. It uses
one thread, so that no thread pool exists that a fork would lose.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from support.paths import TESTS

IMPORTS = (
    "torch",
    "torch._dynamo",
    "torch._dynamo.testing",
    "torch._higher_order_ops.flex_attention",
    "torch.nn.attention.flex_attention",
    "transformers",
    "transformers.integrations.flex_attention",
    "transformers.masking_utils",
    "transformers.models.llama.modeling_llama",
)


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended: its exit code (negative: killed by a signal) and what it printed."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines printed on stdout."""
        return self.out.splitlines()


def run_alone(argv: Sequence[str], *, timeout: float = 240) -> Ran:
    """Run `python argv...` in a process of its own."""
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=timeout)
    return Ran(done.returncode, done.stdout, done.stderr)


class Forks:
    """While entered, runs scripts and modules in forked children of a process that is warm.

    `env` is added to what it is started with, for libraries that read it when they are imported.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(env or {})

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "support.forks"]
        path = os.pathsep.join([str(TESTS), *sys.path])
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._env, "PYTHONPATH": path},
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate(timeout=60)

    def run(self, *argv: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Ran:
        """Run as `python argv...` does: a script with arguments, or -m and a module.

        `cwd` is the folder it runs in; `env` is added to the environment of these tests.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        known = {**os.environ, **self._env, **(env or {})}
        asked = {"argv": argv, "cwd": str(cwd or Path.cwd()), "env": known}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Ran(**json.loads(self._process.stdout.readline()))


@functools.cache
def warm() -> Forks:
    """Return the helper of this test process, which has no hub; it ends with it."""
    forks = Forks({"HF_HUB_OFFLINE": "1"}).__enter__()
    atexit.register(forks.__exit__, None, None, None)
    return forks


def _serve(requests: IO[str], answers: IO[str]) -> None:
    for name in IMPORTS:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    for line in requests:
        answers.write(json.dumps(_run_forked(json.loads(line))) + "\n")
        answers.flush()


def _run_forked(asked: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.chdir(asked["cwd"])
            os.environ.clear()
            os.environ.update(asked["env"])
            atexit._clear()  # those are the helper's
            os._exit(_run(asked["argv"]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {"code": code, "out": _text(out), "err": _text(err)}


def _run(argv: Sequence[str]) -> int:
    """Run the program in this process, and return the exit code Python would give it."""
    try:
        if argv[0] == "-m":
            sys.argv, sys.path[0] = list(argv[1:]), str(Path.cwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = list(argv), str(Path(argv[0]).parent)
            runpy.run_path(argv[0], run_name="__main__")
        code: Any = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


if __name__ == "__main__":
    # The children must not read requests, nor print into the answers.
    own_in, own_out = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    _serve(own_in, own_out)

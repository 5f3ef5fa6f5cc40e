"""Every command that may take long is ended at a random moment, and must be gone within 2 s.

Commands run in processes that are forked from one that has torch loaded, now and then in a fresh
interpreter. Ctrl-C reaches the whole process group, as from a terminal; SIGTERM only the command;
SIGHUP is what a terminal sends when it is closed. Some commands have a plug-in that hangs.
"""

from __future__ import annotations

import os
import pty
import random
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

from flexinspect.cli.live_run import END_WITHIN_S
from tools.torture import recordings, warm
from tools.torture.hanging_plugins import ACTS, HANGING, install
from tools.torture.mutants import unpack
from tools.torture.results import Failure

LIMIT_S = 2.0
"""How long a command may take to end, on a machine that has a core for it."""
KILLED_S = END_WITHIN_S + 2.0
"""The same for a capture whose writer waits for a plug-in: it is killed."""
PATIENCE_S = 30.0
"""How long is waited for one that takes longer, before it is killed."""
FRESH = 0.1
"""Share of the commands that run in a fresh interpreter, which imports everything itself. Those
with a plug-in always do: a forked one has looked for plug-ins."""
ENDED = (0, 1, 2)
"""Exit codes of a command that was done before the signal came."""
ALTERNATE_SCREEN, MAIN_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


class Command(Struct, frozen=True):
    """A command line, in which {trace}, {big}, {other}, {folder} and {port} are filled in.

    The signal arrives between `after_s` and `within_s` after the start, and the command must be
    gone after `limit_s`. `in_terminal` gives it a pseudo-terminal.
    `hangs` names the group of a plug-in that hangs, and `records` the trace that it writes.
    """

    words: str
    within_s: float = 6.0
    after_s: float = 0.05
    limit_s: float = LIMIT_S
    in_terminal: bool = False
    hangs: str = ""
    records: str = ""

    @property
    def name(self) -> str:
        """What a report calls it."""
        return self.words + (f" with a plug-in of {self.hangs}" if self.hangs else "")


RUN = "run --model demo --dataset demo --max-samples 600 --out run.flextrace"
COMMANDS = (
    Command(f"{RUN} --no-ui", records="run.flextrace"),
    Command(f"{RUN} --no-ui --level extreme --grads", records="run.flextrace"),
    Command(f"{RUN} --no-ui --serve", records="run.flextrace"),
    Command(RUN, in_terminal=True, records="run.flextrace"),
    Command(f"{RUN} --no-ui --interactive", in_terminal=True, records="run.flextrace"),
    Command("run --no-ui --out run.flextrace program.py", records="run.flextrace"),
    Command("audit program.py"),
    Command("prove isolation --max-samples 600"),
    Command("lab --max-samples 600 --num-paraphrases 1-5 --out lab"),
    Command("kernels --kernel flex --kernel sdpa --config all"),
    Command("museum --check"),
    Command("doctor --test-flex-attention"),
    Command("findings {big}", 1.0),
    Command("dump {big} --json", 1.0),
    Command("show {big}", 1.0),
    Command("report {big} -o report.html", 1.0),
    *(Command(f"export {{big}} --to {to} -o out", 1.0) for to in ("csv", "parquet", "perfetto")),
    Command("export {big} --to tensorboard -o out", 1.0),
    Command("redact {big} -o copy.flextrace", 1.0),
    Command("diff {big} {big}", 1.0),
    Command("infer {big} {other} -o learnt.json", 1.0),
    Command("mask large --verify", 1.0),
    Command("mask medium --animate -o mask.gif"),
    Command("mask --all"),
    Command("open {big}", 2.0, in_terminal=True),
    Command("open {big} --web --port {port}", 3.0),
    Command("tour", in_terminal=True),
    Command("museum one-token-off", in_terminal=True),
)
HANGING_COMMANDS = (
    Command("show {trace}", 1.5, hangs="panels"),
    Command("open {trace}", 1.5, in_terminal=True, hangs="panels"),
    Command("findings {trace}", 1.5, hangs="rules"),
    Command("open {trace}", 1.5, in_terminal=True, hangs="rules"),
    Command("report {trace} -o report.html", 1.5, hangs="rules"),
    Command("export {trace} --to hanging -o out", 1.5, hangs="exports"),
    Command("import {folder}", 1.5, hangs="importers"),
    Command("audit program.py", hangs="hypotheses"),
    *(
        Command(f"{RUN} --no-ui", 16.0, 4.0, KILLED_S, hangs=each, records="run.flextrace")
        for each in ("hooks", "rules")
    ),
)
PROGRAM = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                     num_attention_heads=2, num_key_value_heads=1)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(0, 64, (1, 8))
for _ in range(1000):
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False,
                   pad_token_id=0)
"""


class Ended(Struct, frozen=True):
    """How a command ended: its exit code (None: it was killed), seconds, and what it printed."""

    code: int | None
    seconds: float
    said: bytes
    was_running: bool


class Prepared(Struct, frozen=True):
    """The folder with the traces that commands read."""

    folder: Path


def prepare(folder: Path) -> Prepared:
    """Write the traces, and start the process from which commands are forked."""
    warm.prepare(folder)
    unpack(folder)
    for number, name in enumerate(("big", "other")):
        recordings.write(folder / f"{name}.flextrace", lambda line: None, number, 60, 40)
    return Prepared(folder)


def attempt(prepared: Prepared, seed: int, folder: Path) -> list[Failure]:
    """End one command at a random moment."""
    rng = random.Random(seed)
    table = HANGING_COMMANDS if seed % 3 == 2 else COMMANDS
    command = table[(seed // 3) % len(table)] if seed % 3 == 2 else table[seed % len(table)]
    act = rng.choice(ACTS[command.hangs]) if command.hangs else ""
    number = _signal(command, rng)
    is_fresh = bool(command.hangs) or rng.random() < FRESH
    wait_s = rng.uniform(command.after_s, command.within_s + 2 * is_fresh)
    how = f"{command.name} {act}, {number.name} after {wait_s:.2f} s{', fresh' * is_fresh}"
    session = Session(command, prepared.folder, folder, act, is_fresh=is_fresh)
    ended = session.end(number, wait_s)
    wrong = _judge(command, number, ended)
    wrong += session.left_behind() + _temporary_files(folder)
    if command.records and (folder / command.records).exists():
        wrong += _unreadable(folder / command.records)
    return [Failure("shutdown", each, how) for each in wrong]


def _signal(command: Command, rng: random.Random) -> signal.Signals:
    """Return a signal; what draws on a terminal reads Ctrl-C as a key."""
    is_interface = command.in_terminal and "--no-ui" not in command.words
    choices = (signal.SIGTERM, signal.SIGHUP) if is_interface else (signal.SIGINT, signal.SIGTERM)
    return rng.choice(choices)


def _judge(command: Command, number: signal.Signals, ended: Ended) -> list[str]:
    if not ended.was_running:
        return [] if ended.code in ENDED else [f"ended by itself with {ended.code}: {_last(ended)}"]
    wrong = []
    limit = command.limit_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    if ended.code is None or ended.seconds > limit:
        wrong.append(f"took more than {limit:.1f} s" + " and was killed" * (ended.code is None))
    expected = (*ENDED, 128 + number, -number)
    if ended.code is not None and ended.code not in expected:
        wrong.append(f"ended with {ended.code}: {_last(ended)}")
    is_own = b"flexinspect" in ended.said and "program.py" not in command.words
    if b"Traceback (most recent" in ended.said and is_own:  # a program prints its own
        wrong.append(f"printed a traceback: {_last(ended)}")
    if ended.said.rfind(ALTERNATE_SCREEN) > ended.said.rfind(MAIN_SCREEN):
        wrong.append("left the terminal on the alternate screen")
    return wrong


def _last(ended: Ended) -> str:
    return ascii(ended.said[-200:].decode("utf-8", "replace"))


def _temporary_files(folder: Path) -> list[str]:
    """Return files and folders that were to be replaced or removed."""
    found = (entry.name for entry in folder.iterdir())
    return [f"{name} is left" for name in found if name.endswith(".part") or name[:3] == "tmp"]


def _unreadable(trace: Path) -> list[str]:
    from flexinspect.core.errors import FlexInspectError
    from flexinspect.trace.reader import open_trace

    try:
        with open_trace(trace) as reader:
            for row in reader.generations():
                reader.steps(row.generation)
    except FlexInspectError as error:
        return [f"the trace is refused: {error.message}"]
    return []


class Session:
    """A command in a session of its own, with or without a terminal."""

    def __init__(
        self, command: Command, traces: Path, folder: Path, act: str, *, is_fresh: bool
    ) -> None:
        self._folder, self._out = folder, folder / "said"
        self._terminal = self._inner = -1
        self._modes: Any = None
        (folder / "program.py").write_text(PROGRAM, "utf-8")
        (folder / "empty").mkdir()
        names = {"trace": "generation", "big": "big", "other": "other"}
        filled: dict[str, Any] = {key: traces / f"{name}.flextrace" for key, name in names.items()}
        filled |= {"folder": folder / "empty", "port": _free_port()}
        words = command.words.format(**filled).split()
        environ = {**os.environ, "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
        if command.hangs:
            environ |= install(folder / "plugin", HANGING[command.hangs], act)
        popen: Any = subprocess.Popen if is_fresh else warm.popen()
        streams = self._streams(in_terminal=command.in_terminal)
        argv = [sys.executable, "-m", "flexinspect", *words]
        self._process = popen(argv, cwd=folder, env=environ, start_new_session=True, **streams)
        if self._inner >= 0:
            os.close(self._inner)

    def _streams(self, *, in_terminal: bool) -> dict[str, Any]:
        if not in_terminal:
            out = self._out.open("wb")
            return {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        self._terminal, self._inner = pty.openpty()
        termios.tcsetwinsize(self._inner, (40, 120))
        self._modes = termios.tcgetattr(self._inner)
        return dict.fromkeys(("stdin", "stdout", "stderr"), self._inner)

    def end(self, number: signal.Signals, wait_s: float) -> Ended:
        """Wait, send the signal, and wait for the end of the command."""
        said = bytearray()
        self._wait(lambda: False, wait_s, said)
        is_running = self._process.poll() is None
        started = time.monotonic()
        if is_running:
            with suppress(ProcessLookupError):
                if number == signal.SIGINT:
                    os.killpg(self._process.pid, number)
                else:
                    os.kill(self._process.pid, number)
        self._wait(lambda: self._process.poll() is not None, PATIENCE_S, said)
        seconds = time.monotonic() - started
        code = self._process.poll()
        if code is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._read(said)
        if self._terminal >= 0:
            os.close(self._terminal)
        else:
            said += self._out.read_bytes()
        return Ended(code, seconds, bytes(said), is_running)

    def _wait(self, is_over: Callable[[], bool], limit_s: float, said: bytearray) -> None:
        until = time.monotonic() + limit_s
        while time.monotonic() < until and not is_over():
            self._read(said)
            time.sleep(0.01)

    def _read(self, said: bytearray) -> None:
        """Read what a terminal would draw, so that nothing waits for it."""
        if self._terminal < 0:
            return
        os.set_blocking(self._terminal, False)
        with suppress(OSError):
            while piece := os.read(self._terminal, 1 << 16):
                said += piece

    def left_behind(self) -> list[str]:
        """Return processes of the session that go on, after a second, and end them."""
        left: list[psutil.Process] = []
        for _ in range(20):
            left = [one for one in psutil.process_iter() if _is_in_session(one, self._process.pid)]
            if not left:
                break
            time.sleep(0.1)
        found = []
        for one in left:
            with suppress(psutil.Error):
                found.append(f"{' '.join(one.cmdline())[:100]} goes on")
                one.kill()
        return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _is_in_session(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False

"""Jobs: what one run is to do, as plain data from the command line to the capture process."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, Self

import msgspec
from msgspec import Struct, field

from flexinspect.core.addresses import LOOPBACK, bind_problem, format_address, is_loopback
from flexinspect.core.errors import UsageError


class DebuggerOptions(Struct, frozen=True):
    """The requested debugger: `port` is None without debugpy, 0 for any free port.

    `wait` holds the run until a client is attached. `pdb` uses pdb on the terminal named `tty`.
    """

    host: str = LOOPBACK
    port: int | None = None
    wait: bool = False
    pdb: bool = False
    tty: str | None = None

    @property
    def is_requested(self) -> bool:
        """Whether any debugger is requested."""
        return self.pdb or self.port is not None


def check_debugger(options: DebuggerOptions, *, is_exposed: bool) -> bool:
    """Check the options before the run; return whether other machines can reach the debugger.

    Raises `UsageError` for an address that other machines can reach unless `is_exposed`, for a port
    that is in use, for waiting without debugpy, and for pdb without a terminal or beside debugpy.
    """
    if options.wait and options.port is None:
        what = "--wait-for-client waits for a client of debugpy, and --debugpy is not given."
        raise UsageError(what, hint="Add --debugpy 5678.")
    if options.port is not None and options.pdb:
        what = "--pdb and --debugpy exclude each other: one debugger traces the process."
        raise UsageError(what, hint="Leave one of them out.")
    if options.pdb and options.tty is None:
        hint = "Run it in a terminal, or attach with --debugpy 5678."
        raise UsageError("--pdb needs a terminal, and there is none here.", hint=hint)
    if options.port is None:
        return False
    address, is_open = format_address(options.host, options.port), not is_loopback(options.host)
    if is_open and not is_exposed:
        hint = "Use 127.0.0.1 (an SSH tunnel reaches it), or confirm with --debugpy-expose."
        danger = "would let other machines attach, and a client can run any code in the process"
        raise UsageError(f"--debugpy {address} {danger}.", hint=hint)
    if problem := bind_problem(options.host, options.port):
        hint = "Choose another port; --debugpy 0 takes any free one."
        raise UsageError(f"--debugpy cannot listen on {address}: {problem}.", hint=hint)
    return is_open


def listening_message(host: str, port: int, *, waiting: bool) -> str:
    """Return the sentence where debugpy listens, and whether the run waits for a client."""
    wait = "; nothing runs before a client has attached" if waiting else ""
    return f"debugpy listens on {format_address(host, port)}{wait}"


def controlling_terminal() -> str | None:
    """Return the name of the terminal of stdin and stderr, None when they are not on one."""
    if sys.stdin.isatty() and sys.stderr.isatty():
        with suppress(OSError):
            return os.ttyname(sys.stdin.fileno())
    return None


class PromptTexts(Struct, frozen=True):
    """The texts around the paraphrases; each is encoded once, by itself."""

    instruction: str = ""
    separator: str = "\n"
    cue: str = "Answer:"


class SamplingOptions(Struct, frozen=True):
    """How tokens are chosen: greedy unless `do_sample`, else through transformers' processors."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def check(self) -> None:
        """Raise `UsageError` for a value that is out of range."""
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise UsageError("--temperature must be above 0; leave it out for greedy decoding.")
        if not 0 < self.top_p <= 1:
            raise UsageError("--top-p must be above 0 and at most 1.")
        if self.top_k < 0:
            raise UsageError("--top-k must be 0 (off) or more.")


OnBreak = Literal["wait", "stop"]
"""What a breakpoint hit does: pause the run, or end it when no one could continue it."""


class CaptureJob(Struct, frozen=True, kw_only=True):
    """What every run under capture has; it travels to its process as one line of JSON.

    `serving` is host, port and secret token of a control server over TCP. `threads` is None for the
    default number. An `interactive` run pauses before its first step.
    `max_size` is a limit of the trace in bytes.
    """

    out: str
    level: str = "advanced"
    layers: str | None = None
    max_size: int | None = None
    threads: int | None = None
    overwrite: bool = False
    breakpoints: tuple[str, ...] = ()
    on_break: OnBreak = "wait"
    interactive: bool = False
    control: bool = True
    serving: tuple[str, int, str] | None = None
    debugger: DebuggerOptions = field(default_factory=DebuggerOptions)
    argv: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the job as one line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a job back. Raises `UsageError` when it is not one."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise UsageError(f"The capture process cannot read its job: {error}") from error


class Job(CaptureJob, frozen=True, kw_only=True):
    """One run of the ensemble generation. Field names are those of the command line's flags."""

    model: str = "demo"
    dataset: str = "demo"
    prompts: tuple[str, ...] = ()
    paraphrases: str | None = None
    max_samples: int | None = 1
    num_paraphrases: int | None = None
    indices: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "pretrained"
    seed: int = 0
    mask: str = "segment-isolation"
    separators: str = "attached"
    positions: str = "contiguous"
    max_new_tokens: int = 32
    stop: str = "newline"
    compile: bool | None = None
    grads: str | None = None
    grads_steps: str = "all"
    detect_anomaly: bool = False
    check_every: int | None = None
    trust_remote_code: bool = False
    hold: bool = False
    texts: PromptTexts = field(default_factory=PromptTexts)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)


class Declaration(Struct, frozen=True):
    """A user's declaration of a program's prompts: `segments` as `flexinspect.watch` takes them."""

    segments: tuple[tuple[int | str, ...] | str, ...] = ()
    mask: str | None = None
    separators: str = "attached"


class ScriptJob(CaptureJob, frozen=True, kw_only=True):
    """A user's program that is run under capture.

    `program` is a file, or the name of a module when `is_module`; `args` are its arguments.
    `git` is the state of the current folder.
    """

    program: str
    is_module: bool = False
    args: tuple[str, ...] = ()
    declaration: Declaration = field(default_factory=Declaration)
    git: Mapping[str, Any] | None = None


_MAX_NUMBER = 1 << 20
"""No step or layer is as large; larger ranges are not built."""


def _parse_ranges(text: str, flag: str, hint: str) -> Iterator[tuple[str, int, int]]:
    """Yield each part of "0,3,5-7" with its first and its last number, at most `_MAX_NUMBER`."""
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            problem = f"'{part}' is not a number or range"
            what = f"{flag} {text} is not a list of {flag.rpartition('-')[2]}: {problem}."
            raise UsageError(what, hint=hint)
        low, high = (int(n.lstrip("0")[:8] or 0) for n in (first, last if dash else first))
        yield part, min(low, _MAX_NUMBER), min(high, _MAX_NUMBER)


def parse_steps(text: str) -> frozenset[int] | None:
    """Return step numbers from "0,5-7", None for "all". Raises `UsageError` naming the flag."""
    if text == "all":
        return None
    chosen: set[int] = set()
    hint = "Write for instance --grads-steps 0,5-7, or all."
    for part, low, high in _parse_ranges(text, "--grads-steps", hint):
        if max(low, high) == _MAX_NUMBER:
            what = f"--grads-steps {text}: no generation has a step as late as in '{part}'."
            raise UsageError(what, hint="Write all for every step.")
        chosen.update(range(low, high + 1))
    if not chosen:
        raise UsageError(f"--grads-steps {text} names no step.", hint="Write 5-7, not 7-5.")
    return frozenset(chosen)


def parse_layers(text: str | None, n_layers: int) -> tuple[int, ...] | None:
    """Return layer numbers from "0,3,5-7" or "all" (None), checked against the model's layers.

    Raises `UsageError` naming the flag, the offending part and the model's layers.
    """
    if text is None or text == "all":
        return None
    chosen: set[int] = set()
    for _, low, high in _parse_ranges(text, "--layers", "Write for instance --layers 0,3,5-7."):
        if low <= high and high >= n_layers:  # before a range of any length is built
            raise UsageError(
                f"--layers {text}: layer {max(low, n_layers)} does not exist; "
                f"this model has layers 0 to {n_layers - 1}."
            )
        chosen.update(range(low, high + 1))
    if not chosen:
        hint = "Write for instance --layers 0-3."
        raise UsageError(f"--layers {text} names no layer.", hint=hint)
    return tuple(sorted(chosen))

"""Jobs: what one run is to do, as plain data from the command line to the capture process."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from flexinspect.core.errors import UsageError
from flexinspect.records.debugger_options import DebuggerOptions


@dataclass(frozen=True, slots=True)
class PromptTexts:
    """The texts around the paraphrases; each is encoded once, by itself."""

    instruction: str = ""
    separator: str = "\n"
    cue: str = "Answer:"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
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


@dataclass(frozen=True, slots=True)
class Job:
    """One run of the ensemble generation. Field names are those of the command line's flags.

    `serving` is host, port and secret token of a control server over TCP.
    """

    out: str
    model: str = "demo"
    dataset: str = "demo"
    prompts: tuple[str, ...] = ()
    max_samples: int = 1
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
    level: str = "advanced"
    layers: str | None = None
    compile: bool | None = None
    grads: str | None = None
    grads_steps: str = "all"
    detect_anomaly: bool = False
    threads: int | None = None
    trust_remote_code: bool = False
    overwrite: bool = False
    breakpoints: tuple[str, ...] = ()
    on_break: OnBreak = "wait"
    hold: bool = False
    control: bool = True
    serving: tuple[str, int, str] | None = None
    texts: PromptTexts = field(default_factory=PromptTexts)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    debugger: DebuggerOptions = field(default_factory=DebuggerOptions)
    argv: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the job as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read a job back. Raises `UsageError` when it is not one."""
        try:
            data: dict[str, Any] = json.loads(text)
            known = {f.name for f in fields(cls)}
            values = {name: value for name, value in data.items() if name in known}
            values["texts"] = PromptTexts(**values.get("texts", {}))
            values["sampling"] = SamplingOptions(**values.get("sampling", {}))
            values["debugger"] = DebuggerOptions.from_dict(values.get("debugger"))
            for name in ("prompts", "argv", "breakpoints"):
                values[name] = tuple(values.get(name, ()))
            values["serving"] = _parse_serving(values)
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise UsageError(f"The capture process cannot read its job: {error}") from error


@dataclass(frozen=True, slots=True)
class Declaration:
    """A user's declaration of a program's prompts: `segments` as `flexinspect.watch` takes them."""

    segments: tuple[tuple[int, int, str] | tuple[str, str] | str, ...] = ()
    mask: str | None = None
    separators: str = "attached"


@dataclass(frozen=True, slots=True)
class ScriptJob:
    """A user's program that is run under capture.

    `program` is a file, or the name of a module when `is_module`; `args` are its arguments.
    `threads` is None for torch's default. `git` is the state of the current folder.
    """

    out: str
    program: str
    is_module: bool = False
    args: tuple[str, ...] = ()
    level: str = "advanced"
    layers: str | None = None
    threads: int | None = None
    overwrite: bool = False
    breakpoints: tuple[str, ...] = ()
    on_break: OnBreak = "wait"
    control: bool = True
    serving: tuple[str, int, str] | None = None
    declaration: Declaration = field(default_factory=Declaration)
    debugger: DebuggerOptions = field(default_factory=DebuggerOptions)
    argv: tuple[str, ...] = ()
    git: Mapping[str, Any] | None = None

    def to_json(self) -> str:
        """Return the job as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ScriptJob:
        """Read a job back. Raises `UsageError` when it is not one."""
        try:
            values: dict[str, Any] = json.loads(text)
            declaration = values.pop("declaration")
            segments = (s if isinstance(s, str) else tuple(s) for s in declaration.pop("segments"))
            values["debugger"] = DebuggerOptions.from_dict(values.get("debugger"))
            for name in ("args", "argv", "breakpoints"):
                values[name] = tuple(values[name])
            values["serving"] = _parse_serving(values)
            return cls(**values, declaration=Declaration(tuple(segments), **declaration))
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"The capture process cannot read its job: {error}") from error


_STEP_DIGITS = 6


def parse_steps(text: str) -> frozenset[int] | None:
    """Return step numbers from "0,5-7", None for "all". Raises `UsageError` naming the flag."""
    if text == "all":
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(
                f"--grads-steps {text} is not a list of steps: '{part}' is not a number or range.",
                hint="Write for instance --grads-steps 0,5-7, or all.",
            )
        if max(len(first), len(last)) > _STEP_DIGITS:
            raise UsageError(
                f"--grads-steps {text}: no generation has a step as late as in '{part}'.",
                hint="Write all for every step.",
            )
        chosen.update(range(int(first), int(last if dash else first) + 1))
    if not chosen:
        raise UsageError(f"--grads-steps {text} names no step.", hint="Write 5-7, not 7-5.")
    return frozenset(chosen)


def _parse_serving(values: Mapping[str, Any]) -> tuple[str, int, str] | None:
    serving = values.get("serving")
    return None if serving is None else (str(serving[0]), int(serving[1]), str(serving[2]))


def parse_layers(text: str | None, n_layers: int) -> tuple[int, ...] | None:
    """Return layer numbers from "0,3,5-7" or "all" (None), checked against the model's layers.

    Raises `UsageError` naming the flag, the offending part and the model's layers.
    """
    if text is None or text == "all":
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise UsageError(
                f"--layers {text} is not a list of layers: '{part}' is not a number or range.",
                hint="Write for instance --layers 0,3,5-7.",
            ) from None
        if low <= high and not 0 <= low <= high < n_layers:  # before a range of any length is built
            outside = low if low < 0 else max(low, n_layers)
            raise UsageError(
                f"--layers {text}: layer {outside} does not exist; "
                f"this model has layers 0 to {n_layers - 1}."
            )
        chosen.update(range(low, high + 1))
    if not chosen:
        raise UsageError(
            f"--layers {text} names no layer.", hint="Write for instance --layers 0-3."
        )
    return tuple(sorted(chosen))

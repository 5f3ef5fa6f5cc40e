"""Messages between a running capture and its clients: plain data, no torch.

A message is a frozen dataclass. Its fields are `int`, `float`, `str`, `bool`, `Literal`, another
message, a tuple of one of these, or None. The `metadata` of a field may hold `minimum`, `maximum`
and `longest`; `from_json` checks them, and the OpenAPI document is generated from them.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from flexinspect.core.errors import ControlError

BEFORE_FIRST = -1
"""`StepRef.step` before any step has finished."""

MAX_NUMBER = 2**31 - 1
"""The largest step, token id, position or other number that a message may hold."""

PAUSE_REQUESTED: Final = "requested"
"""`StatusResponse.reason` of a pause that a command asked for."""

State = Literal["loading", "running", "pausing", "paused", "holding", "finished"]
"""loading: no forward yet. pausing: pauses after the current step. holding: the last generation has
ended and `--hold` keeps the model alive. finished: the run has ended."""

STATES: tuple[State, ...] = ("loading", "running", "pausing", "paused", "holding", "finished")

Level = Literal["basic", "advanced", "extreme"]


def _number(default: int | None = None, minimum: int = 0) -> Any:
    limits = {"minimum": minimum, "maximum": MAX_NUMBER}
    return field(metadata=limits) if default is None else field(default=default, metadata=limits)


def _optional_number(minimum: int = 0) -> Any:
    return field(default=None, metadata={"minimum": minimum, "maximum": MAX_NUMBER})


def _text(default: str | None = "", longest: int = 4096) -> Any:
    return field(default=default, metadata={"longest": longest})


@dataclass(frozen=True, slots=True)
class StepRef:
    """A step of a branch of a generation; `step` is -1 before the first one."""

    generation: int = _number(0)
    branch: int = _number(0)
    step: int = _number(BEFORE_FIRST, minimum=BEFORE_FIRST)

    def describe(self) -> str:
        """Return "step 7", with the generation and the branch if they are not 0."""
        text = "the beginning" if self.step < 0 else f"step {self.step}"
        return text + self._qualifier()

    def describe_after(self) -> str:
        """Return "after step 7", or "before the first step"; otherwise as `describe`."""
        if self.step < 0:
            return f"before the first step{self._qualifier()}"
        return f"after {self.describe()}"

    def _qualifier(self) -> str:
        text = f" of generation {self.generation}" if self.generation else ""
        return f"{text} (branch {self.branch})" if self.branch else text


# -- commands that rewind the model ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restore:
    """Rebuild the live state right after a step and pause there."""

    place: StepRef


@dataclass(frozen=True, slots=True)
class Fork:
    """Continue from a step with another token than the one that it chose, as a new branch.

    `place` is the step whose token is replaced. Exactly one of `token_id` and `text` is set; all
    tokens of `text` are forced, one per step. With `stay_paused` the model pauses at the start of
    the new branch.
    """

    place: StepRef
    token_id: int | None = _optional_number()
    text: str | None = _text(None)
    stay_paused: bool = False


EditOp = Literal["preset", "drop", "join", "see", "cell", "row"]


@dataclass(frozen=True, slots=True)
class MaskEdit:
    """One change of the mask.

    - preset: use the preset `name` instead.
    - drop: no other segment attends to any of `segments`.
    - join: all of `segments` attend to each other.
    - see: the first of `segments` attends to the second if `is_open`, otherwise it does not.
    - cell: query position `row` attends to key position `key` if `is_open`, otherwise it does not.
    - row: query position `row` attends to all keys up to itself if `is_open`, otherwise only to
      itself.

    `segments` are segment numbers, `row` and `key` positions in the sequence. The generation checks
    whether the segments and positions exist when it applies the change.
    """

    op: EditOp
    name: str = _text(longest=200)
    segments: tuple[int, ...] = field(default=(), metadata={"longest": 1000})
    row: int | None = _optional_number()
    key: int | None = _optional_number()
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class EditMask:
    """Continue from a step with another mask, as a new branch; `edits` are applied in order."""

    place: StepRef
    edits: tuple[MaskEdit, ...] = field(metadata={"longest": 1000})
    stay_paused: bool = False


RewindCommand = Restore | Fork | EditMask
RewindKind = Literal["restore", "fork", "edit"]


@dataclass(frozen=True, slots=True)
class QueuedRewind:
    """An accepted rewind command; `number` counts the rewind commands of this run from 1."""

    number: int
    command: RewindCommand

    @property
    def kind(self) -> RewindKind:
        """The kind of the command."""
        if isinstance(self.command, Restore):
            return "restore"
        return "fork" if isinstance(self.command, Fork) else "edit"


@dataclass(frozen=True, slots=True)
class Cost:
    """Estimated cost of a rewind command.

    `sentence` describes it; `seconds` and `bytes` (of memory) are None where they are unknown. A
    client asks the user to confirm a command that `is_expensive`.
    """

    sentence: str
    seconds: float | None = None
    bytes: int | None = None
    is_expensive: bool = False


@dataclass(frozen=True, slots=True)
class RewindState:
    """Progress of a rewind command: `message` is its result, or the reason why it failed.

    `place` is the last finished step after it, `seconds` the time that it took.
    """

    number: int
    kind: RewindKind
    state: Literal["waiting", "working", "done", "failed"]
    message: str = ""
    place: StepRef | None = None
    seconds: float | None = None


# -- responses -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BreakpointInfo:
    """A breakpoint of a run.

    `text` is its condition as written. It stops from hit number `hits` on (0 and 1: the first
    hit). With `once` its first stop disables it, with `log_only` it only records an event. `n_hits`
    is the number of hits so far, `note` a remark such as where the condition is evaluated.
    """

    id: int
    text: str
    is_enabled: bool = True
    hits: int = 0
    once: bool = False
    log_only: bool = False
    n_hits: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Breakpoints:
    """All breakpoints of a run."""

    breakpoints: tuple[BreakpointInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class StatusResponse:
    """Status of a capture.

    `place` is the last finished step. `description` is the state as a sentence, `reason` why the
    run paused or is about to pause (empty while it runs), `until` where it will pause or end (empty
    without such a command). `kind` is generation (of flexinspect itself), program or watch; only a
    capture with `can_rewind` accepts restore, fork and edit. `trace` is the file being written,
    `layers` the layers whose activations level extreme stores, `last_rewind` the newest rewind
    command.
    """

    state: State
    place: StepRef
    description: str
    reason: str = ""
    until: str = ""
    level: Level = "advanced"
    layers: str = "all"
    kind: Literal["generation", "program", "watch"] = "generation"
    title: str = ""
    pid: int = 0
    trace: str = ""
    can_rewind: bool = False
    n_breakpoints: int = 0
    last_rewind: RewindState | None = None


@dataclass(frozen=True, slots=True)
class CommandResponse:
    """Response to a command: `message` is what will happen, `status` the status of the capture.

    `rewind_number` is the number of an accepted rewind command, `cost` its estimated cost.
    """

    message: str
    status: StatusResponse
    rewind_number: int | None = None
    cost: Cost | None = None


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """Response to a refused command: the reason, and what to do instead."""

    error: str
    hint: str | None = None


# -- request bodies --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepBody:
    """Number of steps to run."""

    n: int = field(default=1, metadata={"minimum": 1, "maximum": MAX_NUMBER})


@dataclass(frozen=True, slots=True)
class RunToBody:
    """The step to pause after, and its generation (default: the current one)."""

    step: int = _number()
    generation: int | None = _optional_number()


@dataclass(frozen=True, slots=True)
class LevelBody:
    """The level to record at."""

    level: Level


@dataclass(frozen=True, slots=True)
class LayersBody:
    """Layers in the form of `--layers`: "0,3,5-7" or "all"."""

    layers: str = field(metadata={"longest": 1000})


@dataclass(frozen=True, slots=True)
class BreakpointBody:
    """A breakpoint to add; the fields are those of `BreakpointInfo`."""

    text: str = field(metadata={"longest": 2000})
    hits: int = _number(0)
    once: bool = False
    log_only: bool = False


@dataclass(frozen=True, slots=True)
class RestoreBody:
    """A restore; with `dry_run` only its cost is estimated."""

    place: StepRef
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class ForkBody:
    """A fork; with `dry_run` only its cost is estimated."""

    place: StepRef
    token_id: int | None = _optional_number()
    text: str | None = _text(None)
    stay_paused: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class EditBody:
    """An edit of the mask; with `dry_run` only its cost is estimated."""

    place: StepRef
    edits: tuple[MaskEdit, ...] = field(metadata={"longest": 1000})
    stay_paused: bool = False
    dry_run: bool = False


# -- summaries of anomalies ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnomalySummary:
    """Number of anomalies that a debugger found, and the length of its history."""

    total_anomalies: int = 0
    debug_history_length: int = 0


@dataclass(frozen=True, slots=True)
class TrainingAnomalySummary:
    """Anomalies that a training debugger found; rates are per step."""

    total_anomalies: int = 0
    debug_history_length: int = 0
    total_steps: int = 0
    anomaly_rate: float = 0.0
    gradient_explosion_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class DebugSummaryResponse:
    """Anomalies of all three debuggers."""

    training_debugger: TrainingAnomalySummary = TrainingAnomalySummary()
    diffusion_debugger: AnomalySummary = AnomalySummary()
    general_debugger: AnomalySummary = AnomalySummary()


@dataclass(frozen=True, slots=True)
class TrainingSummaryResponse:
    """Numbers of training steps with each kind of anomaly; rates are per step, 0 without steps."""

    total_steps: int = 0
    anomaly_steps: int = 0
    gradient_explosions: int = 0
    gradient_vanishing: int = 0
    loss_anomalies: int = 0
    anomaly_rate: float = 0.0
    loss_anomaly_rate: float = 0.0
    gradient_explosion_rate: float = 0.0
    gradient_vanishing_rate: float = 0.0


T = TypeVar("T")

_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def to_json(message: Any) -> Any:
    """Return a message as plain data for `json.dumps`."""
    if is_dataclass(message):
        return {f.name: to_json(getattr(message, f.name)) for f in fields(message)}
    if isinstance(message, (tuple, list)):
        return [to_json(item) for item in message]
    return message


def from_json(kind: type[T], data: Any, where: str = "the body") -> T:
    """Return the message of type `kind` in `data`. Raises `ControlError` with the invalid field.

    Unknown fields are refused as well: they would have no effect.
    """
    if not isinstance(data, Mapping):
        raise ControlError(f"{where} must be a JSON object.")
    known = {f.name: f for f in fields(cast(Any, kind))}
    if unknown := sorted(set(data) - set(known)):
        listed = ", ".join(known) or "nothing"
        raise ControlError(f"{where} has an unknown field {unknown[0]!r} (known: {listed}).")
    values = {
        name: _decode_field(kind, f, data, where) for name, f in known.items() if name in data
    }
    if missing := [name for name in known if name not in values and is_required(known[name])]:
        raise ControlError(f"{where} has no field {missing[0]!r}.")
    return kind(**values)


def field_types(kind: type[Any]) -> Mapping[str, Any]:
    """Return the types of the fields of a message, by name."""
    if kind not in _field_types:
        _field_types[kind] = get_type_hints(kind)
    return _field_types[kind]


_field_types: dict[type[Any], Mapping[str, Any]] = {}


def is_required(field: Field[Any]) -> bool:
    """Return whether a field of a message has no default."""
    return field.default is MISSING and field.default_factory is MISSING


def _decode_field(kind: type[Any], field: Field[Any], data: Mapping[str, Any], where: str) -> Any:
    value = _decode_value(
        field_types(kind)[field.name], data[field.name], f"{field.name!r} in {where}"
    )
    _check_bounds(field, value, where)
    return value


def _decode_value(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _decode_value(next(arg for arg in args if arg is not type(None)), value, where)
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        raise ControlError(f"{where} must be one of {', '.join(args)}.")
    if origin is tuple:
        if not isinstance(value, list):
            raise ControlError(f"{where} must be a list.")
        return tuple(_decode_value(args[0], item, f"an entry of {where}") for item in value)
    if is_dataclass(hint):
        return from_json(cast(type[Any], hint), value, where)
    return _decode_scalar(hint, value, where)


def _decode_scalar(hint: type[Any], value: Any, where: str) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and is_number:
        return float(value)
    if hint is int and is_number and _is_integral(value):
        return int(value)
    if hint in (str, bool) and isinstance(value, hint) and _is_encodable(value):
        return value
    raise ControlError(f"{where} must be {_TYPE_NAMES[hint]}.")


def _is_encodable(value: str | bool) -> bool:
    """Return whether a string has a UTF-8 encoding: JSON may hold unpaired surrogates."""
    return isinstance(value, bool) or value.encode("utf-8", "ignore").decode() == value


def _is_integral(value: float) -> bool:
    return isinstance(value, int) or value.is_integer()


def _check_bounds(field: Field[Any], value: Any, where: str) -> None:
    limits = field.metadata
    what = f"{field.name!r} in {where}"
    if value is None:
        return
    if "minimum" in limits and value < limits["minimum"]:
        raise ControlError(f"{what} must be at least {limits['minimum']}.")
    if "maximum" in limits and value > limits["maximum"]:
        raise ControlError(f"{what} must be at most {limits['maximum']}.")
    if "longest" in limits and len(value) > limits["longest"]:
        raise ControlError(f"{what} is longer than {limits['longest']}.")

"""What is said between a running capture and those who control it. Plain data, no torch.

A message is a frozen dataclass of whole numbers, numbers, texts, booleans, `Literal`s, other
messages, tuples of one of these, and None. `metadata` of a field may give its `minimum`,
`maximum` and `longest`; the schema of the server comes from the same place.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from flexinspect.core.errors import ControlError

BEFORE_FIRST = -1
"""The step of a place before any step has finished."""

MAX_NUMBER = 2**31 - 1
"""The largest number that anything may be numbered with."""

PAUSE_REQUESTED: Final = "it was asked to"
"""Why it has paused, where a command alone is the reason."""

State = Literal["loading", "running", "pausing", "paused", "holding", "finished"]
"""loading: no forward yet. pausing: it will pause after this step. holding: the generation is over
and the model is kept alive. finished: nothing will run any more."""

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
    """The last finished step of a generation's branch; `step` is -1 before its first."""

    generation: int = _number(0)
    branch: int = _number(0)
    step: int = _number(BEFORE_FIRST, minimum=BEFORE_FIRST)

    def describe(self) -> str:
        """Return "step 7", with generation and branch where they are not the first."""
        text = "the beginning" if self.step < 0 else f"step {self.step}"
        return text + self._qualifier()

    def describe_after(self) -> str:
        """Return "after step 7", or "before the first step", as `words` does."""
        return (
            f"after {self.describe()}"
            if self.step >= 0
            else f"before the first step{self._qualifier()}"
        )

    def _qualifier(self) -> str:
        text = f" of generation {self.generation}" if self.generation else ""
        return f"{text} (branch {self.branch})" if self.branch else text


# -- what the model is asked to do besides going on ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restore:
    """Rebuild the live state right after a step; the model then stands paused there."""

    place: StepRef


@dataclass(frozen=True, slots=True)
class Fork:
    """Go on from a step with another token than the one that it chose, as a new branch.

    `place` is the step whose choice is replaced. Either `token_id` is given, or `text`, whose
    tokens are all forced one after the other. With `stays` the model stands paused at the new
    branch instead of going on.
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
    - drop: nobody sees any of `segments` any more.
    - join: all of `segments` see each other.
    - see: the first of `segments` sees the second if `is_open`, else it no longer does.
    - cell: query position `row` sees key position `key` if `is_open`, else it no longer does.
    - row: query position `row` sees all keys up to itself if `is_open`, else only itself.

    `segments` are numbers of segments, `row` and `key` positions of the sequence. Whether a change
    makes sense for the generation at hand is for whoever obeys it to say.
    """

    op: EditOp
    name: str = _text(longest=200)
    segments: tuple[int, ...] = field(default=(), metadata={"longest": 1000})
    row: int | None = _optional_number()
    key: int | None = _optional_number()
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class EditMask:
    """Go on from a step with another mask, as a new branch; `edits` apply one after the other."""

    place: StepRef
    edits: tuple[MaskEdit, ...] = field(metadata={"longest": 1000})
    stay_paused: bool = False


RewindCommand = Restore | Fork | EditMask
RewindKind = Literal["restore", "fork", "edit"]


@dataclass(frozen=True, slots=True)
class QueuedRewind:
    """A wish that was accepted, with its number among those of this run, from 1."""

    number: int
    command: RewindCommand

    @property
    def kind(self) -> RewindKind:
        """What kind of wish it is."""
        if isinstance(self.command, Restore):
            return "restore"
        return "fork" if isinstance(self.command, Fork) else "edit"


@dataclass(frozen=True, slots=True)
class Cost:
    """What an order would cost: in words, and in seconds and bytes where they are known.

    `is_dear` asks whoever ordered it to confirm it first.
    """

    sentence: str
    seconds: float | None = None
    bytes: int | None = None
    is_expensive: bool = False


@dataclass(frozen=True, slots=True)
class RewindState:
    """What became of an order: `said` is its result or why it could not be obeyed.

    `place` is where the model stands after it; `seconds` is what it took.
    """

    number: int
    kind: RewindKind
    state: Literal["waiting", "working", "done", "failed"]
    message: str = ""
    place: StepRef | None = None
    seconds: float | None = None


# -- answers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BreakpointInfo:
    """A breakpoint as its owner lists it.

    `text` is its condition as written. It stops from the hit number `hits` on (0 and 1: the first),
    is switched off by its first stop when `once`, and only leaves an event when `log_only`;
    `n_hits` is how often it was met so far; `note` says what there is to know of it, for instance
    where it is judged.
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
    """How a capture stands.

    `place` is the last finished step. `says` is the state as a sentence, `reason` why it paused or
    is about to (empty while it runs), `until` where it will pause or end (empty when nothing is
    asked for). `kind` is generation (our own), program or watch; only a
    capture that `travels` obeys restore, fork and edit. `trace` is the file being written, `layers`
    those whose activations level extreme stores. `order` is the newest order.
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
    """What a command is answered: `said` is what will happen, `status` how things stand.

    `order` is the number of an order that was accepted, `cost` what one would cost.
    """

    message: str
    status: StatusResponse
    rewind_number: int | None = None
    cost: Cost | None = None


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """What a command is answered that cannot be obeyed: why, and what to do instead."""

    error: str
    hint: str | None = None


# -- what is asked ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepBody:
    """How many steps to go."""

    n: int = field(default=1, metadata={"minimum": 1, "maximum": MAX_NUMBER})


@dataclass(frozen=True, slots=True)
class RunToBody:
    """After which step to pause; of the current generation unless another is named."""

    step: int = _number()
    generation: int | None = _optional_number()


@dataclass(frozen=True, slots=True)
class LevelBody:
    """How much to record."""

    level: Level


@dataclass(frozen=True, slots=True)
class LayersBody:
    """Layers as `--layers` takes them: "0,3,5-7" or "all"."""

    layers: str = field(metadata={"longest": 1000})


@dataclass(frozen=True, slots=True)
class BreakpointBody:
    """A breakpoint to set: see `BreakpointInfo`."""

    text: str = field(metadata={"longest": 2000})
    hits: int = _number(0)
    once: bool = False
    log_only: bool = False


@dataclass(frozen=True, slots=True)
class RestoreBody:
    """A restore; with `dry_run` only what it would cost is said."""

    place: StepRef
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class ForkBody:
    """A fork; with `dry_run` only what it would cost is said."""

    place: StepRef
    token_id: int | None = _optional_number()
    text: str | None = _text(None)
    stay_paused: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class EditBody:
    """An edit of the mask; with `dry_run` only what it would cost is said."""

    place: StepRef
    edits: tuple[MaskEdit, ...] = field(metadata={"longest": 1000})
    stay_paused: bool = False
    dry_run: bool = False


# -- summaries of anomalies ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnomalySummary:
    """How many anomalies a debugger has met, over how long a history."""

    total_anomalies: int = 0
    debug_history_length: int = 0


@dataclass(frozen=True, slots=True)
class TrainingAnomalySummary:
    """What a training debugger has met; rates are per step."""

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
    """What training met, in steps; rates are per step, 0 before the first."""

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

_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def to_json(message: Any) -> Any:
    """Return a message as what `json.dumps` takes."""
    if is_dataclass(message):
        return {f.name: to_json(getattr(message, f.name)) for f in fields(message)}
    if isinstance(message, (tuple, list)):
        return [to_json(one) for one in message]
    return message


def from_json(kind: type[T], data: Any, where: str = "the body") -> T:
    """Return the message of this kind that `data` says. Raises `ControlError` naming what is wrong.

    What is not a field of the message is refused too: it would be obeyed by nobody.
    """
    if not isinstance(data, Mapping):
        raise ControlError(f"{where} must be a JSON object.")
    known = {f.name: f for f in fields(cast(Any, kind))}
    if unknown := sorted(set(data) - set(known)):
        listed = ", ".join(known) or "nothing"
        raise ControlError(f"{where} says {unknown[0]!r}, which is unknown (known: {listed}).")
    values = {
        name: _decode_field(kind, f, data, where)
        for name, f in known.items()
        if _is_present(f, data)
    }
    if missing := [name for name in known if name not in values and _is_required(known[name])]:
        raise ControlError(f"{where} lacks {missing[0]!r}.")
    return kind(**values)


def field_types(kind: type[Any]) -> Mapping[str, Any]:
    """Return the types of a message's fields."""
    if kind not in _field_types:
        _field_types[kind] = get_type_hints(kind)
    return _field_types[kind]


_field_types: dict[type[Any], Mapping[str, Any]] = {}


def _is_present(field: Field[Any], data: Mapping[str, Any]) -> bool:
    return field.name in data


def _is_required(field: Field[Any]) -> bool:
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
        return _decode_value(next(one for one in args if one is not type(None)), value, where)
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        raise ControlError(f"{where} must be one of {', '.join(args)}.")
    if origin is tuple:
        if not isinstance(value, list):
            raise ControlError(f"{where} must be a list.")
        return tuple(_decode_value(args[0], one, f"an entry of {where}") for one in value)
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
    """Say whether a text can be written: JSON may hold halves of characters."""
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

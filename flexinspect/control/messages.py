"""Messages between a running capture and its clients: plain data, no torch.

A message is a frozen struct of msgspec: `from_json` checks types, bounds and unknown fields, and
the OpenAPI document is generated from the same classes.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from flexinspect.core.conversion import convert
from flexinspect.core.errors import ControlError

BEFORE_FIRST = -1  # `StepRef.step` before any step has finished
MAX_NUMBER = 2**31 - 1  # the largest number that a message may hold, such as a step

PAUSE_REQUESTED: Final = "requested"  # `StatusResponse.reason` of a pause that a command asked for
INTERACTIVE: Final = "--interactive"  # that of the pause before the first step

State = Literal["loading", "running", "pausing", "paused", "holding", "finished"]
"""loading: no forward yet. pausing: pauses after the current step. holding: the last generation has
ended and `--hold` keeps the model alive. finished: the run has ended."""

Level = Literal["basic", "advanced", "extreme"]
Kind = Literal["generation", "program", "watch"]

Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
LongText = Annotated[str, Meta(max_length=4096)]


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages."""


class StepRef(Message, frozen=True):
    """A step of a branch of a generation; `step` is -1 before the first one."""

    generation: Number = 0
    branch: Number = 0
    step: Annotated[int, Meta(ge=BEFORE_FIRST, le=MAX_NUMBER)] = BEFORE_FIRST

    def describe(self) -> str:
        """Return "step 7", with the generation and the branch if they are not 0."""
        text = "the beginning" if self.step < 0 else f"step {self.step}"
        text += f" of generation {self.generation}" if self.generation else ""
        return f"{text} (branch {self.branch})" if self.branch else text

    def describe_after(self) -> str:
        """Return "after step 7", or "before the first step"; otherwise as `describe`."""
        if self.step >= 0:
            return f"after {self.describe()}"
        return self.describe().replace("the beginning", "before the first step")


def describe_branch_end(place: StepRef) -> str:
    """Return why a run pauses after the last step of a branch."""
    return f"branch {place.branch} is finished"


RewindKind = Literal["restore", "fork", "edit"]


class Restore(Message, frozen=True):
    """Rebuild the live state right after a step and pause there.

    With `dry_run`, as for the other commands, only its cost is estimated.
    """

    kind: ClassVar[RewindKind] = "restore"
    place: StepRef
    dry_run: bool = False


class Fork(Message, frozen=True):
    """Continue from a step with another token than the one that it chose, as a new branch.

    `place` is the step whose token is replaced. Exactly one of `token_id` and `text` is set; all
    tokens of `text` are forced, one per step. With `stay_paused` the model pauses at the start of
    the new branch. Otherwise a paused model generates the branch and pauses at its end.
    """

    kind: ClassVar[RewindKind] = "fork"
    place: StepRef
    token_id: Number | None = None
    text: LongText | None = None
    stay_paused: bool = False
    dry_run: bool = False


EditOp = Literal["preset", "drop", "join", "see", "cell", "row"]


class MaskEdit(Message, frozen=True):
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
    name: Annotated[str, Meta(max_length=200)] = ""
    segments: Annotated[tuple[int, ...], Meta(max_length=1000)] = ()
    row: Number | None = None
    key: Number | None = None
    is_open: bool = True


class EditMask(Message, frozen=True):
    """Continue from a step with another mask, as a new branch; `edits` are applied in order."""

    kind: ClassVar[RewindKind] = "edit"
    place: StepRef
    edits: Annotated[tuple[MaskEdit, ...], Meta(max_length=1000)]
    stay_paused: bool = False
    dry_run: bool = False


RewindCommand = Restore | Fork | EditMask


class QueuedRewind(Message, frozen=True):
    """An accepted rewind command; `number` counts the rewind commands of this run from 1."""

    number: int
    command: RewindCommand


class Cost(Message, frozen=True):
    """Estimated cost of a rewind command.

    `sentence` describes it; `seconds` and `bytes` (of memory) are None where they are unknown. A
    client asks the user to confirm a command that `is_expensive`.
    """

    sentence: str
    seconds: float | None = None
    bytes: int | None = None
    is_expensive: bool = False


class RewindState(Message, frozen=True):
    """Progress of a rewind command: `message` is its result, or the reason why it failed.

    `place` is the last finished step after it, `seconds` the time that it took.
    """

    number: int
    kind: RewindKind
    state: Literal["waiting", "working", "done", "failed"]
    message: str = ""
    place: StepRef | None = None
    seconds: float | None = None


class BreakpointInfo(Message, frozen=True):
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


class Breakpoints(Message, frozen=True):
    """All breakpoints of a run."""

    breakpoints: tuple[BreakpointInfo, ...] = ()


class StatusResponse(Message, frozen=True):
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
    kind: Kind = "generation"
    title: str = ""
    pid: int = 0
    trace: str = ""
    can_rewind: bool = False
    n_breakpoints: int = 0
    last_rewind: RewindState | None = None


class CommandResponse(Message, frozen=True):
    """Response to a command: `message` is what will happen, `status` the status of the capture.

    `rewind_number` is the number of an accepted rewind command, `cost` its estimated cost.
    """

    message: str
    status: StatusResponse
    rewind_number: int | None = None
    cost: Cost | None = None


class ErrorResponse(Message, frozen=True):
    """Response to a refused command: the reason, and what to do instead."""

    error: str
    hint: str | None = None


class StepBody(Message, frozen=True):
    """Number of steps to run."""

    n: Annotated[int, Meta(ge=1, le=MAX_NUMBER)] = 1


class RunToBody(Message, frozen=True):
    """The step to pause after, and its generation (default: the current one)."""

    step: Number
    generation: Number | None = None


class LevelBody(Message, frozen=True):
    """The level to record at."""

    level: Level


class LayersBody(Message, frozen=True):
    """Layers in the form of `--layers`: "0,3,5-7" or "all"."""

    layers: Annotated[str, Meta(max_length=1000)]


class BreakpointBody(Message, frozen=True):
    """A breakpoint to add; the fields are those of `BreakpointInfo`."""

    text: Annotated[str, Meta(max_length=2000)]
    hits: Number = 0
    once: bool = False
    log_only: bool = False


class AnomalySummary(Message, frozen=True):
    """Number of anomalies that a debugger found, and the length of its history."""

    total_anomalies: int = 0
    debug_history_length: int = 0


class TrainingAnomalySummary(AnomalySummary, frozen=True):
    """Anomalies that a training debugger found; rates are per step."""

    total_steps: int = 0
    anomaly_rate: float = 0.0
    gradient_explosion_rate: float = 0.0


class DebugSummaryResponse(Message, frozen=True):
    """Anomalies of all three debuggers."""

    training_debugger: TrainingAnomalySummary = TrainingAnomalySummary()
    diffusion_debugger: AnomalySummary = AnomalySummary()
    general_debugger: AnomalySummary = AnomalySummary()


class TrainingSummaryResponse(Message, frozen=True):
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


def from_json(kind: type[T], data: Any, where: str = "The body") -> T:
    """Return plain data as a message. Raises `ControlError`, also for unknown fields."""
    return convert(kind, data, where, ControlError)


def to_json(message: Any) -> Any:
    """Return a message as plain data for `json.dumps`."""
    return msgspec.to_builtins(message)

"""Rewind commands: estimates their cost, and executes them in the model's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

from flexinspect.control.messages import (
    Cost,
    EditMask,
    Fork,
    MaskEdit,
    QueuedRewind,
    Restore,
    RewindCommand,
    StepRef,
)
from flexinspect.core.errors import MaskError, UsageError
from flexinspect.core.text import plural
from flexinspect.inputs.model_sizes import human_bytes
from flexinspect.masks.edits import Edit
from flexinspect_hooks.rewind.branching_decoder import (
    BranchingDecoder,
    RestoreCost,
)

CONFIRM_ABOVE_S = 1.0
"""A command that is estimated to take longer than this needs a confirmation."""

Encode = Callable[[str], Sequence[int]]
TextOf = Callable[[int], str]


class RewindHandler:
    """Estimates and executes rewind commands for the running generation."""

    def __init__(self, encode: Encode, text_of: TextOf) -> None:
        self._encode, self._text_of = encode, text_of
        self._generation = 0
        self._decoder: BranchingDecoder | None = None

    def begin_generation(self, generation: int, decoder: BranchingDecoder | None) -> None:
        """Set the running generation; `decoder` is None after its end."""
        self._generation, self._decoder = generation, decoder

    def estimate_cost(self, order: QueuedRewind) -> Cost:
        """Estimate the cost of a command. Raises `FlexInspectError` if it cannot be executed.

        It changes nothing, so any thread may call it while the model runs; the figures may then be
        out of date at once.
        """
        command = order.command
        decoder, branch, step = self._target(command)
        if isinstance(command, Restore):
            return _cost_message(decoder.restore_cost(branch, step), "")
        if isinstance(command, Fork):
            return _cost_message(decoder.fork_cost(branch, step, self._fork_tokens(command)), "")
        cost, n_changed = decoder.edit_cost(branch, step, _mask_edits(command))
        if n_changed:
            return _cost_message(cost, f"{plural(n_changed, 'computed row')} changed: ")
        return _cost_message(cost, "No computed row changes: ")

    def execute(self, order: QueuedRewind) -> tuple[StepRef, str]:
        """Execute a command; returns the step the model is at, and a sentence about the result.

        Raises `FlexInspectError` if it cannot be executed; the model then stays where it was.
        """
        command = order.command
        decoder, branch, step = self._target(command)
        if isinstance(command, Restore):
            message = decoder.restore(branch, step).message
        elif isinstance(command, Fork):
            token_ids = self._fork_tokens(command)
            message = decoder.fork(branch, step, token_ids, self._text_of).describe()
        else:
            message = decoder.edit_mask(branch, step, _mask_edits(command)).describe()
        return StepRef(self._generation, decoder.current_branch.number, decoder.step), message

    def _fork_tokens(self, command: Fork) -> list[int]:
        if command.token_id is not None:
            return [command.token_id]
        token_ids = list(self._encode(command.text or ""))
        if not token_ids:
            raise UsageError("A fork needs a token or a text of at least one token.")
        return token_ids

    def _target(self, command: RewindCommand) -> tuple[BranchingDecoder, int, int]:
        """The decoder, branch and step that a command is for."""
        place = command.place
        if self._decoder is None:
            raise UsageError("No generation is running, so there is nothing to rewind.")
        if place.generation != self._generation:
            raise UsageError(
                f"Generation {place.generation} is not running any more; the running generation is "
                f"{self._generation}.",
                hint="Only a generation that is running, or is held at its end, can be rewound.",
            )
        return self._decoder, place.branch, place.step


def _cost_message(cost: RestoreCost, prefix: str) -> Cost:
    seconds = cost.ms / 1e3
    size = human_bytes(cost.n_bytes)
    if not cost.n_forwards:
        return Cost(
            f"{prefix}the cache is cropped; the caches will hold {size}.", 0.0, cost.n_bytes
        )
    sentence = (
        f"{prefix}{plural(cost.n_rows, 'row')} in {plural(cost.n_forwards, 'forward')}, about "
        f"{seconds:.2f} s as measured; the caches will hold {size}."
    )
    return Cost(sentence, round(seconds, 4), cost.n_bytes, seconds > CONFIRM_ABOVE_S)


def _mask_edits(request: EditMask) -> list[Edit]:
    if not request.edits:
        raise MaskError("Editing the mask needs at least one edit.")
    return [edit for message in request.edits for edit in parse_mask_edit(message)]


def parse_mask_edit(message: MaskEdit) -> list[Edit]:
    """The edits that a message describes. Raises `MaskError` if it lacks segments, row or key."""
    op = message.op
    names = tuple(map(str, message.segments))
    needed = {"join": 2, "see": 2, "drop": 1}.get(op, 0)
    if len(names) < needed or (op == "see" and len(names) != 2):
        raise MaskError(f"'{op}' needs {plural(needed, 'segment')}.")
    match op:
        case "preset":
            return [Edit("preset", (message.name,))]
        case "drop":
            return [Edit("drop", (name,)) for name in names]
        case "join":
            return [Edit("join", pair) for pair in combinations(names, 2)]
        case "see":
            return [Edit("see", names, (), None if message.is_open else False)]
    wanted = (message.row,) if op == "row" else (message.row, message.key)
    positions = tuple(position for position in wanted if position is not None)
    if len(positions) < len(wanted):
        raise MaskError(f"'{op}' needs {'a row' if op == 'row' else 'a row and a key'}.")
    return [Edit(op, (), positions, message.is_open)]

"""Rewind commands: estimates their cost, and executes them in the model's thread."""

from __future__ import annotations

from itertools import combinations

from flexinspect.control import messages
from flexinspect.core.errors import MaskError, UsageError
from flexinspect.core.text import plural
from flexinspect.inputs.model_sizes import human_bytes
from flexinspect.masks.edits import Edit
from flexinspect_hooks.loading.tokenizers import Vocabulary
from flexinspect_hooks.rewind.branching_decoder import BranchingDecoder

CONFIRM_ABOVE_S = 1.0
"""A command that is estimated to take longer than this needs a confirmation."""


class RewindHandler:
    """Estimates and executes rewind commands; `decoder` is None while no generation is running."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.generation = 0
        self.decoder: BranchingDecoder | None = None

    def estimate_cost(self, command: messages.RewindCommand) -> messages.Cost:
        """Estimate the cost of a command. Raises `FlexInspectError` if it cannot be executed.

        It changes nothing, so any thread may call it while the model runs; the figures may then be
        out of date at once.
        """
        (decoder, place), prefix = self._decoder_and_place(command), ""
        if isinstance(command, messages.Restore):
            cost = decoder.restore_cost(*place)
        elif isinstance(command, messages.Fork):
            cost = decoder.fork_cost(*place, self._fork_tokens(command))
        else:
            cost, n_changed = decoder.edit_cost(*place, _mask_edits(command))
            rows = f"{plural(n_changed, 'computed row')} changed"
            prefix = f"{rows if n_changed else 'No computed row changes'}: "
        seconds, size = cost.ms / 1e3, human_bytes(cost.n_bytes)
        how = "the cache is cropped"
        if cost.n_forwards:
            rows, forwards = plural(cost.n_rows, "row"), plural(cost.n_forwards, "forward")
            how = f"{rows} in {forwards}, about {seconds:.2f} s as measured"
        sentence = f"{prefix}{how}; the caches will hold {size}."
        return messages.Cost(sentence, round(seconds, 4), cost.n_bytes, seconds > CONFIRM_ABOVE_S)

    def execute(self, command: messages.RewindCommand) -> tuple[messages.StepRef, str]:
        """Execute a command; returns the step the model is at, and a sentence about the result.

        Raises `FlexInspectError` if it cannot be executed; the model then stays where it was.
        """
        decoder, place = self._decoder_and_place(command)
        if isinstance(command, messages.Restore):
            message = decoder.restore(*place).message
        elif isinstance(command, messages.Fork):
            token_ids = self._fork_tokens(command)
            message = decoder.fork(*place, token_ids, self._vocabulary.text_of).describe()
        else:
            message = decoder.edit_mask(*place, _mask_edits(command)).describe()
        current = decoder.current_branch.number
        return messages.StepRef(self.generation, current, decoder.step), message

    def _fork_tokens(self, command: messages.Fork) -> list[int]:
        if command.token_id is not None:
            return [command.token_id]
        token_ids = list(self._vocabulary.encode(command.text or ""))
        if not token_ids:
            raise UsageError("A fork needs a token or a text of at least one token.")
        return token_ids

    def _decoder_and_place(
        self, command: messages.RewindCommand
    ) -> tuple[BranchingDecoder, tuple[int, int]]:
        """Return the decoder, and the branch and step that a command names."""
        place = command.place
        if self.decoder is None:
            raise UsageError("No generation is running, so there is nothing to rewind.")
        if place.generation != self.generation:
            raise UsageError(
                f"Generation {place.generation} is not running any more; the running generation is "
                f"{self.generation}.",
                hint="Only a generation that is running, or is held at its end, can be rewound.",
            )
        return self.decoder, (place.branch, place.step)


def _mask_edits(request: messages.EditMask) -> list[Edit]:
    if not request.edits:
        raise MaskError("Editing the mask needs at least one edit.")
    return [edit for message in request.edits for edit in parse_mask_edit(message)]


def parse_mask_edit(message: messages.MaskEdit) -> list[Edit]:
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

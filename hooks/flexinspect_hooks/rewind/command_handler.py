"""Orders to go back, or elsewhere: what they cost, and obeying them in the model's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    describe_branch,
)

CONFIRM_ABOVE_S = 1.0
"""An order that takes longer than this is to be confirmed first."""

Encode = Callable[[str], Sequence[int]]
TextOf = Callable[[int], str]


class RewindHandler:
    """Judges and obeys orders for the generation that runs; `encode` and `text_of` know tokens."""

    def __init__(self, encode: Encode, text_of: TextOf) -> None:
        self._encode, self._text_of = encode, text_of
        self._generation = 0
        self._decoder: BranchingDecoder | None = None

    def begin_generation(self, generation: int, decoder: BranchingDecoder | None) -> None:
        """Say which generation runs from here on; None when none does."""
        self._generation, self._decoder = generation, decoder

    def estimate_cost(self, order: QueuedRewind) -> Cost:
        """Say what an order would cost. Raises `FlexInspectError` saying why it cannot be obeyed.

        Only looks, so any thread may ask while the model runs; the figures are then of a moment.
        """
        wish = order.command
        journey, place = self._decoder_for(wish), wish.place
        if isinstance(wish, Restore):
            return _cost_message(journey.restore_cost(place.branch, place.step), "")
        if isinstance(wish, Fork):
            token_ids = self._fork_tokens(wish)
            return _cost_message(journey.fork_cost(place.branch, place.step, token_ids), "")
        price, changed = journey.edit_cost(place.branch, place.step, _mask_edits(wish))
        if changed:
            return _cost_message(price, f"{plural(changed, 'row')} computed already changed: ")
        return _cost_message(price, "No row computed already is touched: ")

    def execute(self, order: QueuedRewind) -> tuple[StepRef, str]:
        """Obey an order; returns where the model stands, and what was done as a sentence.

        Raises `FlexInspectError` when it cannot be obeyed; the model then stands where it stood.
        """
        wish = order.command
        journey, place = self._decoder_for(wish), wish.place
        if isinstance(wish, Restore):
            said = journey.restore(place.branch, place.step).message
        elif isinstance(wish, Fork):
            said = self._fork(journey, wish)
        else:
            said = describe_branch(journey.edit_mask(place.branch, place.step, _mask_edits(wish)))
        return StepRef(self._generation, journey.current_branch.number, journey.step), said

    def _fork(self, decoder: BranchingDecoder, request: Fork) -> str:
        branch, step = request.place.branch, request.place.step
        token_ids = self._fork_tokens(request)
        instead = decoder.replaced_token(branch, step, token_ids)
        facts = {"text": self._text_of(token_ids[0]), "instead_text": self._text_of(instead)}
        if len(token_ids) > 1:
            facts["text"] = "".join(map(self._text_of, token_ids))
        return describe_branch(decoder.fork(branch, step, token_ids, facts))

    def _fork_tokens(self, request: Fork) -> list[int]:
        if request.token_id is not None:
            return [request.token_id]
        token_ids = list(self._encode(request.text or ""))
        if not token_ids:
            raise UsageError("A fork needs a token or a text of at least one token.")
        return token_ids

    def _decoder_for(self, request: RewindCommand) -> BranchingDecoder:
        number = request.place.generation
        if self._decoder is None:
            raise UsageError("No generation runs, so there is none to go back in.")
        if number != self._generation:
            raise UsageError(
                f"Generation {number} is not the one that runs, which is {self._generation}: its "
                "live state is gone.",
                hint="Only the generation that runs, or is held at its end, can be gone back in.",
            )
        return self._decoder


def _cost_message(cost: RestoreCost, prefix: str) -> Cost:
    seconds = cost.ms / 1e3
    size = human_bytes(cost.n_bytes)
    if not cost.n_forwards:
        return Cost(
            f"{prefix}the cache is cropped; the caches hold {size} then.", 0.0, cost.n_bytes
        )
    sentence = (
        f"{prefix}{plural(cost.n_rows, 'row')} in {plural(cost.n_forwards, 'forward')}, about "
        f"{seconds:.2f} s as measured; the caches hold {size} then."
    )
    return Cost(sentence, round(seconds, 4), cost.n_bytes, seconds > CONFIRM_ABOVE_S)


def _mask_edits(request: EditMask) -> list[Edit]:
    if not request.edits:
        raise MaskError("An edit of the mask needs something to edit.")
    return [edit for one in request.edits for edit in parse_mask_edit(one)]


def parse_mask_edit(one: MaskEdit) -> list[Edit]:
    """Return a change of the mask, as it is ordered, as edits. Raises `MaskError`."""
    names = tuple(map(str, one.segments))
    needed = {"join": 2, "see": 2, "drop": 1}.get(one.op, 0)
    if len(names) < needed or (one.op == "see" and len(names) != 2):
        raise MaskError(f"'{one.op}' needs {plural(needed, 'segment')}.")
    match one.op:
        case "preset":
            return [Edit("preset", (one.name,))]
        case "drop":
            return [Edit("drop", (name,)) for name in names]
        case "join":
            pairs = ((a, b) for at, a in enumerate(names) for b in names[at + 1 :])
            return [Edit("join", pair) for pair in pairs]
        case "see":
            return [Edit("see", names, (), None if one.is_open else False)]
    places = (one.row,) if one.op == "row" else (one.row, one.key)
    given = tuple(place for place in places if place is not None)
    if len(given) < len(places):
        raise MaskError(f"'{one.op}' needs {'a row' if one.op == 'row' else 'a row and a key'}.")
    return [Edit(one.op, (), given, one.is_open)]

"""Orders to go back, or elsewhere: what they cost, and obeying them in the model's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexinspect.control.messages import Cost, EditMask, Fork, MaskEdit, Order, Place, Restore, Wish
from flexinspect.errors import MaskError, UsageError
from flexinspect.maskedits import Edit
from flexinspect.rules.words import counted
from flexinspect.sizes import human_bytes
from flexinspect_hooks.travel.journey import Journey
from flexinspect_hooks.travel.parts import Price
from flexinspect_hooks.travel.words import branch_words

DEAR_S = 1.0
"""An order that takes longer than this is to be confirmed first."""

Encode = Callable[[str], Sequence[int]]
TextOf = Callable[[int], str]


class Orders:
    """Judges and obeys orders for the generation that runs; `encode` and `text_of` know tokens."""

    def __init__(self, encode: Encode, text_of: TextOf) -> None:
        self._encode, self._text_of = encode, text_of
        self._generation = 0
        self._journey: Journey | None = None

    def begin(self, generation: int, journey: Journey | None) -> None:
        """Say which generation runs from here on; None when none does."""
        self._generation, self._journey = generation, journey

    def check(self, order: Order) -> Cost:
        """Say what an order would cost. Raises `FlexInspectError` saying why it cannot be obeyed.

        Only looks, so any thread may ask while the model runs; the figures are then of a moment.
        """
        wish = order.wish
        journey, place = self._at(wish), wish.place
        if isinstance(wish, Restore):
            return _cost(journey.price(place.branch, place.step), "")
        if isinstance(wish, Fork):
            token_ids = self._tokens(wish)
            return _cost(journey.fork_price(place.branch, place.step, token_ids), "")
        price, changed = journey.edit_price(place.branch, place.step, _edits(wish))
        if changed:
            return _cost(price, f"{counted(changed, 'row')} computed already changed: ")
        return _cost(price, "No row computed already is touched: ")

    def obey(self, order: Order) -> tuple[Place, str]:
        """Obey an order; returns where the model stands, and what was done as a sentence.

        Raises `FlexInspectError` when it cannot be obeyed; the model then stands where it stood.
        """
        wish = order.wish
        journey, place = self._at(wish), wish.place
        if isinstance(wish, Restore):
            said = journey.restore(place.branch, place.step).said
        elif isinstance(wish, Fork):
            said = self._fork(journey, wish)
        else:
            said = branch_words(journey.edit(place.branch, place.step, _edits(wish)))
        return Place(self._generation, journey.line.branch, journey.step), said

    def _fork(self, journey: Journey, wish: Fork) -> str:
        branch, step = wish.place.branch, wish.place.step
        token_ids = self._tokens(wish)
        instead = journey.replaced(branch, step, token_ids)
        facts = {"text": self._text_of(token_ids[0]), "instead_text": self._text_of(instead)}
        if len(token_ids) > 1:
            facts["text"] = "".join(map(self._text_of, token_ids))
        return branch_words(journey.fork(branch, step, token_ids, facts))

    def _tokens(self, wish: Fork) -> list[int]:
        if wish.token_id is not None:
            return [wish.token_id]
        token_ids = list(self._encode(wish.text or ""))
        if not token_ids:
            raise UsageError("A fork needs a token or a text of at least one token.")
        return token_ids

    def _at(self, wish: Wish) -> Journey:
        number = wish.place.generation
        if self._journey is None:
            raise UsageError("No generation runs, so there is none to go back in.")
        if number != self._generation:
            raise UsageError(
                f"Generation {number} is not the one that runs, which is {self._generation}: its "
                "live state is gone.",
                hint="Only the generation that runs, or is held at its end, can be gone back in.",
            )
        return self._journey


def _cost(price: Price, before: str) -> Cost:
    seconds = price.ms / 1e3
    size = human_bytes(price.n_bytes)
    if not price.n_forwards:
        return Cost(
            f"{before}the cache is cropped; the caches hold {size} then.", 0.0, price.n_bytes
        )
    sentence = (
        f"{before}{counted(price.n_rows, 'row')} in {counted(price.n_forwards, 'forward')}, about "
        f"{seconds:.2f} s as measured; the caches hold {size} then."
    )
    return Cost(sentence, round(seconds, 4), price.n_bytes, seconds > DEAR_S)


def _edits(wish: EditMask) -> list[Edit]:
    if not wish.edits:
        raise MaskError("An edit of the mask needs something to edit.")
    return [edit for one in wish.edits for edit in edits_of(one)]


def edits_of(one: MaskEdit) -> list[Edit]:
    """Return a change of the mask, as it is ordered, as edits. Raises `MaskError`."""
    names = tuple(map(str, one.segments))
    needed = {"join": 2, "see": 2, "drop": 1}.get(one.op, 0)
    if len(names) < needed or (one.op == "see" and len(names) != 2):
        raise MaskError(f"'{one.op}' needs {counted(needed, 'segment')}.")
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

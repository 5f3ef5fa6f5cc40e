"""What is said of a forward of a loop that is not ours, when it is placed: events of its step."""

from __future__ import annotations

from flexinspect_hooks.clock import StepContext, StepEvent
from flexinspect_hooks.fedrows import InputRows
from flexinspect_hooks.sequence import OTHER_CACHE, SEVERAL_ROWS, UNKNOWN_CACHE, StepPlace

_EVENT_TEXTS = {
    SEVERAL_ROWS: "{n} rows were fed onto {cached} cached keys: a prompt in chunks, a further "
    "turn, or proposals of an assistant. They are recorded as given; which of them the model "
    "chose is not followed.",
    UNKNOWN_CACHE: "The cache holds {cached} keys, which is not where the generation before stood: "
    "a new generation begins, and what its first {cached} tokens are is not known.",
    OTHER_CACHE: "The cache is that of generation {owner}, and another one came between: what goes "
    "on here is recorded as a new generation, which begins after {cached} keys.",
}


def input_events(step: StepContext, place: StepPlace, rows: InputRows) -> list[StepEvent]:
    """Return what is to be said of where a forward belongs, and of what it was fed."""
    found: list[StepEvent] = []
    if place.note:
        text = _EVENT_TEXTS[place.note].format(
            n=step.q_len, cached=step.kv_before, owner=place.owner
        )
        found.append((place.note, text))
    if not place.begins_generation:
        return found
    if rows.batch > 1:
        text = f"{rows.batch} sequences are fed at once; what is recorded is row 0 of the batch."
        found.append(("batch", text))
    if rows.ids is None:
        found.append(("no-ids", "No token ids were fed, so there are no tokens to show."))
    return found

"""Segments of a user's own prompt: spans that were given, texts that are found in the ids fed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from flexinspect.errors import UsageError
from flexinspect.pieces import places_of_ids, places_of_text
from flexinspect.prompts import Segment, SegmentKind

Wish = tuple[int, int, str] | tuple[str, str] | str
"""A span (start, stop, label), a text with a label, or a text that is its own label."""

_LABEL = 24


@dataclass(frozen=True, slots=True)
class Wanted:
    """One wish, checked: either a text, or positions `start <= pos < stop`."""

    label: str
    text: str | None = None
    start: int = 0
    stop: int = 0


def read_wishes(wishes: Iterable[Wish] | None) -> tuple[Wanted, ...]:
    """Return the wishes in one form. Raises `UsageError` for what can be neither span nor text."""
    wanted = tuple(_read(wish) for wish in wishes or ())
    spans = sorted((one.start, one.stop, one.label) for one in wanted if one.text is None)
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            raise UsageError(f"The segments '{first}' and '{second}' overlap at position {start}.")
    return wanted


def _read(wish: object) -> Wanted:
    match wish:
        case str(text) if text:
            return Wanted(text if len(text) <= _LABEL else f"{text[: _LABEL - 1]}…", text)
        case (str(text), str(label)) if text:
            return Wanted(label, text)
        case (int(start), int(stop), str(label)) if 0 <= start < stop:
            return Wanted(label, None, start, stop)
    raise UsageError(
        f"{wish!r} is no segment.",
        hint="A segment is (start, stop, label) with 0 <= start < stop, a text, or (text, label).",
    )


@dataclass(frozen=True, slots=True)
class FedPrompt:
    """A prompt as it was fed, from position `start` on: its ids, and what each adds to the text.

    `texts` is empty where there is no text to look in. The first `n_pads` of the ids are padding,
    and `has_bos` tells that a BOS comes right after.
    """

    ids: Sequence[int]
    texts: Sequence[str]
    start: int = 0
    n_pads: int = 0
    has_bos: bool = False

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.start + len(self.ids)


def lay_out(
    wanted: Sequence[Wanted], prompt: FedPrompt, encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[Segment, ...], list[str]]:
    """Return segments without gaps over a prompt and what follows, and a sentence per trouble.

    A wish that is not found, or lies outside, is left out. A label whose first word names a kind
    (bos, shared, separator, cue) has that kind, any other is a paraphrase. What no wish covers is
    padding, BOS, "shared" before the first, "separator" between two, "cue" after the last. Without
    wishes the prompt is one segment.
    """
    troubles: list[str] = []
    found = list(_found(wanted, prompt, encode, troubles))
    out: list[Segment] = []
    if prompt.start:
        _add(out, 0, prompt.start, "before watching", SegmentKind.SHARED)
    at = prompt.start + prompt.n_pads
    _add(out, prompt.start, at, "padding", SegmentKind.SHARED)
    if not found:
        _add(out, at, prompt.stop, "prompt", SegmentKind.SHARED)
    else:
        _fill(out, at, found, prompt)
    _add(out, prompt.stop, prompt.stop + 1, "generated", SegmentKind.GENERATED)
    return tuple(out), troubles


def _fill(
    out: list[Segment], at: int, found: list[tuple[int, int, str]], prompt: FedPrompt
) -> None:
    """Add what was found and what lies between."""
    first = found[0][0]
    if prompt.has_bos and at < first:
        _add(out, at, at + 1, "bos", SegmentKind.BOS)
        at += 1
    if at < first:
        _add(out, at, first, "shared", SegmentKind.SHARED)
    for number, (start, stop, label) in enumerate(found):
        if number and at < start:
            _add(out, at, start, f"separator {number}", SegmentKind.SEPARATOR)
        _add(out, start, stop, label, _kind(label))
        at = stop
    after = at + _separator_after(found, prompt)
    _add(out, at, after, f"separator {len(found)}", SegmentKind.SEPARATOR)
    _add(out, after, prompt.stop, "cue", SegmentKind.CUE)


def _separator_after(found: list[tuple[int, int, str]], prompt: FedPrompt) -> int:
    """Return how many tokens after the last piece are the separator that all others have."""
    between = {
        tuple(prompt.ids[one[1] - prompt.start : other[0] - prompt.start])
        for one, other in pairwise(found)
    }
    separator = between.pop() if len(between) == 1 else ()
    rest = tuple(prompt.ids[found[-1][1] - prompt.start :])
    is_same = len(rest) > len(separator) and rest[: len(separator)] == separator
    return len(separator) if is_same and _kind(found[-1][2]) is SegmentKind.PARAPHRASE else 0


def _add(out: list[Segment], start: int, stop: int, label: str, kind: SegmentKind) -> None:
    if start >= stop:
        return
    owner = len(out)
    if kind is SegmentKind.SEPARATOR and out:
        owner = out[-1].owner
    out.append(Segment(start, stop, label, kind, owner))


def _kind(label: str) -> SegmentKind:
    word = label.split()[0].lower() if label.split() else ""
    named = {str(kind) for kind in SegmentKind} - {SegmentKind.GENERATED}
    return SegmentKind(word) if word in named else SegmentKind.PARAPHRASE


def _found(
    wanted: Sequence[Wanted],
    prompt: FedPrompt,
    encode: Callable[[str], Sequence[int]],
    troubles: list[str],
) -> Iterator[tuple[int, int, str]]:
    """Yield (start, stop, label) in order; each text is looked for after the one before it."""
    spans: list[tuple[int, int, str]] = []
    after = 0
    for one in wanted:
        if one.text is None:
            span: tuple[int, int] | None = (one.start, min(one.stop, prompt.stop))
            if one.stop > prompt.stop:
                troubles.append(_outside(one, prompt))
        else:
            span = _search(one.text, prompt, encode, after)
            if span is None:
                troubles.append(f"The text of segment '{one.label}' is not in the prompt fed.")
        if span is None or span[0] >= span[1] or span[0] < prompt.start:
            continue
        spans.append((*span, one.label))
        after = span[1] - prompt.start
    at = prompt.start
    for start, stop, label in sorted(spans):
        if start < at:
            troubles.append(f"Segment '{label}' overlaps the one before it and is left out.")
            continue
        at = stop
        yield start, stop, label


def _outside(one: Wanted, prompt: FedPrompt) -> str:
    return (
        f"Segment '{one.label}' was declared up to position {one.stop}, and the prompt fed ends at "
        f"{prompt.stop}."
    )


def _search(
    text: str, prompt: FedPrompt, encode: Callable[[str], Sequence[int]], after: int
) -> tuple[int, int] | None:
    """Return where a text lies: by its ids, else by what the tokens add to the text.

    Its ids in the prompt may be others than on its own (a leading space, a merge with its
    neighbour), so the second way takes every token that holds a part of it.
    """
    ids = encoded(text, encode)
    for begin in dict.fromkeys((after, prompt.n_pads)):
        places = chain(
            places_of_ids(ids, prompt.ids, begin), places_of_text(text, prompt.texts, begin)
        )
        span = next(places, None)
        if span is not None:
            return prompt.start + span[0], prompt.start + span[1]
    return None


def encoded(text: str, encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    """Return the ids of a text, none for one that cannot have any."""
    try:
        return tuple(encode(text))
    except UsageError:
        return ()

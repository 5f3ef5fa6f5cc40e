"""Segments of a user's own prompt: spans that were given, texts that are found in the ids fed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from flexinspect.core.errors import UsageError
from flexinspect.records.prompt import Segment, SegmentKind, find_id_spans, find_text_spans

SegmentArgument = tuple[int, int, str] | tuple[str, str] | str
"""A span (start, stop, label), a text with a label, or a text that is its own label."""

_MAX_LABEL = 24


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """One wish, checked: either a text, or positions `start <= pos < stop`."""

    label: str
    text: str | None = None
    start: int = 0
    stop: int = 0


def parse_segments(segments: Iterable[SegmentArgument] | None) -> tuple[SegmentSpec, ...]:
    """Return the wishes in one form. Raises `UsageError` for what can be neither span nor text."""
    wanted = tuple(_parse_segment(wish) for wish in segments or ())
    spans = sorted((one.start, one.stop, one.label) for one in wanted if one.text is None)
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            raise UsageError(f"The segments '{first}' and '{second}' overlap at position {start}.")
    return wanted


def _parse_segment(segment: object) -> SegmentSpec:
    match segment:
        case str(text) if text:
            return SegmentSpec(
                text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 1]}…", text
            )
        case (str(text), str(label)) if text:
            return SegmentSpec(label, text)
        case (int(start), int(stop), str(label)) if 0 <= start < stop:
            return SegmentSpec(label, None, start, stop)
    raise UsageError(
        f"{segment!r} is no segment.",
        hint="A segment is (start, stop, label) with 0 <= start < stop, a text, or (text, label).",
    )


@dataclass(frozen=True, slots=True)
class PromptInput:
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


def build_segments(
    specs: Sequence[SegmentSpec], prompt: PromptInput, encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[Segment, ...], list[str]]:
    """Return segments without gaps over a prompt and what follows, and a sentence per trouble.

    A wish that is not found, or lies outside, is left out. A label whose first word names a kind
    (bos, shared, separator, cue) has that kind, any other is a paraphrase. What no wish covers is
    padding, BOS, "shared" before the first, "separator" between two, "cue" after the last. Without
    wishes the prompt is one segment.
    """
    troubles: list[str] = []
    found = list(_find_spans(specs, prompt, encode, troubles))
    out: list[Segment] = []
    if prompt.start:
        _append_segment(out, 0, prompt.start, "before watching", SegmentKind.SHARED)
    at = prompt.start + prompt.n_pads
    _append_segment(out, prompt.start, at, "padding", SegmentKind.SHARED)
    if not found:
        _append_segment(out, at, prompt.stop, "prompt", SegmentKind.SHARED)
    else:
        _add_spans_and_gaps(out, at, found, prompt)
    _append_segment(out, prompt.stop, prompt.stop + 1, "generated", SegmentKind.GENERATED)
    return tuple(out), troubles


def _add_spans_and_gaps(
    out: list[Segment], at: int, found: list[tuple[int, int, str]], prompt: PromptInput
) -> None:
    """Add what was found and what lies between."""
    first = found[0][0]
    if prompt.has_bos and at < first:
        _append_segment(out, at, at + 1, "bos", SegmentKind.BOS)
        at += 1
    if at < first:
        _append_segment(out, at, first, "shared", SegmentKind.SHARED)
    for number, (start, stop, label) in enumerate(found):
        if number and at < start:
            _append_segment(out, at, start, f"separator {number}", SegmentKind.SEPARATOR)
        _append_segment(out, start, stop, label, _segment_kind(label))
        at = stop
    after = at + _separator_after(found, prompt)
    _append_segment(out, at, after, f"separator {len(found)}", SegmentKind.SEPARATOR)
    _append_segment(out, after, prompt.stop, "cue", SegmentKind.CUE)


def _separator_after(found: list[tuple[int, int, str]], prompt: PromptInput) -> int:
    """Return how many tokens after the last piece are the separator that all others have."""
    between = {
        tuple(prompt.ids[one[1] - prompt.start : other[0] - prompt.start])
        for one, other in pairwise(found)
    }
    separator = between.pop() if len(between) == 1 else ()
    rest = tuple(prompt.ids[found[-1][1] - prompt.start :])
    is_same = len(rest) > len(separator) and rest[: len(separator)] == separator
    return (
        len(separator) if is_same and _segment_kind(found[-1][2]) is SegmentKind.PARAPHRASE else 0
    )


def _append_segment(
    out: list[Segment], start: int, stop: int, label: str, kind: SegmentKind
) -> None:
    if start >= stop:
        return
    owner = len(out)
    if kind is SegmentKind.SEPARATOR and out:
        owner = out[-1].owner
    out.append(Segment(start, stop, label, kind, owner))


def _segment_kind(label: str) -> SegmentKind:
    word = label.split()[0].lower() if label.split() else ""
    named = {str(kind) for kind in SegmentKind} - {SegmentKind.GENERATED}
    return SegmentKind(word) if word in named else SegmentKind.PARAPHRASE


def _find_spans(
    specs: Sequence[SegmentSpec],
    prompt: PromptInput,
    encode: Callable[[str], Sequence[int]],
    problems: list[str],
) -> Iterator[tuple[int, int, str]]:
    """Yield (start, stop, label) in order; each text is looked for after the one before it."""
    spans: list[tuple[int, int, str]] = []
    after = 0
    for one in specs:
        if one.text is None:
            span: tuple[int, int] | None = (one.start, min(one.stop, prompt.stop))
            if one.stop > prompt.stop:
                problems.append(_out_of_range_text(one, prompt))
        else:
            span = _find_text(one.text, prompt, encode, after)
            if span is None:
                problems.append(f"The text of segment '{one.label}' is not in the prompt fed.")
        if span is None or span[0] >= span[1] or span[0] < prompt.start:
            continue
        spans.append((*span, one.label))
        after = span[1] - prompt.start
    at = prompt.start
    for start, stop, label in sorted(spans):
        if start < at:
            problems.append(f"Segment '{label}' overlaps the one before it and is left out.")
            continue
        at = stop
        yield start, stop, label


def _out_of_range_text(spec: SegmentSpec, prompt: PromptInput) -> str:
    return (
        f"Segment '{spec.label}' was declared up to position {spec.stop}, and the prompt fed ends at "
        f"{prompt.stop}."
    )


def _find_text(
    text: str, prompt: PromptInput, encode: Callable[[str], Sequence[int]], after: int
) -> tuple[int, int] | None:
    """Return where a text lies: by its ids, else by what the tokens add to the text.

    Its ids in the prompt may be others than on its own (a leading space, a merge with its
    neighbour), so the second way takes every token that holds a part of it.
    """
    ids = encode_or_empty(text, encode)
    for begin in dict.fromkeys((after, prompt.n_pads)):
        places = chain(
            find_id_spans(ids, prompt.ids, begin), find_text_spans(text, prompt.texts, begin)
        )
        span = next(places, None)
        if span is not None:
            return prompt.start + span[0], prompt.start + span[1]
    return None


def encode_or_empty(text: str, encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    """Return the ids of a text, none for one that cannot have any."""
    try:
        return tuple(encode(text))
    except UsageError:
        return ()

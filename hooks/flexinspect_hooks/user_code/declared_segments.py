"""Segments of a prompt in code of the user: declared spans, and texts that are searched in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from flexinspect.core.errors import UsageError
from flexinspect.records.prompt import Segment, SegmentKind, find_id_spans, find_text_spans

SegmentArgument = tuple[int, int, str] | tuple[str, str] | str
"""A span (start, stop, label), a (text, label), or a text that is its own label."""

_MAX_LABEL = 24


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """A declared segment: either a text, or positions `start <= pos < stop`."""

    label: str
    text: str | None = None
    start: int = 0
    stop: int = 0


def parse_segments(segments: Iterable[SegmentArgument] | None) -> tuple[SegmentSpec, ...]:
    """Check declared segments. Raises `UsageError` for an invalid one and for overlapping spans."""
    specs = tuple(_parse_segment(segment) for segment in segments or ())
    spans = sorted((spec.start, spec.stop, spec.label) for spec in specs if spec.text is None)
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            raise UsageError(f"The segments '{first}' and '{second}' overlap at position {start}.")
    return specs


def _parse_segment(segment: object) -> SegmentSpec:
    match segment:
        case str(text) if text:
            label = text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 1]}…"
            return SegmentSpec(label, text)
        case (str(text), str(label)) if text:
            return SegmentSpec(label, text)
        case (int(start), int(stop), str(label)) if 0 <= start < stop:
            return SegmentSpec(label, None, start, stop)
    raise UsageError(
        f"{segment!r} is not a segment.",
        hint="A segment is (start, stop, label) with 0 <= start < stop, a text, or (text, label).",
    )


@dataclass(frozen=True, slots=True)
class PromptInput:
    """A prompt as a forward received it, from position `start` on: its ids, and their texts.

    `texts` is empty if texts cannot be searched. The first `n_pads` ids are padding; with `has_bos`
    a BOS follows them.
    """

    ids: Sequence[int]
    texts: Sequence[str]
    start: int = 0
    n_pads: int = 0
    has_bos: bool = False

    @property
    def stop(self) -> int:
        """The position after the prompt."""
        return self.start + len(self.ids)


def build_segments(
    specs: Sequence[SegmentSpec], prompt: PromptInput, encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[Segment, ...], list[str]]:
    """Return segments without gaps over the prompt and generated tokens, and a list of problems.

    A declared segment that is not found, or lies outside, is left out and reported. A label whose
    first word names a kind (bos, shared, separator, cue) has that kind, any other is a paraphrase.
    Undeclared positions are padding, BOS, "shared" before the first segment, "separator" between
    two, "cue" after the last. Without declared segments the prompt is one segment.
    """
    problems: list[str] = []
    spans = list(_find_spans(specs, prompt, encode, problems))
    out: list[Segment] = []
    if prompt.start:
        _append_segment(out, 0, prompt.start, "before watching", SegmentKind.SHARED)
    pos = prompt.start + prompt.n_pads
    _append_segment(out, prompt.start, pos, "padding", SegmentKind.SHARED)
    if not spans:
        _append_segment(out, pos, prompt.stop, "prompt", SegmentKind.SHARED)
    else:
        _append_spans_and_gaps(out, pos, spans, prompt)
    _append_segment(out, prompt.stop, prompt.stop + 1, "generated", SegmentKind.GENERATED)
    return tuple(out), problems


def _append_spans_and_gaps(
    out: list[Segment], pos: int, spans: list[tuple[int, int, str]], prompt: PromptInput
) -> None:
    """Append the spans (start, stop, label) and the segments between them, from `pos` on."""
    first = spans[0][0]
    if prompt.has_bos and pos < first:
        _append_segment(out, pos, pos + 1, "bos", SegmentKind.BOS)
        pos += 1
    if pos < first:
        _append_segment(out, pos, first, "shared", SegmentKind.SHARED)
    for number, (start, stop, label) in enumerate(spans):
        if number and pos < start:
            _append_segment(out, pos, start, f"separator {number}", SegmentKind.SEPARATOR)
        _append_segment(out, start, stop, label, _segment_kind(label))
        pos = stop
    cue = pos + _separator_after(spans, prompt)
    _append_segment(out, pos, cue, f"separator {len(spans)}", SegmentKind.SEPARATOR)
    _append_segment(out, cue, prompt.stop, "cue", SegmentKind.CUE)


def _separator_after(spans: list[tuple[int, int, str]], prompt: PromptInput) -> int:
    """Return the length of the separator after the last span, 0 without one.

    It is the separator if the same tokens stand between all spans.
    """
    if _segment_kind(spans[-1][2]) is not SegmentKind.PARAPHRASE:
        return 0
    between = {
        tuple(prompt.ids[before[1] - prompt.start : after[0] - prompt.start])
        for before, after in pairwise(spans)
    }
    separator = between.pop() if len(between) == 1 else ()
    rest = tuple(prompt.ids[spans[-1][1] - prompt.start :])
    is_same = len(rest) > len(separator) and rest[: len(separator)] == separator
    return len(separator) if is_same else 0


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
    """Yield (start, stop, label) in order; each text is searched after the segment before it."""
    spans: list[tuple[int, int, str]] = []
    after = 0
    for spec in specs:
        if spec.text is None:
            span: tuple[int, int] | None = (spec.start, min(spec.stop, prompt.stop))
            if spec.stop > prompt.stop:
                problems.append(
                    f"Segment '{spec.label}' was declared up to position {spec.stop}, but the "
                    f"prompt ends at {prompt.stop}."
                )
        else:
            span = _find_text(spec.text, prompt, encode, after)
            if span is None:
                problems.append(f"The text of segment '{spec.label}' is not in the prompt.")
        if span is None or span[0] >= span[1] or span[0] < prompt.start:
            continue
        spans.append((*span, spec.label))
        after = span[1] - prompt.start
    pos = prompt.start
    for start, stop, label in sorted(spans):
        if start < pos:
            problems.append(f"Segment '{label}' overlaps the one before it and is left out.")
            continue
        pos = stop
        yield start, stop, label


def _find_text(
    text: str, prompt: PromptInput, encode: Callable[[str], Sequence[int]], after: int
) -> tuple[int, int] | None:
    """Return the span (start, stop) of a text, found by its ids, else by the texts of tokens.

    The ids of a text may differ in the prompt (a leading space, a merge with its neighbour), so the
    second search takes every token that contains a part of the text.
    """
    ids = encode_or_empty(text, encode)
    for begin in dict.fromkeys((after, prompt.n_pads)):
        spans = chain(
            find_id_spans(ids, prompt.ids, begin), find_text_spans(text, prompt.texts, begin)
        )
        span = next(spans, None)
        if span is not None:
            return prompt.start + span[0], prompt.start + span[1]
    return None


def encode_or_empty(text: str, encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    """Return the ids of a text, none if it cannot be encoded."""
    try:
        return tuple(encode(text))
    except UsageError:
        return ()

"""By how much declared spans are off.

Nothing but the spans was declared, so a shift is only reported if the spans do not fit where they
are and all fit when shifted: to lists of token ids that the program holds, to line boundaries, past
a BOS inside the first span, or to positions with the same tokens between the spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from flexinspect.records.prompt import DeclaredSegment, PromptPart, Span
from flexinspect.rules.prompt.prompt_facts import PromptTokens, candidate_shifts, leading_lengths

_MAX_SPAN_SHIFT = 8
_CLOSING_MARKS = ".?!:;,)]}。？！：；，、）"


class SpanShift(NamedTuple):
    """By how many tokens each span must be shifted to fit (0: it fits), and the reason.

    `source` is "lists" (lists of token ids that the program holds), "lines" (line and sentence
    boundaries), "bos" (a BOS inside the first span, and separators that begin the others), "gaps"
    (the tokens between the spans) or "ends" (a BOS inside the first span and the end of the prompt
    after the last). `lists` are the names of lists that shifted spans begin with. `keeps_start`
    says that the first span begins where it should, so that only the other borders are off.
    """

    offsets: tuple[int, ...]
    source: str
    lists: tuple[str, ...] = ()
    keeps_start: bool = False

    @property
    def tokens(self) -> int | None:
        """The number of tokens if all spans are off by the same number, else None."""
        return self.offsets[0] if len(set(self.offsets)) == 1 else None


def find_shift(prompt: PromptTokens) -> SpanShift | None:
    """How the declared spans are off; None if they fit, or if it is not known."""
    spans = prompt.spans
    if not spans or not prompt.tokens or _are_at_lists(prompt):
        return None
    by_lists = _shift_by_lists(prompt)
    if by_lists is not None and len(by_lists.lists) > 1:
        return by_lists
    if prompt.has_text:
        if _spans_fit(prompt, spans, 0):
            return None
        n = _shift_by_lines(prompt, spans)
        offsets = _span_shifts_by_lines(prompt) if n is None else (n,) * len(spans)
        if offsets is not None:
            return SpanShift(offsets, "lines")
        n = _shift_past_bos(prompt, spans)
        if n is not None:
            return SpanShift((n,) * len(spans), "bos")
    if by_lists is not None:
        return by_lists
    for source, find in (("gaps", _shift_by_gaps), ("ends", _shift_by_ends)):
        n = find(prompt, spans)
        if n is not None:
            return SpanShift((n,) * len(spans), source) if n else None
    return None


def _are_at_lists(prompt: PromptTokens) -> bool:
    """Whether two spans begin with lists of the program, and no border divides a list."""
    spans = [(span.start, span.stop) for span in prompt.spans]
    return len(_parts_begun(prompt, spans)) > 1 and not _divides_part(prompt, spans)


def _shift_by_lists(prompt: PromptTokens) -> SpanShift | None:
    """The shift after which spans begin with lists of the program that their borders divide now."""
    spans = [(span.start, span.stop) for span in prompt.spans]
    is_off = _divides_part(prompt, spans) and not _parts_begun(prompt, spans[1:])
    if not is_off or len(spans) < 2:
        return None
    (first, stop), *others = spans
    # Where the BOS is known to be apart, the first span is right and only the others are off.
    may_keep = prompt.has_bos and first == prompt.first_unpadded + 1
    for n in candidate_shifts(prompt):
        moved = [(a + n, b + n) for a, b in others]
        for keeps in (False, True)[: 1 + may_keep]:
            shifted = [(first if keeps else first + n, stop + n), *moved]
            begun = _parts_begun(prompt, shifted)
            is_enough = len(begun) > 1 or _is_past_bos(prompt, shifted, n, begun)
            if is_enough and shifted[-1][1] <= prompt.stop and not _divides_part(prompt, shifted):
                names = tuple(part.name for part in begun)
                return SpanShift((n,) * len(spans), "lists", names, keeps)
    return None


def _parts_begun(prompt: PromptTokens, spans: Sequence[Span]) -> list[PromptPart]:
    """Return the lists of the program with which spans begin."""
    begins = {part.start: part for part in prompt.parts}
    return [begins[start] for start, _ in spans if start in begins]


def _divides_part(prompt: PromptTokens, spans: Sequence[Span]) -> bool:
    """Whether a span begins or ends inside a list of the program."""
    edges = {edge for span in spans for edge in span}
    return any(part.start < edge < part.stop for part in prompt.parts for edge in edges)


def _is_past_bos(
    prompt: PromptTokens, spans: Sequence[Span], n: int, begun: Sequence[PromptPart]
) -> bool:
    """Whether spans that were shifted by n begin after the BOS, and one is a list as a whole."""
    # A single list may begin with a span by chance; it seldom has the same length, too.
    is_counted = n in leading_lengths(prompt) and spans[0][0] == prompt.first_unpadded + 1
    return prompt.has_bos and is_counted and any((one.start, one.stop) in spans for one in begun)


def _shift_by_lines(prompt: PromptTokens, spans: Sequence[DeclaredSegment]) -> int | None:
    begins, ends = prompt.line_edges
    # The first span may begin with the prompt itself, which proves nothing.
    n_begin = sum(span.start in begins for span in spans[1:])
    n_end = sum(span.stop in ends for span in spans)
    if n_begin > len(spans) // 4 or n_begin + n_end > len(spans):
        return None
    shifts = leading_lengths(prompt) if len(spans) == 1 else candidate_shifts(prompt)
    return next((n for n in shifts if _spans_fit(prompt, spans, n)), None)


def _span_shifts_by_lines(prompt: PromptTokens) -> tuple[int, ...] | None:
    """Offsets that grow from span to span; None unless each span has one."""
    offsets = []
    shifts = sorted(range(-_MAX_SPAN_SHIFT, _MAX_SPAN_SHIFT + 1), key=abs)
    for span in prompt.spans:
        fit = next((n for n in shifts if _spans_fit(prompt, (span,), n)), None)
        if fit is None:
            return None
        offsets.append(fit)
    if len(offsets) < 3 and max(map(abs, offsets)) > 2:
        return None
    return tuple(offsets) if is_growing(offsets) else None


def is_growing(offsets: Sequence[int]) -> bool:
    """Whether offsets grow in one direction and are not all the same."""
    sizes = [abs(offset) for offset in offsets]
    has_one_sign = min(offsets) >= 0 or max(offsets) <= 0
    return has_one_sign and sizes == sorted(sizes) and sizes[0] != sizes[-1]


def _spans_fit(prompt: PromptTokens, spans: Sequence[DeclaredSegment], n: int) -> bool:
    begins, ends = prompt.line_edges
    return all(span.start + n in begins and span.stop + n in ends for span in spans)


def _shift_past_bos(prompt: PromptTokens, spans: Sequence[DeclaredSegment]) -> int | None:
    """The shift that moves a BOS out of the first span and separators to the ends of the spans.

    A separator is a space or a closing mark: one with which each span but the first begins, while
    the word after it would begin the span if it were shifted.
    """
    n = prompt.first_unpadded + 1 - spans[0].start
    is_counted = prompt.has_bos and n in leading_lengths(prompt) and _is_paraphrase(prompt)
    starts, last = [span.start for span in spans[1:]], spans[-1].stop + n
    if not is_counted or not starts or last > prompt.stop:
        return None
    if any(_follows_separator(prompt, start) for start in starts):
        return None
    fits = all(_follows_separator(prompt, start + n) for start in starts)
    return n if fits and (last == prompt.stop or _follows_separator(prompt, last)) else None


def _follows_separator(prompt: PromptTokens, pos: int) -> bool:
    """Whether a word begins at a position, behind a space or a closing mark."""
    before, token = (prompt.tokens[pos - prompt.start - back] for back in (1, 0))
    if token.special:
        return True
    return _is_separator(before.text) and token.text.strip() != "" and not _is_separator(token.text)


def _is_separator(text: str) -> bool:
    return text.isspace() or text.strip()[:1] in {*_CLOSING_MARKS}


def _is_paraphrase(prompt: PromptTokens) -> bool:
    """Whether the first span is one of the segments that should be isolated from each other."""
    return any(segment.label == prompt.spans[0].label for segment in prompt.paraphrases)


def _shift_by_gaps(prompt: PromptTokens, spans: Sequence[DeclaredSegment]) -> int | None:
    """The shift after which all gaps between spans hold the same ids; 0 if they already do."""
    gaps = [(a.stop, b.start) for a, b in pairwise(spans)]
    width = min((b - a for a, b in gaps), default=0)
    if len(gaps) < 2 or width < 1:
        return None
    is_reliable = len(gaps) > 2 or width > 1
    shifts = candidate_shifts(prompt) if is_reliable else sorted(leading_lengths(prompt))
    return next((n for n in (0, *shifts) if _gaps_are_equal(prompt, gaps, n)), None)


def _gaps_are_equal(prompt: PromptTokens, gaps: Sequence[Span], n: int) -> bool:
    offset = n - prompt.start
    if gaps[0][0] + offset < 0 or gaps[-1][1] + n > prompt.stop:
        return False
    moved = [slice(start + offset, stop + offset) for start, stop in gaps]
    if prompt.has_text and any(map(str.isalnum, "".join(prompt.texts[moved[0]]))):
        return False  # paraphrases have words in common
    return len({tuple(prompt.ids[gap]) for gap in moved}) == 1


def _shift_by_ends(prompt: PromptTokens, spans: Sequence[DeclaredSegment]) -> int | None:
    """The shift that moves a BOS out of the first span and the last span to the end."""
    first, n = spans[0], prompt.stop - spans[-1].stop
    if prompt.tokenizer.bos is None or not _is_paraphrase(prompt):
        return None
    if n > 0 and prompt.has_bos and n == prompt.first_unpadded + 1 - first.start:
        return n
    if n == -1 and not prompt.has_bos and first.start == prompt.first_unpadded + 1:
        return n
    return None

"""Spans that lie a few tokens beside the pieces they were meant for, told from the tokens alone.

Nothing but the spans was declared, so each way needs spans that do not fit where they are and all
fit when moved: to where lines begin and end, to where the same tokens lie between them, or past a
BOS in the first to the end of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flexinspect.pieces import DeclaredSegment, Span
from flexinspect.rules.fedfacts import PromptTokens

MAX_SHIFT = 32
"""How many tokens a span is moved at most, but by the padding, which may be any."""
_MAX_SPAN_SHIFT = 8
_MAX_BORDER_SHIFT = 4


@dataclass(frozen=True, slots=True)
class SpanShift:
    """By how many tokens each span must be moved to fit (0: it does), and what says so.

    `by` is "lines" (where lines and sentences begin and end), "gaps" (the tokens between spans) or
    "ends" (a BOS inside of the first span, the end of the prompt behind the last).
    """

    offsets: tuple[int, ...]
    source: str

    @property
    def tokens(self) -> int | None:
        """The number of tokens if all spans are off by the same."""
        return self.offsets[0] if len(set(self.offsets)) == 1 else None


def find_shift(prompt: PromptTokens) -> SpanShift | None:
    """Return how the declared spans are off, None when they fit or nothing tells."""
    spans = prompt.spans
    if not spans or not prompt.tokens:
        return None
    if prompt.has_text and _spans_fit(prompt, spans, 0):
        return None
    n = _shift_by_lines(prompt, spans) if prompt.has_text else None
    if n is not None:
        return SpanShift((n,) * len(spans), "lines")
    drift = _span_shifts_by_lines(prompt, spans) if prompt.has_text else None
    if drift is not None:
        return SpanShift(drift, "lines")
    for by, n in (("gaps", _shift_by_gaps(prompt, spans)), ("ends", _shift_by_ends(prompt, spans))):
        if n is not None:
            return SpanShift((n,) * len(spans), by) if n else None
    return None


def candidate_shifts(prompt: PromptTokens) -> list[int]:
    """Return the numbers of tokens to try, the smallest first: a few, and the padding's."""
    near = {*range(-MAX_SHIFT, MAX_SHIFT + 1), *leading_lengths(prompt)} - {0}
    return sorted(near, key=lambda n: (abs(n), n < 0))


def leading_lengths(prompt: PromptTokens) -> set[int]:
    """Return how many tokens come before the first word: the BOS, the padding, both."""
    bos = int(prompt.has_bos)
    return {bos, prompt.n_pads, prompt.n_pads + bos} - {0}


def _shift_by_lines(prompt: PromptTokens, spans: Sequence[DeclaredSegment]) -> int | None:
    begins, ends = prompt.line_edges
    # The first may begin with whatever comes first in the prompt, which tells nothing.
    n_begin = sum(span.start in begins for span in spans[1:])
    n_end = sum(span.stop in ends for span in spans)
    if n_begin > len(spans) // 4 or n_begin + n_end > len(spans):
        return None
    likely = leading_lengths(prompt) if len(spans) == 1 else candidate_shifts(prompt)
    return next((n for n in likely if _spans_fit(prompt, spans, n)), None)


def _span_shifts_by_lines(
    prompt: PromptTokens, spans: Sequence[DeclaredSegment]
) -> tuple[int, ...] | None:
    """Return offsets that grow from span to span, None unless each span has one."""
    offsets = []
    for span in spans:
        near = sorted(range(-_MAX_SPAN_SHIFT, _MAX_SPAN_SHIFT + 1), key=abs)
        fit = next((n for n in near if _spans_fit(prompt, (span,), n)), None)
        if fit is None:
            return None
        offsets.append(fit)
    if len(spans) < 3 and max(map(abs, offsets)) > 2:
        return None
    return tuple(offsets) if is_growing(offsets) else None


def is_growing(offsets: Sequence[int]) -> bool:
    """Say whether offsets go further and further one way, and are not all the same."""
    far = [abs(offset) for offset in offsets]
    is_one_way = min(offsets) >= 0 or max(offsets) <= 0
    return is_one_way and far == sorted(far) and far[0] != far[-1]


def _spans_fit(prompt: PromptTokens, spans: Sequence[DeclaredSegment], n: int) -> bool:
    begins, ends = prompt.line_edges
    return all(span.start + n in begins and span.stop + n in ends for span in spans)


def _shift_by_gaps(prompt: PromptTokens, spans: Sequence[DeclaredSegment]) -> int | None:
    """Return the move after which the same ids lie between all spans; 0 when they do already."""
    gaps = [(a.stop, b.start) for a, b in pairwise(spans)]
    width = min((b - a for a, b in gaps), default=0)
    if len(gaps) < 2 or width < 1:
        return None
    if _gaps_are_equal(prompt, gaps, 0):
        return 0
    is_sure = len(gaps) > 2 or width > 1
    likely = candidate_shifts(prompt) if is_sure else sorted(leading_lengths(prompt))
    return next((n for n in likely if _gaps_are_equal(prompt, gaps, n)), None)


def _gaps_are_equal(prompt: PromptTokens, gaps: Sequence[Span], n: int) -> bool:
    offset = n - prompt.start
    if gaps[0][0] + offset < 0 or gaps[-1][1] + n > prompt.stop:
        return False
    if prompt.has_text and any(
        map(str.isalnum, "".join(prompt.texts[slice(*_move_gap(gaps[0], offset))]))
    ):
        return False  # paraphrases have words in common
    return len({tuple(prompt.ids[slice(*_move_gap(gap, offset))]) for gap in gaps}) == 1


def _move_gap(gap: Span, n: int) -> Span:
    return gap[0] + n, gap[1] + n


def _shift_by_ends(prompt: PromptTokens, spans: Sequence[DeclaredSegment]) -> int | None:
    """Return the move that takes a BOS out of the first span and the last one to the end."""
    first, last = spans[0], spans[-1]
    n = prompt.stop - last.stop
    if prompt.tokenizer_facts.bos is None or not _is_paraphrase(prompt, first):
        return None
    if n > 0 and prompt.has_bos and n == prompt.first_unpadded + 1 - first.start:
        return n
    if n == -1 and not prompt.has_bos and first.start == prompt.first_unpadded + 1:
        return n
    return None


def _is_paraphrase(prompt: PromptTokens, piece: DeclaredSegment) -> bool:
    return any(one.label == piece.label for one in prompt.paraphrases)


def find_odd_border(prompt: PromptTokens) -> Iterator[tuple[DeclaredSegment, bool, int]]:
    """Yield the one border that does not fit, as (span, whether its start, how far to move it).

    Only among at least two spans whose other borders are all where lines or sentences are.
    """
    begins, ends = prompt.line_edges
    odd = [(span, True) for span in prompt.spans if span.start not in begins]
    odd += [(span, False) for span in prompt.spans if span.stop not in ends]
    if not prompt.has_text or len(prompt.spans) < 2 or len(odd) != 1:
        return
    span, is_start = odd[0]
    at, fitting = (span.start, begins) if is_start else (span.stop, ends)
    near = sorted(range(-_MAX_BORDER_SHIFT, _MAX_BORDER_SHIFT + 1), key=abs)
    n = next((n for n in near if at + n in fitting), None)
    if n is not None and span.start + n * is_start < span.stop + n * (not is_start):
        yield span, is_start, n

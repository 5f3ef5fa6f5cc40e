"""Spans that lie a few tokens beside the pieces they were meant for, told from the tokens alone.

Nothing but the spans was declared, so each way needs spans that do not fit where they are and all
fit when moved: to where lines begin and end, to where the same tokens lie between them, or past a
BOS in the first to the end of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flexinspect.pieces import Piece, Span
from flexinspect.rules.fedfacts import Fed

REACH = 32
"""How many tokens a span is moved at most, but by the padding, which may be any."""
_REACH_OF_ONE = 8
_ODD = 4


@dataclass(frozen=True, slots=True)
class Shift:
    """By how many tokens each span must be moved to fit (0: it does), and what says so.

    `by` is "lines" (where lines and sentences begin and end), "gaps" (the tokens between spans) or
    "ends" (a BOS inside of the first span, the end of the prompt behind the last).
    """

    offsets: tuple[int, ...]
    by: str

    @property
    def n(self) -> int | None:
        """The number of tokens if all spans are off by the same."""
        return self.offsets[0] if len(set(self.offsets)) == 1 else None


def find_shift(fed: Fed) -> Shift | None:
    """Return how the declared spans are off, None when they fit or nothing tells."""
    spans = fed.spans
    if not spans or not fed.tokens:
        return None
    if fed.has_text and _fits(fed, spans, 0):
        return None
    n = _by_lines(fed, spans) if fed.has_text else None
    if n is not None:
        return Shift((n,) * len(spans), "lines")
    drift = _by_lines_each(fed, spans) if fed.has_text else None
    if drift is not None:
        return Shift(drift, "lines")
    for by, n in (("gaps", _by_gaps(fed, spans)), ("ends", _by_ends(fed, spans))):
        if n is not None:
            return Shift((n,) * len(spans), by) if n else None
    return None


def reach_of(fed: Fed) -> list[int]:
    """Return the numbers of tokens to try, the smallest first: a few, and the padding's."""
    near = {*range(-REACH, REACH + 1), *leads(fed)} - {0}
    return sorted(near, key=lambda n: (abs(n), n < 0))


def leads(fed: Fed) -> set[int]:
    """Return how many tokens come before the first word: the BOS, the padding, both."""
    bos = int(fed.has_bos)
    return {bos, fed.n_pads, fed.n_pads + bos} - {0}


def _by_lines(fed: Fed, spans: Sequence[Piece]) -> int | None:
    begins, ends = fed.edges
    # The first may begin with whatever comes first in the prompt, which tells nothing.
    n_begin = sum(span.start in begins for span in spans[1:])
    n_end = sum(span.stop in ends for span in spans)
    if n_begin > len(spans) // 4 or n_begin + n_end > len(spans):
        return None
    likely = leads(fed) if len(spans) == 1 else reach_of(fed)
    return next((n for n in likely if _fits(fed, spans, n)), None)


def _by_lines_each(fed: Fed, spans: Sequence[Piece]) -> tuple[int, ...] | None:
    """Return offsets that grow from span to span, None unless each span has one."""
    offsets = []
    for span in spans:
        near = sorted(range(-_REACH_OF_ONE, _REACH_OF_ONE + 1), key=abs)
        fit = next((n for n in near if _fits(fed, (span,), n)), None)
        if fit is None:
            return None
        offsets.append(fit)
    if len(spans) < 3 and max(map(abs, offsets)) > 2:
        return None
    return tuple(offsets) if grows(offsets) else None


def grows(offsets: Sequence[int]) -> bool:
    """Say whether offsets go further and further one way, and are not all the same."""
    far = [abs(offset) for offset in offsets]
    is_one_way = min(offsets) >= 0 or max(offsets) <= 0
    return is_one_way and far == sorted(far) and far[0] != far[-1]


def _fits(fed: Fed, spans: Sequence[Piece], n: int) -> bool:
    begins, ends = fed.edges
    return all(span.start + n in begins and span.stop + n in ends for span in spans)


def _by_gaps(fed: Fed, spans: Sequence[Piece]) -> int | None:
    """Return the move after which the same ids lie between all spans; 0 when they do already."""
    gaps = [(a.stop, b.start) for a, b in pairwise(spans)]
    width = min((b - a for a, b in gaps), default=0)
    if len(gaps) < 2 or width < 1:
        return None
    if _same_between(fed, gaps, 0):
        return 0
    is_sure = len(gaps) > 2 or width > 1
    likely = reach_of(fed) if is_sure else sorted(leads(fed))
    return next((n for n in likely if _same_between(fed, gaps, n)), None)


def _same_between(fed: Fed, gaps: Sequence[Span], n: int) -> bool:
    offset = n - fed.start
    if gaps[0][0] + offset < 0 or gaps[-1][1] + n > fed.stop:
        return False
    if fed.has_text and any(map(str.isalnum, "".join(fed.texts[slice(*_moved(gaps[0], offset))]))):
        return False  # paraphrases have words in common
    return len({tuple(fed.ids[slice(*_moved(gap, offset))]) for gap in gaps}) == 1


def _moved(gap: Span, n: int) -> Span:
    return gap[0] + n, gap[1] + n


def _by_ends(fed: Fed, spans: Sequence[Piece]) -> int | None:
    """Return the move that takes a BOS out of the first span and the last one to the end."""
    first, last = spans[0], spans[-1]
    n = fed.stop - last.stop
    if fed.words.bos is None or not _is_paraphrase(fed, first):
        return None
    if n > 0 and fed.has_bos and n == fed.first + 1 - first.start:
        return n
    if n == -1 and not fed.has_bos and first.start == fed.first + 1:
        return n
    return None


def _is_paraphrase(fed: Fed, piece: Piece) -> bool:
    return any(one.label == piece.label for one in fed.paraphrases)


def odd_borders(fed: Fed) -> Iterator[tuple[Piece, bool, int]]:
    """Yield the one border that does not fit, as (span, whether its start, how far to move it).

    Only among at least two spans whose other borders are all where lines or sentences are.
    """
    begins, ends = fed.edges
    odd = [(span, True) for span in fed.spans if span.start not in begins]
    odd += [(span, False) for span in fed.spans if span.stop not in ends]
    if not fed.has_text or len(fed.spans) < 2 or len(odd) != 1:
        return
    span, is_start = odd[0]
    at, fitting = (span.start, begins) if is_start else (span.stop, ends)
    near = sorted(range(-_ODD, _ODD + 1), key=abs)
    n = next((n for n in near if at + n in fitting), None)
    if n is not None and span.start + n * is_start < span.stop + n * (not is_start):
        yield span, is_start, n

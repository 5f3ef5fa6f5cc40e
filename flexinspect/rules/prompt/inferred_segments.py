"""Reads the segments of a prompt out of the executed mask, where no mask was declared.

The rows at which another set of keys begins are the borders (see `segment_borders`). The text on
both sides of a border says whether it may be a mistake: lines, sentences, turns of a chat, special
tokens, separators and repeated wordings begin a segment; the middle of a word does not, nor does
that of a list of ids which the program holds. Where position ids start again, a segment begins too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from flexinspect.core.text import capitalize, join_labels, plural, printable, truncate
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Span
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks.mask_views import calls_by_mask, layers_of
from flexinspect.rules.prompt import prompt_facts, segment_borders
from flexinspect.rules.prompt.prompt_facts import PromptTokens
from flexinspect.rules.prompt.segment_borders import (
    BorderCheck,
    Borders,
    describe_direction,
    explain_shift,
    limit_names,
)

INFERRED, SUSPECT = "segments.inferred", "segments.suspect-border"
_MAX_SHIFT = 4  # tokens; borders farther away from a line are not meant to be at one
_MAX_QUOTED_CHARACTERS = 28
_GUESS = "You declared no segments, so this is a guess from the mask and the text."
_BY_PARTS = "You declared no segments; these lists of token ids are variables of your program."
_BY_IDS = "You declared no segments; these position ids are those that your program passed."
_SEGMENTS_ONLY = "You declared segments but no mask, so the cells were not compared one by one."
_FIX_BY_MOVE = (
    "Count positions in the input ids, with the BOS and the padding. To compare every cell with "
    "what you meant: flexinspect declare TRACE --move {} (D in the interface) writes the moved "
    "segments to a file for run --declare."
)
_FIX_BESIDE_DECLARED = (
    "Count positions in the input ids, with the BOS and the padding. To compare every cell, "
    'declare the mask beside the segments, for example mask = "segment-isolation".'
)
_FIRST_SCRIPT_WITHOUT_SPACES = "\u0590"  # from here on, letters do not tell where a word ends


_ROLES = frozenset(("system", "user", "assistant", "model", "tool", "developer", "human"))
"""The words behind the special token with which a chat template begins a turn."""


class Landmark(NamedTuple):
    """Positions at which segments may begin, and what they are: `the beginning of a line`."""

    name: str
    positions: frozenset[int]


class InferredSegments(NamedTuple):
    """The segments into which a mask cuts a prompt.

    `borders` are the first positions of all segments but the first. All of them are at a landmark
    after a move by `shift` tokens; 0 if they already are, or if no small move achieves that;
    `landmark` is its name, and `is_cut` says that they divide lists of the program, or `by_ids`
    what has position ids of its own. `in_words` and `before_breaks` are borders inside a word and
    just before a line break, if they do not have a shift in common. `without_border` is where the
    first of segments with the same position ids begins, if the mask has borders at the others only.
    """

    borders: Borders
    shift: int = 0
    in_words: Borders = ()
    before_breaks: Borders = ()
    landmark: str = ""
    is_cut: bool = False
    by_ids: bool = False
    without_border: int | None = None

    @property
    def is_suspect(self) -> bool:
        """Whether a border is probably not where it was meant to be."""
        is_odd = self.shift or self.in_words or self.before_breaks
        return bool(is_odd or self.without_border is not None)

    def describe_distance(self) -> str:
        """Return where the borders are if they have a shift: `1 token before ... of a line`."""
        side = "before" if self.shift > 0 else "after"
        return f"{plural(abs(self.shift), 'token')} {side} {self.landmark}"


def find_segment_borders(mask: MaskRecord, prompt: PromptTokens) -> dict[Borders, int]:
    """Return the borders of the segments into which a mask cuts the prompt, with one of its heads.

    Empty for a mask that has none, or another structure: a border in most rows.
    """
    found: dict[Borders, int] = {}
    for heads, borders in segment_borders.find_borders(mask):
        if borders and len(borders) <= mask.q_len // 2 and mask.cells is not None:
            head = heads[0] if heads else 0
            row = mask.cells[head, borders[0], : borders[0]]
            # The first segment begins with what the second one sees of it: a text that all share.
            shared = int(np.argmin(row)) if not row.all() else 0
            has_text = shared > first_text_position(prompt)
            found.setdefault((shared, *borders) if has_text else borders, head)
    return found


def first_text_position(prompt: PromptTokens, start: int = 0) -> int:
    """Return the first position from `start` on that is neither padding nor a special token.

    Without a tokenizer, the first token that is not padding counts as special.
    """
    if not prompt.has_text:
        return max(start, prompt.first_unpadded + 1)
    start = max(start, prompt.first_unpadded)
    while start < prompt.stop and prompt.tokens[start - prompt.start].special:
        start += 1
    return start


def segment_spans(borders: Borders, prompt: PromptTokens) -> list[Span]:
    """Return the spans into which borders cut a prompt, in order and without gaps."""
    edges = pairwise((0, *borders, prompt.stop))
    return [(start, stop) for start, stop in edges if start < stop]


def isolated_spans(
    cells: npt.NDArray[np.bool_], spans: Sequence[Span], prompt: PromptTokens
) -> range:
    """Return which spans are isolated in a mask, (rows, keys): neither seen by all nor seeing all.

    What is before them is shared or has no text, and what is after them is the cue.
    """
    last = len(spans) - 1
    while last > 0 and cells[spans[last][0], : spans[last][0] + 1].all():
        last -= 1
    start, stop = first_text_position(prompt), spans[0][1]
    is_shared = last > 0 and start < stop and cells[stop : spans[last][1], start:stop].all()
    return range(int(is_shared or start >= stop), last + 1)


class ParallelSegments(NamedTuple):
    """Segments whose position ids all begin with the same number: at `first`, and at `others`.

    `is_first_seen` says that the second one attends to all of the first.
    """

    first: int
    others: tuple[int, ...]
    is_first_seen: bool = False

    def under(self, cells: npt.NDArray[np.bool_]) -> ParallelSegments:
        """Return them with what a mask (rows, keys) lets the second one see."""
        second = self.others[0]
        return self._replace(is_first_seen=bool(cells[second, self.first : second].all()))

    @classmethod
    def of_runs(cls, runs: Sequence[tuple[int, int]]) -> ParallelSegments | None:
        """Return those of position ids in runs (first id, count), None for fewer than three.

        The first segment continues the ids of the text before it, so only the others have a run of
        their own; without such a text it begins at 0.
        """
        starts = np.cumsum([0, *(count for _, count in runs)])
        ids = [first for first, _ in runs]
        if len(ids) < 3 or len({*ids[1:]}) > 1 or ids[0] != 0 or not 0 <= ids[1] < runs[0][1]:
            return None
        return cls(ids[1], tuple(int(start) for start in starts[1:-1]))


def infer_segments(
    borders: Borders, prompt: PromptTokens, parallel: ParallelSegments | None = None
) -> InferredSegments:
    """Return the segments that borders cut a prompt into, with what is odd about the borders."""
    if parallel is not None and (numbered := _numbered_parts(borders, prompt, parallel)):
        return numbered
    if (divided := _divided_parts(borders, prompt)) is not None:
        return divided
    if not prompt.has_text:
        return InferredSegments(borders)
    landmarks = [*_landmarks(prompt, len(borders))]
    if any(landmark.positions.issuperset(borders) for landmark in landmarks):
        return InferredSegments(borders)
    largest = 1 if len(borders) == 1 else max(_MAX_SHIFT, prompt.n_pads + 1)
    for size, shifts in groupby(prompt_facts.candidate_shifts(prompt), abs):
        if size > largest:
            break
        for (name, positions), n in product(landmarks, [*shifts]):
            if all(border + n in positions for border in borders):
                return InferredSegments(borders, n, landmark=name)
    texts = {
        border: (prompt.texts[border - prompt.start - 1], prompt.texts[border - prompt.start])
        for border in borders
        if prompt.start < border < prompt.stop
    }
    return InferredSegments(
        borders,
        in_words=tuple(b for b, (before, after) in texts.items() if _is_in_word(before, after)),
        before_breaks=tuple(b for b, (_, after) in texts.items() if after.startswith("\n")),
    )


def _numbered_parts(
    borders: Borders, prompt: PromptTokens, parallel: ParallelSegments
) -> InferredSegments | None:
    """Return the segments if the first has no border, or all are at one distance from the ids.

    None if the borders are those of the position ids, or have another structure.
    """
    begins, others = {parallel.first, *parallel.others}, {*parallel.others}
    if others <= {*borders}:
        if not parallel.is_first_seen or not parallel.first:
            return None
        return InferredSegments(borders, by_ids=True, without_border=parallel.first)
    for n in prompt_facts.candidate_shifts(prompt):
        moved = {border + n for border in borders}
        if n and abs(n) <= max(_MAX_SHIFT, prompt.n_pads + 1) and others <= moved <= begins:
            name = "where the position ids start again"
            return InferredSegments(borders, n, landmark=name, by_ids=True)
    return None


def _divided_parts(borders: Borders, prompt: PromptTokens) -> InferredSegments | None:
    """Return the segments if each border is an edge of a list, or all divide one at one distance.

    A border that divides a list is so many tokens before its end, or after its beginning.
    """
    parts = prompt.parts
    begins, ends = {p.start: p for p in parts}, {p.stop: p for p in parts}
    if len(parts) < 2 or not borders:
        return None
    if {*borders} <= begins.keys() | ends.keys():
        return InferredSegments(borders)
    divided = [next((p for p in parts if p.start < b < p.stop), None) for b in borders]
    largest = 1 if len(borders) == 1 else max(_MAX_SHIFT, prompt.n_pads + 1)
    for n in prompt_facts.candidate_shifts(prompt):
        edges = [None if p is None else (p.stop if n > 0 else p.start) for p in divided]
        if abs(n) <= largest and edges == [border + n for border in borders]:
            first = borders[0] + n
            name = f"the end of {ends[first].name}" if first in ends else ""
            if first in begins:
                name = f"the beginning of {begins[first].name}"
            return InferredSegments(borders, n, landmark=name, is_cut=True)
    return None


def _landmarks(prompt: PromptTokens, n_borders: int) -> Iterator[Landmark]:
    """Yield where segments may begin by the text, the most specific positions first.

    Separators and wordings count if there are as many as borders, but for the one of the cue, and
    at least two.
    """
    tokens, start = prompt.tokens, prompt.start
    turns = {
        token.pos
        for token, after in pairwise(tokens)
        if token.special and after.text.strip().lower() in _ROLES
    }
    if turns:
        yield Landmark("the beginning of a turn of the chat", frozenset(turns))
    special = {token.pos for token in tokens if token.special}
    # The role belongs to the special token before it, and the end of a turn to the turn.
    inside = {pos + 1 for pos in turns} | {pos - 1 for pos in turns if pos - 1 in special}
    lines = (prompt.line_edges[0] | special) - inside
    yield Landmark("the beginning of a line", lines)
    places: dict[str, list[int]] = {}
    for token in tokens:
        if not token.special and token.pos not in inside and (text := token.text.strip()):
            places.setdefault(text, []).append(token.pos)
    words = {pos for text, own in places.items() if any(map(str.isalnum, text)) for pos in own}
    first = first_text_position(prompt, start)
    for text, positions in places.items():
        quoted, n, after = f'"{printable(text)}"', len(positions), {pos + 1 for pos in positions}
        is_separator = words.isdisjoint(positions) and words >= after
        if is_separator and 2 <= n <= n_borders <= n + 1:
            yield Landmark(f"the text after {quoted}", lines | after)
        if positions[0] == first and 2 < n <= n_borders + 1 <= n + 1:
            name = f"{quoted}, with which the prompt and other segments begin"
            yield Landmark(name, lines | {*positions})


def _is_in_word(before: str, after: str) -> bool:
    return all(
        letter.isalnum() and letter < _FIRST_SCRIPT_WITHOUT_SPACES
        for letter in (before[-1:], after[:1])
    )


class InferredSegmentsRule(Rule):
    """Reports the segments of a mask, and borders that are probably misplaced, without a declared
    mask.

    Where segments are declared, only misplaced borders are reported: those between the segments,
    about which `PromptRule` says nothing because a separator may belong to either side. The first
    step with masks of the whole prompt is checked. Without a cache every later step has
    such masks too, and the same borders.
    """

    name = "inferred_segments"
    needs = (imported.MASKS, imported.WORDS)
    findings = finding_kinds(INFERRED, SUSPECT)

    def reset(self) -> None:
        context = self.context
        self._prompt = PromptTokens(context)
        is_declared = context.declared_spec is not None or context.has_custom_mask_mod
        self._is_active = not is_declared and bool(self._prompt.tokens)
        self._has_segments = bool(self._prompt.pieces or self._prompt.paraphrases)
        self._parts: dict[Borders, str] = {}  # what borders cut a prompt into
        self._open_bos: set[Borders] = set()  # those behind which rows see the BOS

    def on_step(self, step: StepRecord) -> Findings:
        """Check the masks of a step with several rows."""
        if step.q_len == 1 or not self._is_active:
            return
        calls_by_borders: dict[Borders, list[CallRecord]] = {}
        parallel = None if step.inputs is None else ParallelSegments.of_runs(step.inputs.positions)
        seen: dict[Borders, ParallelSegments] = {}
        for fingerprint, calls in calls_by_mask(step).items():
            mask = self.context.mask(fingerprint)
            if mask is None or mask.q_offset or mask.q_len < self._prompt.stop:
                continue
            self._is_active = False
            for borders, head in find_segment_borders(mask, self._prompt).items():
                if mask.cells is not None:
                    self._count_segments(borders, mask.cells[head])
                    self._note_open_bos(borders, mask.cells[head])
                if parallel is not None and mask.cells is not None:
                    seen.setdefault(borders, parallel.under(mask.cells[head]))
                if not self._has_segments or self._are_between_segments(mask, borders):
                    calls_by_borders.setdefault(borders, []).extend(calls)
        for borders, calls in calls_by_borders.items():
            segments = infer_segments(borders, self._prompt, seen.get(borders))
            if segments.is_suspect or not self._has_segments:
                yield self._make_finding(step, segments, calls)

    def _count_segments(self, borders: Borders, cells: npt.NDArray[np.bool_]) -> None:
        """Keep what a mask cuts the prompt into: `3 segments and a cue`, as a declaration has."""
        spans = segment_spans(borders, self._prompt)
        apart = isolated_spans(cells, spans, self._prompt)
        if not apart:
            self._parts.setdefault(borders, plural(len(spans), "segment"))
            return
        before = [self._describe_beginning(spans[0])] * apart.start
        after = ["a cue"] if apart.stop < len(spans) else []
        parts = join_labels([*before, plural(len(apart), "segment"), *after])
        self._parts.setdefault(borders, parts)

    def _describe_beginning(self, span: Span) -> str:
        """Return what a first span is that belongs to no segment."""
        n = span[1] - span[0]
        if first_text_position(self._prompt) < span[1]:
            return "a shared text"
        if self._prompt.has_bos and not self._prompt.n_pads:
            return "the BOS"
        return "the first token" if n == 1 else f"the first {n} tokens"

    def _note_open_bos(self, borders: Borders, cells: npt.NDArray[np.bool_]) -> None:
        """Note borders whose second segment sees the BOS of the first."""
        start, stop = (*borders, self._prompt.stop)[:2]
        if self._prompt.has_bos and cells[start:stop, self._prompt.first_unpadded].any():
            self._open_bos.add(borders)

    def _has_cause(self, segments: InferredSegments) -> bool:
        """Whether all borders are off by what was not counted: the padding, or the BOS.

        A mask that opens the BOS to all segments does count it; then a line break or a mark before
        each border may be meant to begin the segment.
        """
        shift = segments.shift
        if not shift or not explain_shift(self._prompt, shift):
            return False
        return abs(shift) > 1 or segments.borders not in self._open_bos

    def _are_between_segments(self, mask: MaskRecord, borders: Borders) -> bool:
        """Whether a border is where no declared segment begins, and nothing else reports it."""
        apart = self._prompt.paraphrases
        begins = {one.start for one in apart}
        if apart and all(border in begins or border >= apart[-1].stop for border in borders):
            return False
        return BorderCheck(self, self._prompt).check_mask(mask, ((), borders)) is None

    def _make_finding(
        self, step: StepRecord, segments: InferredSegments, calls: Sequence[CallRecord]
    ) -> Finding:
        layers, spans = layers_of(calls), segment_spans(segments.borders, self._prompt)
        texts = [self._text(start, stop) for start, stop in spans]
        where = format_step_layers(layers, step)
        cut = f"the executed mask cuts the prompt into {self._parts[segments.borders]}"
        if segments.is_suspect:
            sentence = f"{self._describe_oddity(segments)}. In {where} {cut}."
        else:
            quoted = [f'"{text}"' if self._prompt.has_text else text for text in texts]
            sentence = f"In {where} {cut}: {join_labels(limit_names(quoted))}."
        guess = _BY_PARTS if segments.is_cut else _GUESS
        guess = _BY_IDS if segments.by_ids else guess
        sentence += f" {_SEGMENTS_ONLY if self._has_segments else guess}"
        evidence = {
            "borders": list(segments.borders),
            "segments": [
                {"start": start, "stop": stop, "text": text}
                for (start, stop), text in zip(spans, texts, strict=True)
            ],
        }
        if segments.shift:
            evidence["shift"] = segments.shift
        odd = (*segments.in_words, *segments.before_breaks) or segments.borders
        if segments.without_border is not None:
            odd = (segments.without_border,)
        is_certain = segments.is_cut or segments.by_ids or self._has_cause(segments)
        found = self.finding(
            step,
            SUSPECT if segments.is_suspect else INFERRED,
            sentence,
            layers,
            evidence,
            positions=sorted(odd),
            series=f"borders {segments.borders}",
            severity=Severity.WARNING if is_certain and len(segments.borders) > 1 else None,
        )
        return replace(found, fix=self._describe_fix(segments.shift))

    def _describe_fix(self, shift: int) -> str:
        """Return the fix, with the command that moves all borders; "" for the usual one."""
        if self._has_segments:
            return _FIX_BESIDE_DECLARED
        return _FIX_BY_MOVE.format(shift) if shift else ""

    def _describe_oddity(self, segments: InferredSegments) -> str:
        place, n = self.context.format_position, segments.shift
        if (first := segments.without_border) is not None:
            other = next(border for border in segments.borders if border > first)
            return (
                f"By the position ids, {place(first)} begins a segment as {place(other)} does, but "
                f"the mask has no border there: later segments attend to {first}-{other - 1}"
            )
        if n:
            first = segments.borders[0]
            each = "The segment border" if len(segments.borders) == 1 else "Every segment border"
            return (
                f"{each} is {plural(abs(n), 'token')} {describe_direction(n)}"
                f"{explain_shift(self._prompt, n)}: {place(first)} begins a segment instead of "
                f"{place(first + n)} ({segments.landmark})"
            )
        parts = [f"{place(border)} begins a segment inside a word" for border in segments.in_words]
        parts += [
            f"{place(border)} begins a segment with a line break"
            for border in segments.before_breaks
        ]
        return capitalize(join_labels(limit_names(parts)))

    def _text(self, start: int, stop: int) -> str:
        """Return the beginning of the text of a segment, or its positions without a tokenizer."""
        prompt = self._prompt
        if not prompt.has_text:
            return f"{start}-{stop - 1}"
        tokens = prompt.tokens[max(start - prompt.start, 0) : max(stop - prompt.start, 0)]
        words = [token for token in tokens if not token.special] or tokens
        text = "".join(token.text or token.token for token in words)
        return truncate(printable(text), _MAX_QUOTED_CHARACTERS)

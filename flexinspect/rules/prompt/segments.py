"""Compares the prompt that a model received, and the masks that ran, with the declared segments.

The prompt is checked once per generation, when it is complete. The borders of each mask of several
rows are compared with those of the declared segments once per run. Decode steps are skipped.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from msgspec.structs import replace

from flexinspect.core.text import is_or_are, join_labels, plural, printable
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import DeclaredSegment, Span
from flexinspect.records.step import CallRecord, StepRecord, TokenRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks.mask_views import calls_by_mask
from flexinspect.rules.prompt import prompt_facts, segment_borders, span_shift
from flexinspect.rules.prompt.prompt_facts import SPECIAL_MARK, PromptTokens
from flexinspect.rules.prompt.segment_borders import BorderFault, HeadBorders, limit_names
from flexinspect.rules.prompt.span_shift import SpanShift

_MAX_QUOTED_CHARACTERS = 32
_MAX_BORDER_SHIFT = 4
_MIN_CUT_CHARACTERS, _MIN_CUT_TOKENS = 8, 3
_KNOWN_SPECIALS = re.compile(r"<\|\w[\w ]{0,40}\|>|</?s>|<(?:bos|eos|pad|(?:start|end)_of_turn)>")
"""Special tokens of well-known vocabularies."""
_HTML_TAG = re.compile(r"</?(?:a|p|b|i|br|div|span|li|ul|td|tr|html|body)\b[^>]*>")
_SHIFT_REASONS = {
    ("lines", True): "it starts and ends at line or sentence boundaries",
    ("lines", False): "they start and end at line or sentence boundaries",
    ("bos", True): "it excludes the BOS",
    ("bos", False): "they exclude the BOS, and none begins with a space or a closing mark",
    ("gaps", True): "it has the same tokens around it",
    ("gaps", False): "they have the same tokens between them",
    ("ends", True): "it excludes the BOS and ends with the prompt",
    ("ends", False): "they exclude the BOS and end with the prompt",
}
"""By `SpanShift.source` and whether there is one span, why the shifted spans fit."""


class _TruncatedPiece(NamedTuple):
    """A piece of which `n_lost` of `n` units are missing, at its end or at its beginning."""

    piece: DeclaredSegment
    n_lost: int
    n: int
    unit: str  # "position", "token" or "character"
    at_end: bool = True


class PromptRule(Rule):
    """Reports where the declared segments differ from the input tokens or the executed mask."""

    name = "prompt"
    needs = (imported.WORDS,)
    findings = finding_kinds(
        "segments.[!isu]*", "segments.shifted", "segments.special-as-text", "segments.uncovered"
    )

    def __init__(self) -> None:
        self._borders: dict[str, tuple[HeadBorders, ...]] = {}  # by mask, for the whole run
        self._had_complete_prompt = False  # missing pieces are then only a note

    def reset(self) -> None:
        self._later_tokens: list[TokenRecord] = []
        self._prompt = PromptTokens(self.context)
        self._is_checked = not self._prompt.tokens
        self._border_check = segment_borders.BorderCheck(self, self._prompt)
        self._border_faults: dict[str, list[BorderFault]] = {}

    def on_step(self, step: StepRecord) -> Findings:
        """Check the prompt once it is complete, and the masks of steps with several rows."""
        if self._is_checked and step.q_len == 1:
            return
        if not self._is_checked:
            prompt_tokens = [token for token in step.tokens if token.step is None]
            if prompt_tokens:
                self._later_tokens += prompt_tokens
                self._prompt = PromptTokens(self.context, self._later_tokens)
            # Later forwards may still add missing pieces.
            if self._prompt.is_complete or (step.step > 0 and not prompt_tokens):
                yield from self._check_prompt()
        if step.q_len > 1 and self._prompt.paraphrases:
            yield from self._check_masks(step)

    def on_generation_end(self) -> Findings:
        """Check a prompt that never became complete."""
        if not self._is_checked:
            yield from self._check_prompt()

    def _check_prompt(self) -> Findings:
        """Yield what is wrong with the prompt, without the consequences of another finding."""
        self._is_checked, prompt = True, self._prompt
        if not prompt.tokens:
            return
        shift = span_shift.find_shift(prompt)
        if shift is not None:
            yield self._shifted(shift) if shift.tokens is not None else self._drifted(shift)
        else:
            yield from self._odd_border()
            yield from self._inner_padding()
            yield from self._missing_pieces()
            yield from self._uncovered_words()
        yield from self._overlaps()
        yield from self._length_drift()
        yield from self._ambiguous_texts()
        yield from self._reordered()
        yield from self._check_bos()
        yield from self._check_eos()
        yield from self._special_tokens()
        self._had_complete_prompt |= bool(prompt.pieces) and prompt.is_complete

    def _check_masks(self, step: StepRecord) -> Findings:
        calls_by_fault: dict[BorderFault, list[CallRecord]] = {}
        for fingerprint, calls in calls_by_mask(step).items():
            if fingerprint is None:
                continue
            faults = self._border_faults.get(fingerprint)
            if faults is None:
                mask, check = self.context.mask(fingerprint), self._border_check.check_mask
                if fingerprint not in self._borders:
                    self._borders[fingerprint] = segment_borders.find_borders(mask)
                found = (check(mask, borders) for borders in self._borders[fingerprint])
                faults = self._border_faults[fingerprint] = list(filter(None, found))
            for fault in faults:
                calls_by_fault.setdefault(fault, []).extend(calls)
        for fault, calls in calls_by_fault.items():
            yield self._border_check.make_finding(step, fault, calls)

    def _prompt_finding(
        self,
        finding_id: str,
        sentence: str,
        positions: Iterable[int],
        evidence: Mapping[str, Any],
        severity: Severity | None = None,
    ) -> Finding:
        options: dict[str, Any] = {"severity": severity, "positions": positions}
        found = self.finding(None, finding_id, sentence, evidence=evidence, **options)
        return replace(found, step=0)

    def _shifted(self, shift: SpanShift) -> Finding:
        """All spans are off by the same number of tokens."""
        n, spans = shift.tokens or 0, self._prompt.spans
        one = len(spans) == 1
        keeps = [shift.keeps_start, *[False] * (len(spans) - 1)]
        misfits = [self._describe_misfit(*each, n) for each in zip(spans, keeps, strict=True)]
        listed = "; ".join(text for text, _ in misfits[: segment_borders.MAX_NAMES])
        subject = "The declared span is" if one else f"The {len(spans)} declared spans are"
        if shift.keeps_start:
            subject = f"All borders of the {len(spans)} declared spans but the first are"
        sentence = (
            f"{subject} {plural(abs(n), 'token')} too {segment_borders.describe_direction(n)}"
            f"{segment_borders.explain_shift(self._prompt, n)}: {listed}. Shifted by {n:+d}, "
            f"{_describe_reason(shift)}."
        )
        positions = sorted({position for _, some in misfits for position in some})
        declared = segment_borders.declared_evidence(spans)
        evidence = {"shift": n, "declared": declared, "reported_by": shift.source}
        return self._prompt_finding("segments.shifted", sentence, positions, evidence)

    def _describe_misfit(
        self, span: DeclaredSegment, keeps_start: bool, n: int
    ) -> tuple[str, list[int]]:
        """Describe the tokens that a span wrongly includes and misses; also their positions."""
        declared = range(span.start, span.stop)
        shifted = range(span.start + n * (not keeps_start), span.stop + n)
        extra = [p for p in declared if p not in shifted]
        missing = [p for p in shifted if p not in declared]
        texts = []
        for verb, some in (("includes", extra), ("misses", missing)):
            if some:
                first = self.context.format_position(some[0])
                several = "" if len(some) == 1 else f"{len(some)} tokens from "
                texts.append(f"{verb} {several}{first}")
        text = f"{_quote_label(span)} {' and '.join(texts)}"
        return text, [p for p in (*extra, *missing) if p < self._prompt.stop]

    def _drifted(self, shift: SpanShift) -> Finding:
        """Each span is off by more tokens than the one before."""
        spans, offsets = self._prompt.spans, list(shift.offsets)
        pairs = zip(spans, offsets, strict=True)
        moves = ", ".join(f"{_quote_label(span)} by {n:+d}" for span, n in pairs)
        sentence = (
            f"The {len(spans)} declared spans drift away from the words: to start and end at line "
            f"or sentence boundaries they would have to move, {moves}, as if positions had been "
            f"summed from pieces encoded one by one; {_quote_label(spans[-1])} begins at "
            f"{self.context.format_position(spans[-1].start)}."
        )
        declared = segment_borders.declared_evidence(spans)
        evidence, starts = {"offsets": offsets, "declared": declared}, [one.start for one in spans]
        return self._prompt_finding("segments.drift", sentence, starts, evidence, Severity.WARNING)

    def _odd_border(self) -> Findings:
        """A single border of several spans does not fit to a line or sentence boundary."""
        prompt, (begins, ends) = self._prompt, self._prompt.line_edges
        # A BOS may belong to the first segment; if it does not, all spans are shifted.
        bos = {prompt.first_unpadded} if prompt.has_bos else set[int]()
        odd = [(span, True) for span in prompt.spans if span.start not in begins | bos]
        odd += [(span, False) for span in prompt.spans if span.stop not in ends]
        if not prompt.has_text or len(prompt.spans) < 2 or len(odd) != 1:
            return
        span, is_start = odd[0]
        at, fitting = (span.start, begins) if is_start else (span.stop, ends)
        shifts = sorted(range(-_MAX_BORDER_SHIFT, _MAX_BORDER_SHIFT + 1), key=abs)
        n = next((n for n in shifts if at + n in fitting), None)
        if n is None or span.start + n * is_start >= span.stop + n * (not is_start):
            return
        sentence = (
            f"{_quote_label(span)} {'begins at' if is_start else 'ends before'} "
            f"{self.context.format_position(at)}, inside a line: the line "
            f"{'begins' if is_start else 'ends'} {plural(abs(n), 'token')} "
            f"{'later' if n > 0 else 'earlier'}. All other borders are at line or sentence "
            "boundaries."
        )
        between = range(min(at, at + n), max(at, at + n))
        evidence = {"border": at, "shift": n, "segment": span.label}
        yield self._prompt_finding("segments.odd-border", sentence, between, evidence)

    def _inner_padding(self) -> Findings:
        """Pieces contain padding (by the padding mask or its id): one finding for all of them."""
        prompt, pads, pieces = self._prompt, list[int](), []
        leading = range(prompt.start, prompt.first_unpadded)
        at_pads = {token.pos for token in prompt.tokens if token.token_id == prompt.pad_id}
        for located, (start, stop) in prompt.found_pieces:
            inside = range(max(start, prompt.start), min(stop, prompt.stop))
            some = [pos for pos in inside if pos in leading or pos in at_pads]
            if some and not located.piece.label.lower().startswith("padding"):
                pads += some
                pieces.append(located.piece)
        if pieces:
            sentence = (
                f"{_join_labels(pieces)} {'contains' if len(pieces) == 1 else 'contain'} "
                f"{plural(len(pads), 'padding token')} (first: "
                f"{self.context.format_position(pads[0])}); the prompt has "
                f"{plural(prompt.n_pads, 'leading padding token')}."
            )
            labels = [piece.label for piece in pieces]
            evidence = {"pads": len(pads), "before the prompt": prompt.n_pads, "segments": labels}
            yield self._prompt_finding("segments.padding-inside", sentence, pads, evidence)

    def _uncovered_words(self) -> Findings:
        """Words between pieces belong to no piece: one finding for all of them."""
        prompt, uncovered = self._prompt, list[tuple[range, str]]()
        for (_, before), (start, _) in pairwise(sorted(span for _, span in prompt.found_pieces)):
            texts = prompt.texts[max(before - prompt.start, 0) : max(start - prompt.start, 0)]
            text = "".join(texts).replace(SPECIAL_MARK, "")
            if any(map(str.isalnum, text)):
                uncovered.append((range(before, start), text))
        if prompt.has_text and uncovered:
            positions = [p for gap, _ in uncovered for p in gap]
            sentence = (
                f"{plural(len(uncovered), 'gap')} between declared pieces "
                f"{'contains' if len(uncovered) == 1 else 'contain'} words that belong to no "
                f"piece, {plural(len(positions), 'token')}; first: "
                f'"{printable(uncovered[0][1].strip())[:_MAX_QUOTED_CHARACTERS]}" at '
                f"{self.context.format_position(positions[0])}."
            )
            evidence = {"gaps": len(uncovered), "tokens": len(positions)}
            yield self._prompt_finding("segments.uncovered", sentence, positions, evidence)

    def _missing_pieces(self) -> Findings:
        """Pieces are missing or truncated; only a note if an earlier prompt had them all."""
        # A prompt without some of the pieces then probably has another purpose.
        prompt, cut = self._prompt, self._find_truncated()
        absent = [one.piece for one in prompt.located_pieces if one.span is None and prompt.ids]
        missing = [piece for piece in absent if prompt.has_text or piece.ids]
        if cut is not None:
            late = [span for span in prompt.spans if span.stop > prompt.stop]
            yield self._truncated(cut, [one for one in (*missing, *late) if one != cut.piece])
        elif missing:
            n, one = len(prompt.pieces), len(missing) == 1
            beginning = "".join(token.text for token in prompt.tokens[prompt.n_pads :][:12])
            beginning = printable(beginning)[:_MAX_QUOTED_CHARACTERS]
            sentence = (
                f"The {'text' if one else 'texts'} of {_join_labels(missing)} "
                f"{is_or_are(len(missing))} not in the prompt ({plural(len(prompt.ids), 'token')}, "
                f'beginning with "{beginning}"); {n - len(missing)} of {n} declared pieces were '
                "found."
            )
            evidence = {"texts": [piece.text for piece in missing]}
            severity = Severity.NOTE if self._had_complete_prompt else None
            yield self._prompt_finding("segments.not-found", sentence, (), evidence, severity)

    def _find_truncated(self) -> _TruncatedPiece | None:
        """Return the first piece that is cut off at the end or the beginning of the prompt."""
        prompt = self._prompt
        for piece, span in ((located.piece, located.span) for located in prompt.located_pieces):
            if piece.text is None and piece.stop > prompt.stop:
                lost = piece.stop - max(prompt.stop, piece.start)
                return _TruncatedPiece(piece, lost, piece.stop - piece.start, "position")
            if span is None and (cut := _find_cut(prompt, piece)) is not None:
                return cut
        return None

    def _truncated(self, cut: _TruncatedPiece, after: Sequence[DeclaredSegment]) -> Finding:
        prompt, rest = self._prompt, ""
        if after:
            rest = f"; {_join_labels(after)} {is_or_are(len(after))} missing or incomplete"
        if cut.unit == "position" and _are_character_spans(prompt):
            rest += ", as if counted in characters"
        at = prompt.stop - 1 if cut.at_end else prompt.first_unpadded
        sentence = (
            f"The prompt {'ends' if cut.at_end else 'begins'} inside {_quote_label(cut.piece)}, at "
            f"{self.context.format_position(at)}: {cut.n_lost} of its {plural(cut.n, cut.unit)} "
            f"are missing{rest}."
        )
        received, label = len(prompt.ids), cut.piece.label
        evidence = {"lost": cut.n_lost, "of": cut.n, "received": received, "segment": label}
        severity = Severity.NOTE if self._had_complete_prompt else None
        return self._prompt_finding("segments.truncated", sentence, (at,), evidence, severity)

    def _ambiguous_texts(self) -> Findings:
        """Texts occur more often than pieces with that text were declared."""
        for located, (start, _) in self._prompt.found_pieces:
            piece, n = located.piece, located.n_places
            if piece.text is None or n <= sum(p.text == piece.text for p in self._prompt.pieces):
                continue
            times = f"at least {n}" if n >= prompt_facts.MAX_COUNTED_PLACES else str(n)
            sentence = (
                f"The text of {_quote_label(piece)} occurs {times} times in the prompt; the "
                f"occurrence at {self.context.format_position(start)} was used."
            )
            evidence = {"places": n, "text": piece.text}
            yield self._prompt_finding("segments.ambiguous", sentence, (start,), evidence)

    def _overlaps(self) -> Findings:
        found = self._prompt.found_pieces
        for second, (start, stop) in found:
            for first, (a, b) in found if second.overlaps else ():
                shared = range(max(a, start), min(b, stop))
                if first is not second and shared:
                    sentence = (
                        f"{_quote_label(first.piece)} and {_quote_label(second.piece)} share "
                        f"{plural(len(shared), 'token')}, starting at "
                        f"{self.context.format_position(shared[0])}; only the first is a segment."
                    )
                    evidence = {"segments": [first.piece.label, second.piece.label]}
                    yield self._prompt_finding("segments.overlap", sentence, shared, evidence)
                    break

    def _length_drift(self) -> Findings:
        """Pieces have another number of tokens when encoded alone, so sums of lengths are wrong."""
        pairs = self._prompt.token_lengths
        off = accumulate(alone - joined for alone, joined in pairs)
        worst = max(map(abs, off), default=0)
        if not worst or len(pairs) < 2:
            return
        lengths_alone, lengths_joined = (", ".join(str(pair[n]) for pair in pairs) for n in (0, 1))
        sentence = (
            f"Encoded alone, the {len(pairs)} declared texts have {lengths_alone} tokens; in the "
            f"prompt they have {lengths_joined}. Borders summed from the pieces are off by up to "
            f"{plural(worst, 'token')}."
        )
        evidence = {"tokens alone and in the prompt": list(map(list, pairs)), "worst": worst}
        yield self._prompt_finding("segments.drift", sentence, (), evidence)

    def _reordered(self) -> Findings:
        """Texts are in another order; only a note where the declared order may mean nothing."""
        declared = [
            (span, located.piece)
            for located, span in self._prompt.found_pieces
            if located.piece.text and located.n_places == 1 and not located.overlaps
        ]
        by_position = sorted(declared, key=lambda pair: pair[0])
        if by_position != declared:
            pieces = [piece for _, piece in by_position]
            sentence = (
                f"{len(pieces)} declared texts are in another order in the prompt than declared: "
                f"{_join_labels(pieces)}."
            )
            order = [piece.label for piece in self._prompt.pieces if piece in pieces]
            evidence = {"received": [piece.label for piece in pieces], "declared": order}
            starts = [start for (start, _), _ in by_position]
            severity = None if _is_order_declared(self._prompt) else Severity.NOTE
            yield self._prompt_finding("segments.reordered", sentence, starts, evidence, severity)

    def _check_bos(self) -> Findings:
        """The BOS is missing, doubled, or repeated inside the prompt."""
        prompt, format_position = self._prompt, self.context.format_position
        facts, ids, first = prompt.tokenizer, prompt.ids, prompt.first_unpadded
        is_whole = prompt.start == 0 and len(ids) > prompt.n_pads
        if is_whole and facts.adds_bos is True and not prompt.has_bos:
            sentence = (
                f"The prompt begins with {format_position(first)}, without the BOS (id "
                f"{facts.bos}) that its tokenizer adds to every text."
            )
            evidence = {"bos": facts.bos}
            yield self._prompt_finding("segments.bos-missing", sentence, (first,), evidence)
        n = _count_leading_bos(prompt)
        if n > 1:
            sentence = (
                f"The prompt begins with {n} BOS tokens (id {facts.bos}) instead of one; the first "
                f"word, {format_position(first + n)}, is {n - 1} further than in training."
            )
            evidence = {"bos": facts.bos, "n": n}
            doubled = range(first, first + n)
            yield self._prompt_finding("segments.bos-doubled", sentence, doubled, evidence)
        if facts.bos is None or facts.bos in (facts.pad, *facts.eos):
            return
        inner = range(prompt.n_pads + n + 1, len(ids))
        later = [i for i in inner if ids[i] == facts.bos and ids[i - 1] not in facts.eos]
        if later:
            sentence = (
                f"The prompt contains {plural(len(later), 'further BOS token')} (id {facts.bos}) "
                f"without an EOS before {'it' if len(later) == 1 else 'them'}, first at "
                f"{format_position(prompt.start + later[0])}, as if pieces had been encoded one by "
                "one with special tokens."
            )
            positions = [prompt.start + index for index in later]
            evidence = {"bos": facts.bos, "n": len(later)}
            id_, severity = "segments.bos-doubled", Severity.NOTE
            yield self._prompt_finding(id_, sentence, positions, evidence, severity)

    def _check_eos(self) -> Findings:
        """The tokenizer added an EOS to each piece; only a note where that may be intended."""
        # Without declared pieces, all EOS tokens between words count; at the ends of a prompt they
        # may be padding.
        prompt, facts = self._prompt, self._prompt.tokenizer
        if not facts.adds_eos or facts.bos in facts.eos:
            return
        words = [n for n, id_ in enumerate(prompt.ids) if id_ not in (*facts.eos, prompt.pad_id)]
        between = range(*(words[:1] + words[-1:]))
        inside = [prompt.start + n for n in between if prompt.ids[n] in facts.eos]
        ends = {stop - back for _, (_, stop) in prompt.found_pieces for back in (0, 1)}
        if prompt.pieces:
            inside = [at for at in inside if at in ends]
        if inside:
            at_end = " at the end of a declared piece" if prompt.pieces else ""
            sentence = (
                f"The prompt contains {plural(len(inside), 'EOS token')} (id "
                f"{prompt.ids[inside[0] - prompt.start]}){at_end}, first at "
                f"{self.context.format_position(inside[0])}: the tokenizer adds one to every "
                "text, as if pieces had been encoded one by one with special tokens."
            )
            # Packed documents end with an EOS after the last piece.
            is_packed = prompt.ids[-1] in facts.eos and prompt.stop - 1 in ends
            severity = Severity.NOTE if not prompt.pieces or is_packed else None
            evidence = {"eos": list(facts.eos), "n": len(inside)}
            yield self._prompt_finding("segments.eos-inside", sentence, inside, evidence, severity)

    def _special_tokens(self) -> Findings:
        """Special tokens were encoded as characters: one finding for each kind of token."""
        by_name: dict[str, list[Span]] = {}
        for name, span in _find_written_specials(self._prompt):
            by_name.setdefault(name, []).append(span)
        for name, spans in by_name.items():
            (start, stop), token_id = spans[0], self._prompt.tokenizer.special.get(name)
            known_as = "unknown to this tokenizer" if token_id is None else f"id {token_id}"
            times = "" if len(spans) == 1 else f" {len(spans)} times, first"
            sentence = (
                f'The characters of the special token "{printable(name)}" ({known_as}) were '
                f"encoded as {stop - start} ordinary tokens,{times} at "
                f"{self.context.format_position(start)}."
            )
            positions = [p for span in spans for p in range(*span)]
            evidence = {"token": name, "id": token_id, "times": len(spans)}
            yield self._prompt_finding("segments.special-as-text", sentence, positions, evidence)


def _describe_reason(shift: SpanShift) -> str:
    """Return why shifted spans fit."""
    if shift.source != "lists":
        return _SHIFT_REASONS[shift.source, len(shift.offsets) == 1]
    names = join_labels(limit_names(shift.lists))
    if len(shift.lists) == 1:
        return f"they exclude the BOS, and one is {names}, a list of token ids of your program"
    return f"they begin with lists of token ids of your program ({names})"


def _quote_label(piece: DeclaredSegment) -> str:
    return f"'{printable(piece.label)}'"


def _join_labels(pieces: Iterable[DeclaredSegment]) -> str:
    return join_labels(limit_names([_quote_label(piece) for piece in pieces]))


def _find_written_specials(prompt: PromptTokens) -> Iterator[tuple[str, Span]]:
    """Yield the special tokens that the prompt contains as ordinary tokens, in order."""
    if not prompt.has_text:
        return
    whole = "".join(prompt.texts)
    names = sorted(prompt.tokenizer.special, key=len, reverse=True)
    pattern = re.compile("|".join([*map(re.escape, names), _KNOWN_SPECIALS.pattern]))
    is_html = _HTML_TAG.search(whole) is not None
    starts = [0, *accumulate(map(len, prompt.texts))][:-1]
    for match in pattern.finditer(whole):
        first, last = bisect_right(starts, match.start()) - 1, bisect_left(starts, match.end()) - 1
        if first != last and not (is_html and match[0] in ("<s>", "</s>")):
            yield match[0], (prompt.start + first, prompt.start + last + 1)


def _count_leading_bos(prompt: PromptTokens) -> int:
    """Number of BOS tokens after the padding; at most 1 if they may be padding."""
    ids, facts = prompt.ids[prompt.n_pads :], prompt.tokenizer
    n = next((n for n, id_ in enumerate(ids) if id_ != facts.bos), len(ids))
    may_be_padding = n > 2 and facts.bos in (facts.pad, *facts.eos)
    return min(n, 1) if facts.bos is None or may_be_padding or n == len(ids) else n


def _is_order_declared(prompt: PromptTokens) -> bool:
    """Whether the declared order is intended: the pieces have no labels, or ascending numbers."""
    pieces = [(piece.label, piece.text) for piece in prompt.pieces if piece.text]
    are_texts = all(label.startswith(text[: len(label) - 1]) for label, text in pieces)
    numbers = [re.search(r"\d+$", label) for label, _ in pieces]
    order = [int(number[0]) for number in numbers if number is not None]
    return are_texts or (len(order) == len(pieces) and order == sorted(order))


def _are_character_spans(prompt: PromptTokens) -> bool:
    """Whether the declared spans fit the words of the prompt when read as character positions."""
    whole = "".join(prompt.texts).strip(SPECIAL_MARK)
    ends = [edge for span in prompt.spans for edge in (span.start, span.stop)]
    if not prompt.has_text or len(ends) < 4 or ends[-1] > len(whole) + 1:
        return False
    return all(edge in (0, len(whole)) or not whole[edge - 1 : edge + 1].isalnum() for edge in ends)


def _find_cut(prompt: PromptTokens, piece: DeclaredSegment) -> _TruncatedPiece | None:
    """Return which end of a piece is missing: of its text, or of its ids without a tokenizer."""
    part: Any = piece.text or ""
    whole: Any = "".join(prompt.texts).strip(SPECIAL_MARK)
    unit, least = "character", _MIN_CUT_CHARACTERS
    if not prompt.has_text:
        part, whole = list(piece.ids), prompt.ids[prompt.n_pads :]
        unit, least = "token", _MIN_CUT_TOKENS
    for kept in range(len(part) - 1, least - 1, -1):
        at_end = whole[-kept:] == part[:kept]
        if at_end or whole[:kept] == part[-kept:]:
            return _TruncatedPiece(piece, len(part) - kept, len(part), unit, at_end)
    return None

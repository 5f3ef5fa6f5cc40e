"""What was fed against what was declared: shifted, lost, shared or mistaken pieces of a prompt.

The words are looked at once per generation, when its prompt is known, and each mask of several rows
once in a run: its borders against those of the declared segments. A decode step costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from flexinspect.core.text import plural, printable
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import DeclaredSegment
from flexinspect.records.step import CallRecord, StepRecord, TokenRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule
from flexinspect.rules.prompt import prompt_facts as words
from flexinspect.rules.prompt import segment_findings as kinds
from flexinspect.rules.prompt.prompt_facts import (
    PromptTokens,
    SpanShift,
    find_odd_border,
    find_shift,
    is_complete,
)
from flexinspect.rules.prompt.segment_borders import (
    BorderCheck,
    BorderFault,
    HeadBorders,
    explain_shift,
    find_borders,
)
from flexinspect.rules.prompt.segment_findings import PROMPT_KINDS


class PromptRule(Rule):
    """Says where what was declared of a prompt is not what was fed, or not what the mask has."""

    name: ClassVar[str] = "fed"
    findings: ClassVar[Mapping[str, FindingKind]] = PROMPT_KINDS

    def __init__(self) -> None:
        self._borders: dict[str, tuple[HeadBorders, ...] | None] = {}
        """By fingerprint and for the whole run."""
        self._had_complete_prompt = False
        """Whether a generation had every piece; then one without them may be of another kind."""

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with a prompt that nothing is said of."""
        super().on_generation_start(context)
        self._later_tokens: list[TokenRecord] = []
        self._prompt = PromptTokens.from_context(context)
        self._is_checked = not self._prompt.tokens
        self._border_check = BorderCheck(context, self._prompt)
        self._border_faults: dict[str, tuple[BorderFault, ...]] = {}

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return what is wrong with the prompt, once it is known, and with the step's masks."""
        if self._is_checked and step.q_len == 1:
            return ()
        found = []
        if not self._is_checked:
            found += self._read_prompt(step)
        if step.q_len > 1 and self._border_check.is_needed:
            found += self._check_masks(step)
        return found

    def on_generation_end(self) -> Sequence[Finding]:
        """Return what is wrong with a prompt that was not seen to be over."""
        return () if self._is_checked else self._check_prompt()

    def _read_prompt(self, step: StepRecord) -> list[Finding]:
        """Judge the prompt, unless pieces are missing that later forwards may still bring."""
        given = [token for token in step.tokens if token.step is None]
        if given:
            self._later_tokens += given
            self._prompt = PromptTokens.from_context(self.context, self._later_tokens)
        if is_complete(self._prompt) or (step.step > 0 and not given):
            return self._check_prompt()
        return []

    def _check_prompt(self) -> list[Finding]:
        self._is_checked = True
        found = list(
            check_prompt(self.context, self._prompt, had_complete_prompt=self._had_complete_prompt)
        )
        self._had_complete_prompt |= bool(self._prompt.pieces) and is_complete(self._prompt)
        return found

    def _check_masks(self, step: StepRecord) -> Iterator[Finding]:
        by_mask: dict[str, list[CallRecord]] = {}
        for call in step.calls:
            if call.mask is not None:
                by_mask.setdefault(call.mask, []).append(call)
        verdicts: dict[BorderFault, list[CallRecord]] = {}
        for fingerprint, calls in by_mask.items():
            if fingerprint not in self._border_faults:
                self._border_faults[fingerprint] = tuple(self._check_mask(fingerprint))
            for verdict in self._border_faults[fingerprint]:
                verdicts.setdefault(verdict, []).extend(calls)
        for verdict, calls in verdicts.items():
            yield self._border_check.make_finding(step, verdict, calls)

    def _check_mask(self, fingerprint: str) -> Iterator[BorderFault]:
        mask = self.context.mask(fingerprint)
        if fingerprint not in self._borders:
            self._borders[fingerprint] = find_borders(mask) if mask is not None else None
        for part in self._borders[fingerprint] or ():
            verdict = self._border_check.check_mask(mask, part)
            if verdict is not None:
                yield verdict


_MAX_NAMED_PIECES = 3
_MAX_LISTED = 32
_SHIFT_REASONS = {
    "lines": "begin and end where lines or sentences do",
    "gaps": "have the same tokens between them",
    "ends": "leave out the BOS and end with the prompt",
}


def check_prompt(
    context: RuleContext, prompt: PromptTokens, *, had_complete_prompt: bool
) -> Iterator[Finding]:
    """Yield what is wrong with a prompt, leaving out what only follows from something else.

    `is_other` tells that an earlier generation had all the pieces, so that one which lacks some is
    likely to be about something else.
    """
    if not prompt.tokens:
        return
    say = _PromptReporter(context, prompt)
    shift = find_shift(prompt)
    if shift is not None:
        yield say.shifted(shift) if shift.tokens is not None else say.drifted(shift)
    else:
        yield from say.odd_border()
        yield from say.inner_padding()
        yield from say.missing_pieces(had_complete_prompt=had_complete_prompt)
        yield from say.uncovered_words()
    yield from say.doubtful_texts()
    yield from say.reordered()
    yield from say.bos()
    yield from say.eos()
    yield from say.special_tokens()


class _PromptReporter:
    """Makes findings about one prompt."""

    def __init__(self, context: RuleContext, prompt: PromptTokens) -> None:
        self._context, self._prompt = context, prompt

    def _finding(
        self,
        finding_id: str,
        sentence: str,
        positions: Iterable[int],
        evidence: Mapping[str, Any],
        severity: Severity | None = None,
    ) -> Finding:
        return Finding(
            id=finding_id,
            severity=severity or kinds.PROMPT_KINDS[finding_id].severity,
            sentence=sentence,
            generation=self._context.generation.generation,
            step=0,
            positions=tuple(positions)[:_MAX_LISTED],
            evidence=evidence,
        )

    def _join_piece_labels(self, pieces: Sequence[DeclaredSegment]) -> str:
        names = [_quote_label(piece) for piece in pieces[:_MAX_NAMED_PIECES]]
        if len(pieces) > _MAX_NAMED_PIECES:
            names.append(f"{len(pieces) - _MAX_NAMED_PIECES} more")
        return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

    # -- spans -----------------------------------------------------------------------------------

    def shifted(self, shift: SpanShift) -> Finding:
        """Return that all spans are off by the same number of tokens."""
        n, spans = shift.tokens or 0, self._prompt.spans
        wrong = [(self._describe_misfit(span, n)) for span in spans]
        told = "; ".join(text for text, _ in wrong[:_MAX_NAMED_PIECES])
        one = len(spans) == 1
        sentence = (
            f"{_format_spans(len(spans))} {plural(abs(n), 'token')} too {'early' if n > 0 else 'late'}"
            f"{explain_shift(self._prompt, n)}: {told}. Moved by {n:+d}, {'it' if one else 'they'} "
            f"{_singular_reason(_SHIFT_REASONS[shift.source]) if one else _SHIFT_REASONS[shift.source]}."
        )
        positions = sorted({position for _, some in wrong for position in some})
        declared = [[span.label, span.start, span.stop] for span in spans]
        evidence = {"shift": n, "declared": declared, "told by": shift.source}
        return self._finding(kinds.SHIFTED, sentence, positions, evidence)

    def _describe_misfit(self, span: DeclaredSegment, n: int) -> tuple[str, list[int]]:
        """Return in words what a span wrongly has and lacks, and these positions."""
        own, right = range(span.start, span.stop), range(span.start + n, span.stop + n)
        has = [p for p in own if p not in right]
        lacks = [p for p in right if p not in own]
        text = f"{_quote_label(span)} takes in {self._describe_positions(has)} and leaves out {self._describe_positions(lacks)}"
        return text, [p for p in (*has, *lacks) if p < self._prompt.stop]

    def _describe_positions(self, positions: Sequence[int]) -> str:
        first = self._context.format_position(positions[0])
        return first if len(positions) == 1 else f"{len(positions)} tokens from {first}"

    def drifted(self, shift: SpanShift) -> Finding:
        """Return that spans are off by more and more tokens."""
        spans = self._prompt.spans
        moves = ", ".join(
            f"{_quote_label(span)} by {n:+d}" for span, n in zip(spans, shift.offsets, strict=True)
        )
        last = spans[-1]
        sentence = (
            f"The {len(spans)} declared spans drift away from the words: to begin and end where "
            f"lines or sentences do, they would have to move, {moves}, as if positions had been "
            f"summed from pieces that were encoded one by one; {_quote_label(last)} begins at "
            f"{self._context.format_position(last.start)}."
        )
        positions = [span.start for span in spans]
        declared = [[span.label, span.start, span.stop] for span in spans]
        evidence = {"offsets": list(shift.offsets), "declared": declared}
        severity = Severity.WARNING
        return self._finding(kinds.DRIFT, sentence, positions, evidence, severity)

    def odd_border(self) -> Iterator[Finding]:
        """Yield the one border that does not fit."""
        for span, is_start, n in find_odd_border(self._prompt):
            at = span.start if is_start else span.stop
            side = "begins at" if is_start else "ends before"
            part = "The other borders" if len(self._prompt.spans) > 2 else "All other borders"
            sentence = (
                f"{_quote_label(span)} {side} {self._context.format_position(at)}, inside of its line: "
                f"{plural(abs(n), 'token')} {'later' if n > 0 else 'earlier'} the line "
                f"{'begins' if is_start else 'ends'}. {part} are where lines or sentences are."
            )
            between = range(min(at, at + n), max(at, at + n))
            evidence = {"border": at, "shift": n, "segment": span.label}
            yield self._finding(kinds.ODD_BORDER, sentence, between, evidence)

    def inner_padding(self) -> Iterator[Finding]:
        """Yield pieces that hold padding, all in one finding."""
        held = list(words.find_inner_padding(self._prompt))
        if not held:
            return
        pads = [position for _, some in held for position in some]
        one = len(held) == 1
        sentence = (
            f"{self._join_piece_labels([one.piece for one, _ in held])} {'holds' if one else 'hold'} "
            f"{plural(len(pads), 'token')} of padding (first: {self._context.format_position(pads[0])}); "
            f"{plural(self._prompt.n_pads, 'token')} of padding come before the prompt."
        )
        labels = [one.piece.label for one, _ in held]
        evidence = {"pads": len(pads), "before the prompt": self._prompt.n_pads, "segments": labels}
        yield self._finding(kinds.PADDING_INSIDE, sentence, pads, evidence)

    def uncovered_words(self) -> Iterator[Finding]:
        """Yield words that belong to no piece, all in one finding."""
        gaps = words.find_uncovered_gaps(self._prompt)
        if gaps:
            n, first = sum(b - a for a, b in gaps), words.span_text(self._prompt, gaps[0])
            sentence = (
                f"{plural(len(gaps), 'stretch')} of words between declared pieces "
                f"{'belongs' if len(gaps) == 1 else 'belong'} to none of them, "
                f'{plural(n, "token")}; first: "{printable(first.strip())[:_MAX_LISTED]}" at '
                f"{self._context.format_position(gaps[0][0])}."
            ).replace("stretchs", "stretches")
            positions = [p for a, b in gaps for p in range(a, b)]
            yield self._finding(
                kinds.UNCOVERED, sentence, positions, {"gaps": len(gaps), "tokens": n}
            )

    # -- texts -----------------------------------------------------------------------------------

    def missing_pieces(self, *, had_complete_prompt: bool) -> Iterator[Finding]:
        """Yield pieces that are not there, or not wholly; a note when `is_other`."""
        fed = self._prompt
        cut = words.find_truncated(fed)
        gone = words.find_missing_texts(fed)
        if cut is not None:
            late = [one for one in fed.spans if one.stop > fed.stop and one != cut.piece]
            after = [*(piece for piece in gone if piece != cut.piece), *late]
            yield self._truncated(cut, after, had_complete_prompt=had_complete_prompt)
        elif gone:
            n, n_found = len(fed.pieces), len(fed.pieces) - len(gone)
            is_one = len(gone) == 1
            texts_are = ("text", "is") if is_one else ("texts", "are")
            sentence = (
                f"The {texts_are[0]} of {self._join_piece_labels(gone)} {texts_are[1]} not in the prompt that "
                f"was fed, {plural(len(fed.ids), 'token')} that begin with {self._quote_beginning()}; "
                f"{n_found} of {n} declared pieces are there."
            )
            texts = [piece.text for piece in gone]
            severity = Severity.NOTE if had_complete_prompt else None
            yield self._finding(kinds.NOT_FOUND, sentence, (), {"texts": texts}, severity)

    def _truncated(
        self,
        cut: words.TruncatedPiece,
        after: Sequence[DeclaredSegment],
        *,
        had_complete_prompt: bool,
    ) -> Finding:
        fed, side = self._prompt, "ends" if cut.at_end else "begins"
        at = fed.stop - 1 if cut.at_end else fed.first_unpadded
        are = "is" if len(after) == 1 else "are"
        rest = f"; {self._join_piece_labels(after)} {are} not in it, or not wholly" if after else ""
        by_character = cut.unit == "position" and words.are_character_spans(fed)
        in_characters = ", as if positions had been counted in characters" if by_character else ""
        sentence = (
            f"The prompt that was fed {side} inside of {_quote_label(cut.piece)}, with "
            f"{self._context.format_position(at)}: {cut.n_lost} of its {plural(cut.n, cut.unit)} were not "
            f"fed{rest}{in_characters}."
        )
        evidence = {
            "lost": cut.n_lost,
            "of": cut.n,
            "fed": len(fed.ids),
            "segment": cut.piece.label,
        }
        severity = Severity.NOTE if had_complete_prompt else None
        return self._finding(kinds.TRUNCATED, sentence, (at,), evidence, severity)

    def _quote_beginning(self) -> str:
        texts = "".join(token.text for token in self._prompt.tokens[self._prompt.n_pads :][:12])
        return f'"{printable(texts)[:_MAX_LISTED]}"'

    def doubtful_texts(self) -> Iterator[Finding]:
        """Yield what is doubtful about texts that were found."""
        yield from self._overlaps()
        yield from self._length_drift()
        for one in words.find_ambiguous(self._prompt):
            assert one.span is not None
            many = "at least 9" if one.n_places >= 9 else str(one.n_places)
            sentence = (
                f"The text of {_quote_label(one.piece)} is in {many} places of the prompt; the one at "
                f"{self._context.format_position(one.span[0])} was taken."
            )
            places = {"places": one.n_places, "text": one.piece.text}
            yield self._finding(kinds.AMBIGUOUS, sentence, (one.span[0],), places)

    def _overlaps(self) -> Iterator[Finding]:
        located = [one for one in self._prompt.located_pieces if one.span is not None]
        for one in (one for one in located if one.overlaps):
            start, stop = one.span or (0, 0)
            for other in located:
                a, b = other.span or (0, 0)
                shared = range(max(a, start), min(b, stop))
                if other is one or not shared:
                    continue
                sentence = (
                    f"{_quote_label(other.piece)} and {_quote_label(one.piece)} share "
                    f"{plural(len(shared), 'token')}, from {self._context.format_position(shared[0])} on; "
                    "only the first of the two is a segment."
                )
                both = [other.piece.label, one.piece.label]
                yield self._finding(kinds.OVERLAP, sentence, shared, {"segments": both})
                break

    def _length_drift(self) -> Iterator[Finding]:
        """Yield that pieces have another length alone, so that sums of lengths go astray."""
        pairs = words.token_lengths(self._prompt)
        off, worst = 0, 0
        for alone, fed in pairs:
            off += alone - fed
            worst = max(worst, abs(off), key=abs)
        if not worst or len(pairs) < 2:
            return
        one_by_one, joined = (", ".join(str(pair[n]) for pair in pairs) for n in (0, 1))
        sentence = (
            f"Encoded alone the {len(pairs)} declared texts have {one_by_one} tokens, in the "
            f"prompt {joined}: borders that are summed from the pieces lie up to "
            f"{plural(worst, 'token')} beside the words."
        )
        evidence = {"tokens alone and fed": [list(pair) for pair in pairs], "worst": worst}
        yield self._finding(kinds.DRIFT, sentence, (), evidence)

    # -- special tokens --------------------------------------------------------------------------

    def bos(self) -> Iterator[Finding]:
        """Yield a BOS that is missing, doubled, or repeated inside."""
        fed, scene = self._prompt, self._context
        bos = fed.tokenizer_facts.bos
        if words.lacks_bos(fed):
            sentence = (
                f"The prompt begins with {scene.format_position(fed.first_unpadded)}, without the BOS (id {bos}) "
                "that its tokenizer puts before every text."
            )
            yield self._finding(kinds.BOS_MISSING, sentence, (fed.first_unpadded,), {"bos": bos})
        n = words.count_leading_bos(fed)
        if n > 1:
            at = range(fed.first_unpadded, fed.first_unpadded + n)
            sentence = (
                f"The prompt begins with {n} BOS (id {bos}) instead of one; the first word, "
                f"{scene.format_position(fed.first_unpadded + n)}, is {n - 1} further than in training."
            )
            yield self._finding(kinds.BOS_DOUBLED, sentence, at, {"bos": bos, "n": n})
        later = words.find_inner_bos(fed)
        if later:
            sentence = (
                f"{plural(len(later), 'further BOS').replace('BOSs', 'BOS')} (id {bos}) "
                f"{'lies' if len(later) == 1 else 'lie'} inside of the prompt, without an EOS "
                f"before, first at {scene.format_position(later[0])}, as if pieces had been encoded with "
                "special tokens one by one."
            )
            evidence = {"bos": bos, "n": len(later)}
            yield self._finding(kinds.BOS_DOUBLED, sentence, later, evidence, Severity.NOTE)

    def eos(self) -> Iterator[Finding]:
        """Yield EOS that the tokenizer put behind pieces; a note where that may be meant."""
        fed = self._prompt
        inside = words.find_inner_eos(fed)
        if inside:
            one, ends = len(inside) == 1, " at the end of a declared piece" * bool(fed.pieces)
            sentence = (
                f"{len(inside)} EOS (id {fed.ids[inside[0] - fed.start]}) "
                f"{'lies' if one else 'lie'} inside of the prompt{ends}, first at "
                f"{self._context.format_position(inside[0])}: the tokenizer puts one behind every text, as "
                "if pieces had been encoded with special tokens one by one."
            )
            is_meant = not fed.pieces or words.is_packed(fed)
            evidence = {"eos": list(fed.tokenizer_facts.eos), "n": len(inside)}
            severity = Severity.NOTE if is_meant else None
            yield self._finding(kinds.EOS_INSIDE, sentence, inside, evidence, severity)

    def reordered(self) -> Iterator[Finding]:
        """Yield that texts were fed in another order; a note where none may have been meant."""
        found = words.find_reordered(self._prompt)
        if found:
            pieces = [one.piece for one in found]
            declared = [piece.label for piece in self._prompt.pieces if piece in pieces]
            sentence = (
                f"{len(found)} declared texts were fed in another order than they were declared "
                f"in: {self._join_piece_labels(pieces)}."
            )
            starts = [one.span[0] for one in found if one.span is not None]
            evidence = {"fed": [piece.label for piece in pieces], "declared": declared}
            severity = None if words.is_order_declared(self._prompt) else Severity.NOTE
            yield self._finding(kinds.REORDERED, sentence, starts, evidence, severity)

    def special_tokens(self) -> Iterator[Finding]:
        """Yield special tokens that were fed as characters, each kind once."""
        by_name: dict[str, list[words.WrittenSpecial]] = {}
        for one in words.find_written_specials(self._prompt):
            by_name.setdefault(one.characters, []).append(one)
        for name, found in by_name.items():
            start, stop = found[0].span
            own = found[0].token_id
            whose = "which this tokenizer does not know" if own is None else f"id {own}"
            times = "" if len(found) == 1 else f" {len(found)} times, first"
            sentence = (
                f'The characters of the special token "{printable(name)}" ({whose}) were fed as '
                f"{stop - start} ordinary tokens,{times} at {self._context.format_position(start)}."
            )
            positions = [p for one in found for p in range(*one.span)]
            evidence = {"token": name, "id": own, "times": len(found)}
            yield self._finding(kinds.SPECIAL_AS_TEXT, sentence, positions, evidence)


def _quote_label(piece: DeclaredSegment) -> str:
    return f"'{printable(piece.label)}'"


def _format_spans(n: int) -> str:
    return "The declared span lies" if n == 1 else f"The {n} declared spans lie"


def _singular_reason(reason: str) -> str:
    first, _, rest = reason.partition(" ")
    verb = {"begin": "begins", "have": "has", "leave": "leaves"}[first]
    return f"{verb} {rest}".replace(" end ", " ends ").replace(
        "lines or sentences do", "a line does"
    )

"""Compares the prompt that a model received, and the masks that ran, with the declared segments.

The prompt is checked once per generation, when it is complete. The borders of each mask of several
rows are compared with those of the declared segments once per run. Decode steps are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flexinspect.core.text import join_labels, plural, printable
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import DeclaredSegment
from flexinspect.records.step import CallRecord, StepRecord, TokenRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Rule, finding_kinds
from flexinspect.rules.masks.mask_views import calls_by_mask
from flexinspect.rules.prompt import prompt_facts
from flexinspect.rules.prompt.prompt_facts import PromptTokens, SpanShift
from flexinspect.rules.prompt.segment_borders import (
    MAX_NAMES,
    BorderCheck,
    BorderFault,
    HeadBorders,
    explain_shift,
    find_borders,
    limit_names,
)

_MAX_LISTED = 32
_SHIFT_REASONS = {
    "lines": (
        "it starts and ends at line or sentence boundaries",
        "they start and end at line or sentence boundaries",
    ),
    "gaps": ("it has the same tokens around it", "they have the same tokens between them"),
    "ends": (
        "it excludes the BOS and ends with the prompt",
        "they exclude the BOS and end with the prompt",
    ),
}
"""By `SpanShift.source`, why the shifted spans fit: for one span, and for several."""


class PromptRule(Rule):
    """Reports where the declared segments differ from the input tokens or the executed mask."""

    name = "fed"
    findings = finding_kinds(
        "segments.shifted",
        "segments.drift",
        "segments.merged",
        "segments.odd-border",
        "segments.not-found",
        "segments.truncated",
        "segments.ambiguous",
        "segments.overlap",
        "segments.uncovered",
        "segments.padding-inside",
        "segments.bos-missing",
        "segments.bos-doubled",
        "segments.eos-inside",
        "segments.reordered",
        "segments.special-as-text",
    )

    def __init__(self) -> None:
        self._borders: dict[str, tuple[HeadBorders, ...] | None] = {}
        """By mask fingerprint, for the whole run."""
        self._had_complete_prompt = False
        """Whether an earlier generation had every piece: missing pieces are then only a note."""

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the state of a generation."""
        super().on_generation_start(context)
        self._later_tokens: list[TokenRecord] = []
        self._prompt = PromptTokens.from_context(context)
        self._is_checked = not self._prompt.tokens
        self._border_check = BorderCheck(self, self._prompt)
        self._border_faults: dict[str, tuple[BorderFault, ...]] = {}

    def on_step(self, step: StepRecord) -> Iterator[Finding]:
        """Check the prompt once it is complete, and the masks of steps with several rows."""
        if self._is_checked and step.q_len == 1:
            return
        if not self._is_checked:
            yield from self._read_prompt(step)
        if step.q_len > 1 and self._border_check.is_needed:
            yield from self._check_masks(step)

    def on_generation_end(self) -> Iterator[Finding]:
        """Check a prompt that never became complete."""
        if not self._is_checked:
            yield from self._check_prompt()

    def _read_prompt(self, step: StepRecord) -> Iterator[Finding]:
        """Check the prompt, unless pieces are missing that later forwards may still add."""
        prompt_tokens = [token for token in step.tokens if token.step is None]
        if prompt_tokens:
            self._later_tokens += prompt_tokens
            self._prompt = PromptTokens.from_context(self.context, self._later_tokens)
        if prompt_facts.is_complete(self._prompt) or (step.step > 0 and not prompt_tokens):
            yield from self._check_prompt()

    def _check_prompt(self) -> Iterator[Finding]:
        """Yield what is wrong with the prompt, without the consequences of another finding."""
        self._is_checked, prompt = True, self._prompt
        if not prompt.tokens:
            return
        shift = prompt_facts.find_shift(prompt)
        if shift is not None:
            yield self._shifted(shift) if shift.tokens is not None else self._drifted(shift)
        else:
            yield from self._odd_border()
            yield from self._inner_padding()
            yield from self._missing_pieces()
            yield from self._uncovered_words()
        yield from self._doubtful_texts()
        yield from self._reordered()
        yield from self._check_bos()
        yield from self._check_eos()
        yield from self._special_tokens()
        self._had_complete_prompt |= bool(prompt.pieces) and prompt_facts.is_complete(prompt)

    def _check_masks(self, step: StepRecord) -> Iterator[Finding]:
        calls_by_fault: dict[BorderFault, list[CallRecord]] = {}
        for fingerprint, calls in calls_by_mask(step).items():
            if fingerprint is None:
                continue
            if fingerprint not in self._border_faults:
                self._border_faults[fingerprint] = tuple(self._check_mask(fingerprint))
            for fault in self._border_faults[fingerprint]:
                calls_by_fault.setdefault(fault, []).extend(calls)
        for fault, calls in calls_by_fault.items():
            yield self._border_check.make_finding(step, fault, calls)

    def _check_mask(self, fingerprint: str) -> Iterator[BorderFault]:
        mask = self.context.mask(fingerprint)
        if fingerprint not in self._borders:
            self._borders[fingerprint] = find_borders(mask) if mask is not None else None
        for head_borders in self._borders[fingerprint] or ():
            fault = self._border_check.check_mask(mask, head_borders)
            if fault is not None:
                yield fault

    # -- sentences -------------------------------------------------------------------------------

    def _prompt_finding(
        self,
        finding_id: str,
        sentence: str,
        positions: Iterable[int],
        evidence: Mapping[str, Any],
        severity: Severity | None = None,
    ) -> Finding:
        finding = self.finding(
            None,
            finding_id,
            sentence,
            severity=severity,
            positions=positions,
            evidence=evidence,
        )
        return replace(finding, step=0)

    def _join_piece_labels(self, pieces: Sequence[DeclaredSegment]) -> str:
        return join_labels(limit_names([_quote_label(piece) for piece in pieces]))

    # -- spans -----------------------------------------------------------------------------------

    def _shifted(self, shift: SpanShift) -> Finding:
        """All spans are off by the same number of tokens."""
        n, spans = shift.tokens or 0, self._prompt.spans
        misfits = [self._describe_misfit(span, n) for span in spans]
        listed = "; ".join(text for text, _ in misfits[:MAX_NAMES])
        subject = (
            "The declared span is" if len(spans) == 1 else f"The {len(spans)} declared spans are"
        )
        side = "early" if n > 0 else "late"
        sentence = (
            f"{subject} {plural(abs(n), 'token')} too {side}{explain_shift(self._prompt, n)}: "
            f"{listed}. Shifted by {n:+d}, {_SHIFT_REASONS[shift.source][len(spans) > 1]}."
        )
        positions = sorted({position for _, some in misfits for position in some})
        declared = [[span.label, span.start, span.stop] for span in spans]
        evidence = {"shift": n, "declared": declared, "reported_by": shift.source}
        return self._prompt_finding("segments.shifted", sentence, positions, evidence)

    def _describe_misfit(self, span: DeclaredSegment, n: int) -> tuple[str, list[int]]:
        """Describe the tokens that a span wrongly includes and misses; also their positions."""
        declared, shifted = range(span.start, span.stop), range(span.start + n, span.stop + n)
        extra = [p for p in declared if p not in shifted]
        missing = [p for p in shifted if p not in declared]
        text = (
            f"{_quote_label(span)} includes {self._describe_positions(extra)} and misses "
            f"{self._describe_positions(missing)}"
        )
        return text, [p for p in (*extra, *missing) if p < self._prompt.stop]

    def _describe_positions(self, positions: Sequence[int]) -> str:
        first = self.context.format_position(positions[0])
        return first if len(positions) == 1 else f"{len(positions)} tokens from {first}"

    def _drifted(self, shift: SpanShift) -> Finding:
        """Each span is off by more tokens than the one before."""
        spans = self._prompt.spans
        moves = ", ".join(
            f"{_quote_label(span)} by {n:+d}" for span, n in zip(spans, shift.offsets, strict=True)
        )
        last = spans[-1]
        sentence = (
            f"The {len(spans)} declared spans drift away from the words: to start and end at line "
            f"or sentence boundaries they would have to move, {moves}, as if positions had been "
            f"summed from pieces encoded one by one; {_quote_label(last)} begins at "
            f"{self.context.format_position(last.start)}."
        )
        positions = [span.start for span in spans]
        declared = [[span.label, span.start, span.stop] for span in spans]
        evidence = {"offsets": list(shift.offsets), "declared": declared}
        severity = Severity.WARNING
        return self._prompt_finding("segments.drift", sentence, positions, evidence, severity)

    def _odd_border(self) -> Iterator[Finding]:
        """A single border does not fit."""
        for span, is_start, n in prompt_facts.find_odd_border(self._prompt):
            at = span.start if is_start else span.stop
            side = "begins at" if is_start else "ends before"
            direction = "later" if n > 0 else "earlier"
            sentence = (
                f"{_quote_label(span)} {side} {self.context.format_position(at)}, inside a line: "
                f"the line {'begins' if is_start else 'ends'} {plural(abs(n), 'token')} "
                f"{direction}. All other borders are at line or sentence boundaries."
            )
            between = range(min(at, at + n), max(at, at + n))
            evidence = {"border": at, "shift": n, "segment": span.label}
            yield self._prompt_finding("segments.odd-border", sentence, between, evidence)

    def _inner_padding(self) -> Iterator[Finding]:
        """Pieces contain padding: one finding for all of them."""
        padded = list(prompt_facts.find_inner_padding(self._prompt))
        if not padded:
            return
        pads = [position for _, some in padded for position in some]
        pieces = [located.piece for located, _ in padded]
        verb = "contains" if len(pieces) == 1 else "contain"
        sentence = (
            f"{self._join_piece_labels(pieces)} {verb} {plural(len(pads), 'padding token')} "
            f"(first: {self.context.format_position(pads[0])}); the prompt has "
            f"{plural(self._prompt.n_pads, 'leading padding token')}."
        )
        labels = [piece.label for piece in pieces]
        evidence = {"pads": len(pads), "before the prompt": self._prompt.n_pads, "segments": labels}
        yield self._prompt_finding("segments.padding-inside", sentence, pads, evidence)

    def _uncovered_words(self) -> Iterator[Finding]:
        """Words belong to no piece: one finding for all of them."""
        gaps = prompt_facts.find_uncovered_gaps(self._prompt)
        if gaps:
            n, first = sum(b - a for a, b in gaps), prompt_facts.span_text(self._prompt, gaps[0])
            verb = "contains" if len(gaps) == 1 else "contain"
            sentence = (
                f"{plural(len(gaps), 'gap')} between declared pieces {verb} words that belong to "
                f"no piece, {plural(n, 'token')}; first: "
                f'"{printable(first.strip())[:_MAX_LISTED]}" at '
                f"{self.context.format_position(gaps[0][0])}."
            )
            positions = [p for a, b in gaps for p in range(a, b)]
            yield self._prompt_finding(
                "segments.uncovered", sentence, positions, {"gaps": len(gaps), "tokens": n}
            )

    # -- texts -----------------------------------------------------------------------------------

    def _missing_pieces(self) -> Iterator[Finding]:
        """Pieces are missing or truncated; only a note if an earlier prompt had them all.

        A prompt without some of the pieces then probably has another purpose.
        """
        prompt = self._prompt
        cut = prompt_facts.find_truncated(prompt)
        missing = prompt_facts.find_missing_texts(prompt)
        if cut is not None:
            late = [span for span in prompt.spans if span.stop > prompt.stop and span != cut.piece]
            after = [*(piece for piece in missing if piece != cut.piece), *late]
            yield self._truncated(cut, after)
        elif missing:
            n, n_found = len(prompt.pieces), len(prompt.pieces) - len(missing)
            subject, verb = ("text", "is") if len(missing) == 1 else ("texts", "are")
            sentence = (
                f"The {subject} of {self._join_piece_labels(missing)} {verb} not in the prompt "
                f"({plural(len(prompt.ids), 'token')}, beginning with {self._quote_beginning()}); "
                f"{n_found} of {n} declared pieces were found."
            )
            texts = [piece.text for piece in missing]
            severity = Severity.NOTE if self._had_complete_prompt else None
            yield self._prompt_finding(
                "segments.not-found", sentence, (), {"texts": texts}, severity
            )

    def _truncated(
        self, cut: prompt_facts.TruncatedPiece, after: Sequence[DeclaredSegment]
    ) -> Finding:
        prompt, side = self._prompt, "ends" if cut.at_end else "begins"
        at = prompt.stop - 1 if cut.at_end else prompt.first_unpadded
        are = "is" if len(after) == 1 else "are"
        rest = f"; {self._join_piece_labels(after)} {are} missing or incomplete" if after else ""
        by_character = cut.unit == "position" and prompt_facts.are_character_spans(prompt)
        in_characters = ", as if positions had been counted in characters" if by_character else ""
        sentence = (
            f"The prompt {side} inside {_quote_label(cut.piece)}, at "
            f"{self.context.format_position(at)}: {cut.n_lost} of its {plural(cut.n, cut.unit)} "
            f"are missing{rest}{in_characters}."
        )
        evidence = {
            "lost": cut.n_lost,
            "of": cut.n,
            "received": len(prompt.ids),
            "segment": cut.piece.label,
        }
        severity = Severity.NOTE if self._had_complete_prompt else None
        return self._prompt_finding("segments.truncated", sentence, (at,), evidence, severity)

    def _quote_beginning(self) -> str:
        texts = "".join(token.text for token in self._prompt.tokens[self._prompt.n_pads :][:12])
        return f'"{printable(texts)[:_MAX_LISTED]}"'

    def _doubtful_texts(self) -> Iterator[Finding]:
        """Texts were found, but not unambiguously."""
        yield from self._overlaps()
        yield from self._length_drift()
        for located in prompt_facts.find_ambiguous(self._prompt):
            assert located.span is not None
            start, n = located.span[0], located.n_places
            times = f"at least {n}" if n >= prompt_facts.MAX_COUNTED_PLACES else str(n)
            sentence = (
                f"The text of {_quote_label(located.piece)} occurs {times} times in the prompt; "
                f"the occurrence at {self.context.format_position(start)} was used."
            )
            evidence = {"places": n, "text": located.piece.text}
            yield self._prompt_finding("segments.ambiguous", sentence, (start,), evidence)

    def _overlaps(self) -> Iterator[Finding]:
        located = [piece for piece in self._prompt.located_pieces if piece.span is not None]
        for second in (piece for piece in located if piece.overlaps):
            start, stop = second.span or (0, 0)
            for first in located:
                a, b = first.span or (0, 0)
                shared = range(max(a, start), min(b, stop))
                if first is second or not shared:
                    continue
                sentence = (
                    f"{_quote_label(first.piece)} and {_quote_label(second.piece)} share "
                    f"{plural(len(shared), 'token')}, starting at "
                    f"{self.context.format_position(shared[0])}; only the first is a segment."
                )
                both = [first.piece.label, second.piece.label]
                yield self._prompt_finding("segments.overlap", sentence, shared, {"segments": both})
                break

    def _length_drift(self) -> Iterator[Finding]:
        """Pieces have another number of tokens when encoded alone, so sums of lengths are wrong."""
        pairs = prompt_facts.token_lengths(self._prompt)
        off, worst = 0, 0
        for alone, joined in pairs:
            off += alone - joined
            worst = max(worst, abs(off))
        if not worst or len(pairs) < 2:
            return
        lengths_alone, lengths_joined = (", ".join(str(pair[n]) for pair in pairs) for n in (0, 1))
        sentence = (
            f"Encoded alone, the {len(pairs)} declared texts have {lengths_alone} tokens; in the "
            f"prompt they have {lengths_joined}. Borders summed from the pieces are off by up to "
            f"{plural(worst, 'token')}."
        )
        evidence = {"tokens alone and fed": [list(pair) for pair in pairs], "worst": worst}
        yield self._prompt_finding("segments.drift", sentence, (), evidence)

    # -- special tokens --------------------------------------------------------------------------

    def _check_bos(self) -> Iterator[Finding]:
        """The BOS is missing, doubled, or repeated inside the prompt."""
        prompt, context = self._prompt, self.context
        bos, first = prompt.tokenizer_facts.bos, prompt.first_unpadded
        if prompt_facts.lacks_bos(prompt):
            sentence = (
                f"The prompt begins with {context.format_position(first)}, without the BOS "
                f"(id {bos}) that its tokenizer adds to every text."
            )
            yield self._prompt_finding("segments.bos-missing", sentence, (first,), {"bos": bos})
        n = prompt_facts.count_leading_bos(prompt)
        if n > 1:
            sentence = (
                f"The prompt begins with {n} BOS tokens (id {bos}) instead of one; the first word, "
                f"{context.format_position(first + n)}, is {n - 1} further than in training."
            )
            evidence = {"bos": bos, "n": n}
            yield self._prompt_finding(
                "segments.bos-doubled", sentence, range(first, first + n), evidence
            )
        later = prompt_facts.find_inner_bos(prompt)
        if later:
            sentence = (
                f"The prompt contains {plural(len(later), 'further BOS token')} (id {bos}) without "
                f"an EOS before {'it' if len(later) == 1 else 'them'}, first at "
                f"{context.format_position(later[0])}, as if pieces had been encoded one by one "
                "with special tokens."
            )
            evidence = {"bos": bos, "n": len(later)}
            yield self._prompt_finding(
                "segments.bos-doubled", sentence, later, evidence, Severity.NOTE
            )

    def _check_eos(self) -> Iterator[Finding]:
        """The tokenizer added an EOS to each piece; only a note where that may be intended."""
        prompt = self._prompt
        inside = prompt_facts.find_inner_eos(prompt)
        if inside:
            at_end = " at the end of a declared piece" if prompt.pieces else ""
            sentence = (
                f"The prompt contains {plural(len(inside), 'EOS token')} (id "
                f"{prompt.ids[inside[0] - prompt.start]}){at_end}, first at "
                f"{self.context.format_position(inside[0])}: the tokenizer adds one to every "
                "text, as if pieces had been encoded one by one with special tokens."
            )
            may_be_intended = not prompt.pieces or prompt_facts.is_packed(prompt)
            evidence = {"eos": list(prompt.tokenizer_facts.eos), "n": len(inside)}
            severity = Severity.NOTE if may_be_intended else None
            yield self._prompt_finding("segments.eos-inside", sentence, inside, evidence, severity)

    def _reordered(self) -> Iterator[Finding]:
        """Texts are in another order; only a note where the declared order may mean nothing."""
        reordered = prompt_facts.find_reordered(self._prompt)
        if reordered:
            pieces = [located.piece for located in reordered]
            declared = [piece.label for piece in self._prompt.pieces if piece in pieces]
            sentence = (
                f"{len(pieces)} declared texts are in another order in the prompt than declared: "
                f"{self._join_piece_labels(pieces)}."
            )
            starts = [located.span[0] for located in reordered if located.span is not None]
            evidence = {"received": [piece.label for piece in pieces], "declared": declared}
            severity = None if prompt_facts.is_order_declared(self._prompt) else Severity.NOTE
            yield self._prompt_finding("segments.reordered", sentence, starts, evidence, severity)

    def _special_tokens(self) -> Iterator[Finding]:
        """Special tokens were encoded as characters: one finding for each kind of token."""
        by_name: dict[str, list[prompt_facts.WrittenSpecial]] = {}
        for special in prompt_facts.find_written_specials(self._prompt):
            by_name.setdefault(special.characters, []).append(special)
        for name, occurrences in by_name.items():
            (start, stop), token_id = occurrences[0].span, occurrences[0].token_id
            known_as = "unknown to this tokenizer" if token_id is None else f"id {token_id}"
            times = "" if len(occurrences) == 1 else f" {len(occurrences)} times, first"
            sentence = (
                f'The characters of the special token "{printable(name)}" ({known_as}) were '
                f"encoded as {stop - start} ordinary tokens,{times} at "
                f"{self.context.format_position(start)}."
            )
            positions = [p for special in occurrences for p in range(*special.span)]
            evidence = {"token": name, "id": token_id, "times": len(occurrences)}
            yield self._prompt_finding("segments.special-as-text", sentence, positions, evidence)


def _quote_label(piece: DeclaredSegment) -> str:
    return f"'{printable(piece.label)}'"

"""Sentences about the words of a prompt: each way in which they are not what was declared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flexinspect.findings import Finding, Severity
from flexinspect.pieces import Piece
from flexinspect.rules import fedkinds as kinds
from flexinspect.rules import fedwords as words
from flexinspect.rules.fedborders import as_if
from flexinspect.rules.fedfacts import Fed
from flexinspect.rules.fedshift import Shift, find_shift, odd_borders
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import counted, printable

_MOST = 3
_WORDS = 32
_REASONS = {
    "lines": "begin and end where lines or sentences do",
    "gaps": "have the same tokens between them",
    "ends": "leave out the BOS and end with the prompt",
}


def about_words(scene: Scene, fed: Fed, *, is_other: bool) -> Iterator[Finding]:
    """Yield what is wrong with a prompt, leaving out what only follows from something else.

    `is_other` tells that an earlier generation had all the pieces, so that one which lacks some is
    likely to be about something else.
    """
    if not fed.tokens:
        return
    say = _Say(scene, fed)
    shift = find_shift(fed)
    if shift is not None:
        yield say.shifted(shift) if shift.n is not None else say.drifted(shift)
    else:
        yield from say.odd()
        yield from say.padding()
        yield from say.lost(is_other=is_other)
        yield from say.between()
    yield from say.texts()
    yield from say.order()
    yield from say.bos()
    yield from say.eos()
    yield from say.specials()


class _Say:
    """Makes findings about one prompt."""

    def __init__(self, scene: Scene, fed: Fed) -> None:
        self._scene, self._fed = scene, fed

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
            severity=severity or kinds.KINDS[finding_id].severity,
            sentence=sentence,
            generation=self._scene.generation.generation,
            step=0,
            positions=tuple(positions)[:_WORDS],
            evidence=evidence,
        )

    def _named(self, pieces: Sequence[Piece]) -> str:
        names = [_name(piece) for piece in pieces[:_MOST]]
        if len(pieces) > _MOST:
            names.append(f"{len(pieces) - _MOST} more")
        return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

    # -- spans -----------------------------------------------------------------------------------

    def shifted(self, shift: Shift) -> Finding:
        """Return that all spans are off by the same number of tokens."""
        n, spans = shift.n or 0, self._fed.spans
        wrong = [(self._wrongly(span, n)) for span in spans]
        told = "; ".join(text for text, _ in wrong[:_MOST])
        one = len(spans) == 1
        sentence = (
            f"{_spans(len(spans))} {counted(abs(n), 'token')} too {'early' if n > 0 else 'late'}"
            f"{as_if(self._fed, n)}: {told}. Moved by {n:+d}, {'it' if one else 'they'} "
            f"{_singular(_REASONS[shift.by]) if one else _REASONS[shift.by]}."
        )
        positions = sorted({position for _, some in wrong for position in some})
        declared = [[span.label, span.start, span.stop] for span in spans]
        evidence = {"shift": n, "declared": declared, "told by": shift.by}
        return self._finding(kinds.SHIFTED, sentence, positions, evidence)

    def _wrongly(self, span: Piece, n: int) -> tuple[str, list[int]]:
        """Return in words what a span wrongly has and lacks, and these positions."""
        own, right = range(span.start, span.stop), range(span.start + n, span.stop + n)
        has = [p for p in own if p not in right]
        lacks = [p for p in right if p not in own]
        text = f"{_name(span)} takes in {self._few(has)} and leaves out {self._few(lacks)}"
        return text, [p for p in (*has, *lacks) if p < self._fed.stop]

    def _few(self, positions: Sequence[int]) -> str:
        first = self._scene.position(positions[0])
        return first if len(positions) == 1 else f"{len(positions)} tokens from {first}"

    def drifted(self, shift: Shift) -> Finding:
        """Return that spans are off by more and more tokens."""
        spans = self._fed.spans
        moves = ", ".join(
            f"{_name(span)} by {n:+d}" for span, n in zip(spans, shift.offsets, strict=True)
        )
        last = spans[-1]
        sentence = (
            f"The {len(spans)} declared spans drift away from the words: to begin and end where "
            f"lines or sentences do, they would have to move, {moves}, as if positions had been "
            f"summed from pieces that were encoded one by one; {_name(last)} begins at "
            f"{self._scene.position(last.start)}."
        )
        positions = [span.start for span in spans]
        declared = [[span.label, span.start, span.stop] for span in spans]
        evidence = {"offsets": list(shift.offsets), "declared": declared}
        severity = Severity.WARNING
        return self._finding(kinds.DRIFT, sentence, positions, evidence, severity)

    def odd(self) -> Iterator[Finding]:
        """Yield the one border that does not fit."""
        for span, is_start, n in odd_borders(self._fed):
            at = span.start if is_start else span.stop
            side = "begins at" if is_start else "ends before"
            part = "The other borders" if len(self._fed.spans) > 2 else "All other borders"
            sentence = (
                f"{_name(span)} {side} {self._scene.position(at)}, inside of its line: "
                f"{counted(abs(n), 'token')} {'later' if n > 0 else 'earlier'} the line "
                f"{'begins' if is_start else 'ends'}. {part} are where lines or sentences are."
            )
            between = range(min(at, at + n), max(at, at + n))
            evidence = {"border": at, "shift": n, "segment": span.label}
            yield self._finding(kinds.ODD_BORDER, sentence, between, evidence)

    def padding(self) -> Iterator[Finding]:
        """Yield pieces that hold padding, all in one finding."""
        held = list(words.padding_inside(self._fed))
        if not held:
            return
        pads = [position for _, some in held for position in some]
        one = len(held) == 1
        sentence = (
            f"{self._named([one.piece for one, _ in held])} {'holds' if one else 'hold'} "
            f"{counted(len(pads), 'token')} of padding (first: {self._scene.position(pads[0])}); "
            f"{counted(self._fed.n_pads, 'token')} of padding come before the prompt."
        )
        labels = [one.piece.label for one, _ in held]
        evidence = {"pads": len(pads), "before the prompt": self._fed.n_pads, "segments": labels}
        yield self._finding(kinds.PADDING, sentence, pads, evidence)

    def between(self) -> Iterator[Finding]:
        """Yield words that belong to no piece, all in one finding."""
        gaps = words.words_between(self._fed)
        if gaps:
            n, first = sum(b - a for a, b in gaps), words.text_of(self._fed, gaps[0])
            sentence = (
                f"{counted(len(gaps), 'stretch')} of words between declared pieces "
                f"{'belongs' if len(gaps) == 1 else 'belong'} to none of them, "
                f'{counted(n, "token")}; first: "{printable(first.strip())[:_WORDS]}" at '
                f"{self._scene.position(gaps[0][0])}."
            ).replace("stretchs", "stretches")
            positions = [p for a, b in gaps for p in range(a, b)]
            yield self._finding(
                kinds.UNCOVERED, sentence, positions, {"gaps": len(gaps), "tokens": n}
            )

    # -- texts -----------------------------------------------------------------------------------

    def lost(self, *, is_other: bool) -> Iterator[Finding]:
        """Yield pieces that are not there, or not wholly; a note when `is_other`."""
        fed = self._fed
        cut = words.truncated(fed)
        gone = words.not_found(fed)
        if cut is not None:
            late = [one for one in fed.spans if one.stop > fed.stop and one != cut.piece]
            after = [*(piece for piece in gone if piece != cut.piece), *late]
            yield self._cut(cut, after, is_other=is_other)
        elif gone:
            n, n_found = len(fed.pieces), len(fed.pieces) - len(gone)
            is_one = len(gone) == 1
            texts_are = ("text", "is") if is_one else ("texts", "are")
            sentence = (
                f"The {texts_are[0]} of {self._named(gone)} {texts_are[1]} not in the prompt that "
                f"was fed, {counted(len(fed.ids), 'token')} that begin with {self._beginning()}; "
                f"{n_found} of {n} declared pieces are there."
            )
            texts = [piece.text for piece in gone]
            severity = Severity.NOTE if is_other else None
            yield self._finding(kinds.NOT_FOUND, sentence, (), {"texts": texts}, severity)

    def _cut(self, cut: words.Cut, after: Sequence[Piece], *, is_other: bool) -> Finding:
        fed, side = self._fed, "ends" if cut.at_end else "begins"
        at = fed.stop - 1 if cut.at_end else fed.first
        are = "is" if len(after) == 1 else "are"
        rest = f"; {self._named(after)} {are} not in it, or not wholly" if after else ""
        by_character = cut.unit == "position" and words.counts_characters(fed)
        in_characters = ", as if positions had been counted in characters" if by_character else ""
        sentence = (
            f"The prompt that was fed {side} inside of {_name(cut.piece)}, with "
            f"{self._scene.position(at)}: {cut.n_lost} of its {counted(cut.n, cut.unit)} were not "
            f"fed{rest}{in_characters}."
        )
        evidence = {
            "lost": cut.n_lost,
            "of": cut.n,
            "fed": len(fed.ids),
            "segment": cut.piece.label,
        }
        severity = Severity.NOTE if is_other else None
        return self._finding(kinds.TRUNCATED, sentence, (at,), evidence, severity)

    def _beginning(self) -> str:
        texts = "".join(token.text for token in self._fed.tokens[self._fed.n_pads :][:12])
        return f'"{printable(texts)[:_WORDS]}"'

    def texts(self) -> Iterator[Finding]:
        """Yield what is doubtful about texts that were found."""
        yield from self._overlaps()
        yield from self._lengths()
        for one in words.ambiguous(self._fed):
            assert one.span is not None
            many = "at least 9" if one.n_places >= 9 else str(one.n_places)
            sentence = (
                f"The text of {_name(one.piece)} is in {many} places of the prompt; the one at "
                f"{self._scene.position(one.span[0])} was taken."
            )
            places = {"places": one.n_places, "text": one.piece.text}
            yield self._finding(kinds.AMBIGUOUS, sentence, (one.span[0],), places)

    def _overlaps(self) -> Iterator[Finding]:
        located = [one for one in self._fed.located if one.span is not None]
        for one in (one for one in located if one.shares):
            start, stop = one.span or (0, 0)
            for other in located:
                a, b = other.span or (0, 0)
                shared = range(max(a, start), min(b, stop))
                if other is one or not shared:
                    continue
                sentence = (
                    f"{_name(other.piece)} and {_name(one.piece)} share "
                    f"{counted(len(shared), 'token')}, from {self._scene.position(shared[0])} on; "
                    "only the first of the two is a segment."
                )
                both = [other.piece.label, one.piece.label]
                yield self._finding(kinds.OVERLAP, sentence, shared, {"segments": both})
                break

    def _lengths(self) -> Iterator[Finding]:
        """Yield that pieces have another length alone, so that sums of lengths go astray."""
        pairs = words.lengths(self._fed)
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
            f"{counted(worst, 'token')} beside the words."
        )
        evidence = {"tokens alone and fed": [list(pair) for pair in pairs], "worst": worst}
        yield self._finding(kinds.DRIFT, sentence, (), evidence)

    # -- special tokens --------------------------------------------------------------------------

    def bos(self) -> Iterator[Finding]:
        """Yield a BOS that is missing, doubled, or repeated inside."""
        fed, scene = self._fed, self._scene
        bos = fed.words.bos
        if words.misses_bos(fed):
            sentence = (
                f"The prompt begins with {scene.position(fed.first)}, without the BOS (id {bos}) "
                "that its tokenizer puts before every text."
            )
            yield self._finding(kinds.BOS_MISSING, sentence, (fed.first,), {"bos": bos})
        n = words.n_leading_bos(fed)
        if n > 1:
            at = range(fed.first, fed.first + n)
            sentence = (
                f"The prompt begins with {n} BOS (id {bos}) instead of one; the first word, "
                f"{scene.position(fed.first + n)}, is {n - 1} further than in training."
            )
            yield self._finding(kinds.BOS_DOUBLED, sentence, at, {"bos": bos, "n": n})
        later = words.later_bos(fed)
        if later:
            sentence = (
                f"{counted(len(later), 'further BOS').replace('BOSs', 'BOS')} (id {bos}) "
                f"{'lies' if len(later) == 1 else 'lie'} inside of the prompt, without an EOS "
                f"before, first at {scene.position(later[0])}, as if pieces had been encoded with "
                "special tokens one by one."
            )
            evidence = {"bos": bos, "n": len(later)}
            yield self._finding(kinds.BOS_DOUBLED, sentence, later, evidence, Severity.NOTE)

    def eos(self) -> Iterator[Finding]:
        """Yield EOS that the tokenizer put behind pieces; a note where that may be meant."""
        fed = self._fed
        inside = words.inner_eos(fed)
        if inside:
            one, ends = len(inside) == 1, " at the end of a declared piece" * bool(fed.pieces)
            sentence = (
                f"{len(inside)} EOS (id {fed.ids[inside[0] - fed.start]}) "
                f"{'lies' if one else 'lie'} inside of the prompt{ends}, first at "
                f"{self._scene.position(inside[0])}: the tokenizer puts one behind every text, as "
                "if pieces had been encoded with special tokens one by one."
            )
            is_meant = not fed.pieces or words.are_packed(fed)
            evidence = {"eos": list(fed.words.eos), "n": len(inside)}
            severity = Severity.NOTE if is_meant else None
            yield self._finding(kinds.EOS_INSIDE, sentence, inside, evidence, severity)

    def order(self) -> Iterator[Finding]:
        """Yield that texts were fed in another order; a note where none may have been meant."""
        found = words.reordered(self._fed)
        if found:
            pieces = [one.piece for one in found]
            declared = [piece.label for piece in self._fed.pieces if piece in pieces]
            sentence = (
                f"{len(found)} declared texts were fed in another order than they were declared "
                f"in: {self._named(pieces)}."
            )
            starts = [one.span[0] for one in found if one.span is not None]
            evidence = {"fed": [piece.label for piece in pieces], "declared": declared}
            severity = None if words.is_order_said(self._fed) else Severity.NOTE
            yield self._finding(kinds.REORDERED, sentence, starts, evidence, severity)

    def specials(self) -> Iterator[Finding]:
        """Yield special tokens that were fed as characters, each kind once."""
        by_name: dict[str, list[words.Written]] = {}
        for one in words.written_specials(self._fed):
            by_name.setdefault(one.characters, []).append(one)
        for name, found in by_name.items():
            start, stop = found[0].span
            own = found[0].token_id
            whose = "which this tokenizer does not know" if own is None else f"id {own}"
            times = "" if len(found) == 1 else f" {len(found)} times, first"
            sentence = (
                f'The characters of the special token "{printable(name)}" ({whose}) were fed as '
                f"{stop - start} ordinary tokens,{times} at {self._scene.position(start)}."
            )
            positions = [p for one in found for p in range(*one.span)]
            evidence = {"token": name, "id": own, "times": len(found)}
            yield self._finding(kinds.SPECIAL_AS_TEXT, sentence, positions, evidence)


def _name(piece: Piece) -> str:
    return f"'{printable(piece.label)}'"


def _spans(n: int) -> str:
    return "The declared span lies" if n == 1 else f"The {n} declared spans lie"


def _singular(reason: str) -> str:
    first, _, rest = reason.partition(" ")
    verb = {"begin": "begins", "have": "has", "leave": "leaves"}[first]
    return f"{verb} {rest}".replace(" end ", " ends ").replace(
        "lines or sentences do", "a line does"
    )

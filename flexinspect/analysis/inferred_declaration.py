"""A declaration for a run without one: the segments into which its executed mask cuts the prompt.

The file that it becomes says what was meant, so that the next run is compared with it
(`flexinspect run --declare FILE`; `flexinspect.inputs.declarations` reads it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from flexinspect.core.errors import UsageError
from flexinspect.core.text import ensure_printable, printable, truncate
from flexinspect.masks import mask_presets
from flexinspect.records.prompt import Segment, SegmentKind, Span, find_text_spans
from flexinspect.records.step import MaskRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.prompt.inferred_segments import (
    InferredSegments,
    find_segment_borders,
    first_text_position,
    infer_segments,
    isolated_spans,
    segment_spans,
)
from flexinspect.rules.prompt.prompt_facts import PromptTokens
from flexinspect.rules.prompt.segment_borders import Borders
from flexinspect.trace.queries import step_bounds
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.replay import branch_start_record

MAX_CHOICE_CHARACTERS = 16  # of each segment's text, where several declarations are listed

Cells = npt.NDArray[np.bool_]


class SegmentEntry(Struct, frozen=True):
    """A segment of the file: its positions, and its text if that alone finds them again."""

    label: str
    span: Span
    text: str | None

    def describe(self) -> str:
        """Return the positions and the beginning of the text."""
        start, stop = self.span
        text = "" if self.text is None else f'  "{printable(self.text)}"'
        return f"{self.label}  tokens {start}-{stop - 1}{text}"


class InferredDeclaration(Struct, frozen=True):
    """The segments that are isolated, and the preset that the executed mask is (None: no preset).

    `move` is the number of tokens by which the borders were moved.
    """

    generation: int
    segments: tuple[SegmentEntry, ...]
    preset: str | None
    move: int = 0
    moved: Mapping[int, int] = {}

    def describe(self) -> str:
        """Return the move and the beginning of each segment in one line."""
        texts = [
            entry.text or f"tokens {entry.span[0]}-{entry.span[1] - 1}" for entry in self.segments
        ]
        listed = " | ".join(truncate(printable(text), MAX_CHOICE_CHARACTERS) for text in texts)
        single = [f"border {old} at {new}" for old, new in self.moved.items()]
        how = [f"moved by {self.move:+d}"] if self.move else []
        return f"{', '.join([*how, *single]) or 'as it ran'}: {listed}"

    def as_json(self) -> dict[str, Any]:
        """Return the declaration as JSON, with the positions named as in a declaration file."""
        return {
            **structs.asdict(self),
            "segments": [
                {"label": one.label, "start": one.span[0], "stop": one.span[1], "text": one.text}
                for one in self.segments
            ],
        }

    def toml(self, trace: str) -> str:
        """Return the declaration as TOML; the comment names the trace that it was read from."""
        moved = f" Its borders were moved by {self.move:+d}." if self.move else ""
        moved += "".join(f" The border {old} is at {new}." for old, new in self.moved.items())
        where = f"generation {self.generation} of {ensure_printable(trace)}"
        lines = [
            f"# Read from the mask that ran in {where}.{moved}",
            "# Change what is not as you meant it; the next run is compared with this file.",
        ]
        if self.preset is not None:
            lines.append(f"mask = {_quote(self.preset)}")
        if any(entry.text is None for entry in self.segments):
            lines.append("# start is the first token of a segment, stop the one after its last.")
        for entry in self.segments:
            place = [f"start = {entry.span[0]}", f"stop = {entry.span[1]}"]
            if entry.text is not None:
                place = [f"text = {_quote(entry.text)}"]
            lines += ["", "[[segments]]", *place, f"label = {_quote(entry.label)}"]
        return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    """Return a basic string of TOML: one of JSON, with DEL escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class UndeclaredMask:
    """The executed mask of a generation that declared nothing.

    `inferred` are the segments into which it cuts the prompt. Raises `UsageError` for a generation
    with a declaration, without a recorded mask, or with a mask that has no segments, and
    `TraceError`.
    """

    def __init__(self, reader: TraceReader, generation: int) -> None:
        self.generation = generation
        row = reader.generation(generation)
        context = RuleContext()
        record = branch_start_record(reader, row, reader.branches(generation)[0])
        context.start_generation(record)
        self._prompt = PromptTokens(context)
        if context.declared_mask is not None or self._prompt.pieces:
            what = f"The segments of generation {generation} were declared when it was recorded."
            raise UsageError(what, hint="Edit the declaration that you gave to that run.")
        self._cells, borders = self._read_mask(reader)
        self.inferred: InferredSegments = infer_segments(borders, self._prompt)

    def _read_mask(self, reader: TraceReader) -> tuple[Cells, Borders]:
        """Return the cells of the first mask with borders, (rows, keys), and the borders."""
        first, _ = step_bounds(reader, self.generation, 0) or (0, 0)
        names = dict.fromkeys(call.mask for call in reader.calls(self.generation, first, 0))
        masks = (reader.mask(name) for name in names if name)
        whole = [mask for mask in masks if mask is not None and self._covers_prompt(mask)]
        for mask in whole:
            for borders, head in find_segment_borders(mask, self._prompt).items():
                if mask.cells is not None:
                    return mask.cells[head], borders
        if not whole:
            what = f"Generation {self.generation} has no executed mask of the whole prompt."
            hint = "Level advanced records it, for a prompt that the model reads in one step."
            raise UsageError(what, hint=hint)
        what = f"The mask of generation {self.generation} does not cut the prompt into segments."
        raise UsageError(what, hint="'flexinspect run --help' says how to declare another one.")

    def _covers_prompt(self, mask: MaskRecord) -> bool:
        is_whole = mask.q_offset == 0 and mask.q_len >= self._prompt.stop
        return is_whole and mask.cells is not None

    def declare(self, move: int = 0, moved: Mapping[int, int] | None = None) -> InferredDeclaration:
        """Return the declaration of the segments with all borders moved by `move` tokens.

        `moved` are the positions of single borders instead, by their position as they ran.
        """
        borders, moved = self.inferred.borders, moved or {}
        unknown = [border for border in moved if border not in borders]
        if unknown:
            known = ", ".join(map(str, borders))
            raise UsageError(f"There is no border at {unknown[0]}; they are at {known}.")
        edges = [0, *(moved.get(b, b + move) for b in borders), self._prompt.stop]
        if edges != sorted({*edges}):
            what = f"The borders {', '.join(map(str, edges[1:-1]))} are not in order in the prompt."
            raise UsageError(what, hint="Each must be after the one before, and inside the prompt.")
        names = isolated_spans(self._cells, self._spans(), self._prompt)
        entries, after = list[SegmentEntry](), 0
        for number, index in enumerate(names, 1):
            entry = self._entry(f"paraphrase {number}", (edges[index], edges[index + 1]), after)
            entries.append(entry)
            after = entry.span[1] - self._prompt.start
        preset = self._find_preset(names)
        return InferredDeclaration(self.generation, tuple(entries), preset, move, dict(moved))

    def describe_border(self, position: int) -> str:
        """Return the words around a border at a position: `9: called? | ↵Could`."""
        texts, at = self._prompt.texts, position - self._prompt.start
        before, after = "".join(texts[max(at - 3, 0) : at]), "".join(texts[at : at + 3])
        return f"{position}: {printable(before)} | {printable(after)}"

    def choices(self) -> list[InferredDeclaration]:
        """Return what the user probably meant, the likeliest first: moved borders, and as they ran.

        Moves that leave the prompt are left out.
        """
        found = []
        shift = self.inferred.shift
        for move in (shift, 0) if shift else (0, 1, -1):
            with suppress(UsageError):
                found.append(self.declare(move))
        return found

    def describe_oddity(self) -> str:
        """Return what is odd about the borders as they ran, "" if nothing is."""
        inferred = self.inferred
        if inferred.shift:
            where = inferred.describe_distance()
            if inferred.is_cut and len(inferred.borders) > 1:
                others = "and each other one is as far from the edge of a list of token ids"
                return f"The first border of the executed mask is {where}, {others}."
            return f"Every border of the executed mask is {where}."
        if inferred.is_suspect:
            odd = ", ".join(map(str, sorted((*inferred.in_words, *inferred.before_breaks))))
            return f"Borders inside a word or before a line break: at position {odd}."
        return ""

    def _spans(self) -> list[Span]:
        return segment_spans(self.inferred.borders, self._prompt)

    def _entry(self, label: str, span: Span, after: int) -> SegmentEntry:
        """Return a segment without special tokens and line breaks at its ends."""
        prompt = self._prompt
        start, stop = first_text_position(self._prompt, span[0]), span[1]
        while stop - 1 > start and not prompt.tokens[stop - 1 - prompt.start].text.strip("\r\n"):
            stop -= 1
        parts = prompt.texts[start - prompt.start : stop - prompt.start]
        text = "".join(parts).strip()
        found = next(find_text_spans(text, prompt.texts, after), None) if text else None
        is_found = found == (start - prompt.start, stop - prompt.start) and prompt.has_text
        return SegmentEntry(label, (start, stop), text if is_found else None)

    def _find_preset(self, isolated: Sequence[int]) -> str | None:
        """Return the preset that the executed mask is, for the borders as they ran.

        Who sees the BOS does not matter: it sees only itself, and conventions differ.
        """
        spans, n = self._spans(), self._prompt.stop
        if not isolated:
            return None
        first = first_text_position(self._prompt, spans[isolated[0]][0])
        pieces = [("bos", SegmentKind.BOS, (0, min(first, 1)))]
        pieces.append(("shared", SegmentKind.SHARED, (min(first, 1), first)))
        for index in isolated:
            start, stop = max(spans[index][0], first), spans[index][1]
            pieces.append((str(index), SegmentKind.PARAPHRASE, (start, stop)))
        pieces.append(("cue", SegmentKind.CUE, (spans[isolated[-1]][1], n)))
        kept = [piece for piece in pieces if piece[2][0] < piece[2][1]]
        segments = [
            Segment(*span, label, kind, owner) for owner, (label, kind, span) in enumerate(kept)
        ]
        keys = slice(min(first_text_position(self._prompt), 1), n)
        for name in mask_presets.PRESETS:
            cells = mask_presets.preset(name, segments).dense(n)
            if np.array_equal(cells[:, keys], self._cells[:n, keys]):
                return name
        return None

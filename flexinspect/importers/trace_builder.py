"""Writes the forward passes of a dump as a trace.

The trace is written under another name and renamed at the end, so that an interrupted or failed
import leaves nothing behind and an older trace in its place stays until then.
"""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from flexinspect.core import __version__
from flexinspect.core.errors import TracePlaceError, TraceWriteError, UsageError
from flexinspect.importers.importer import (
    MAX_TOKENS,
    Dump,
    DumpedGeneration,
    DumpedToken,
    ForwardPass,
)
from flexinspect.importers.tensor_records import AttentionTracker, logits_record
from flexinspect.importers.vocabulary import DumpVocabulary
from flexinspect.records import imported
from flexinspect.records.prompt import (
    Segment,
    SegmentKind,
    close_generated_segment,
    segment_index,
)
from flexinspect.records.step import (
    ArrayRecord,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.trace.file import location
from flexinspect.trace.file.writer import TraceWriter, write_problem

MAX_GENERATED = 1 << 20
"""Length of the generated segment until the end of its passes is known."""


class ImportResult(Struct, frozen=True):
    """What was written: `holds` and `lacks` are kinds of records, `notes` sentences."""

    trace: Path
    source: str
    versions: dict[str, str]
    n_generations: int
    n_steps: int
    holds: tuple[str, ...]
    lacks: tuple[str, ...]
    notes: tuple[str, ...]


def write_trace(
    dump: Dump,
    format_name: str,
    target: Path,
    vocabulary: DumpVocabulary,
    *,
    overwrite: bool = False,
) -> ImportResult:
    """Write a dump to `target`. Raises `UsageError` and `TraceWriteError`, and then writes nothing.

    An existing trace is replaced only with `overwrite`; any other file is never replaced.
    """
    target = target.absolute()
    location.check_trace_target(target, overwrite=overwrite)
    facts = {"started_at": time.time(), "model": dict(dump.model), "rules": []}
    facts["versions"] = {"flexinspect": __version__, **dump.versions}
    facts[imported.IMPORTED_KEY] = to_builtins(imported.ImportedFacts(dump.source, format_name))
    with _open_part(target, facts) as writer:
        return _write(writer, dump, format_name, target, vocabulary)


@contextmanager
def _open_part(target: Path, facts: dict[str, Any]) -> Iterator[TraceWriter]:
    """Yield the writer of a trace under another name, which becomes `target` at the end.

    Raises `TraceWriteError` in the words of an import.
    """
    part = target.with_name(f".{target.name}.{os.urandom(4).hex()}.part")
    try:
        writer = TraceWriter.create(part, facts)
        try:
            yield writer
            writer.close()
            if writer.failed:
                raise TracePlaceError(f"The trace {target} could not be written.")
            part.replace(target)
        except BaseException:
            writer.close("interrupted")
            writer.discard()
            raise
    except TraceWriteError as error:
        raise _name_target(error, part, target) from error


def _name_target(error: TraceWriteError, part: Path, target: Path) -> TracePlaceError:
    """Return an error of writing `part` with the name `target`, without words about a recording."""
    if isinstance(error.__cause__, sqlite3.Error):
        reason, remedy = write_problem(error.__cause__)
        what = f"The trace {target} cannot be written: {reason}."
        return TracePlaceError(what, hint=remedy or None)
    return TracePlaceError(error.message.replace(str(part), str(target)), hint=error.hint)


def _write(
    writer: TraceWriter, dump: Dump, format_name: str, target: Path, vocabulary: DumpVocabulary
) -> ImportResult:
    n_generations = n_steps = 0
    holds: set[str] = set()
    model = dict(dump.model)
    for number, generation in enumerate(dump.generations):
        builder = _GenerationBuilder(number, generation, vocabulary)
        writer.begin_generation(builder.start())
        for step in builder.steps():
            writer.write_step(step)
            _add_sizes(model, step)
            n_steps += 1
        writer.end_generation(builder.end())
        holds |= builder.holds
        dump.notes.extend(builder.notes)
        n_generations += 1
    if not n_steps:
        raise UsageError("The dump holds no forward pass, so there is nothing to import.")
    kinds = tuple(kind for kind in imported.RECORD_KINDS if kind in holds)
    notes = tuple(dict.fromkeys(dump.notes))
    facts = imported.ImportedFacts(dump.source, format_name, dump.versions, kinds, notes)
    writer.update_run(**{imported.IMPORTED_KEY: to_builtins(facts), "model": model})
    for note in (f"imported from {dump.source}", *notes):
        writer.write_event(EventRecord("import", note, time.time()))
    lacks = facts.lacks(imported.RECORD_KINDS)
    versions = dict(dump.versions)
    return ImportResult(target, dump.source, versions, n_generations, n_steps, kinds, lacks, notes)


def _add_sizes(model: dict[str, Any], step: StepRecord) -> None:
    """Add the numbers of heads, and of layers up to the last dumped one, where they are unknown."""
    numbers = [*(stat.layer for stat in step.layer_stats), *(call.layer for call in step.calls)]
    model["layers"] = max(int(model.get("layers") or 0), max(numbers, default=-1) + 1)
    for name, each in (("heads", "q_heads"), ("kv_heads", "kv_heads")):
        if step.calls and not model.get(name):
            model[name] = max(getattr(call, each) for call in step.calls)


class _GenerationBuilder:
    """Makes the records of one generation; `holds` are the kinds of records that it has so far."""

    def __init__(self, number: int, source: DumpedGeneration, vocabulary: DumpVocabulary) -> None:
        self.holds: set[str] = set()
        self.notes: list[str] = []
        self._number, self._source, self._vocabulary = number, source, vocabulary
        self._complete = vocabulary.make_text_stream()
        named = (*source.prompt, *source.chosen.values())
        self._texts = {token.id: token.text for token in named if token.text is not None}
        self._attention = AttentionTracker()
        self._segments = _segments(source)
        self._answer: list[TokenRecord] = []
        self._length = source.prompt_start + source.n_prompt

    def start(self) -> GenerationRecord:
        """Return the prompt. Raises `UsageError` for one that is too long."""
        source = self._source
        if source.n_prompt > MAX_TOKENS:
            what = f"The prompt has {source.n_prompt} tokens; at most {MAX_TOKENS} are imported."
            raise UsageError(what)
        numbers = source.position_ids or range(source.prompt_start, self._length)
        places = enumerate(zip(source.prompt, numbers, strict=False), source.prompt_start)
        tokens = tuple(self._token(pos, token, number) for pos, (token, number) in places)
        if tokens:
            self.holds.add(imported.TOKENS)
        if source.position_ids:
            self.holds.add(imported.POSITIONS)
        return GenerationRecord(
            *(self._number, source.sample_id, "", "", self._segments, tokens),
            started_at=math.nan,
        )

    def _token(
        self, pos: int, token: DumpedToken, position_id: int, step: int | None = None
    ) -> TokenRecord:
        known = self._complete(token)
        if self._vocabulary.has_text or token.text is not None:
            self.holds.add(imported.WORDS)
        segment = segment_index(self._segments, pos)
        name, text = known.token or "", known.text or ""
        return TokenRecord(pos, token.id, name, text, position_id, segment, known.special, step)

    def _text_of(self, token_id: int) -> str:
        """Return the text of a candidate: that of the dump, if it names it anywhere."""
        return self._texts.get(token_id) or self._vocabulary.text_of(token_id)

    def steps(self) -> Iterator[StepRecord]:
        """Yield the passes as steps."""
        for number, each in enumerate(self._source.passes):
            yield self._step(number, each)
        if self._attention.is_full:
            self.notes.append(
                "The attention of later steps by segment was not computed: the keys of all steps "
                "together are too large."
            )

    def _step(self, number: int, each: ForwardPass) -> StepRecord:
        end = each.kv_before + each.n_rows
        attention = self._attention.add(each.attention, self._segments, each.kv_before)
        arrays = (*attention.arrays, *(ArrayRecord("hidden", hidden, layer) for layer, hidden
                                       in sorted(each.hidden.items())))  # fmt: skip
        logits = None
        if each.logits is not None:
            logits = logits_record(each.logits, each.chosen_id, self._text_of)
        found: dict[str, Any] = {
            imported.LOGITS: logits,
            imported.STATISTICS: each.stats,
            imported.CALLS: attention.calls,
            imported.MASKS: attention.masks,
            imported.ATTENTION: any(one.stream == "attention.mass" for one in arrays),
        }
        self.holds |= {kind for kind, value in found.items() if value}
        return StepRecord(
            generation=self._number,
            step=number,
            phase="prefill" if number == 0 or each.n_rows > 1 else "decode",
            q_len=each.n_rows,
            kv_before=each.kv_before,
            kv_after=end,
            started_at=math.nan,
            wall_ms=math.nan,
            capture_ms=math.nan,
            logits=logits,
            tokens=self._chosen_token(number, each, end),
            calls=attention.calls,
            layer_stats=each.stats,
            masks=attention.masks,
            arrays=arrays,
        )

    def _chosen_token(self, number: int, each: ForwardPass, pos: int) -> tuple[TokenRecord, ...]:
        """Return the token that the pass chose; not the prompt's own, of a prompt in parts."""
        if each.chosen_id is None or pos < self._source.prompt_start + self._source.n_prompt:
            return ()
        self.holds.add(imported.CHOSEN)
        token = self._source.chosen.get(number, DumpedToken(each.chosen_id))
        last = each.position_ids[-1] + 1 if each.position_ids else pos
        record = self._token(pos, token, last, number)
        self._answer.append(record)
        self._length = pos + 1
        return (record,)

    def end(self) -> GenerationEnd:
        """Return the end: its text is that of the chosen tokens."""
        segments = close_generated_segment(self._segments, self._length)
        answer = "".join(token.text for token in self._answer if not token.special).strip()
        return GenerationEnd(
            self._number, "finished", answer, segments, "end of the dump", math.nan
        )


def _segments(source: DumpedGeneration) -> tuple[Segment, ...]:
    """Return the segments of the dump, or the prompt as one, with the generated one last."""
    start, stop = source.prompt_start, source.prompt_start + source.n_prompt
    segments = list(source.segments)
    if not segments and start:
        segments.append(Segment(0, start, "before the dump", SegmentKind.SHARED, 0))
    if not source.segments:
        own = len(segments)
        segments.append(Segment(start, stop, "prompt", SegmentKind.SHARED, own))
    last = Segment(stop, stop + MAX_GENERATED, "generated", SegmentKind.GENERATED, len(segments))
    return (*segments, last)

"""A trace as text for people or as JSON for programs, piece by piece, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from flexinspect.errors import TraceError, UsageError
from flexinspect.findings import Finding
from flexinspect.records import TRAIN, MaskRecord, TokenRecord
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import (
    BranchRow,
    EventRow,
    FindingRow,
    GenerationRow,
    OutputRow,
    StepRow,
)
from flexinspect.trace.values import plain_json

T = TypeVar("T")

PAGE_ROWS = 256
"""Rows asked for at a time."""

MASK_ARRAYS = ("cells", "partial", "full")


@dataclass(frozen=True, slots=True)
class DumpSelection:
    """What of a trace to print: one generation or all (None), one step of each or all."""

    reader: TraceReader
    generation: int | None = None
    step: int | None = None

    def check(self) -> None:
        """Raise `UsageError` when there is no such generation or step."""
        path = self.reader.path
        if self.generation is not None and not self.generations():
            raise UsageError(
                f"{path} has no generation {self.generation}.",
                hint=f"It has {len(self.reader.generations())}, numbered from 0.",
            )
        if self.step is not None and not any(True for b in self.branches() for _ in self.steps(b)):
            last = max((self._last(branch) for branch in self.branches()), default=-1)
            raise UsageError(
                f"{path} has no step {self.step}.",
                hint=f"Its steps go from 0 to {last}." if last >= 0 else "It has no steps yet.",
            )

    def _last(self, branch: BranchRow) -> int:
        last = self.reader.last_step(branch.generation, branch.branch)
        return -1 if last is None else last

    def generations(self) -> list[GenerationRow]:
        """Return the selected generations."""
        rows = self.reader.generations()
        return [row for row in rows if self.generation in (None, row.generation)]

    def branches(self) -> Iterator[BranchRow]:
        """Yield the branches of the selected generations."""
        for row in self.generations():
            yield from self.reader.branches(row.generation)

    def steps(self, branch: BranchRow) -> Iterator[StepRow]:
        """Yield the selected steps of a branch."""
        place = (branch.generation, branch.branch)
        if self.step is not None:
            yield from self.reader.steps(*place, self.step, self.step + 1)
            return

        def fetch(start: int) -> list[StepRow]:
            return self.reader.steps(*place, start, limit=PAGE_ROWS)

        yield from self._pages(fetch, lambda row: row.step)

    def tokens(self, branch: BranchRow) -> Iterator[TokenRecord]:
        """Yield the tokens of a branch, of the selected step only if one is selected."""
        place = (branch.generation, branch.branch)
        if self.step is not None:
            yield from self.reader.step_tokens(place[0], self.step, place[1])
            return

        def fetch(start: int) -> list[TokenRecord]:
            return self.reader.tokens(*place, start, limit=PAGE_ROWS)

        yield from self._pages(fetch, lambda row: row.pos)

    def masks(self) -> Iterator[MaskRecord]:
        """Yield the masks, with arrays, that the selected steps had first or that they used."""
        for fingerprint in self._fingerprints():
            mask = self.reader.mask(fingerprint)
            if mask is not None:
                yield mask

    def _fingerprints(self) -> Iterable[str]:
        reader = self.reader
        if self.step is None and self.generation is None:
            return reader.fingerprints()
        used: dict[str, None] = {}
        for branch in self.branches():
            place = (branch.generation, self.step, branch.branch)
            used.update(dict.fromkeys(reader.fingerprints(*place)))
            for row in self.steps(branch):
                calls = reader.calls(branch.generation, row.step, branch.branch)
                used.update(dict.fromkeys(call.mask for call in calls if call.mask))
        return used

    def findings(self) -> Iterator[Finding]:
        """Yield the findings of the selected generations and steps."""
        if self.generation is None and self.step is None:
            yield from self._findings({})
            return
        for branch in self.branches():
            place = {"generation": branch.generation, "branch": branch.branch}
            yield from self._findings({**place, "step": self.step})

    def _findings(self, place: Mapping[str, Any]) -> Iterator[Finding]:
        def fetch(start: int) -> list[FindingRow]:
            return self.reader.finding_rows(start - 1, limit=PAGE_ROWS, **place)

        for row in self._pages(fetch, lambda row: row.id):
            yield row.finding

    def events(self) -> Iterator[EventRow]:
        """Yield the events of the selected generations and steps."""

        def fetch(start: int) -> list[EventRow]:
            place = {"generation": self.generation, "step": self.step}
            return self.reader.events(start - 1, limit=PAGE_ROWS, **place)

        yield from self._pages(fetch, lambda row: row.id)

    def output(self) -> Iterator[OutputRow]:
        """Yield what the program printed: all of it, or what came with the selected steps."""

        def fetch(start: int) -> list[OutputRow]:
            return self.reader.output(start - 1, limit=PAGE_ROWS)

        for row in self._pages(fetch, lambda row: row.id):
            place = (row.output.generation, row.output.step)
            wanted = (self.generation, self.step)
            if all(want in (None, have) for want, have in zip(wanted, place, strict=True)):
                yield row

    def _pages(self, fetch: Callable[[int], list[T]], key: Callable[[T], int]) -> Iterator[T]:
        """Yield all rows, a window at a time, each from after the last key of the one before."""
        start = 0
        while page := fetch(start):
            yield from page
            last = key(page[-1])
            if last < start:  # only a damaged index does this, and would do it for ever
                raise TraceError(f"{self.reader.path} is damaged: its rows are out of order.")
            start = last + 1


def dump_json(what: DumpSelection) -> Iterator[str]:
    """Yield the pieces of one JSON object, a row per line.

    NaN and infinities are the strings "NaN", "Infinity" and "-Infinity". Raises `UsageError` for a
    step or generation that does not exist, `TraceError` for a damaged trace.
    """
    what.check()
    branches = list(what.branches())
    yield f'{{"run": {plain_json(what.reader.run())}'
    yield from _json_section("generations", (_record_fields(row) for row in what.generations()))
    yield from _json_section("branches", (_record_fields(row) for row in branches))
    yield from _json_section("segments", (row for b in branches for row in _segment_dicts(what, b)))
    yield from _json_section("tokens", (row for b in branches for row in _token_dicts(what, b)))
    steps = (_step_dict(what.reader, row) for b in branches for row in what.steps(b))
    yield from _json_section("steps", steps)
    yield from _json_section("masks", (_mask_dict(mask) for mask in what.masks()))
    yield from _json_section("findings", (_record_fields(row) for row in what.findings()))
    yield from _json_section("events", (_event_dict(row) for row in what.events()))
    yield from _json_section(
        "output", ({"id": r.id, **_record_fields(r.output)} for r in what.output())
    )
    yield "}\n"


def mask_facts(mask: MaskRecord) -> dict[str, dict[str, Any] | None]:
    """Return shape and number of true cells of each array of a mask, None where not captured."""
    arrays = {name: getattr(mask, name) for name in MASK_ARRAYS}
    return {
        name: None if array is None else {"shape": list(array.shape), "open": int(array.sum())}
        for name, array in arrays.items()
    }


def _json_section(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield f',\n"{name}": ['
    separator = "\n"
    for row in rows:
        yield separator + plain_json(row)
        separator = ",\n"
    yield "]"


def _record_fields(record: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    names = type(record).__slots__  # all records have them; `fields` is slower
    return {name: getattr(record, name) for name in names if name not in without}


def _branch_place(branch: BranchRow) -> dict[str, int]:
    return {"generation": branch.generation, "branch": branch.branch}


def _segment_dicts(what: DumpSelection, branch: BranchRow) -> Iterator[dict[str, Any]]:
    rows = what.reader.segments(branch.generation, branch.branch)
    for number, row in enumerate(rows):
        yield {**_branch_place(branch), "segment": number, **_record_fields(row)}


def _token_dicts(what: DumpSelection, branch: BranchRow) -> Iterator[dict[str, Any]]:
    for row in what.tokens(branch):
        yield {**_branch_place(branch), **_record_fields(row)}


def _step_dict(reader: TraceReader, row: StepRow) -> dict[str, Any]:
    key = (row.generation, row.step, row.branch)
    logits = reader.logits(*key)
    memory, inputs = reader.memory(*key), reader.inputs(*key)
    training = reader.training_step(*key) if row.phase == TRAIN else None
    return {
        **_record_fields(row),
        "logits": logits and _record_fields(logits, without=("candidates",)),
        "candidates": [_record_fields(each) for each in logits.candidates] if logits else [],
        "inputs": inputs and _record_fields(inputs),
        "calls": [_record_fields(each) for each in reader.calls(*key)],
        "builds": [_record_fields(each) for each in reader.builds(*key)],
        "layer_stats": [_record_fields(each) for each in reader.layer_stats(*key)],
        "memory": memory and _record_fields(memory),
        "gradients": _gradients_dict(reader, key),
        "training": training and asdict(training),
        "arrays": [_record_fields(each) for each in reader.arrays(*key)],
    }


def _gradients_dict(reader: TraceReader, key: tuple[int, int, int]) -> dict[str, Any] | None:
    found = reader.gradients(*key)
    if found is None:
        return None
    stats = [_record_fields(each) for each in found.stats]
    return {**_record_fields(found, without=("stats", "tokens", "layers")), "parameters": stats}


def _mask_dict(mask: MaskRecord) -> dict[str, Any]:
    return {**_record_fields(mask, without=MASK_ARRAYS), **mask_facts(mask)}


def _event_dict(row: EventRow) -> dict[str, Any]:
    return {"id": row.id, **_record_fields(row.event), "branch": row.branch}

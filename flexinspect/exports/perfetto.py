"""A trace as a timeline for Perfetto (https://ui.perfetto.dev)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from flexinspect.exports.exporter import ExportOptions, Progress
from flexinspect.exports.perfetto_packets import Args, TimelineWriter, nanoseconds
from flexinspect.exports.step_values import step_values
from flexinspect.records.prompt import Segment
from flexinspect.records.step import TRAIN, CallRecord, StepRecord
from flexinspect.trace.query_results import BranchRow, GenerationRow
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.replay import replay_steps

_CALL_TIME = "the step's: single calls are not timed"


class PerfettoExporter:
    """Writes tracks for generations, steps, segments, layers, findings and events, and counters.

    Times are the recorded ones. A kernel call is not timed by itself: its slice is its step.
    """

    name = "perfetto"
    description = "A timeline for ui.perfetto.dev: steps, kernel calls by layer, memory, entropy."
    suffix = ".perfetto-trace"
    is_folder = False
    unit = "events"

    def export(
        self, reader: TraceReader, target: Path, options: ExportOptions, progress: Progress
    ) -> Mapping[str, int]:
        """Write the timeline, generation by generation; see `Exporter`."""
        chosen = [reader.generation(number) for number in options.generations(reader)]
        starts = [row.started_at for row in chosen]
        starts += [row.event.at for row in reader.events(generation=options.generation)]
        with target.open("wb") as out:
            timeline = TimelineWriter(
                out,
                name=f"flexinspect {reader.path.name}",
                start_ns=min(filter(None, map(nanoseconds, starts)), default=0),
            )
            bounds = [(row, branch) for row in chosen for branch in reader.branches(row.generation)]
            total = sum(reader.n_steps(row.generation, branch.branch) for row, branch in bounds)
            done = 0
            for row, branch in bounds:
                tracks = _BranchTracks(timeline, reader, row, branch)
                for step in replay_steps(reader, row.generation, branch.branch, mask_arrays=False):
                    tracks.add_step(step)
                    done += 1
                    progress(done, total)
                tracks.finish()
            _add_events(timeline, reader, options.generation)
        return {"": timeline.n_events}


class _BranchTracks:
    """The tracks of one branch of a generation, which receives its steps in order."""

    def __init__(
        self, timeline: TimelineWriter, reader: TraceReader, row: GenerationRow, branch: BranchRow
    ) -> None:
        self._timeline, self._row, self._branch = timeline, row, branch
        title = f"generation {row.generation}" + (f", branch {branch.branch}" * bool(branch.branch))
        self._track = timeline.track(
            timeline.root,
            f"{row.generation}/{branch.branch}",
            f"{title}: {row.sample_id}" if row.sample_id else title,
        )
        self._steps = timeline.track(self._track, "steps", "steps")
        self._groups = reader.parameter_groups(row.generation)
        place = {"generation": row.generation, "branch": branch.branch}
        self._segments = reader.segments(**place)
        self._findings = reader.findings(**place)
        self._tracks: dict[str, int] = {}
        self._spans: dict[int, tuple[int, int]] = {}
        started = nanoseconds(row.started_at, timeline.start_ns)
        self._start_ns = self._now = nanoseconds(branch.started_at, started)
        self._has_steps = False
        self._finding_steps = {finding.step for finding in self._findings}
        self._ends: dict[int | None, int] = {}

    def add_step(self, step: StepRecord) -> None:
        """Add the slices and counter values of a step."""
        start, stop = self._interval(step)
        name = step.phase if step.phase != "decode" else f"decode {step.step}"
        name = f"train {step.step}" if step.phase == TRAIN else name
        self._timeline.slice(self._steps, start, stop, name, _step_args(step))
        self._add_calls(step, start, stop)
        for number, segment in enumerate(self._segments):
            if _computes(step, segment):
                self._spans[number] = (self._spans.get(number, (start, stop))[0], stop)
        for value in step_values(step, self._groups):
            if math.isfinite(value.value):
                track = self._child("counters", value.name, unit=value.unit)
                self._timeline.counter(track, start, value.value)
        if step.step in self._finding_steps:
            self._ends[step.step] = stop

    def finish(self) -> None:
        """Add what spans several steps: the generation, its segments, and its findings."""
        row, branch = self._row, self._branch
        stop = max(nanoseconds(branch.ended_at), self._now)
        args = {**asdict(branch), "sample": row.sample_id, "mask": row.mask, "model": row.model}
        self._timeline.slice(self._track, self._start_ns, stop, branch.state, args)
        for number, (start, end) in self._spans.items():
            segment = self._segments[number]
            key, label = f"segment {number}", f"{number}: {segment.label}"
            track = self._child("segments", label, key=key)
            self._timeline.slice(track, start, end, segment.label, _segment_args(segment))
        for finding in self._findings:
            at = self._ends.get(finding.step, stop)
            track = self._child("", "findings")
            args = {**asdict(finding), "severity": str(finding.severity)}
            self._timeline.instant(track, at, finding.id, args)

    def _interval(self, step: StepRecord) -> tuple[int, int]:
        """Return start and end of a step, not before the end of the step before it.

        The clock of the start and that of the duration differ by microseconds, and the first may be
        set back.
        """
        own = nanoseconds(step.started_at, self._now)
        if not self._has_steps:  # a branch begins with a step that may be older than its row
            self._start_ns = self._now = min(self._now, own)
            self._has_steps = True
        start = max(own, self._now)
        duration = nanoseconds(step.wall_ms / 1e3)
        self._now = max(own + duration, start)
        return start, self._now

    def _add_calls(self, step: StepRecord, start: int, stop: int) -> None:
        """Add a slice for each kernel call to the track of its layer; several in one are nested."""
        tracks = []
        for call in step.calls:
            track = self._child("layers", f"layer {call.layer}")
            self._timeline.begin(track, start, call.path, _call_args(step, call))
            tracks.append(track)
        for track in reversed(tracks):
            self._timeline.end(track, stop)

    def _child(self, group: str, name: str, *, key: str = "", unit: str | None = None) -> int:
        """Return a track within a group of tracks, which are made when they are first needed."""
        full = f"{group}/{key or name}"
        if full not in self._tracks:
            parent = self._track
            if group:
                if group not in self._tracks:
                    self._tracks[group] = self._timeline.track(parent, group, group)
                parent = self._tracks[group]
            self._tracks[full] = self._timeline.track(parent, full, name, unit=unit)
        return self._tracks[full]


def _computes(step: StepRecord, segment: Segment) -> bool:
    """Whether the rows of a step are positions of a segment."""
    return step.kv_before < segment.stop and segment.start < step.kv_after


def _step_args(step: StepRecord) -> Args:
    names = ("step", "phase", "q_len", "kv_before", "kv_after", "wall_ms", "capture_ms")
    args: dict[str, Any] = {name: getattr(step, name) for name in names}
    if step.tokens:
        args["tokens"] = [token.text for token in step.tokens]
    if step.logits is not None:
        logits = asdict(step.logits)
        args |= {name: logits[name] for name in ("entropy", "margin", "chosen_logprob")}
        args["candidates"] = [candidate.text for candidate in step.logits.candidates]
    if step.training is not None:
        args["loss"] = step.training.loss
    return args


def _call_args(step: StepRecord, call: CallRecord) -> Args:
    return {"step": step.step, **asdict(call), "interval": _CALL_TIME}


def _segment_args(segment: Segment) -> Args:
    return {**asdict(segment), "kind": str(segment.kind)}


def _add_events(timeline: TimelineWriter, reader: TraceReader, generation: int | None) -> None:
    """Add the events of the run, or those of a generation, as instants."""
    rows: Sequence[Any] = reader.events(generation=generation)
    track = timeline.track(timeline.root, "events", "events") if rows else 0
    for row in rows:
        event = row.event
        args = {"text": event.text, "step": event.step, "data": event.data}
        timeline.instant(track, nanoseconds(event.at, timeline.start_ns), event.kind, args)

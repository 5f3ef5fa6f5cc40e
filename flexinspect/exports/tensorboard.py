"""A trace as a log folder for TensorBoard: scalars, histograms and pictures of masks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flexinspect.core.environment import require_library
from flexinspect.exports.exporter import ExportOptions, Progress, clean_text
from flexinspect.exports.step_values import step_values
from flexinspect.exports.trace_mask_images import MaskImages
from flexinspect.records.prompt import Segment
from flexinspect.records.step import ArrayRecord, LogitsRecord, StepRecord
from flexinspect.trace.query_results import GenerationRow
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.replay import replay_steps

if TYPE_CHECKING:
    import numpy.typing as npt

_STREAMS = ("attention.mass", "attention.entropy")
_BINS = 30


class TensorBoardExporter:
    """Writes a run for each generation (and branch), in the form that `SummaryWriter` writes too.

    The steps are those of the trace, the wall times the recorded ones.
    """

    name = "tensorboard"
    description = "A log folder for TensorBoard: scalars and histograms by step, mask pictures."
    suffix = "-tensorboard"
    is_folder = True
    unit = "events"

    def export(
        self, reader: TraceReader, target: Path, options: ExportOptions, progress: Progress
    ) -> Mapping[str, int]:
        """Write one event file per generation and branch; see `Exporter`."""
        require_library("tensorboard.summary.writer.record_writer", "tensorboard", "This export")
        places = [
            (reader.generation(generation), branch.branch)
            for generation in options.generations(reader)
            for branch in reader.branches(generation)
        ]
        total = sum(reader.n_steps(row.generation, branch) for row, branch in places)
        done, written = 0, {}
        for row, branch in places:
            name = f"generation-{row.generation}" + (f"-branch-{branch}" if branch else "")
            at = int(row.started_at) if 0 <= row.started_at < 1 << 62 else 0
            file = f"{name}/events.out.tfevents.{at}.flexinspect"
            (target / name).mkdir()
            with closing(_EventFile(target / file, at)) as events:
                for _ in _write_branch(events, reader, row, branch):
                    done += 1
                    progress(done, total)
            written[file] = events.n_events
        return written


def _write_branch(
    events: _EventFile, reader: TraceReader, row: GenerationRow, branch: int
) -> Iterator[int]:
    """Write the steps of a branch; yield the number of each step that is written."""
    groups = reader.parameter_groups(row.generation)
    segments = reader.segments(row.generation, branch)
    images = MaskImages(reader, row.generation, branch)
    for step in replay_steps(reader, row.generation, branch, _STREAMS, mask_arrays=False):
        for value in step_values(step, groups):
            events.add(tag=value.name, simple_value=value.value)
        if step.logits is not None and (histogram := _logits_histogram(step.logits)):
            events.add(tag="logits/all", histo=histogram)
        for array in step.arrays:
            for tag, values in _attention_values(array, segments):
                events.add(tag=tag, histo=_histogram(values))
        for tag, png, height, width in images.of_step(step):
            image = {"height": height, "width": width, "colorspace": 3}
            events.add(tag=tag, image={**image, "encoded_image_string": png})
        events.write(step)
        yield step.step


class _EventFile:
    """An event file: values are added, then written as one event of their step."""

    def __init__(self, file: Path, at: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._at, self.n_events = Event, float(at), 0
        self._values: list[dict[str, Any]] = []
        self._records = RecordWriter(file.open("wb"))
        version = Event(wall_time=self._at, file_version="brain.Event:2")
        self._records.write(version.SerializeToString())

    def add(self, *, tag: str, **value: Any) -> None:
        """Add a value of the next event."""
        self._values.append({"tag": clean_text(tag), **value})

    def write(self, step: StepRecord) -> None:
        """Write the added values as the event of a step, at the time of its end."""
        end = step.started_at + step.wall_ms / 1e3
        self._at = end if math.isfinite(end) else self._at
        summary = {"value": self._values}
        event = self._event(wall_time=self._at, step=step.step, summary=summary)
        self._records.write(event.SerializeToString())
        self._values, self.n_events = [], self.n_events + 1

    def close(self) -> None:
        """Complete the file."""
        self._records.close()


def _attention_values(
    array: ArrayRecord, segments: Sequence[Segment]
) -> Iterator[tuple[str, npt.NDArray[np.float64]]]:
    """Yield what a step's attention tells, over all layers and heads, for a histogram each."""
    values = np.asarray(array.array, np.float64)
    if array.stream == "attention.entropy":
        yield "attention/entropy", values
    elif array.stream == "attention.mass" and values.ndim == 3:
        for number in range(values.shape[2]):
            label = segments[number].label if number < len(segments) else ""
            yield f"attention_to/{number}_{label or 'segment'}", values[:, :, number]


def _histogram(values: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return the fields of a `HistogramProto`, of the finite values."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return {"bucket_limit": [0.0], "bucket": [0.0]}
    counts, edges = np.histogram(finite, _BINS)
    return {
        "min": finite.min(),
        "max": finite.max(),
        "num": finite.size,
        "sum": finite.sum(),
        "sum_squares": np.square(finite).sum(),
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.tolist(),
    }


def _logits_histogram(logits: LogitsRecord) -> dict[str, Any] | None:
    """Return the recorded histogram as a `HistogramProto`; its sums are those of the bins' centres.

    None when its ends are not finite.
    """
    low, high, counts = logits.histogram_min, logits.histogram_max, np.array(logits.histogram)
    if not counts.size or not math.isfinite(high - low):
        return None
    edges = np.linspace(low, high, counts.size + 1)
    centers = (edges[:-1] + edges[1:]) / 2
    return {
        "min": low,
        "max": high,
        "num": counts.sum(),
        "sum": (counts * centers).sum(),
        "sum_squares": (counts * centers**2).sum(),
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.tolist(),
    }

"""Exports in tests: one call, and reading back the values of a Perfetto trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from flexinspect.exports.exporter import ExportOptions, load_exporter, write_export
from flexinspect.trace.reader import open_trace


def export(trace: Path, name: str, generation: int | None = None) -> Path:
    """Export a trace beside itself and return where."""
    exporter = load_exporter(name)
    target = trace.with_name(trace.stem + exporter.suffix)
    with open_trace(trace) as reader, reader.snapshot():
        write_export(exporter, reader, ExportOptions(target, generation), lambda done, total: None)
    return target


class Slice(Struct):
    """A slice of a track as a viewer understands it; `depth` counts the slices around it."""

    track: str
    name: str
    start: int
    stop: int
    depth: int
    args: dict[str, Any]

    @property
    def duration(self) -> int:
        """Nanoseconds."""
        return self.stop - self.start


class Timeline:
    """A decoded Perfetto trace. Reading it checks what the format asks for.

    Every track is described before its events, once; names of tracks are joined by "/".
    """

    def __init__(self, file: Path) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2

        trace = perfetto_trace_pb2.Trace()
        trace.ParseFromString(file.read_bytes())
        self.packets = trace.packet
        self.paths: dict[int, str] = {}
        self.slices: list[Slice] = []
        self.instants: list[Slice] = []
        self.counters: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._open: dict[int, list[Slice]] = defaultdict(list)
        self._last: dict[int, int] = defaultdict(int)
        for packet in trace.packet:
            assert packet.trusted_packet_sequence_id == 1
            if packet.HasField("clock_snapshot"):
                now = {one.clock_id: one.timestamp for one in packet.clock_snapshot.clocks}
                began = now[1] - now[6]  # the time of day at boot time 0
            elif packet.HasField("track_descriptor"):
                self._describe(packet.track_descriptor)
            elif packet.HasField("track_event"):
                self._add(began + packet.timestamp, packet.track_event)
        assert not any(self._open.values()), "a slice has no end"

    def _describe(self, track: Any) -> None:
        assert track.uuid not in self.paths, "a track is described twice"
        name = track.name
        parent = f"{self.paths[track.parent_uuid]}/" if track.parent_uuid else ""
        self.paths[track.uuid] = parent + name

    def _add(self, at: int, event: Any) -> None:
        track, kinds = event.track_uuid, event.Type
        path, args = self.paths[track], {a.name: value_of(a) for a in event.debug_annotations}
        if event.type == kinds.TYPE_COUNTER:
            self.counters[path].append((at, event.double_counter_value))
        elif event.type == kinds.TYPE_INSTANT:
            self.instants.append(Slice(path, event.name, at, at, 0, args))
        elif event.type == kinds.TYPE_SLICE_BEGIN:
            assert at >= self._last[track], "a slice begins before the last event of its track"
            self._open[track].append(Slice(path, event.name, at, at, len(self._open[track]), args))
            self._last[track] = at
        else:
            assert event.type == kinds.TYPE_SLICE_END
            assert at >= self._last[track], "a slice ends before the last event of its track"
            ended = self._open[track].pop()
            ended.stop = self._last[track] = at
            self.slices.append(ended)

    def on(self, end: str) -> list[Slice]:
        """Return the slices of tracks whose path ends so, in order."""
        return [one for one in self.slices if one.track.endswith(end)]

    def texts(self) -> Iterator[str]:
        """Yield all names and texts."""
        yield from self.paths.values()
        for one in [*self.slices, *self.instants]:
            yield one.name
            yield from map(str, one.args.values())


def value_of(annotation: Any) -> Any:
    """Return the value of a debug annotation."""
    if annotation.array_values:
        return [value_of(item) for item in annotation.array_values]
    if annotation.dict_entries:
        return {entry.name: value_of(entry) for entry in annotation.dict_entries}
    kind = annotation.WhichOneof("value")
    return None if kind is None else getattr(annotation, kind)

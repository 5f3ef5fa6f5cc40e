"""A timeline as a Perfetto trace: tracks with slices, instants and counters, written as a stream.

Field numbers are those of `protos/perfetto/trace/` in https://github.com/google/perfetto; a test
decodes what is written here with the messages that the `perfetto` package generates from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, BinaryIO

from flexinspect.exports.protobuf import bytes_field, double_field, int_field, text_field

Args = Mapping[str, Any]
"""Values that the viewer shows for an event: numbers, text, and lists or mappings of them."""

SLICE_BEGIN, SLICE_END, INSTANT, COUNTER = 1, 2, 3, 4  # TrackEvent.Type
_SEQUENCE = int_field(10, 1)  # TracePacket.trusted_packet_sequence_id: all packets are of one
_STATE_CLEARED = int_field(13, 1)  # TracePacket.sequence_flags
_REALTIME, _BOOTTIME = 1, 6  # BuiltinClock
_EXPLICIT_ORDER, _NO_MERGE = 3, 2  # ChildTracksOrdering, SiblingMergeBehavior
_UNITS = {"bytes": int_field(3, 3)}  # CounterDescriptor.unit: UNIT_SIZE_BYTES
_MAX_NS = 1 << 62


class TimelineWriter:
    """Writes the packets of a timeline to `out`, in any order of time.

    Times are nanoseconds since the epoch; those before `start_ns` count as `start_ns`, at which the
    axis of the viewer begins. `n_events` counts slices, instants and counter values.
    """

    def __init__(self, out: BinaryIO, name: str, start_ns: int) -> None:
        self._out, self.start_ns = out, start_ns
        self._ranks: dict[int, int] = {}
        self.n_events = 0
        self._write_clocks(start_ns)
        # The viewer sorts the tracks of a process by name; those of another track keep their order.
        self.root = self._describe(0, ("root",), text_field(2, name))

    def track(self, parent: int, key: str, name: str, *, unit: str | None = None) -> int:
        """Add a track below `parent` and return its id; `key` tells it from its siblings.

        With a `unit` ("bytes", another one, or empty) it is a counter.
        """
        body = text_field(2, name) + int_field(5, parent) + int_field(15, _NO_MERGE)
        if unit is not None:
            kind = _UNITS.get(unit) or (text_field(6, unit) if unit else b"")
            body += bytes_field(8, kind)
        rank = self._ranks[parent] = self._ranks.get(parent, -1) + 1
        return self._describe(parent, (str(parent), key), body + int_field(12, rank))

    def slice(self, track: int, start_ns: int, stop_ns: int, name: str, args: Args) -> None:
        """Add a slice. It must lie within or after the last one of the track."""
        self.begin(track, start_ns, name, args)
        self.end(track, stop_ns)

    def begin(self, track: int, at_ns: int, name: str, args: Args) -> None:
        """Begin a slice within those of the track that have not ended."""
        self._write_event(track, at_ns, SLICE_BEGIN, text_field(23, name) + _annotations(args))
        self.n_events += 1

    def end(self, track: int, at_ns: int) -> None:
        """End the last slice of the track that has not ended."""
        self._write_event(track, at_ns, SLICE_END, b"")

    def instant(self, track: int, at_ns: int, name: str, args: Args) -> None:
        """Add an event without duration."""
        self._write_event(track, at_ns, INSTANT, text_field(23, name) + _annotations(args))
        self.n_events += 1

    def counter(self, track: int, at_ns: int, value: float) -> None:
        """Add a value of a counter, which lasts until its next one."""
        self._write_event(track, at_ns, COUNTER, double_field(44, value))
        self.n_events += 1

    def _write_event(self, track: int, at_ns: int, kind: int, rest: bytes) -> None:
        event = int_field(9, kind) + int_field(11, track) + rest
        self._write(int_field(8, max(at_ns - self.start_ns, 0)) + bytes_field(11, event))

    def _describe(self, parent: int, key: tuple[str, ...], body: bytes) -> int:
        digest = blake2b(repr(key).encode("utf-8", "backslashreplace"), digest_size=8)
        uuid = int.from_bytes(digest.digest(), "big") >> 1 | 1
        order = int_field(11, _EXPLICIT_ORDER)
        self._write(bytes_field(60, int_field(1, uuid) + body + order))
        return uuid

    def _write_clocks(self, start_ns: int) -> None:
        """Tell the time of day at which the default clock (boot time) begins."""
        clocks = b"".join(
            bytes_field(1, int_field(1, clock) + int_field(2, now))
            for clock, now in ((_BOOTTIME, 0), (_REALTIME, start_ns))
        )
        snapshot = bytes_field(6, clocks + int_field(2, _BOOTTIME))
        self._write(_STATE_CLEARED + int_field(8, 0) + snapshot)

    def _write(self, packet: bytes) -> None:
        self._out.write(bytes_field(1, packet + _SEQUENCE))


def nanoseconds(seconds: float | None, default: int = 0) -> int:
    """Return a time as nanoseconds, `default` for one that no clock tells (NaN, before 1970)."""
    if seconds is None or not 0 <= seconds < _MAX_NS / 1e9:
        return default
    return round(seconds * 1e9)


def _annotations(args: Args) -> bytes:
    """Return the debug annotations of an event; values that are None are left out."""
    return b"".join(
        bytes_field(4, text_field(10, name) + _annotation_value(value))
        for name, value in args.items()
        if value is not None
    )


def _annotation_value(value: Any) -> bytes:
    if isinstance(value, bool):
        return int_field(2, value)
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return int_field(4, value)
    if isinstance(value, float):
        return double_field(5, value)
    if isinstance(value, Mapping):
        return b"".join(
            bytes_field(11, text_field(10, str(key)) + _annotation_value(item))
            for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return b"".join(bytes_field(12, _annotation_value(item)) for item in value)
    return text_field(6, str(value))

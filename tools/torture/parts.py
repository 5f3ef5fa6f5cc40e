"""The parts of torture, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from tools.torture.results import Failure

Prepare = Callable[[Path], Any]
Attempt = Callable[[Any, int, Path], list[Failure]]


class Part(Struct, frozen=True):
    """A kind of attack.

    `place` is "module:prepare:attempt" in this package. `weight` is its share of the time.
    `injects` tells that the process is started with the library of faults. `most` is the number of
    seeds that one process runs.
    """

    name: str
    what: str
    place: str
    weight: float = 1.0
    injects: bool = False
    most: int = 500

    def load(self) -> tuple[Prepare, Attempt]:
        """Import the part; return what prepares a process, and what runs a seed."""
        module, prepare, attempt = self.place.split(":")
        found = importlib.import_module(f"tools.torture.{module}")
        return getattr(found, prepare), getattr(found, attempt)


_ALL = (
    Part("mutants", "damaged traces, read", "mutants:prepare:attempt", 4.0, most=4000),
    Part("crash-points", "kills at calls", "crash_points:prepare:attempt", 2.0, True, 5000),
    Part("random-kills", "kills at moments", "crash_points:prepare_random:attempt_random", 2.0),
    Part("model-kills", "kills of a model", "model_process:prepare:attempt_kill", 2.0, True, 2000),
    Part("model-faults", "faults in it", "model_process:prepare:attempt_fault", 1.0, True, 2000),
    Part("live-faults", "events beside a writer", "live_faults:prepare:attempt", 2.0, True, 5000),
    Part("io-faults", "errors of the disk", "io_faults:prepare:attempt", 2.0, True, 5000),
    Part("decoders", "fuzzed decoders", "decoder_fuzz:prepare:attempt", 1.0),
    Part("hostile-inputs", "hostile files", "hostile_inputs:prepare:attempt", 2.0),
    Part("shutdowns", "commands that are ended", "shutdowns:prepare:attempt", 2.0),
    Part("control", "attacks on the server", "control_attacks:prepare:attempt", 1.0),
    Part("viewers", "interfaces that are killed", "viewer_kills:prepare:attempt", 1.0),
    Part("debug-adapter", "attacks on debugpy", "adapter_attacks:prepare:attempt", 1.0),
    Part("soak", "long runs", "soak:prepare:attempt", 1.0),
)
PARTS = {part.name: part for part in _ALL}

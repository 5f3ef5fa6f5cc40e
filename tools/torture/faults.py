"""Faults at the border to the kernel: the preloaded library `fault_shim.c`, and its switches.

The product has no branch for this: the library stands between Python or SQLite and the C library,
only in processes that were started with it. A *crash point* is one call that touches the files of
a trace, by its operation, the role of the file and its number, before it, after it, or torn (half
of a write).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from msgspec import Struct

OPS = (
    *("open", "read", "write", "sync", "truncate"),
    *("lock", "map", "rename", "unlink", "close"),
)
ROLES = ("trace", "wal", "shm", "journal", "part")
ACTIONS = ("none", "before", "after", "torn", "fail", "short", "slow")
KILLS = ACTIONS[1:4]
EVER = 1 << 40
"""The number of a call that is never reached."""
VARIABLE = "LD_PRELOAD"


class Fault(Struct, frozen=True):
    """What happens at the calls `first` to `last` (from 1) of `op` on files of `role`.

    None stands for any operation or role. `value` is the error number of "fail", and the
    milliseconds of "slow".
    """

    action: str
    op: str | None = None
    role: str | None = None
    first: int = 1
    last: int = EVER
    value: int = 0

    def words(self) -> str:
        """Return "torn write to the wal, number 17"."""
        detail = os.strerror(self.value) if self.action == "fail" else self.action
        which = f"number {self.first}" if self.last == self.first else f"from number {self.first}"
        return (
            f"{detail}: {self.op or 'any call'} of the {self.role or 'trace or its files'}, {which}"
        )

    def arm(self) -> None:
        """Make it happen in this process from now on."""
        op = -1 if self.op is None else OPS.index(self.op)
        role = -1 if self.role is None else ROLES.index(self.role)
        action = ACTIONS.index(self.action)
        library().torture_arm(op, role, self.first, self.last, action, self.value)


def disarm() -> None:
    """Count calls from zero, without a fault."""
    Fault("none").arm()


def counts() -> dict[tuple[str, str], int]:
    """Return how many calls there were since the last `arm` or `disarm`, by operation and role."""
    n_calls = library().torture_count
    pairs = ((op, role) for op in OPS for role in ROLES)
    return {pair: n for pair in pairs if (n := n_calls(OPS.index(pair[0]), ROLES.index(pair[1])))}


def hits() -> int:
    """Return how often the fault has happened."""
    return int(library().torture_hits())


def turn_clock_back(seconds_per_look: int) -> None:
    """Let the clock of the wall go back by some seconds each time that it is read."""
    library().torture_clock(seconds_per_look)


@cache
def library() -> ctypes.CDLL:
    """Return the switches of the library that this process was started with."""
    found = ctypes.CDLL(None)
    found.torture_arm.argtypes = [*(ctypes.c_int,) * 2, *(ctypes.c_long,) * 2, ctypes.c_int]
    found.torture_arm.argtypes += [ctypes.c_long]
    found.torture_count.restype = found.torture_hits.restype = ctypes.c_long
    found.torture_clock.argtypes = [ctypes.c_long]
    return found


def is_loaded() -> bool:
    """Tell whether this process was started with the library."""
    return hasattr(ctypes.CDLL(None), "torture_arm")


def missing() -> str | None:
    """Return why faults cannot be injected here, None if they can."""
    if sys.platform != "linux":
        return "calls are intercepted on Linux only"
    return None if _compiler() else "there is no C compiler"


def environment() -> dict[str, str]:
    """Return the environment of a process with the library, which is compiled once."""
    return {**os.environ, VARIABLE: str(_compiled())}


def _compiler() -> str | None:
    return next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


@cache
def _compiled() -> Path:
    source = Path(__file__).with_name("fault_shim.c")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"flexinspect-torture-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"fault_shim-{digest}.so"
    if not target.exists():
        part = target.with_suffix(f".{os.getpid()}")
        command = [_compiler() or "cc", "-shared", "-fPIC", "-O1", str(source), "-o", str(part)]
        subprocess.run([*command, "-ldl"], check=True)
        part.replace(target)
    return target

"""Run seeds of one part of torture in a process of their own, which may die of it.

    python -m tools.torture.worker PART FIRST_SEED N_SEEDS UNTIL

Prints a line of JSON for each seed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from tools.torture.parts import PARTS
from tools.torture.results import Result


def main() -> None:
    """Run the seeds until the time is over."""
    name, first, n_seeds, until = sys.argv[1:]
    part = PARTS[name]
    with tempfile.TemporaryDirectory(prefix="flexinspect-torture-") as scratch:
        Path(scratch).chmod(0o711)  # a child without the superuser's rights reads in it
        prepare, attempt = part.load()
        prepared = Path(scratch, "prepared")
        prepared.mkdir(mode=0o711)
        context = prepare(prepared)
        for seed in range(int(first), int(first) + int(n_seeds)):
            if time.time() > float(until):
                return
            folder = Path(scratch, f"seed-{seed}")
            folder.mkdir(mode=0o711)
            started = time.monotonic()
            failures = attempt(context, seed, folder)
            found = [msgspec.to_builtins(failure) for failure in failures]
            result = Result(name, seed, found, round(time.monotonic() - started, 4))
            print(msgspec.json.encode(result).decode(), flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            if any(failure.kind == "memory" for failure in failures):
                return  # the peak of a process never falls: go on in a new one


if __name__ == "__main__":
    main()

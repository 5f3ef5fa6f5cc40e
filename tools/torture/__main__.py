"""Run seeds until the time is over, and print a table of what failed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import zstandard

FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures" / "traces"
BATCH = 500
"""Seeds that one process runs, at most."""


def unpack(folder: Path) -> None:
    """Write the recorded traces of the test suite into a folder."""
    for packed in sorted(FIXTURES.glob("*.flextrace.zst")):
        whole = zstandard.ZstdDecompressor().decompress(packed.read_bytes())
        (folder / packed.name.removesuffix(".zst")).write_bytes(whole)


def run(first: int, n_seeds: int, until: float, out: Path | None) -> tuple[int, list[Any]]:
    """Return the number of damaged traces that were read, and the failures."""
    failures: list[Any] = []
    seed, end = first, first + n_seeds
    with tempfile.TemporaryDirectory(prefix="flexinspect-torture-") as name:
        unpack(Path(name))
        while seed < end and time.time() < until:
            count = str(min(BATCH, end - seed))
            command = [
                sys.executable,
                "-m",
                "tools.torture.mutant_commands",
                name,
                str(seed),
                count,
            ]
            worker = subprocess.Popen([*command, str(until)], stdout=subprocess.PIPE, text=True)
            assert worker.stdout is not None
            before = seed
            for line in worker.stdout:
                result = json.loads(line)
                seed = result["seed"] + 1
                failures += result["failures"]
                if out is not None:
                    with out.open("a", encoding="utf-8") as file:
                        file.write(line)
                if sys.stderr.isatty():
                    print(
                        f"\r{seed - first} traces, {len(failures)} failures",
                        end="",
                        file=sys.stderr,
                    )
            if worker.wait() or (seed == before and time.time() < until):
                detail = f"the process ended with {worker.returncode}"
                failures.append({"seed": seed, "kind": "crash", "detail": detail})
                seed += 1
    return seed - first, failures


def main() -> int:
    """Parse the flags, run, and print the summary; exit code 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="budget (default: 2)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1 << 40)
    parser.add_argument("--out", type=Path, help="append each result here, as lines of JSON")
    args = parser.parse_args()
    started = time.time()
    until = started + 60 * args.minutes
    n_done, failures = run(args.first_seed, args.seeds, until, args.out)
    print(f"\n{n_done} damaged traces in {time.time() - started:.0f} s, {len(failures)} failures")
    for (kind, detail), times in Counter((f["kind"], f["detail"]) for f in failures).most_common():
        example = next(f for f in failures if (f["kind"], f["detail"]) == (kind, detail))
        print(f"{times:6}  {kind}: {detail}")
        print(f"        python -m tools.torture --first-seed {example['seed']} --seeds 1")
        print(f"        {example.get('how', '')}: {' '.join(example.get('argv', [])[:1])}")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())

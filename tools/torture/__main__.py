"""Run the parts until the time is over, and print a table of what failed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tools.torture import faults
from tools.torture.parts import PARTS, Part
from tools.torture.results import Result


class Run:
    """Seeds of some parts in turn, each in processes of its own.

    `results` are those so far; each is also appended to the file `out`.
    """

    def __init__(self, out: Path | None = None) -> None:
        self._out = out
        self.results: list[Result] = []

    def resume(self) -> None:
        """Take the results of an earlier run from the file."""
        if self._out is not None and self._out.exists():
            lines = self._out.read_bytes().splitlines()
            self.results = [msgspec.json.decode(line, type=Result) for line in lines]

    def next_seed(self, part: Part, first: int) -> int:
        """Return the seed after the last one of a part, at least `first`."""
        done = (one.seed + 1 for one in self.results if one.part == part.name)
        return max(done, default=first)

    def run(self, part: Part, first: int, n_seeds: int, until: float) -> None:
        """Run seeds of a part until the time is over; a process that dies is a failure."""
        seed, end = first, first + n_seeds
        while seed < end and time.time() < until:
            before = seed
            count = min(part.most, end - seed)
            for result in _work(part, seed, count, until):
                seed = max(seed, result.seed + 1)
                self._add(result)
            if seed == before and time.time() < until:
                self._add(Result(part.name, seed, [{"kind": "crash", "detail": "no result"}]))
                seed += 1

    def _add(self, result: Result) -> None:
        self.results.append(result)
        if self._out is not None:
            with self._out.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
        if sys.stderr.isatty():
            n_failed = sum(bool(one.failures) for one in self.results)
            print(f"\r{len(self.results)} attempts, {n_failed} failures", end="", file=sys.stderr)


def _work(part: Part, first: int, count: int, until: float) -> Iterator[Result]:
    """Yield the results of one process, and a failure if it dies."""
    environ = faults.environment() if part.injects else dict(os.environ)
    environ["OMP_NUM_THREADS"] = "1"
    words = ["-m", "tools.torture.worker", part.name, str(first), str(count), str(until)]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, env=environ) as worker:
        assert worker.stdout is not None
        last = first - 1
        for line in worker.stdout:
            result = msgspec.json.decode(line, type=Result)
            last = result.seed
            yield result
    if worker.returncode:
        detail = f"the process ended with {worker.returncode}"
        yield Result(part.name, last + 1, [{"kind": "crash", "detail": detail}])


def summary(results: Sequence[Result]) -> str:
    """Return a table: attempts and failures of each part, then each kind with its command."""
    lines = [f"{'part':<16}{'attempts':>9}{'failures':>9}{'seconds':>9}"]
    for name, part in PARTS.items():
        own = [one for one in results if one.part == name]
        if own:
            n_failed, seconds = sum(bool(one.failures) for one in own), sum(o.seconds for o in own)
            lines.append(f"{name:<16}{len(own):>9}{n_failed:>9}{seconds:>9.0f}  {part.what}")
    found = [(one, failure) for one in results for failure in one.failures]
    kinds = Counter((one.part, each["kind"], each["detail"]) for one, each in found)
    for (name, kind, detail), times in kinds.most_common():
        one, failure = next(
            (one, each)
            for one, each in found
            if (one.part, each["kind"], each["detail"]) == (name, kind, detail)
        )
        lines.append(f"\n{times:6}  {name}: {kind}: {detail}")
        lines.append(
            f"        {failure.get('how', '')} {' '.join(failure.get('argv', ()))}".rstrip()
        )
        lines.append(f"        python -m tools.torture {name} --first-seed {one.seed} --seeds 1")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.torture", description=__doc__)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    add("--minutes", type=float, default=2.0, help="budget (default: 2)")
    add("--first-seed", type=int, default=0)
    add("--seeds", type=int, default=1 << 40, help="of each part")
    add("--out", type=Path, help="append each result here, as lines of JSON")
    add("--resume", action="store_true", help="go on after the results in --out")
    add("--json", action="store_true", help="print the failures as JSON")
    return parser


def main() -> int:
    """Parse the flags, run, and print the summary; exit code 1 if anything failed."""
    parser = _parser()
    args = parser.parse_args()
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; parts: {', '.join(PARTS)}")
    chosen = [PARTS[name] for name in args.parts or PARTS]
    if reason := faults.missing():
        left_out = [part.name for part in chosen if part.injects]
        chosen = [part for part in chosen if not part.injects]
        if left_out:
            print(f"left out, because {reason}: {', '.join(left_out)}", file=sys.stderr)
    run = Run(args.out)
    if args.resume:
        run.resume()
    end, weights = time.time() + 60 * args.minutes, sum(part.weight for part in chosen)
    for part in chosen:  # what a part leaves of its time goes to those after it
        until = time.time() + (end - time.time()) * part.weight / weights
        weights -= part.weight
        first = run.next_seed(part, args.first_seed)
        run.run(part, first, args.first_seed + args.seeds - first, until)
    failed = [one for one in run.results if one.failures]
    if args.json:
        print(json.dumps([msgspec.to_builtins(one) for one in failed]))
    else:
        print(f"\n{summary(run.results)}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())

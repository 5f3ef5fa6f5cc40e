"""`python -m benchmarks.clean_runs`: record correct generations and list every false alarm."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.clean_runs.runner import run_case, run_seeds, summary, table, warm_up
from benchmarks.common import RESULTS, machine, save

LOG = RESULTS / "clean-runs.log"


def main() -> int:
    """Run the seeds; return 1 if something fired."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clean_runs", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="how many seeds (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first one (%(default)s)")
    parser.add_argument("--seed", type=int, help="run only this seed, and print what fired")
    parser.add_argument("--attempt", type=int, default=0, help="of --seed (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (%(default)s)")
    parser.add_argument("--log", type=Path, default=LOG, help="where a run goes on (%(default)s)")
    parser.add_argument("--again", action="store_true", help="do not go on, begin again")
    args = parser.parse_args()
    warm_up()
    if args.seed is not None:
        outcome = run_case(args.seed, args.attempt)
        print("refused by transformers" if outcome is None else outcome)
        return int(outcome is not None and not outcome.is_clean)
    if args.again:
        args.log.unlink(missing_ok=True)
    args.log.parent.mkdir(parents=True, exist_ok=True)
    seeds = range(args.first_seed, args.first_seed + args.runs)
    facts = summary(run_seeds(seeds, args.log, jobs=args.jobs))
    if facts["runs"] == args.runs and not args.first_seed:
        save("clean-runs", {"case": "clean-runs", "machine": machine("cpu"), **facts})
    print(table(facts))
    for one in facts["alarms"]:
        print(one["command"], *one["alarms"], one["failed"], sep="\n    ", file=sys.stderr)
    return int(bool(facts["alarms"]))


if __name__ == "__main__":
    sys.exit(main())

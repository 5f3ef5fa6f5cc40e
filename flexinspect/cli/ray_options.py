"""What `run` and `lab` share for Ray: the flags, their meaning, and the progress on stderr."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from flexinspect.cli.flags import positive_int
from flexinspect.cli.progress import ProgressLine
from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable, plural
from flexinspect.lab.ray_cluster import RayOptions
from flexinspect.lab.ray_executor import PoolStatus

_LINE_EVERY_S = 10.0


def add_ray_flags(parser: argparse.ArgumentParser) -> None:
    """Add --ray and --ray-workers."""
    title = "needs the extra flexinspect[ray]; docs/cluster.md describes it"
    add = parser.add_argument_group("many samples on a Ray cluster", title).add_argument
    where = "local (this machine), auto, or the HOST:PORT of a cluster"
    add("--ray", metavar="local|ADDRESS", help=where)
    workers = "processes with a model each (default: one per GPU, or per --threads cores)"
    add("--ray-workers", type=positive_int, metavar="N", help=workers)


def ray_options(args: argparse.Namespace, device: str) -> RayOptions | None:
    """Return where to run, None without --ray. Raises `UsageError` for flags that need it."""
    if args.ray is None:
        if args.ray_workers is not None:
            raise UsageError("--ray-workers needs --ray.", hint="Add --ray local.")
        return None
    if not args.ray.strip():
        raise UsageError("--ray is empty.", hint="Write --ray local, or the address of a cluster.")
    threads = args.threads or 1
    return RayOptions(
        address=args.ray.strip(), workers=args.ray_workers, threads=threads, device=device
    )


class RayProgress:
    """Shows samples, workers and speed on stderr: a line that changes, or one now and then.

    Notes, such as a lost worker, are lines of their own.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._line = ProgressLine(is_shown=not quiet)
        self._shown_at = time.monotonic()

    def on_status(self, status: PoolStatus) -> None:
        """Show the state of the run."""
        if status.note:
            self._print(status.note)
        if self._line.is_shown:
            self._line.show(status_text(status))
        elif time.monotonic() - self._shown_at >= _LINE_EVERY_S:
            self._shown_at = time.monotonic()
            self._print(status_text(status))

    def close(self) -> None:
        """Wipe the line."""
        self._line.clear()

    def _print(self, text: str) -> None:
        if not self._quiet:
            self._line.clear()
            print(escape_unprintable(text), file=sys.stderr, flush=True)


def status_text(status: PoolStatus) -> str:
    """Return a line about a run: what is done, by how many workers, how fast, and how long yet."""
    parts = [f"{status.n_done} of {plural(status.n_jobs, 'sample')}"]
    if status.n_working:
        parts.append(plural(status.n_working, "worker"))
    if status.n_starting:
        parts.append(f"{plural(status.n_starting, 'worker')} starting")
    if status.n_lost:
        parts.append(f"{status.n_lost} lost")
    if rate := status.samples_per_s:
        left = (status.n_jobs - status.n_done) / rate
        parts.append(f"{rate:.1f} samples/s, {_duration(left)} left")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes = round(seconds) // 60
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {round(seconds) % 60:02d} s" if minutes else f"{seconds:.0f} s"


def refuse_beside_ray(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Raise `UsageError` for a flag that needs a single process beside the terminal."""
    given: dict[str, Any] = vars(args)
    for name in names:
        if given.get(name) not in (None, False, []):
            flag = "--break" if name == "breakpoints" else f"--{name.replace('_', '-')}"
            what = f"{flag} and --ray exclude each other: many processes run the samples."
            raise UsageError(what, hint="Leave one of them out.")

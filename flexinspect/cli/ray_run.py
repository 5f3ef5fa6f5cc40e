"""`flexinspect run --dataset … --ray …`: the samples of a dataset on a Ray cluster."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from flexinspect.cli.output import print_json
from flexinspect.cli.ray_options import RayProgress, refuse_beside_ray
from flexinspect.cli.run_summary import print_summary, summarize_run
from flexinspect.core.environment import command_path
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.core.signals import exit_code_of
from flexinspect.core.text import print_message
from flexinspect.inputs.job_samples import load_samples
from flexinspect.lab import dataset_run
from flexinspect.lab.dataset_run import DatasetRun, RecordedSample
from flexinspect.lab.ray_cluster import RayOptions
from flexinspect.lab.result_store import read_results
from flexinspect.lab.sample_jobs import jobs_of
from flexinspect.records.finding import Finding, sort_by_severity
from flexinspect.records.job import Job

ONE_PROCESS = (
    *("hold", "interactive", "breakpoints", "wait", "serve", "insecure_bind", "debugpy", "pdb"),
    *("wait_for_client", "debugpy_expose", "verbose", "log_file", "invariants"),
)
"""Flags of `run` for a single capture process, which a person watches."""

_MAX_FINDINGS = 200


def check_ray_flags(args: argparse.Namespace) -> None:
    """Raise `UsageError` for flags of `run` that --ray excludes."""
    refuse_beside_ray(args, ONE_PROCESS)
    if hasattr(args, "program") or hasattr(args, "module"):
        raise UsageError("--ray runs the samples of a dataset, not a program of your own.")
    if "prompt" in vars(args):
        what = "--prompt is a single sample, and --ray runs the samples of a dataset."
        raise UsageError(what, hint="Use --dataset.")


def run_on_ray(job: Job, options: RayOptions, *, out: str | None, as_json: bool) -> int:
    """Run the samples of a job, print the result, and return the exit code.

    `out` is the folder, None for a new one in the current folder.
    """
    folder = Path(job.out).with_suffix("") if out is None else Path(out)
    dataset_run.check_folder(folder)
    jobs = jobs_of(load_samples(job))
    if job.overwrite:
        dataset_run.remove_results(folder)
    job = replace(job, out=str(folder), threads=options.threads, control=False)
    progress = RayProgress(quiet=as_json)
    error: FlexInspectError | None = None
    code = 0
    try:
        DatasetRun(job, folder, options, progress.on_status).run(jobs)
    except KeyboardInterrupt as interrupt:
        code = exit_code_of(interrupt)
    except UsageError:
        raise
    except FlexInspectError as raised:
        error, code = raised, raised.exit_code
    finally:
        progress.close()
    results = _results(folder, len(jobs))
    summary = summarize_runs(folder, results) if results else None
    if as_json:
        facts = summary or {"trace": None, "generations": []}
        facts.pop("is_own", None)
        message = (error.message, error.hint) if error else (None, None)
        print_json({**facts, "exit_code": code, "error": message[0], "hint": message[1]})
    elif summary is not None:
        print_summary(summary)
    if error is not None:
        print_message(error.sentence())
    if code and len(results) < len(jobs):
        print_message(_how_to_continue(folder, len(results), len(jobs), has_out=out is not None))
    return code


def _results(folder: Path, n_jobs: int) -> list[RecordedSample]:
    """Return the results whose traces are in the folder."""
    file = folder / dataset_run.RESULTS
    if not file.exists():
        return []
    names = {file.name for file in dataset_run.trace_files(folder)}
    results = read_results(file, RecordedSample)[1]
    return [one for one in results if one.trace in names and one.index < n_jobs]


def _how_to_continue(folder: Path, n_done: int, n_jobs: int, *, has_out: bool) -> str:
    text = f"{n_done} of {n_jobs} samples are stored; "
    same = "the same command continues" if has_out else "the same command continues with --out "
    return text + same + ("" if has_out else command_path(folder)) + "."


def summarize_runs(folder: Path, results: Sequence[RecordedSample]) -> dict[str, Any]:
    """Return the result of a run by several workers, with the keys of `run --json`.

    `trace` is the folder, `traces` are its files. Each generation names its `trace`; generations
    that a lost worker did not finish are left out. Raises `TraceError`.
    """
    files = dataset_run.trace_files(folder)
    summaries = {file.name: summarize_run(file) for file in files}
    generations = [
        {**summaries[one.trace]["generations"][one.generation], "trace": one.trace}
        for one in results
    ]
    runs = list(summaries.values())
    states = {run["state"] for run in runs}
    wanted = {(one.trace, one.generation) for one in results}
    return {
        "trace": str(folder),
        "traces": [str(file) for file in files],
        "state": "finished" if states == {"finished"} else "with lost or interrupted workers",
        "bytes": sum(run["bytes"] for run in runs),
        **{name: runs[-1][name] for name in ("model", "level", "is_own")},
        "cost": total_cost([run["cost"] for run in runs if run["cost"]]),
        "generations": generations,
        "notes": list(dict.fromkeys(note for run in runs for note in run["notes"])),
        "findings": _findings(summaries, wanted),
    }


def _findings(
    summaries: Mapping[str, Mapping[str, Any]], wanted: Iterable[tuple[str, int]]
) -> tuple[Finding, ...]:
    """Return the findings of the wanted generations; the same sentence once."""
    by_sentence: dict[tuple[str, str], Finding] = {}
    for trace, generation in sorted(wanted):
        for finding in summaries[trace]["findings"]:
            if finding.generation == generation:
                by_sentence.setdefault((finding.id, finding.sentence), finding)
    return sort_by_severity(by_sentence.values())[:_MAX_FINDINGS]


def total_cost(costs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of what capture took in several traces; `ratio` is the mean by their time."""
    names = dict.fromkeys(name for cost in costs for name in cost)
    total = {name: sum(cost.get(name, 0) for cost in costs) for name in names}
    if total.get("total_s"):
        weighted = sum(cost["ratio"] * cost["total_s"] for cost in costs)
        total["ratio"] = round(weighted / total["total_s"], 6)
    return total

"""`flexinspect lab`: ways to use paraphrases, compared on a dataset."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flexinspect.cli import run as run_command
from flexinspect.cli import run_flags
from flexinspect.cli.flags import add_switches, n_threads, non_negative_int, positive_int
from flexinspect.cli.output import errors_as_json, print_json
from flexinspect.cli.ray_options import add_ray_flags, ray_options
from flexinspect.core.errors import UsageError
from flexinspect.core.text import format_ranges, plural, print_message

if TYPE_CHECKING:
    from flexinspect.lab.lab_result import LabResult
    from flexinspect.lab.ray_cluster import RayOptions
    from flexinspect.lab.result_store import ResultStore
    from flexinspect.lab.sample_jobs import SampleJob
    from flexinspect.lab.settings import LabSettings

DESCRIPTION = (
    "Answer the questions of a dataset by several ways to use paraphrases, and compare them.\n"
    "flex: all paraphrases in one prompt under a mask. per-prompt: each paraphrase alone.\n"
    "avg, max, weighted_avg, weighted_max: fuse the next-token distributions of the prompts.\n"
    "majority: the most frequent answer of per-prompt. Results are stored sample by sample:\n"
    "the same command continues a run that was killed. With a folder of results it prints them."
)
EXAMPLES = """\
examples:
  flexinspect lab --out lab-demo                         # all methods on the demo's 600 questions
  flexinspect lab --max-samples 100 --num-paraphrases 1-5 --out lab-1-5
  flexinspect lab --methods flex,majority --mask causal --positions reset --out lab-causal
  flexinspect lab --dataset webqa --paraphrases templates --model llama3.2_3b_it --out lab-webqa
  flexinspect lab --dataset my_data:Capitals --traces wrong --out lab-mine
  flexinspect lab --ray local --ray-workers 2 --out lab-ray     # docs/cluster.md: many processes
  flexinspect lab lab-demo                               # print what is there
  flexinspect lab lab-1-5 --num-paraphrases 3            # the tables for three paraphrases
  flexinspect lab lab-demo --sample 7                    # one sample: whose token won
  flexinspect lab lab-demo --figure accuracy.pdf --json

exit codes: 0 success, 1 a sample could not be answered, 2 invalid request, 130 interrupted
docs/lab.md describes the methods, the scores and the files.
"""

RESULTS = "results.jsonl"
REPORT_EVERY_S = 30.0


def configure(parser: argparse.ArgumentParser) -> None:
    from flexinspect.lab.scoring import LEMMATIZERS
    from flexinspect.lab.settings import METHODS, TRACE_CHOICES

    stored = "print the results in this folder instead of running"
    parser.add_argument("results", nargs="?", metavar="FOLDER", help=stored)
    group = parser.add_argument_group("what is compared", argument_default=argparse.SUPPRESS)
    add = group.add_argument
    add("--methods", metavar="M,M", help=f"{', '.join(METHODS)}, or all (default)")
    counts = "how many of each sample: 5, 1-5 or 1,3,5 (default: 5, or what every sample has)"
    add("--num-paraphrases", "--num_paraphrases", dest="counts", metavar="N", help=counts)
    orders = "other orders of the paraphrases to try with flex (default: 2; 0: none)"
    add("--orders", type=non_negative_int, metavar="N", help=orders)
    traces = f"samples whose flex answer is recorded: {', '.join(TRACE_CHOICES)}, or 0,3-5"
    add("--traces", metavar="WHICH", help=f"{traces} (default: none)")
    run_flags.add_model_flags(parser)
    group = parser.add_argument_group("data", argument_default=argparse.SUPPRESS)
    run_flags.add_dataset_flags(group, "demo")
    group.add_argument("--max-samples", type=positive_int, help="default: all")
    run_flags.add_text_flags(group)
    run_flags.add_attention_flags(parser)
    add = parser.add_argument_group("decoding (greedy)", None).add_argument
    add("--max-new-tokens", default=argparse.SUPPRESS, type=positive_int, help="default: 32")
    stop: dict[str, Any] = {"default": argparse.SUPPRESS, "choices": ("newline", "eos")}
    add("--stop", **stop, help="where an answer ends (default: newline)")
    add = (group := parser.add_argument_group("output")).add_argument
    add("--out", metavar="FOLDER", help="default: lab-MODEL-DATASET in this folder")
    figure = "draw the accuracies into this file (default: accuracy.svg in the folder)"
    add("--figure", metavar="FILE", help=figure)
    lemmas = "what makes the lemmas (default: the first of these that is installed)"
    add("--lemmatizer", default="auto", choices=LEMMATIZERS, help=lemmas)
    one = "of results: one sample, by its number from 0 or its id"
    # `run --sample` switches sampling on, and lab decodes greedily.
    add("--sample", dest="shown_sample", metavar="ID", help=one)
    add("--threads", default=None, type=n_threads, help="of the CPU (default: one less than cores)")
    add_switches(group, json="print the result as JSON")
    add_ray_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run or continue the laboratory, or print stored results; return the exit code."""
    from flexinspect.lab.lab_result import LabResult
    from flexinspect.lab.result_store import ResultStore, read_results

    with errors_as_json(args.json):
        if args.results is not None:
            _check_shown(args)
            stored, results = read_results(Path(args.results) / RESULTS, LabResult)
            return _report(args, Path(args.results), _selected(args, stored), results)
        if args.shown_sample is not None:
            raise UsageError("--sample shows stored results.", hint="Name their folder first.")
        settings, jobs, folder = prepare(args)
        options = ray_options(args, settings.job.device)
        with ResultStore(folder / RESULTS, settings.compared(), LabResult) as store:
            _run_jobs(settings, jobs, store, options, quiet=args.json)
            wanted = {job.index for job in jobs}
            results = [one for one in store.results if one.index in wanted]
        return _report(args, folder, settings.compared(), results)


_SHOW_FLAGS = (
    *("results", "figure", "lemmatizer", "shown_sample", "json", "command", "run", "parser"),
    *("counts", "methods"),
)


def _check_shown(args: argparse.Namespace) -> None:
    """Raise `UsageError` for flags of a run beside a folder of results."""
    given = [name for name, value in vars(args).items() if name not in _SHOW_FLAGS and value]
    if given:
        what = f"--{given[0].replace('_', '-')} is for a run, and {args.results} names results."
        raise UsageError(what, hint=f"To continue the run, name it by --out {args.results}.")
    if not Path(args.results).is_dir():
        what = f"There is no folder {args.results} of results."
        raise UsageError(what, hint="flexinspect lab --out FOLDER makes one.")


def _selected(args: argparse.Namespace, stored: dict[str, Any]) -> dict[str, Any]:
    """Return stored settings with the methods and numbers of paraphrases that are asked for.

    Raises `UsageError` for one that was not run.
    """
    from flexinspect.lab.settings import parse_counts, parse_methods

    if not {"methods", "counts", "job"} <= stored.keys():
        what = f"{Path(args.results) / RESULTS} has no results of flexinspect lab."
        raise UsageError(what, hint="Name a folder that it has written.")
    given = vars(args)
    wanted: dict[str, Sequence[Any]] = {}
    if "methods" in given:
        wanted["methods"] = parse_methods(given["methods"])
    if "counts" in given:
        wanted["counts"] = parse_counts(given["counts"])
    for name, values in wanted.items():
        for value in values:
            if value not in stored[name]:
                what = {"methods": "the method {}", "counts": "{} paraphrases"}[name].format(value)
                has = ", ".join(map(str, stored[name]))
                raise UsageError(f"{args.results} has no results of {what}.", hint=f"It has {has}.")
    return {**stored, **wanted}


# -- what is run -----------------------------------------------------------------------------------


def prepare(args: argparse.Namespace) -> tuple[LabSettings, list[SampleJob], Path]:
    """Return the settings, the jobs of all samples and the folder. Raises `FlexInspectError`."""
    from msgspec.structs import replace

    from flexinspect.inputs.job_samples import DEFAULT_PARAPHRASES, load_samples
    from flexinspect.lab import settings as labs
    from flexinspect.lab.sample_jobs import jobs_of
    from flexinspect.records.job import Job

    given = vars(args)
    options = run_command.generation_options(args)
    options.setdefault("max_samples", None)
    job = Job(out="", threads=args.threads, argv=tuple(sys.argv), **options)
    methods = labs.parse_methods(given.get("methods", "all"))
    traces = given.get("traces", "none")
    labs.check_traces(traces, methods)
    counts = labs.parse_counts(given["counts"]) if "counts" in given else None
    run_command.check_job(job)
    if args.figure:
        _check_figure(args.figure)
    if counts:
        job = replace(job, num_paraphrases=counts[-1])
    samples = load_samples(job)
    if counts is None:
        counts = (min(DEFAULT_PARAPHRASES, *(len(one.paraphrases) for one in samples)),)
        samples = [replace(one, paraphrases=one.paraphrases[: counts[-1]]) for one in samples]
    folder = Path(args.out or _default_folder(job))
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file.", hint="Name a folder by --out.")
    orders = given.get("orders", 2) if labs.FLEX in methods and counts[-1] > 1 else 0
    settings = labs.LabSettings(
        job=job,
        methods=methods,
        counts=counts,
        orders=orders,
        traces=traces,
        folder=str(folder.absolute()),
    )
    return settings, jobs_of(samples), folder


def _default_folder(job: Any) -> str:
    stem = f"lab-{Path(job.model).name}-{Path(job.dataset).name}"
    return re.sub(r"[^\w.-]+", "-", stem).strip("-")


def _check_figure(file: str) -> None:
    from flexinspect.figures.figure_files import check_figure_path
    from flexinspect.figures.sheet import require_matplotlib

    check_figure_path(file)
    require_matplotlib()


def _run_jobs(
    settings: LabSettings,
    jobs: list[SampleJob],
    store: ResultStore[LabResult],
    options: RayOptions | None,
    *,
    quiet: bool,
) -> None:
    """Run the samples that have no result yet, or lack a trace that is wanted now."""
    from flexinspect.lab.traced_samples import traced_samples

    is_traced = traced_samples(settings.traces)
    untraced = {one.index for one in store.results if not one.trace and is_traced(one)}
    missing = {job.index for job in store.remaining(jobs)} | untraced
    remaining = [job for job in jobs if job.index in missing]
    if not remaining:
        return
    n_known = len(jobs) - len(remaining)
    if n_known and not quiet:
        print_message(f"continuing: {n_known} of {plural(len(jobs), 'sample')} are stored")
    run = _run_here if options is None else partial(_run_on_ray, options)
    try:
        run(settings, remaining, store, len(jobs), quiet=quiet)
    except KeyboardInterrupt:
        n_stored = len(store.finished())
        text = f"{n_stored} of {plural(len(jobs), 'sample')} are stored in {store.file}; "
        print_message(f"{text}the same command continues")
        raise


def _run_here(
    settings: LabSettings,
    jobs: list[SampleJob],
    store: ResultStore[LabResult],
    total: int,
    *,
    quiet: bool,
) -> None:
    """Run samples in this process; `total` counts those of the dataset."""
    from flexinspect.cli.live_run import ExperimentProgress
    from flexinspect.core import plugins
    from flexinspect.lab.sample_jobs import SerialExecutor

    progress = ExperimentProgress(quiet=quiet)
    counter = _Counter(total - len(jobs), total, progress.report, quiet=quiet)

    def on_result(result: LabResult) -> None:
        store.append(result)
        counter.count()

    with progress.shown:
        progress.show_phase("importing torch", {})
        worker = plugins.load(plugins.CAPTURE, "lab-worker")
        make_worker = partial(worker, settings, progress.show_phase)
        SerialExecutor().run(jobs, make_worker, on_result)


def _run_on_ray(
    options: RayOptions,
    settings: LabSettings,
    jobs: list[SampleJob],
    store: ResultStore[LabResult],
    _total: int,
    *,
    quiet: bool,
) -> None:
    """Run samples by the workers of a Ray cluster, each with its share of the cores."""
    from msgspec.structs import replace

    from flexinspect.cli.ray_options import RayProgress
    from flexinspect.lab.ray_executor import PluginWorker, RayExecutor

    settings = replace(settings, job=replace(settings.job, threads=options.threads))
    progress = RayProgress(quiet=quiet)
    try:
        executor = RayExecutor(options, on_status=progress.on_status)
        executor.run(jobs, PluginWorker("lab-worker", settings), store.append)
    finally:
        progress.close()


class _Counter:
    """Shows how many samples are done: as a bar on a terminal, elsewhere a line now and then."""

    def __init__(
        self, n: int, total: int, report: Callable[[str, float | None], None], *, quiet: bool
    ) -> None:
        self._n, self._total, self._report = n, total, report
        self._prints = not (quiet or sys.stderr.isatty())
        self._last = time.monotonic()

    def count(self) -> None:
        self._n += 1
        text = f"{self._n} of {self._total} samples"
        self._report(text, self._n / self._total)
        if self._prints and time.monotonic() - self._last > REPORT_EVERY_S:
            self._last = time.monotonic()
            print_message(text)


# -- what is printed -------------------------------------------------------------------------------


def _report(
    args: argparse.Namespace, folder: Path, stored: dict[str, Any], results: Sequence[LabResult]
) -> int:
    """Print results, and write the files beside them; return the exit code."""
    from flexinspect.cli import lab_output
    from flexinspect.lab.method_comparison import compare
    from flexinspect.lab.scoring import load_lemmatizer

    stored = msgspec.to_builtins(stored)
    if not results:
        what = f"{folder} has no result yet."
        raise UsageError(what, hint="Run the command that made it again to continue.")
    if args.shown_sample is not None:
        lab_output.print_sample(find_sample(results, args.shown_sample), stored, as_json=args.json)
        return 0
    lemmatizer = load_lemmatizer(args.lemmatizer)
    comparison = compare(results, stored["methods"], stored["counts"], lemmatizer)
    files = lab_output.write_files(folder, stored, results, comparison, lemmatizer, args.figure)
    exit_code = int(comparison.n_failed > 0)
    if args.json:
        facts = lab_output.summary(stored, comparison)
        print_json({"folder": str(folder), **facts, "exit_code": exit_code})
    else:
        lab_output.print_comparison(comparison, stored)
        lab_output.print_failures(results)
        lab_output.print_files(folder, files, results)
    return exit_code


def find_sample(results: Sequence[LabResult], text: str) -> LabResult:
    """Return the result of a sample by number or id. Raises `UsageError`."""
    for one in results:
        if text == one.sample_id or (text.isdecimal() and int(text) == one.index):
            return one
    what = f"There is no result of a sample {text!r}."
    hint = f"The stored samples are {format_ranges(one.index for one in results)}; "
    raise UsageError(what, hint=f"{hint}--sample takes an id, too.")

"""`flexinspect fetch`: download models and datasets before a run, and look after the cache."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.cli.output import print_json, stdout_console
from flexinspect.cli.progress import open_bar
from flexinspect.core.errors import UsageError
from flexinspect.core.text import plural, print_message

if TYPE_CHECKING:
    from flexinspect.inputs.hub_cache import CacheContents
    from flexinspect.inputs.hub_download import OnLoadProgress, Repository

DESCRIPTION = """Download models and datasets from the Hugging Face hub into its cache, before a run
or for a machine without network. Interrupted downloads continue, checksums are compared, and the
disk is checked first. HF_ENDPOINT sets a mirror, HTTPS_PROXY a proxy, HF_HOME the cache."""

EXAMPLES = """examples:
  flexinspect fetch --model llama3.2_3b_it --dataset webqa
  flexinspect fetch --dataset-only webqa
  flexinspect fetch --list                  (what is known, its size, and what is here)
  flexinspect fetch --report                (what the cache holds)
  flexinspect fetch --clear                 (what could be freed; nothing is deleted)
  flexinspect fetch --clear meta-llama/Llama-3.2-3B-Instruct --yes
  HF_ENDPOINT=https://hf-mirror.example flexinspect fetch --model qwen3_1.7b

exit codes: 0 everything is here, 2 a download failed or the request is invalid, 130 interrupted
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="NAME", action="append", default=[], help="download this model")
    dataset = "download this dataset of the hub: webqa or myriadlama"
    add("--dataset", "--dataset-only", metavar="NAME", action="append", default=[], help=dataset)
    what = parser.add_mutually_exclusive_group()
    listing = "list the known models and datasets, their sizes, and what is here"
    what.add_argument("--list", action="store_true", help=listing)
    what.add_argument("--report", action="store_true", help="list what the cache holds")
    clear = "say what deleting these repositories frees (default: all); --yes deletes them"
    what.add_argument("--clear", metavar="ID", nargs="*", help=clear)
    add("--yes", action="store_true", help="with --clear: delete")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Download, list, report or clear. Raises `ModelError` and `UsageError`."""
    if args.yes and args.clear is None:
        raise UsageError("--yes confirms --clear, which is not given.")
    if args.list:
        return _list(args)
    if args.report:
        return _report(args)
    if args.clear is not None:
        return _clear(args)
    if not args.model and not args.dataset:
        hint = "For example: flexinspect fetch --model llama3.2_3b_it. --list shows what is known."
        raise UsageError("Nothing to fetch: name a --model or a --dataset.", hint=hint)
    return _fetch(args)


# -- downloads ------------------------------------------------------------------------------------


def _fetch(args: argparse.Namespace) -> int:
    wanted = [*map(_find_model, args.model), *map(_find_dataset, args.dataset)]
    with _progress() as report:
        found = [_fetch_one(name, repository, report) for name, repository in wanted]
    if args.json:
        print_json({"version": 1, "fetched": found})
    else:
        for one in found:
            print(_describe(one))
    return 0


def _find_model(name: str) -> tuple[str, Repository | None]:
    from flexinspect.inputs.config import load_config
    from flexinspect.inputs.hub_download import model_repository
    from flexinspect.inputs.model_names import resolve

    source = resolve(name, load_config())
    return name, None if source.where == "here" else model_repository(source)


def _find_dataset(name: str) -> tuple[str, Repository | None]:
    from flexinspect.inputs.datasets import PUBLIC_DATASETS
    from flexinspect.inputs.hub_download import dataset_repository

    if name == "demo":
        return name, None
    if name not in PUBLIC_DATASETS:
        known = ", ".join(PUBLIC_DATASETS)
        hint = f"Those of the hub are {known}. A file needs no download: --dataset FILE.jsonl."
        raise UsageError(f"There is no dataset '{name}' to fetch.", hint=hint)
    return name, dataset_repository(PUBLIC_DATASETS[name].repo_id)


def _fetch_one(name: str, repository: Repository | None, report: OnLoadProgress) -> dict[str, Any]:
    from flexinspect.inputs import hub_download

    if repository is None:
        return {"name": name, "repo_id": None, "path": None, "bytes": 0, "verified": 0}
    report("asking the hub", {"fraction": None})
    missing = hub_download.plan_download(repository)
    folder = hub_download.download(repository, report)
    n_verified = hub_download.verify(folder, report)
    size = sum(missing.values())
    facts = {"name": name, "repo_id": repository.id, "path": str(folder), "bytes": size}
    return facts | {"verified": n_verified}


def _describe(one: Mapping[str, Any]) -> str:
    from flexinspect.inputs.model_sizes import human_bytes

    if one["path"] is None:
        return f"{one['name']}: here, nothing to download"
    size = f"{human_bytes(one['bytes'])} downloaded" if one["bytes"] else "was here already"
    checked = f"{plural(one['verified'], 'checksum')} right"
    return f"{one['name']}: {size}, {checked}, in {one['path']}"


@contextmanager
def _progress() -> Iterator[OnLoadProgress]:
    """Yield a function that shows the bytes of a phase in a bar."""
    with open_bar("", unit="B", unit_scale=True) as bar:

        def report(phase: str, facts: Mapping[str, Any]) -> None:
            bar.total = facts.get("total") or None
            bar.set_description(f"{phase} {facts['file']}" if "file" in facts else phase)
            bar.update(facts.get("bytes", 0) - bar.n)

        with _interruptible(bar.close):
            yield report


@contextmanager
def _interruptible(stop_drawing: Callable[[], None]) -> Iterator[None]:
    """End the process at Ctrl-C: huggingface_hub's threads would first finish their files.

    The files that they were writing are removed; complete ones stay.
    """

    def end(_signal: int, _frame: object) -> None:
        import psutil

        stop_drawing()
        for file in psutil.Process().open_files():
            if file.path.endswith(".incomplete"):
                Path(file.path).unlink(missing_ok=True)
        print_message("interrupted; complete files are kept")
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# -- the cache ------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    from flexinspect.cli.models import model_facts, model_names
    from flexinspect.inputs.config import load_config
    from flexinspect.inputs.datasets import PUBLIC_DATASETS
    from flexinspect.inputs.hub_cache import read_cache
    from flexinspect.inputs.model_sizes import human_bytes

    config = load_config()
    models = [model_facts(name, config) for name in model_names(config)]
    cached = {one.id for one in read_cache().repositories}
    datasets = [
        {"name": name, "repo_id": one.repo_id, "state": _state(one.repo_id in cached)}
        for name, one in PUBLIC_DATASETS.items()
    ]
    if args.json:
        print_json({"version": 1, "models": models, "datasets": datasets})
        return 0
    for model in models:
        size = human_bytes(model["weight_bytes"]["bfloat16"])
        gated = ", gated" if model["gated"] and model["state"] == "download" else ""
        what = model["repo_id"] or model["kind"] or ""
        print(f"model    {model['alias']:<16} {size:>9}  {model['state'] + gated:<16} {what}")
    for dataset in datasets:
        print(
            f"dataset  {dataset['name']:<16} {'':>9}  {dataset['state']:<16} {dataset['repo_id']}"
        )
    return 0


def _state(is_cached: bool) -> str:
    return "cached" if is_cached else "download"


def _report(args: argparse.Namespace) -> int:
    from flexinspect.inputs.hub_cache import read_cache

    contents = read_cache()
    if args.json:
        print_json({"version": 1, "cache": contents})
        return 0
    _print_contents(contents)
    return 0


def _print_contents(contents: CacheContents) -> None:
    from flexinspect.inputs.model_sizes import human_bytes

    console = stdout_console()
    for one in contents.repositories:
        used = time.strftime("%Y-%m-%d", time.localtime(one.last_used))
        size, files = human_bytes(one.n_bytes), plural(one.n_files, "file")
        line = f"{size:>9}  {one.type:<8} {one.id}  ({files}, used {used})"
        console.print(line, soft_wrap=True)
    if contents.incomplete:
        size = human_bytes(contents.incomplete_bytes)
        console.print(f"{size:>9}  {plural(len(contents.incomplete), 'interrupted download')}")
    console.print(f"{human_bytes(contents.n_bytes):>9}  in {contents.folder}", soft_wrap=True)


def _clear(args: argparse.Namespace) -> int:
    from flexinspect.inputs import hub_cache
    from flexinspect.inputs.model_sizes import human_bytes

    contents = hub_cache.read_cache()
    chosen = hub_cache.choose_repositories(contents, args.clear)
    incomplete = () if args.clear else contents.incomplete
    size = sum(one.n_bytes for one in chosen) + (contents.incomplete_bytes if incomplete else 0)
    freed = hub_cache.delete(chosen, incomplete) if args.yes else 0
    if args.json:
        ids = [one.id for one in chosen]
        print_json({"version": 1, "deleted": args.yes, "repositories": ids, "bytes": freed or size})
        return 0
    for one in chosen:
        print(f"{human_bytes(one.n_bytes):>9}  {one.type} {one.id}")
    if incomplete:
        count = plural(len(incomplete), "interrupted download")
        print(f"{human_bytes(contents.incomplete_bytes):>9}  {count}")
    if args.yes:
        print(f"{human_bytes(freed)} freed in {contents.folder}.")
    else:
        print(f"{human_bytes(size)} would be freed. Nothing was deleted; add --yes to delete.")
    return 0

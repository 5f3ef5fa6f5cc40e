"""Checks of the Hugging Face hub, and of one model or dataset: here, reachable, does it fit?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from flexinspect.core.environment import existing_folder, hub_answers, hub_endpoint, hub_is_offline
from flexinspect.core.errors import FlexInspectError
from flexinspect.doctor.check import Check, error, note, ok, warning
from flexinspect.doctor.machine import hub_cache
from flexinspect.inputs import datasets
from flexinspect.inputs.config import load_config
from flexinspect.inputs.model_names import ModelSource, count_parameters, read_config, resolve
from flexinspect.inputs.model_sizes import DTYPE_BYTES, human_bytes, human_count, plan_memory

PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy", "http_proxy", "all_proxy")
NO_HUB = "Set a mirror (HF_ENDPOINT) or a proxy (HTTPS_PROXY), or place the files by hand."


def check_hub() -> Check:
    """Check that the hub answers, and name its mirror and proxy."""
    endpoint, proxy = hub_endpoint(), next(filter(os.environ.get, PROXIES), None)
    through = f" through {proxy}" if proxy else ""
    if hub_is_offline():
        return note("hub", "switched off by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE")
    if not hub_answers():
        return warning("hub", f"{endpoint} does not answer; only local models can be used", NO_HUB)
    return ok("hub", f"{endpoint} answers{through}" if not proxy else f"{endpoint}{through}")


def check_model(name: str, dtype: str, *, hub_is_up: bool) -> Iterator[Check]:
    """Check whether a model is here or can be had, and fits into the disk and the memory."""
    try:
        source = resolve(name, load_config())
        n_parameters = count_parameters(source)
        config = read_config(source) or {}
    except FlexInspectError as problem:
        yield error("model", problem.message, problem.hint or "")
        return
    yield _place_check(source, hub_is_up=hub_is_up)
    if n_parameters is None:
        yield note("model size", "unknown before it is downloaded")
        return
    weights = n_parameters * DTYPE_BYTES[dtype]
    if source.where == "download":
        yield _space_check(weights)
    plan = plan_memory(config, dtype=dtype, n_parameters=n_parameters)
    size = f"{human_count(n_parameters)} parameters, {human_bytes(plan.total)} in {dtype}"
    found = f"{size} with 2048 tokens; {human_bytes(plan.available)} free"
    if plan.fits:
        yield ok("model memory", found)
    else:
        fix = "Take a smaller model, or --dtype bfloat16; a GPU may have more memory."
        yield warning("model memory", found, fix)


def _place_check(source: ModelSource, *, hub_is_up: bool) -> Check:
    if source.where != "download":
        return ok("model", f"{source.name} is on this machine", str(source.path))
    if not hub_is_up:
        fix = "Without weights, --weights random builds the real architecture. " + NO_HUB
        return error("model", f"{source.name} is not here, and the hub does not answer", fix)
    if source.gated:
        fix = f"Accept the licence at {hub_endpoint()}/{source.repo_id}, then run `hf auth login`."
        return warning("model", f"{source.name} is gated and not here yet", fix)
    return note("model", f"{source.name} is downloaded from the hub by the first run")


def _space_check(n_bytes: int) -> Check:
    free = shutil.disk_usage(existing_folder(hub_cache())).free
    found = f"{human_bytes(n_bytes)} to download, {human_bytes(free)} free"
    if free < n_bytes:
        return error("model disk", found, "Free some space, or move the cache: export HF_HOME=….")
    return ok("model disk", found)


def check_dataset(name: str, *, hub_is_up: bool) -> Iterator[Check]:
    """Check whether a dataset can be read: a file, the demo's, or one of the hub."""
    if name in datasets.PUBLIC_DATASETS and not hub_is_up:
        repo_id = datasets.PUBLIC_DATASETS[name].repo_id
        if not (hub_cache() / f"datasets--{repo_id.replace('/', '--')}").is_dir():
            fix = f"Download it elsewhere and use --dataset {name}:FILE.jsonl. {NO_HUB}"
            yield error("dataset", f"{name} is not here, and the hub does not answer", fix)
            return
    try:
        first = next(iter(datasets.load(name, max_samples=1)), None)
    except FlexInspectError as problem:
        yield error("dataset", problem.message, problem.hint or "")
        return
    if first is None:
        yield warning("dataset", f"{name} has no sample", "Name a file with at least one question.")
    else:
        yield ok("dataset", f"{name}: {len(first.paraphrases)} paraphrases in the first sample")

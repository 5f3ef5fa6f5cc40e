"""Downloads models from the Hugging Face hub: only the files needed, never a pickle.

Every failure is a `ModelError` with one sentence and the next step.
"""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

from flexinspect.core import environment
from flexinspect.core.errors import ModelError, exception_chain
from flexinspect.inputs.model_names import ModelSource, has_all_weights
from flexinspect.inputs.model_sizes import INDEX_FILE, SINGLE_FILE
from flexinspect_hooks.loading.library_output import OnLoadProgress

# Patterns match from the root of the repository: copies in subfolders stay where they are.
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    SINGLE_FILE,
    "model-*-of-*.safetensors",
    INDEX_FILE,
)
_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
_CODE_FILES = ("*.py",)


def fetch_config(source: ModelSource) -> Path:
    """Return the folder that holds the config.json of a hub model, fetching that one file.

    Raises `ModelError` if it cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    repo_id = _reachable_repo(source)
    try:
        return Path(hf_hub_download(repo_id, "config.json")).parent
    except Exception as error:
        raise explain_hub_error(error, source) from error


def fetch_code(source: ModelSource) -> Path:
    """Return the folder with the repository's own Python files and config.json."""
    return _snapshot(source, ("config.json", *_CODE_FILES), lambda _phase, _data: None)


def fetch_tokenizer(source: ModelSource, report: OnLoadProgress) -> Path:
    """Return the folder with the tokenizer and config.json, fetching these files only."""
    return _snapshot(source, ("config.json", *_TOKENIZER_FILES), report)


def fetch_all(source: ModelSource, report: OnLoadProgress, *, code: bool = False) -> Path:
    """Download weights (safetensors only), tokenizer and configuration; return their folder.

    `report("downloading", {"bytes", "total", "fraction"})` is called from download threads. With
    `code` the repository's Python files are downloaded too. Raises `ModelError` if something is
    missing.
    """
    patterns = (*_MODEL_FILES, *_TOKENIZER_FILES, *(_CODE_FILES if code else ()))
    folder = _snapshot(source, patterns, report)
    if not has_all_weights(folder) and (folder / INDEX_FILE).is_file():
        raise ModelError(
            f"The download of {source.repo_id} is incomplete: weight files are missing in "
            f"{folder}.",
            hint="Run the same command again; it continues where it stopped.",
        )
    return folder


def _snapshot(source: ModelSource, patterns: tuple[str, ...], report: OnLoadProgress) -> Path:
    from huggingface_hub import snapshot_download

    repo_id, progress = _reachable_repo(source), _progress_class(report)
    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(patterns), tqdm_class=progress))
    except Exception as error:
        raise explain_hub_error(error, source) from error


def _reachable_repo(source: ModelSource) -> str:
    """Return the hub id of a model. Raises `ModelError` if it has none or the hub is silent."""
    if not environment.hub_is_offline() and not environment.hub_answers():
        raise _unreachable_error(source, None, offline=False)
    if source.repo_id is None:
        raise ModelError(f"The model {source.name} has no hub id to fetch it from.")
    return source.repo_id


def _progress_class(report: OnLoadProgress) -> Any:
    """Return a tqdm class that draws nothing and reports the downloaded bytes."""
    from tqdm.auto import tqdm

    class Progress(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def display(self, *_args: Any, **_kwargs: Any) -> None:
            if self.unit == "B":
                total = int(self.total or 0)
                fraction = min(1.0, self.n / total) if total else None
                report("downloading", {"bytes": int(self.n), "total": total, "fraction": fraction})

    return Progress


def explain_hub_error(error: BaseException, source: ModelSource) -> ModelError:
    """Return an exception of the hub client as a `ModelError` with the next step."""
    if isinstance(error, ModelError):
        return error
    endpoint = environment.hub_endpoint()
    chain = exception_chain(error)
    codes = (getattr(getattr(e, "response", None), "status_code", None) for e in chain)
    status = next((code for code in codes if isinstance(code, int)), None)
    names = {kind.__name__ for e in chain for kind in type(e).__mro__}
    if "GatedRepoError" in names or (status in (401, 403) and source.gated):
        return ModelError(
            f"The model {source.repo_id} is gated: its owner asks you to accept a licence first, "
            "and the hub did not recognise your access.",
            hint=f"Accept it on https://huggingface.co/{source.repo_id}, then run `hf auth login`"
            f"{_random_weights_hint(source)}.",
        )
    if "RepositoryNotFoundError" in names or status == 401:
        return ModelError(
            f"There is no model {source.repo_id} on {endpoint}, or it is private.",
            hint="Check the spelling (owner/name); for a private one run `hf auth login` first.",
        )
    if status == 404 or "RemoteEntryNotFoundError" in names:
        return ModelError(
            f"The repository {source.repo_id} has no config.json: it is not a transformers model.",
            hint="Give the id of a repository with transformers weights in safetensors.",
        )
    if any(isinstance(e, OSError) and e.errno == errno.ENOSPC for e in chain):
        return ModelError(
            f"The disk is full: {source.repo_id} does not fit into the Hugging Face cache.",
            hint="Free space, or move the cache to a larger disk with HF_HOME.",
        )
    return _unreachable_error(source, status, offline="OfflineModeIsEnabled" in names)


def _unreachable_error(source: ModelSource, status: int | None, *, offline: bool) -> ModelError:
    if offline or environment.hub_is_offline():
        return ModelError(
            f"The model {source.repo_id} is not in the Hugging Face cache, and offline mode is on "
            "(HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE).",
            hint=f"Unset it to download, or use a local folder{_random_weights_hint(source)}.",
        )
    answer = f" (it answered {status})" if status else ""
    return ModelError(
        f"The model {source.repo_id} is not on this machine, and the hub "
        f"{environment.hub_endpoint()} cannot be reached{answer}.",
        hint="Check the network, set HF_ENDPOINT to a mirror or HTTPS_PROXY to a proxy, use a "
        f"local folder, try --model demo{_random_weights_hint(source)}.",
    )


def _random_weights_hint(source: ModelSource) -> str:
    return ", or use --weights random, which needs no download" if source.config_path else ""

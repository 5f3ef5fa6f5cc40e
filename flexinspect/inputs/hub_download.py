"""Downloads models and datasets from the Hugging Face hub: only the files needed, never a pickle.

Every failure is a `ModelError` with one sentence and the next step.
"""

from __future__ import annotations

import errno
import hashlib
import io
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core import environment
from flexinspect.core.errors import ModelError, exception_chain
from flexinspect.inputs.model_names import ModelSource, has_all_weights
from flexinspect.inputs.model_sizes import INDEX_FILE, SINGLE_FILE, human_bytes

OnLoadProgress = Callable[[str, Mapping[str, Any]], None]
"""Called with a phase and its facts, such as "downloading" with `bytes`, `total`, `fraction`."""

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
_DATA_FILES = ("*.parquet", "*.json", "*.jsonl", "*.csv", "*.tsv", "*.txt", "*.md")
"""Files of a dataset: no code, no pickle."""


class Repository(Struct, frozen=True):
    """A repository of the hub, of the type "model" or "dataset".

    `patterns` are the files that are needed, `gated` whether its owner is known to require a
    licence, `without_weights` whether `--weights random` can replace it.
    """

    id: str
    type: str = "model"
    patterns: tuple[str, ...] = (*_MODEL_FILES, *_TOKENIZER_FILES)
    gated: bool = False
    without_weights: bool = False


def model_repository(source: ModelSource) -> Repository:
    """Return the repository of a model. Raises `ModelError` if it has none."""
    if source.repo_id is None:
        raise ModelError(f"The model {source.name} has no hub id to fetch it from.")
    has_shape = source.config_path is not None
    return Repository(source.repo_id, gated=source.gated, without_weights=has_shape)


def dataset_repository(repo_id: str) -> Repository:
    """Return the repository of a dataset."""
    return Repository(repo_id, "dataset", _DATA_FILES)


def fetch_config(source: ModelSource) -> Path:
    """Return the folder that holds the config.json of a hub model, fetching that one file.

    Raises `ModelError` if it cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    repository = model_repository(source)
    _check_reachable(repository)
    try:
        return Path(hf_hub_download(repository.id, "config.json")).parent
    except Exception as error:
        raise explain_hub_error(error, repository) from error


def fetch_code(source: ModelSource) -> Path:
    """Return the folder with the repository's own Python files and config.json."""
    repository = replace(model_repository(source), patterns=("config.json", *_CODE_FILES))
    return download(repository, lambda _phase, _data: None)


def fetch_tokenizer(source: ModelSource, report: OnLoadProgress) -> Path:
    """Return the folder with the tokenizer and config.json, fetching these files only."""
    patterns = ("config.json", *_TOKENIZER_FILES)
    return download(replace(model_repository(source), patterns=patterns), report)


def fetch_all(source: ModelSource, report: OnLoadProgress, *, code: bool = False) -> Path:
    """Download weights (safetensors only), tokenizer and configuration; return their folder.

    `report("downloading", {"bytes", "total", "fraction"})` is called from download threads. With
    `code` the repository's Python files are downloaded too. Raises `ModelError` if something is
    missing.
    """
    repository = model_repository(source)
    if code:
        repository = replace(repository, patterns=(*repository.patterns, *_CODE_FILES))
    folder = download(repository, report)
    if not has_all_weights(folder) and (folder / INDEX_FILE).is_file():
        raise ModelError(
            f"The download of {source.repo_id} is incomplete: weight files are missing in "
            f"{folder}.",
            hint="Run the same command again; it continues where it stopped.",
        )
    return folder


def plan_download(repository: Repository) -> dict[str, int]:
    """Return the bytes of each file that is not in the cache yet, by name.

    Raises `ModelError` if the hub does not list them, or if they do not fit on the disk.
    """
    from huggingface_hub import constants, snapshot_download

    _check_reachable(repository)
    options: Any = {"repo_type": repository.type, "allow_patterns": [*repository.patterns]}
    try:
        silent = _progress_class(lambda _phase, _data: None)
        files: Any = snapshot_download(repository.id, dry_run=True, tqdm_class=silent, **options)
    except Exception as error:
        raise explain_hub_error(error, repository) from error
    missing = {file.filename: int(file.file_size or 0) for file in files if file.will_download}
    at = environment.existing_folder(Path(constants.HF_HUB_CACHE))
    needed, free = sum(missing.values()), shutil.disk_usage(at).free
    if needed > free:
        raise ModelError(
            f"The {repository.type} {repository.id} needs {human_bytes(needed)} more, and "
            f"{human_bytes(free)} are free in {at}.",
            hint="Free space (flexinspect fetch --clear), or move the cache with HF_HOME.",
        )
    return missing


def download(repository: Repository, report: OnLoadProgress) -> Path:
    """Download what is missing, continuing interrupted files, and return the folder.

    Raises `ModelError`.
    """
    from huggingface_hub import snapshot_download

    _check_reachable(repository)
    options: Any = {"repo_type": repository.type, "allow_patterns": [*repository.patterns]}
    try:
        progress = _progress_class(report)
        return Path(snapshot_download(repository.id, tqdm_class=progress, **options))
    except Exception as error:
        raise explain_hub_error(error, repository) from error


def verify(folder: Path, report: OnLoadProgress) -> int:
    """Compare every file of a snapshot with its checksum; return how many were compared.

    The cache names a file by its SHA-256, or by its git hash if it is small. Files that were copied
    in by hand have no checksum. A file that differs is removed, so that the next download fetches
    it again. Raises `ModelError` for it.
    """
    files = [file for file in sorted(folder.rglob("*")) if _checksum_of(file) is not None]
    for number, file in enumerate(files):
        report("verifying", {"file": file.name, "fraction": number / len(files)})
        blob = file.resolve()
        if _hash(blob) != _checksum_of(file):
            file.unlink()
            blob.unlink()
            raise ModelError(
                f"The file {file.name} is damaged: its checksum differs from that of the hub. It "
                "was removed.",
                hint="Run the same command again; it downloads only this file.",
            )
    return len(files)


def _checksum_of(file: Path) -> str | None:
    name = file.resolve().name if file.is_symlink() else ""
    return name if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name) and file.is_file() else None


def _hash(blob: Path) -> str:
    """Return the SHA-256 of a file, or its git hash (SHA-1 of a header and the content)."""
    is_git = len(blob.name) == 40
    digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size) if is_git else hashlib.sha256()
    with blob.open("rb") as content:
        for chunk in iter(lambda: content.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def _check_reachable(repository: Repository) -> None:
    """Raise `ModelError` if the hub is silent: its client would retry for more than a minute."""
    if not environment.hub_is_offline() and not environment.hub_answers():
        raise _unreachable_error(repository, None, offline=False)


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


def explain_hub_error(error: BaseException, repository: Repository) -> ModelError:
    """Return an exception of the hub client as a `ModelError` with the next step."""
    if isinstance(error, ModelError):
        return error
    endpoint, what = environment.hub_endpoint(), f"{repository.type} {repository.id}"
    chain = exception_chain(error)
    codes = (getattr(getattr(e, "response", None), "status_code", None) for e in chain)
    status = next((code for code in codes if isinstance(code, int)), None)
    names = {kind.__name__ for e in chain for kind in type(e).__mro__}
    if "GatedRepoError" in names or (status in (401, 403) and repository.gated):
        return ModelError(
            f"The {what} is gated: its owner asks you to accept a licence first, "
            "and the hub did not recognise your access.",
            hint=f"Accept it on {_page(repository)}, then run `hf auth login`"
            f"{_random_weights_hint(repository)}.",
        )
    if "RepositoryNotFoundError" in names or status == 401:
        return ModelError(
            f"There is no {what} on {endpoint}, or it is private.",
            hint="Check the spelling (owner/name); for a private one run `hf auth login` first.",
        )
    if status == 404 or "RemoteEntryNotFoundError" in names:
        return _missing_entry_error(repository)
    if any(isinstance(e, OSError) and e.errno == errno.ENOSPC for e in chain):
        return ModelError(
            f"The disk is full: {repository.id} does not fit into the Hugging Face cache.",
            hint="Free space, or move the cache to a larger disk with HF_HOME.",
        )
    if status == 429:
        return ModelError(
            f"The hub {endpoint} refuses more requests for now (429), on the way to the {what}.",
            hint="Wait some minutes and run the command again; `hf auth login` raises the limit.",
        )
    if any("Consistency check failed" in str(e) for e in chain):
        return ModelError(
            f"The download of {repository.id} is damaged: a file is not as long as the hub said.",
            hint="Run the same command again; complete files are not downloaded twice.",
        )
    return _unreachable_error(repository, status, offline="OfflineModeIsEnabled" in names)


def _missing_entry_error(repository: Repository) -> ModelError:
    if repository.type == "dataset":
        what = f"The dataset {repository.id} has no data file of a known kind."
        return ModelError(what, hint="Download it by hand and name the file: --dataset FILE.jsonl.")
    return ModelError(
        f"The repository {repository.id} has no config.json: it is not a transformers model.",
        hint="Give the id of a repository with transformers weights in safetensors.",
    )


def _unreachable_error(repository: Repository, status: int | None, *, offline: bool) -> ModelError:
    what = f"The {repository.type} {repository.id}"
    if offline or environment.hub_is_offline():
        return ModelError(
            f"{what} is not in the Hugging Face cache, and offline mode is on "
            "(HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE).",
            hint=f"Unset it to download, or use a local folder{_random_weights_hint(repository)}.",
        )
    answer = f" (it answered {status})" if status else ""
    own = "use a local folder, try --model demo"
    if repository.type == "dataset":
        own = "download it elsewhere and name the file (--dataset FILE.jsonl), try --dataset demo"
    return ModelError(
        f"{what} is not on this machine, and the hub {environment.hub_endpoint()} cannot be "
        f"reached{answer}.",
        hint="Check the network, set HF_ENDPOINT to a mirror or HTTPS_PROXY to a proxy, "
        f"{own}{_random_weights_hint(repository)}.",
    )


def _page(repository: Repository) -> str:
    folder = "datasets/" if repository.type == "dataset" else ""
    return f"https://huggingface.co/{folder}{repository.id}"


def _random_weights_hint(repository: Repository) -> str:
    return (
        ", or use --weights random, which needs no download" if repository.without_weights else ""
    )

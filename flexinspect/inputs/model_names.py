"""Resolves model names to files or hub ids, without torch and without the network."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.environment import PACKAGE_DATA
from flexinspect.core.errors import ModelError
from flexinspect.core.parsing import parse_json
from flexinspect.inputs.config import Config, ModelAlias, expand_user
from flexinspect.inputs.model_sizes import parameter_count, stored_parameter_count, weight_files

ARCHITECTURES = PACKAGE_DATA / "architectures"
DEMO = PACKAGE_DATA / "demo"

ALIASES: Mapping[str, str] = {
    "llama3.2_3b_it": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.2_1b_it": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.1_8b_it": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.2_3b": "meta-llama/Llama-3.2-3B",
    "llama3.2_1b": "meta-llama/Llama-3.2-1B",
    "llama3.1_8b": "meta-llama/Llama-3.1-8B",
    "qwen2.5_3b_it": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5_7b": "Qwen/Qwen2.5-7B",
    "qwen2.5_7b_it": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5_14b_it": "Qwen/Qwen2.5-14B-Instruct",
    "qwen3_1.7b": "Qwen/Qwen3-1.7B",
    "qwen3_4b": "Qwen/Qwen3-4B",
    "qwen3_8b": "Qwen/Qwen3-8B",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelSource(Struct, frozen=True):
    """A resolved model name.

    `name`: as the user wrote it; `kind`: "demo", "alias", "folder" or "hub"; `repo_id`: its hub
    id, if it has one; `path`: its folder on this machine (for a cached model the snapshot in the
    Hugging Face cache), None if it must be downloaded; `config_path`: the configuration that ships
    with flexinspect, for building it with random weights; `where`: "here", "cached" (configuration
    and all weight files present) or "download"; `gated`: whether its owner is known to require a
    licence; `dtype`: the dtype set in the user's configuration.
    """

    name: str
    kind: str
    repo_id: str | None
    path: Path | None
    config_path: Path | None
    where: str
    gated: bool = False
    dtype: str | None = None

    @property
    def place(self) -> str:
        """The folder or hub id, for messages."""
        return str(self.path) if self.where == "here" else str(self.repo_id)


def resolve(name: str, config: Config | None = None) -> ModelSource:
    """Resolve `name`: demo, the user's alias, built-in alias, local folder or hub id.

    They are tried in this order, without the network. Raises `ModelError` for an unknown name (with
    the nearest known ones) and for a folder without a model.
    """
    config = config or Config()
    name = name.strip()
    if name == "demo":
        if not (DEMO / "config.json").is_file():
            hint = "Reinstall flexinspect, or run `make demo-model` in a clone to train it."
            raise ModelError("The demo model is missing from this installation.", hint=hint)
        return ModelSource("demo", "demo", None, DEMO, None, "here")
    if name in config.models:
        return _user_alias(config.models[name])
    if name in ALIASES:
        return replace(_hub(ALIASES[name]), name=name, kind="alias")
    if expand_user(name).is_dir():
        return _folder(name, expand_user(name))
    if _looks_like_path(name):
        hint = "Use a folder that contains config.json, or a name from `flexinspect models`."
        raise ModelError(f"There is no model folder {name}.", hint=hint)
    if _HUB_ID.fullmatch(name):
        return _hub(name)
    lower = {alias.lower(): alias for alias in ("demo", *config.models, *ALIASES)}
    near = difflib.get_close_matches(name.lower(), list(lower), n=3, cutoff=0.5)
    nearest = "The nearest names are " + ", ".join(lower[n] for n in near) + ". " if near else ""
    forms = "a hub id is written owner/name, a local folder ./name."
    hint = f"{nearest}`flexinspect models` lists all; {forms}"
    raise ModelError(f"The model {name!r} is unknown.", hint=hint)


def _user_alias(entry: ModelAlias) -> ModelSource:
    if entry.target == "demo" or entry.target in ALIASES:
        source = resolve(entry.target)
    elif entry.folder.is_dir():
        source = _folder(entry.alias, entry.folder)
    elif not _looks_like_path(entry.target) and _HUB_ID.fullmatch(entry.target):
        source = _hub(entry.target)
    else:
        raise ModelError(
            f"The model {entry.alias!r} of {entry.file} points to {entry.target}, "
            "which is neither a folder nor a hub id.",
            hint=f"Correct the path: as a folder it would be {entry.folder}.",
        )
    return replace(source, name=entry.alias, kind="alias", dtype=entry.dtype)


def _folder(name: str, folder: Path) -> ModelSource:
    if not (folder / "config.json").is_file():
        hint = "Use a folder that `save_pretrained` wrote, or one downloaded from the hub."
        raise ModelError(f"The folder {folder} is not a model: it has no config.json.", hint=hint)
    return ModelSource(name, "folder", None, folder.resolve(), None, "here")


def _hub(repo_id: str) -> ModelSource:
    snapshot = cached_snapshot(repo_id)
    complete = snapshot is not None and has_all_weights(snapshot)
    alias = next((alias for alias, target in ALIASES.items() if target == repo_id), None)
    config = None if alias is None else ARCHITECTURES / f"{alias}.json"
    path, where = (snapshot, "cached") if complete else (None, "download")
    # Their owners require users to accept a licence before the first download.
    is_gated = repo_id.startswith(("meta-llama/", "google/gemma"))
    return ModelSource(repo_id, "hub", repo_id, path, config, where, gated=is_gated)


def cached_snapshot(repo_id: str, file: str = "config.json") -> Path | None:
    """Return the snapshot folder of a hub id in the Hugging Face cache that has `file`, or None."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repo_id, file)
    return Path(path).parent if isinstance(path, str) and Path(path).exists() else None


def has_all_weights(folder: Path) -> bool:
    """Return whether every safetensors file in the folder's index exists."""
    try:
        return all(path.exists() for path in weight_files(folder))
    except (ModelError, OSError):  # the index may name what no file can be called
        return False


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1


def read_config(source: ModelSource) -> dict[str, Any] | None:
    """Return the configuration if it is available without a download, else None.

    The model's own file takes precedence over the shipped one. Raises `ModelError` if it is
    unreadable.
    """
    snapshot = source.path or (cached_snapshot(source.repo_id) if source.repo_id else None)
    file = source.config_path if snapshot is None else snapshot / "config.json"
    return None if file is None else read_config_file(file)


def read_config_file(file: Path) -> dict[str, Any]:
    """Return a model's configuration. Raises `ModelError` if it is unreadable."""
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"The model configuration {file} cannot be read."
        raise ModelError(what, hint="Fetch the file again.") from error
    if not isinstance(config, dict):
        raise ModelError(f"The model configuration {file} is not a JSON object.")
    return config


def count_parameters(source: ModelSource) -> int | None:
    """Return the number of parameters, by formula or from local weight files; None if unknown."""
    config, count = read_config(source) or {}, None
    with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
        count = parameter_count(config)
    if count is None and source.path is not None and has_all_weights(source.path):
        return stored_parameter_count(source.path)
    return count

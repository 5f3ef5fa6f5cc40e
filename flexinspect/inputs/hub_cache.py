"""What the cache of the Hugging Face hub holds, and how to free it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from flexinspect.core.errors import UsageError
from flexinspect.core.text import did_you_mean


class CachedRepository(Struct, frozen=True):
    """A repository in the cache; `last_used` is in seconds since 1970."""

    id: str
    type: str
    n_bytes: int
    n_files: int
    last_used: float
    path: Path


class CacheContents(Struct, frozen=True):
    """All repositories, the largest first, and the bytes of interrupted downloads."""

    folder: Path
    repositories: tuple[CachedRepository, ...]
    incomplete: tuple[Path, ...]
    incomplete_bytes: int
    n_bytes: int


def read_cache() -> CacheContents:
    """Return what the cache holds; an absent cache is empty."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    info = _scan()
    if info is None:
        return CacheContents(folder, (), (), 0, 0)
    found = [
        CachedRepository(
            one.repo_id,
            one.repo_type,
            one.size_on_disk,
            one.nb_files,
            one.last_accessed,
            one.repo_path,
        )
        for one in info.repos
    ]
    incomplete = tuple(file.file_path for file in info.incomplete_files)
    largest_first = sorted(found, key=lambda one: (-one.n_bytes, one.id))
    sizes = info.incomplete_size_on_disk, info.size_on_disk
    return CacheContents(folder, tuple(largest_first), incomplete, *sizes)


def _scan() -> Any:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def choose_repositories(
    contents: CacheContents, names: Sequence[str]
) -> tuple[CachedRepository, ...]:
    """Return the repositories of these ids, all without any.

    Raises `UsageError` for an id that the cache does not hold.
    """
    by_id = {one.id: one for one in contents.repositories}
    for name in names:
        if name not in by_id:
            default = "`flexinspect fetch --report` lists what it holds."
            hint = did_you_mean(name, by_id, default)
            raise UsageError(f"The cache {contents.folder} does not hold {name}.", hint=hint)
    return tuple(by_id[name] for name in names) if names else contents.repositories


def delete(repositories: Sequence[CachedRepository], incomplete: Sequence[Path]) -> int:
    """Delete repositories and interrupted downloads; return the bytes that this frees."""
    info, freed = _scan(), 0
    paths = {one.path for one in repositories}
    for one in info.repos if info is not None else ():
        if one.repo_path in paths:
            strategy = info.delete_revisions(*(each.commit_hash for each in one.revisions))
            freed += strategy.expected_freed_size
            strategy.execute()
    for file in incomplete:
        if file.exists():
            freed += file.stat().st_size
            file.unlink()
    return freed

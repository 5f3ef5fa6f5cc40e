"""Cheap names for weights: equal weights give equal fingerprints, on any machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexinspect.sizes import weight_files

# Files up to this size are read whole; of larger ones evenly spread samples are.
_MAX_WHOLE_FILE = 64 * 2**20
_SAMPLES = 256
_SAMPLE_BYTES = 16 * 1024
_IGNORED_CONFIG_KEYS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
_RANDOM_VERSION = 1  # raised whenever `random_weights` makes other values from the same seed


def fingerprint_files(folder: Path) -> str:
    """Return the fingerprint of a folder's safetensors files.

    It covers names, sizes, headers, and the content: whole up to 64 MiB per file, otherwise 256
    samples of 16 KiB, so that a change of a few values in a large file can stay unseen.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= _MAX_WHOLE_FILE:
                while chunk := file.read(2**20):
                    digest.update(chunk)
                continue
            digest.update(file.read(8 + int.from_bytes(file.read(8), "little")))
            for index in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def fingerprint_random(config: Mapping[str, Any], seed: int, dtype: str) -> str:
    """Return the fingerprint of random weights: what they are computed from."""
    shape = {key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}
    text = json.dumps([_RANDOM_VERSION, seed, dtype, shape], sort_keys=True, default=str)
    return "random-" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

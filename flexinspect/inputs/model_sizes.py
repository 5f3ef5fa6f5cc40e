"""Model sizes, computed from the configuration or the safetensors headers, without torch.

Counts are parameters, sizes are bytes. The formulas are exact for Llama, Mistral, Qwen2 and Qwen3;
for other architectures the count comes from the headers of the weight files, or is unknown (None).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from flexinspect.core.errors import ModelError, UsageError
from flexinspect.core.parsing import parse_json

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float": "float32"}
_DTYPE_NAMES |= {"half": "float16"} | {name: name for name in DTYPE_BYTES}
_MAX_HEADER = 100_000_000  # the limit of the safetensors format; a larger one means damage

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def canonical_dtype(name: str) -> str:
    """Return float32, bfloat16 or float16 for any accepted spelling; `UsageError` otherwise."""
    try:
        return _DTYPE_NAMES[name.strip().lower().removeprefix("torch.")]
    except KeyError:
        hint = "Use float32, bfloat16 or float16."
        raise UsageError(f"The dtype {name!r} is unknown.", hint=hint) from None


def check_dtype(name: str) -> None:
    """Raise `ModelError` unless `name` is a known dtype or `auto`."""
    if name.strip().lower() == "auto":
        return
    try:
        canonical_dtype(name)
    except UsageError as error:
        raise ModelError(error.message, hint=f"{error.hint} Or auto.") from None


def parameter_count(config: Mapping[str, Any]) -> int | None:
    """Return the number of parameters of a Llama, Mistral, Qwen2 or Qwen3 configuration.

    Tied embeddings count once. None for every other architecture, and for a configuration that
    lacks a size.
    """
    try:
        return _count_parameters(config)
    except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError):
        return None


def _count_parameters(config: Mapping[str, Any]) -> int | None:
    kind = config.get("model_type")
    if kind not in ("llama", "mistral", "qwen2", "qwen3"):
        return None
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    q = int(config["num_attention_heads"]) * _head_dim(config)
    kv = _kv_heads(config) * _head_dim(config)
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inner + 2 * hidden
    has_bias = bool(config.get("attention_bias", False)) and kind in ("llama", "qwen3")
    if has_bias or kind == "qwen2":
        layer += q + 2 * kv
    if has_bias:
        layer += hidden
    if kind == "qwen3":
        layer += 2 * _head_dim(config)
    if kind == "llama" and config.get("mlp_bias", False):
        layer += 2 * inner + hidden
    embedding = int(config["vocab_size"]) * hidden
    head = 0 if config.get("tie_word_embeddings", False) else embedding
    return embedding + int(config["num_hidden_layers"]) * layer + hidden + head


def _kv_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _head_dim(config: Mapping[str, Any]) -> int:
    explicit = config.get("head_dim")
    if explicit is None and config.get("model_type") == "qwen3":
        return 128
    return int(explicit or config["hidden_size"] // config["num_attention_heads"])


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str) -> int | None:
    """Return the bytes that one token adds to the KV cache of all layers, None when unknown.

    For layers with a sliding window this is the bound before the window is full.
    """
    text = config.get("text_config", config)
    try:
        values = 2 * int(text["num_hidden_layers"]) * _kv_heads(text) * _head_dim(text)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError):
        return None
    return values * DTYPE_BYTES[canonical_dtype(dtype)]


class MemoryPlan(Struct, frozen=True):
    """Memory that a run needs and memory that is available, in bytes; None means unknown.

    `weights`: the parameters in the dtype of the run; `kv`: the KV cache of `n_tokens` tokens;
    `available`: free memory of the device.
    """

    weights: int | None
    kv: int | None
    n_tokens: int
    available: int | None

    @property
    def total(self) -> int | None:
        """Weights and cache together, None if the weights are unknown."""
        return None if self.weights is None else self.weights + (self.kv or 0)

    @property
    def fits(self) -> bool:
        """False only if both are known and the total exceeds the available memory."""
        return self.total is None or self.available is None or self.total <= self.available


def plan_memory(
    config: Mapping[str, Any],
    *,
    dtype: str,
    n_tokens: int = 2048,
    n_parameters: int | None = None,
    available: int | None = None,
) -> MemoryPlan:
    """Return the memory that a model needs in `dtype` with `n_tokens` tokens in its cache.

    `n_parameters` overrides the count from the configuration; `available` (bytes) defaults to the
    free RAM of this machine.
    """
    count = parameter_count(config) if n_parameters is None else n_parameters
    weights = None if count is None else count * DTYPE_BYTES[canonical_dtype(dtype)]
    per_token = kv_bytes_per_token(config, dtype)
    kv = None if per_token is None else per_token * n_tokens
    return MemoryPlan(weights, kv, n_tokens, available_ram() if available is None else available)


def available_ram() -> int:
    """Return the bytes of RAM that this process can still allocate, including container limits."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limits = (_cgroup_free(*names) for names in _CGROUPS)
    return min([free, *(limit for limit in limits if limit is not None)])


_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Folder, limit and use of control groups, version 2 and 1."""


def _cgroup_free(root: Path, limit: str, used: str) -> int | None:
    try:
        # "max", no limit, raises ValueError
        free = int((root / limit).read_text()) - int((root / used).read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, free + int(stat.get("inactive_file", 0)))  # the kernel reclaims this on demand


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: tensor name to dtype, shape and offsets.

    Reads no tensor. Raises `ModelError` when the file is truncated or not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: Any = parse_json(file.read(length)) if length <= _MAX_HEADER else None
        # The shapes are computed so that a header without valid ones is refused here.
        ends = [(int(t["data_offsets"][1]), math.prod(t["shape"])) for t in _tensors(header)]
        if path.stat().st_size < 8 + length + max(ends, default=(0, 0))[0]:
            raise ValueError("the file is truncated")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        hint = "Fetch the file again: delete it and repeat the download or copy."
        what = f"The weight file {path} is damaged or not a safetensors file."
        raise ModelError(what, hint=hint) from error
    tensors: dict[str, Any] = header
    return tensors


def _tensors(header: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [tensor for name, tensor in header.items() if name != "__metadata__"]


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model folder, whether they exist or not.

    They come from the index if there is one; otherwise it is the single `model.safetensors`.
    Raises `ModelError` for an unreadable index.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return (folder / SINGLE_FILE,)
    try:
        names = set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values())
        return tuple(folder / Path(name).name for name in sorted(names))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"The weight index {index} cannot be read."
        raise ModelError(what, hint="Fetch the file again.") from error


def stored_parameter_count(folder: Path) -> int:
    """Return the exact number of values in the safetensors files of a folder, from their headers.

    Raises `ModelError` when a file is missing or damaged.
    """
    headers = (read_header(path) for path in weight_files(folder))
    return sum(math.prod(t["shape"]) for header in headers for t in _tensors(header))


def human_count(n: int | None) -> str:
    """Return a parameter count as "3.2 B", "2.1 M" or "640 k", "?" when unknown."""
    if n is None:
        return "?"
    if n >= 10**6:
        return f"{n / 1e9:.1f} B" if n >= 10**9 else f"{n / 1e6:.1f} M"
    return f"{n / 1000:.0f} k" if n >= 1000 else str(n)


def human_bytes(n: int | None) -> str:
    """Return a size in decimal units as "6.4 GB", "?" when unknown."""
    if n is None:
        return "?"
    value = float(n)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"

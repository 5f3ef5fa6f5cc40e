"""Chooses the device and the dtype of a model, and checks that it fits into memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flexinspect.core.errors import ModelError, UsageError
from flexinspect.core.text import plural
from flexinspect.inputs import model_sizes
from flexinspect.inputs.model_sizes import MemoryPlan, available_ram, human_bytes

DEVICES = ("auto", "cpu", "cuda", "mps")


def choose_device(name: str = "auto") -> str:
    """Return the torch device for auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps.

    Raises `ModelError` if the device is unknown or not available.
    """
    import torch

    kind, _, index = name.strip().lower().partition(":")
    if kind == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if kind not in DEVICES or (index and not (kind == "cuda" and index.isdecimal())):
        raise ModelError(
            f"The device {name!r} is unknown.", hint="Use auto, cpu, cuda, cuda:N or mps."
        )
    if kind == "cuda":
        _require_cuda(name, int(index or 0))
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ModelError(
            "The device mps is not available here: it needs macOS on Apple silicon.",
            hint="Use --device cpu.",
        )
    return f"{kind}:{index}" if index else kind


def device_report(*, opens_gpu: bool) -> str:
    """Return what there is to run on, and how much memory is free, in one line.

    Only if `opens_gpu`, the free memory of GPUs is read: that creates a CUDA context.
    """
    import psutil
    import torch

    total = human_bytes(int(psutil.virtual_memory().total))
    threads = plural(torch.get_num_threads(), "thread")
    parts = [
        f"torch {torch.__version__} on {threads} of {plural(os.cpu_count() or 1, 'core')}",
        f"memory {human_bytes(available_ram())} of {total} free",
    ]
    n_gpus = torch.cuda.device_count()
    for index in range(n_gpus) if opens_gpu else ():
        free, size = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        parts.append(f"GPU {index} {name}, {human_bytes(free)} of {human_bytes(size)} free")
    if not opens_gpu or not n_gpus:
        parts.append(plural(n_gpus, "GPU") if n_gpus else "no GPU")
    if torch.backends.mps.is_available():
        parts.append("MPS")
    return f"devices: {'; '.join(parts)}"


def _require_cuda(name: str, index: int) -> None:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        raise ModelError(
            f"The device {name} is not available: this torch {torch.__version__} is built "
            "without GPU support.",
            hint="Use --device cpu, or install a CUDA build of torch (https://pytorch.org).",
        )
    if not torch.cuda.is_available():
        raise ModelError(
            f"The device {name} is not available: torch sees no usable GPU or driver.",
            hint="Use --device cpu, or check `nvidia-smi` and CUDA_VISIBLE_DEVICES.",
        )
    if index >= torch.cuda.device_count():
        raise ModelError(
            f"The device {name} does not exist: there are {torch.cuda.device_count()} GPUs, "
            "counted from 0.",
            hint="Use cuda:0, or check CUDA_VISIBLE_DEVICES.",
        )


def choose_dtype(name: str, device: str, config: Mapping[str, Any]) -> str:
    """Return float32, bfloat16 or float16 for a device.

    `auto` is float32 on a CPU, on other devices the checkpoint's own dtype (bfloat16 if it has
    none), or float32 if the device cannot compute in that. Raises `ModelError` for an unknown name
    and for a dtype that the device does not support well.
    """
    if name.strip().lower() != "auto":
        return _explicit_dtype(name, device)
    if device == "cpu":
        return "float32"
    own = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    try:
        wanted = model_sizes.canonical_dtype(str(own))
    except UsageError:
        wanted = "bfloat16"
    return "float32" if wanted == "bfloat16" and not _has_bfloat16(device) else wanted


def _explicit_dtype(name: str, device: str) -> str:
    model_sizes.check_dtype(name)
    dtype = model_sizes.canonical_dtype(name)
    if dtype == "float16" and device == "cpu":
        raise ModelError(
            "float16 is not usable on the CPU: many operations are missing or very slow.",
            hint="Use --dtype float32, or --dtype bfloat16 for half the memory.",
        )
    if dtype == "bfloat16" and not _has_bfloat16(device):
        raise ModelError(
            f"The device {device} cannot compute in bfloat16.",
            hint="Use --dtype float32, or --dtype float16 for half the memory.",
        )
    return dtype


def _has_bfloat16(device: str) -> bool:
    import torch

    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device == "mps":
        try:
            torch.ones(1, dtype=torch.bfloat16, device="mps").sum()
        except (TypeError, RuntimeError):
            return False
    return True


def free_memory(device: str) -> int | None:
    """Return the free memory of the device in bytes, None if it cannot be read."""
    import torch

    if device == "cpu":
        return available_ram()
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    limit = getattr(torch.mps, "recommended_max_memory", None)
    return int(limit() - torch.mps.driver_allocated_memory()) if limit else None


def require_fit(name: str, plan: MemoryPlan, *, device: str, dtype: str) -> None:
    """Raise `ModelError` with the sizes if the model does not fit."""
    if plan.fits:
        return
    memory = "RAM" if device == "cpu" else f"memory of {device}"
    steps = ["choose a smaller model (`flexinspect models` shows the sizes)"]
    if dtype == "float32":
        steps.append("halve it with --dtype bfloat16")
    last = "free some memory" if device == "cpu" else "use --device cpu"
    raise ModelError(
        f"The model {name} does not fit: it needs {human_bytes(plan.total)} in {dtype} "
        f"({human_bytes(plan.weights)} weights, {human_bytes(plan.kv)} KV cache for "
        f"{plan.n_tokens} tokens), and {human_bytes(plan.available)} of {memory} are free.",
        hint=f"Next: {', '.join(steps)}, or {last}.",
    )

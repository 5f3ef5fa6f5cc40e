"""`python -m flexinspect_hooks.environment.torch_facts`: facts about torch, one JSON line each.

An import that raises is a fact; one that crashes ends this process, and the parent reports it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

Facts = dict[str, Any]


def main() -> None:
    """Print the facts in the order in which they are found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--test-flex-attention", action="store_true")
    args = parser.parse_args()
    torch = _report("torch", lambda: _import("torch"))
    if torch.get("error"):
        return
    _report("flex", _flex_facts)
    _report("cuda", _cuda_facts)
    _report("mps", _mps_facts)
    _report("triton", lambda: _import("triton"))
    _report("transformers", lambda: _import("transformers"))
    if args.test_flex_attention:
        from flexinspect_hooks.environment.flex_self_test import kernels, run_kernel

        for name in kernels():
            print(json.dumps({"fact": "testing", "kernel": name}), flush=True)
            _report("kernel", partial(run_kernel, name))


def _report(fact: str, find: Callable[[], Facts]) -> Facts:
    started = time.perf_counter()
    try:
        facts = find()
    except BaseException as error:  # an import may also raise SystemExit
        facts = {"error": f"{type(error).__name__}: {error}"}
    facts |= {"fact": fact, "seconds": round(time.perf_counter() - started, 3)}
    print(json.dumps(facts, default=str), flush=True)
    return facts


def _import(name: str) -> Facts:
    module = importlib.import_module(name)
    return {"version": str(module.__version__), "file": module.__file__}


def _flex_facts() -> Facts:
    module = importlib.import_module("torch.nn.attention.flex_attention")
    names = ("flex_attention", "create_block_mask", "BlockMask")
    return {"missing": [name for name in names if not hasattr(module, name)]}


def _cuda_facts() -> Facts:
    import torch

    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"{properties.major}.{properties.minor}"
        devices.append(
            {"name": properties.name, "capability": capability, "free": free, "total": total}
        )
    settings = {
        "precision": torch.get_float32_matmul_precision(),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }
    built = {"built": torch.version.cuda, "hip": torch.version.hip}
    return {**built, "devices": devices, **settings}


def _mps_facts() -> Facts:
    import torch

    mps = torch.backends.mps
    return {"built": mps.is_built(), "available": mps.is_available()}


if __name__ == "__main__":
    main()

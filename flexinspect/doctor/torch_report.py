"""Checks of torch, FlexAttention and the GPU: a child process imports them, so it may crash."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flexinspect.core.environment import command_output
from flexinspect.core.parsing import parse_json
from flexinspect.doctor.check import Check, error, note, ok, warning
from flexinspect.doctor.packages import torch_build
from flexinspect.inputs.model_sizes import human_bytes

Facts = Mapping[str, Any]

MODULE = "flexinspect_hooks.environment.torch_facts"
REINSTALL = "Install it again: pip install --force-reinstall --no-deps {}."
FLEX_TEST = "python -c 'from torch.nn.attention.flex_attention import flex_attention'"


class TorchReport:
    """The checks of torch. Making one starts the child process, which works meanwhile."""

    def __init__(self, *, test_flex_attention: bool = False) -> None:
        command = [sys.executable, "-m", MODULE]
        command += ["--test-flex-attention"] if test_flex_attention else []
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )

    def checks(self, progress: Callable[[str], None]) -> Iterator[Check]:
        """Yield the checks as they come; `progress` receives what runs until the next one."""
        progress("importing torch")
        assert self._process.stdout is not None
        for line in self._process.stdout:
            facts = _parse(line)
            if facts.get("fact") == "testing":
                progress(f"testing FlexAttention, {facts['kernel']}")
                continue
            make = _CHECKS.get(str(facts.get("fact")))
            if make is not None:
                yield from make(facts)
            progress("importing transformers" if facts.get("fact") == "triton" else "asking torch")
        yield from self._crash()

    def _crash(self) -> Iterator[Check]:
        _, stderr = self._process.communicate()
        if self._process.returncode:
            last = stderr.strip().splitlines()[-1:] or [f"exit code {self._process.returncode}"]
            found = f"the process that imports it ended: {last[0]}"
            yield error("torch", found, REINSTALL.format("torch"))

    def close(self) -> None:
        """End the child process."""
        self._process.kill()
        self._process.communicate()


def _parse(line: str) -> Facts:
    try:
        facts = parse_json(line)
    except ValueError:  # something that a library printed
        return {}
    return facts if isinstance(facts, dict) else {}


def _import_check(facts: Facts) -> Iterator[Check]:
    name = str(facts["fact"])
    if problem := facts.get("error"):
        yield error(f"import {name}", str(problem), REINSTALL.format(name))
        return
    build = f", built for {torch_build(facts['version'])}" if name == "torch" else ""
    yield ok(f"import {name}", f"{facts['seconds']:.1f} s{build}", str(facts["file"]))


def _flex_check(facts: Facts) -> Iterator[Check]:
    name = "FlexAttention"
    if facts.get("error") or facts.get("missing"):
        found = facts.get("error") or f"torch has no {', '.join(facts['missing'])}"
        fix = f"Install torch 2.11 or newer; to verify: {FLEX_TEST}"
        yield error(name, str(found), fix)
    else:
        yield ok(name, "torch.nn.attention.flex_attention can be imported")


def _cuda_check(facts: Facts) -> Iterator[Check]:
    driver = gpu_driver()
    if problem := facts.get("error"):
        fix = "Compare the driver (nvidia-smi) with the CUDA version that torch was built for."
        yield error("CUDA", str(problem), fix)
        return
    devices = facts["devices"]
    if not devices and driver:
        built = (
            f"torch is built for CUDA {facts['built']}" if facts["built"] else "torch has no CUDA"
        )
        fix = "Install a build of torch for this driver: https://pytorch.org/get-started/locally/."
        yield warning("CUDA", f"a GPU is here (driver {driver}), and {built}", fix)
    elif not devices:
        yield note("CUDA", "no GPU; models run on the CPU")
    else:
        version = facts["built"] or f"ROCm {facts['hip']}"
        yield ok("CUDA", f"{version}, driver {driver or 'unknown'}")
    yield from map(_device_check, devices)
    if devices:
        yield _gpu_settings(facts)


def _gpu_settings(facts: Facts) -> Check:
    """Tell what torch's settings for speed are; docs/installation.md has a table of them."""
    precision = facts.get("precision", "highest")
    products = "float32" if precision == "highest" else "TF32 (less exact)"
    found = f"float32 products in {products}, allocator {facts.get('allocator') or 'default'}"
    faster = "faster float32 products: torch.set_float32_matmul_precision('high')"
    memory = "memory in pieces: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return note("GPU settings", found, "", faster, memory)


def _device_check(device: Facts) -> Check:
    free, total = device["free"], device["total"]
    found = f"{human_bytes(free)} of {human_bytes(total)} free, {device['name']}"
    name, holders = "GPU memory", gpu_processes()
    if free < total / 2 and holders:
        fix = "Other processes hold it; end them, or choose another GPU (CUDA_VISIBLE_DEVICES)."
        return warning(name, found, fix, *holders)
    return ok(name, found, f"compute capability {device['capability']}", *holders)


def gpu_driver() -> str | None:
    """Return the version of the NVIDIA driver, None without a GPU of NVIDIA."""
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    text = command_output("nvidia-smi", *query, timeout_s=10.0)
    return text.splitlines()[0].strip() if text else None


def gpu_processes() -> list[str]:
    """Return who holds GPU memory: process id, name and memory, one line each."""
    query = ("--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")
    text = command_output("nvidia-smi", *query, timeout_s=10.0)
    return [f"process {line.strip()}" for line in (text or "").splitlines() if line.strip()]


def _mps_check(facts: Facts) -> Iterator[Check]:
    if facts.get("available"):
        yield ok("MPS", "available")
    elif facts.get("built"):
        yield note("MPS", "built in, but this machine has no GPU for it")


def _triton_check(facts: Facts) -> Iterator[Check]:
    if facts.get("error"):
        yield note("Triton", "not installed; only GPUs need it", "pip install triton")
    else:
        yield ok("Triton", str(facts["version"]))


def _kernel_check(facts: Facts) -> Iterator[Check]:
    if problem := facts.get("error"):
        fix = "The error is that of torch; flexinspect runs FlexAttention uncompiled without it."
        yield error("FlexAttention test", str(problem).splitlines()[0], fix)
        return
    name = f"FlexAttention {facts['kernel']}"
    found = f"largest error {facts['error_size']:.1e}, {facts['next_s']:.3f} s"
    if "compiled" in facts["kernel"].split():
        found += f", compiled in {facts['first_s']:.1f} s"
    if facts["error_size"] <= facts["tolerance"]:
        yield ok(name, found)
    else:
        fix = f"Rounding explains {facts['tolerance']:.0e} only. Report it to PyTorch."
        yield error(name, found, fix)


_CHECKS: Mapping[str, Callable[[Facts], Iterator[Check]]] = {
    "torch": _import_check,
    "transformers": _import_check,
    "flex": _flex_check,
    "cuda": _cuda_check,
    "mps": _mps_check,
    "triton": _triton_check,
    "kernel": _kernel_check,
}

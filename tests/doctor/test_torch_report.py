"""Checks of torch in a child process, which may find a broken install."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexinspect.doctor import torch_report
from flexinspect.doctor.check import Check, Status
from flexinspect.doctor.torch_report import TorchReport

GIB = 1 << 30


def checks_of(**facts: Any) -> list[Check]:
    return list(torch_report._CHECKS[facts["fact"]]({"seconds": 0.5, "version": "1.0", **facts}))


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, torch: str) -> None:
    """Put a module `torch` before the real one in the child's search path."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_an_import_that_raises_is_reported_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "libcudart.so.12: cannot open shared object file"
    install(tmp_path, monkeypatch, f"raise ImportError({missing!r})")
    (check,) = TorchReport().checks(lambda text: None)
    assert (check.status, check.found) == (Status.ERROR, f"ImportError: {missing}")
    assert "pip install --force-reinstall" in check.fix


def test_an_import_that_crashes_is_reported_and_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "import os; print('noise', flush=True); os.abort()")
    (check,) = TorchReport().checks(lambda text: None)
    assert check.status is Status.ERROR
    assert "the process that imports it ended" in check.found


def test_a_torch_without_flex_attention_is_told_the_version_that_has_it() -> None:
    (check,) = checks_of(fact="flex", missing=["flex_attention"])
    assert check.status is Status.ERROR
    assert "torch 2.11 or newer" in check.fix
    assert checks_of(fact="flex", missing=[])[0].status is Status.OK


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, driver: str, apps: str) -> None:
    script = folder / "nvidia-smi"
    script.write_text(
        f'#!/bin/sh\ncase "$1" in *driver*) echo "{driver}";; *) printf "{apps}";; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_gpu_that_torch_cannot_use_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, monkeypatch, "570.12", "")
    (check,) = checks_of(fact="cuda", devices=[], built=None, hip=None)
    assert check.status is Status.WARNING
    assert check.found == "a GPU is here (driver 570.12), and torch has no CUDA"


def test_who_holds_the_memory_of_a_gpu_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, monkeypatch, "570.12", "4242, python, 61000 MiB\\n")
    device = {"name": "H100", "capability": "9.0", "free": 10 * GIB, "total": 80 * GIB}
    cuda, memory, _ = checks_of(fact="cuda", devices=[device], built="12.8", hip=None)
    assert cuda.found == "12.8, driver 570.12"
    assert memory.status is Status.WARNING
    assert memory.details == ("process 4242, python, 61000 MiB",)
    roomy = {**device, "free": 79 * GIB}
    assert checks_of(fact="cuda", devices=[roomy], built="12.8", hip=None)[1].status is Status.OK


def test_the_settings_for_speed_of_a_gpu_are_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, monkeypatch, "570.12", "")
    device = {"name": "H100", "capability": "9.0", "free": 70 * GIB, "total": 80 * GIB}
    facts = {"fact": "cuda", "devices": [device], "built": "12.8", "hip": None}
    plain = checks_of(**facts, precision="highest", allocator="")[-1]
    assert plain.found == "float32 products in float32, allocator default"
    assert any("set_float32_matmul_precision" in line for line in plain.details)
    assert any("PYTORCH_CUDA_ALLOC_CONF" in line for line in plain.details)
    fast = checks_of(**facts, precision="high", allocator="expandable_segments:True")[-1]
    assert fast.found == "float32 products in TF32 (less exact), allocator expandable_segments:True"


def test_without_a_gpu_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = checks_of(fact="cuda", devices=[], built=None, hip=None)
    assert (check.status, check.found) == (Status.NOTE, "no GPU; models run on the CPU")


def test_a_kernel_is_judged_by_the_rounding_of_its_dtype() -> None:
    facts = {"fact": "kernel", "kernel": "compiled", "first_s": 4.5, "next_s": 0.001}
    (good,) = checks_of(**facts, error_size=3e-7, tolerance=1e-5)
    assert (good.status, good.found) == (
        Status.OK,
        "largest error 3.0e-07, 0.001 s, compiled in 4.5 s",
    )
    (wrong,) = checks_of(**facts, error_size=0.3, tolerance=1e-5)
    assert wrong.status is Status.ERROR


@pytest.mark.slow
def test_the_real_torch_passes_and_uncompiled_flex_attention_equals_the_oracle() -> None:
    from flexinspect_hooks.environment.flex_self_test import kernels, run_kernel

    assert kernels()[:2] == ["uncompiled", "compiled"]
    facts = run_kernel("uncompiled")
    assert 0 < facts["error_size"] < facts["tolerance"]
    checks = {check.name: check for check in TorchReport().checks(lambda text: None)}
    assert checks["import torch"].status is Status.OK
    assert checks["FlexAttention"].status is Status.OK
    assert checks["import transformers"].status is Status.OK

"""The script for machines with a GPU runs on a CPU too, in a small form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu
from flexinspect_hooks.kernels.builtin_kernels import NAMES


def test_it_compares_and_times_every_kernel_that_the_device_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.main(["kernels", "--small", "--device", "cpu", "--out", str(out)]) == 0
    facts = json.loads(out.read_text("utf-8"))
    assert facts["left_out"] == []
    assert {one["kernel"] for one in facts["evaluations"]} == {*NAMES} - {"flex-compiled"}
    assert {one["inputs"].split(" ")[0] for one in facts["evaluations"]} == {"q,", "--range"}
    assert all(one["samples"] for one in facts["speed"][0]["timings"])
    assert "--range unit" in capsys.readouterr().out


def test_no_work_is_begun_after_its_time(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["kernels", "--small", "--device", "cpu", "--seconds", "0", "--out", str(out)])
    facts = json.loads(out.read_text("utf-8"))
    assert facts["evaluations"] == []
    assert "times of causal-float32 at 64 keys" in facts["left_out"]


def test_what_fails_is_named_and_the_rest_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu.KernelComparison, "speed", lost)
    out = tmp_path / "gpu.json"
    gpu.main(["kernels", "--small", "--device", "cpu", "--out", str(out)])
    facts = json.loads(out.read_text("utf-8"))
    assert facts["evaluations"]
    (text,) = facts["left_out"]
    assert text.startswith("times of causal-float32 at 64 keys: RuntimeError: CUDA error")
    assert f"left out: {text}" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        gpu.main(["kernels", "--device", "nothing"])
    assert caught.value.code == 2
    assert "The device 'nothing' is unknown." in capsys.readouterr().err

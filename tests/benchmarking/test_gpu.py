"""The script for machines with a GPU runs on a CPU too, in a small form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.traces import sample_trace

from benchmarks import gpu, gpu_capture
from flexinspect.trace.reader import open_trace
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


def test_capture_is_checked_and_its_cost_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.main(["capture", "--small", "--device", "cpu", "--out", str(out)]) == 0
    facts = json.loads(out.read_text("utf-8"))["capture"]
    assert facts["left_out"] == []
    checks = {one["name"].partition(",")[0]: one for one in facts["checks"]}
    for name in ("masks", "kernel path", "LSE", "findings", "restore and fork"):
        assert checks[name]["passed"] is True, checks[name]
    for name in ("memory", "no synchronization"):
        assert checks[name]["passed"] is None
        assert "needs CUDA" in checks[name]["text"]
    for case in facts["costs"]["cases"].values():
        assert case["advanced"]["ratio"]["median"] > 0
        assert case["bandwidth_share"] > 0
    printed = capsys.readouterr().out
    assert "| masks, float32, uncompiled | yes |" in printed
    assert json.loads(printed.splitlines()[-1])["case"] == "gpu-capture"


def test_a_check_that_fails_is_the_result_of_the_script() -> None:
    failed = {"capture": {"checks": [{"passed": None}, {"passed": False}]}}
    assert gpu._has_failed(failed)
    assert not gpu._has_failed({"capture": {"checks": [{"passed": None}, {"passed": True}]}})


def test_capture_begins_nothing_after_its_time() -> None:
    def ignore(_: object) -> None:
        pass

    facts = gpu_capture.measure(
        *("cpu", ("checks", "costs")), seconds=0, small=True, tokens=4, say=ignore, save=ignore
    )
    assert facts["checks"] == []
    assert "costs: no time was left" in facts["left_out"]


def test_each_result_is_saved_before_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_capture, "check_rewind", killed)
    out = tmp_path / "gpu.json"
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["checks", "--small", "--device", "cpu", "--out", str(out)])
    names = [one["name"] for one in json.loads(out.read_text("utf-8"))["capture"]["checks"]]
    assert "LSE, float32, uncompiled" in names


def test_another_path_and_a_larger_error_fail_their_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu_capture.LSE_TOLERANCE, "float32", 1e-6)
    path = sample_trace(tmp_path / "a.flextrace")
    with open_trace(path) as reader:
        assert gpu_capture._check_paths(reader, "", compiled=True).passed is False
        assert gpu_capture._check_lse(reader, "", "float32").passed is False

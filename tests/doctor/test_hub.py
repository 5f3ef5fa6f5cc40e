"""Checks of the hub, of a model and of a dataset."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from flexinspect.doctor import hub
from flexinspect.doctor.check import Check, Status


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def by_name(name: str, *, hub_is_up: bool, dtype: str = "bfloat16") -> dict[str, Check]:
    return {check.name: check for check in hub.check_model(name, dtype, hub_is_up=hub_is_up)}


def test_a_hub_that_is_switched_off_is_only_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.check_hub().status is Status.NOTE


def test_a_hub_that_does_not_answer_is_a_warning_with_mirror_and_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    for name in hub.PROXIES:
        monkeypatch.delenv(name, raising=False)
    check = hub.check_hub()
    assert check.status is Status.WARNING
    assert "HF_ENDPOINT" in check.fix
    assert "HTTPS_PROXY" in check.fix


def test_the_demo_model_is_here_and_fits() -> None:
    checks = by_name("demo", hub_is_up=False)
    assert checks["model"].status is Status.OK
    assert checks["model memory"].status is Status.OK


def test_a_gated_model_names_its_licence_and_a_missing_hub_the_random_weights() -> None:
    gated = by_name("llama3.2_3b_it", hub_is_up=True)["model"]
    assert gated.status is Status.WARNING
    assert "meta-llama/Llama-3.2-3B-Instruct" in gated.fix
    unreachable = by_name("llama3.2_3b_it", hub_is_up=False)["model"]
    assert unreachable.status is Status.ERROR
    assert "--weights random" in unreachable.fix


def test_a_model_that_does_not_fit_into_the_memory_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flexinspect.inputs.model_sizes.available_ram", lambda: 8_000_000_000)
    assert by_name("llama3.2_3b_it", hub_is_up=True)["model memory"].status is Status.OK
    large = by_name("llama3.2_3b_it", hub_is_up=True, dtype="float32")["model memory"]
    assert (large.status, large.found) == (
        Status.WARNING,
        "3.2 B parameters, 13.3 GB in float32 with 2048 tokens; 8.0 GB free",
    )


def test_an_unknown_model_and_dataset_are_errors_with_the_nearest_names() -> None:
    assert "llama3.2_3b_it" in by_name("llama3.2_3b_its", hub_is_up=True)["model"].fix
    (check,) = hub.check_dataset("webqaa", hub_is_up=True)
    assert check.status is Status.ERROR


def test_a_dataset_is_read_or_says_how_to_place_it_by_hand() -> None:
    (demo,) = hub.check_dataset("demo", hub_is_up=False)
    assert (demo.status, demo.found) == (Status.OK, "demo: 5 paraphrases in the first sample")
    (webqa,) = hub.check_dataset("webqa", hub_is_up=False)
    assert webqa.status is Status.ERROR
    assert "webqa:FILE.jsonl" in webqa.fix

"""Checks of Python and packages, by their metadata."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.requirements import Requirement

from flexinspect.doctor import packages
from flexinspect.doctor.check import Status


def test_a_python_outside_of_the_supported_range_is_an_error() -> None:
    assert packages.check_python((3, 11, 7)).status is Status.OK
    old = packages.check_python((3, 9, 1))
    assert (old.status, old.found) == (Status.ERROR, "3.9.1")
    assert ">=3.11" in old.fix


def test_every_required_package_is_checked_without_an_import() -> None:
    names = {requirement.name for requirement in packages.required_packages()}
    assert {"torch", "transformers", "textual", "debugpy", "numpy"} <= names
    assert "pytest" not in names  # of an extra
    assert all(check.status is not Status.ERROR for check in packages.check_packages())


@pytest.mark.parametrize(
    ("requirement", "status", "words"),
    [
        ("numpy>=1.26", Status.OK, "1.26.4"),
        ("numpy>=2", Status.ERROR, "1.26.4, which is outside of >=2"),
        ("no-such-package>=1", Status.ERROR, "not installed"),
    ],
)
def test_a_package_is_missing_outside_of_its_range_or_right(
    monkeypatch: pytest.MonkeyPatch, requirement: str, status: Status, words: str
) -> None:
    def version(name: str) -> str:
        if name != "numpy":
            raise metadata.PackageNotFoundError(name)
        return "1.26.4"

    monkeypatch.setattr(metadata, "version", version)
    check = packages.check_package(Requirement(requirement))
    assert (check.status, check.found) == (status, words)
    assert status is Status.OK or check.fix == f"pip install '{requirement}'"


@pytest.mark.parametrize("version", ["2.6.0", "2.6.1+cu124", "2.6.0.dev20250101"])
def test_a_version_that_breaks_flex_attention_is_named_with_its_public_thread(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    check = packages.check_package(Requirement("torch>=2.5"))
    assert check.status is Status.WARNING
    assert "NoValidChoicesError" in check.found
    assert check.details == ("https://github.com/pytorch/pytorch/issues/146260",)


def test_every_known_version_has_a_valid_range_and_a_public_source() -> None:
    table = packages.known_versions()
    assert table
    for known in table:
        Requirement(f"{known.package}{known.versions}")
        assert known.source.startswith("https://github.com/")


def test_the_build_of_torch_is_named() -> None:
    assert packages.torch_build("2.13.0+cpu") == "CPU"
    assert packages.torch_build("2.13.0+cu128") == "CUDA 12.8"
    assert packages.torch_build("2.13.0+rocm6.4") == "rocm6.4"

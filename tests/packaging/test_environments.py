"""requirements.txt and the conda environments name what pyproject.toml needs; figures agree."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from support.paths import DOCS, REPOSITORY

ENVIRONMENTS = {
    "environment.yml": "flexattention",
    "environment_linux.yml": "self-ensemble-debug",
}
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))[
    "project"
]


def requirements(file: str) -> dict[str, SpecifierSet]:
    lines = (REPOSITORY / file).read_text("utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert len({one.name for one in found}) == len(found)
    return {_name(one.name): one.specifier for one in found}


def _name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def environment(file: str) -> tuple[Any, dict[str, SpecifierSet], list[str]]:
    """Return an environment, its conda packages, and the lines that pip gets."""
    read = yaml.safe_load((REPOSITORY / file).read_text("utf-8"))
    (pip,) = [one["pip"] for one in read["dependencies"] if isinstance(one, dict)]
    conda = {}
    for one in read["dependencies"]:
        if isinstance(one, str):
            name, version = re.fullmatch(r"([a-z]+)(.*)", one).groups()  # type: ignore[union-attr]
            exact = re.fullmatch(r"=(\d[\d.]*)", version)  # conda: any 3.12 version
            conda[name] = SpecifierSet(f"=={exact[1]}.*" if exact else version)
    return read, conda, pip


def test_the_requirements_are_those_of_the_project_and_of_datasets() -> None:
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["datasets"]]
    needed = {_name(one.name): one.specifier for one in map(Requirement, lines)}
    assert requirements("requirements.txt") == needed


def test_the_tested_versions_lie_in_the_required_ranges() -> None:
    pins, ranges = requirements("constraints.txt"), requirements("requirements.txt")
    outside = {
        name: str(pins[name])
        for name, accepted in ranges.items()
        if name in pins and not accepted.contains(str(pins[name]).removeprefix("=="))
    }
    assert outside == {}
    assert {"torch", "transformers", "numpy"} <= pins.keys() & ranges.keys()


@pytest.mark.parametrize(("file", "name"), ENVIRONMENTS.items())
def test_an_environment_has_its_name_and_a_python_that_the_project_supports(
    file: str, name: str
) -> None:
    read, conda, _ = environment(file)
    assert read["name"] == name
    supported = SpecifierSet(PROJECT["requires-python"])
    versions = [f"3.{minor}.0" for minor in range(8, 20)]
    accepted = [version for version in versions if conda["python"].contains(version)]
    assert accepted
    assert all(supported.contains(version) for version in accepted)


@pytest.mark.parametrize("file", ENVIRONMENTS)
def test_the_lines_for_pip_are_options_and_files_that_exist(file: str) -> None:
    _, _, lines = environment(file)
    options = {line.split()[0]: line.split()[1:] for line in lines}
    assert set(options) <= {"--pre", "--extra-index-url", "-c", "-r", "-e"}
    assert (REPOSITORY / options["-r"][0]).is_file()
    assert options["-e"] == ["."]
    if "-c" in options:
        assert (REPOSITORY / options["-c"][0]).is_file()
    assert ("--pre" in options) == (file == "environment.yml")  # the nightly one


def test_the_figures_of_the_page_are_those_of_the_project() -> None:
    page = (DOCS / "installation.md").read_text("utf-8")
    ranges, pins = requirements("requirements.txt"), requirements("constraints.txt")
    lowest = str(min(Version(one) for one in re.findall(r"[\d.]+", PROJECT["requires-python"])))
    assert f"| Python | {lowest} |" in page
    for row, name in (("PyTorch", "torch"), ("transformers", "transformers")):
        minimum, tested = (str(found[name]).lstrip(">=") for found in (ranges, pins))
        assert f"| {row} | {minimum} | tested with {tested}" in page


def test_the_checklist_of_the_troubleshooting_page_has_eight_steps_and_its_links_exist() -> None:
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    checklist = page.partition("## Checklist")[2]
    assert re.findall(r"^(\d)\. ", checklist, re.MULTILINE) == list("12345678")
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.+)$", page, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", page):
        file, _, anchor = target.partition("#")
        assert (DOCS / file).exists()
        if not file:
            assert anchor in anchors

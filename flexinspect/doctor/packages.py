"""Checks of Python and the installed packages, by their metadata: nothing is imported."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata

from msgspec import Struct, convert
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from flexinspect.core.environment import PACKAGE_DATA
from flexinspect.doctor.check import Check, error, note, ok, warning

PACKAGES = "packages"

OPTIONAL = {
    "datasets": ("the datasets of the hub (--dataset webqa)", "datasets"),
    "matplotlib": ("pictures of masks as PNG, SVG and PDF", "figures"),
    "resvg-py": ("saving a panel as PNG", "png"),
    "nvidia-ml-py": ("the GPU panel", "gpu"),
    "textual-serve": ("the interface in a browser (--web)", "web"),
    "pandas": ("tables of a trace as data frames", "frames"),
}
"""Optional packages: what needs them, and the extra of flexinspect that installs them."""


class KnownVersions(Struct, frozen=True):
    """An entry of `known_versions.toml`: versions of a package that break FlexAttention."""

    package: str
    versions: str
    effect: str
    fix: str
    source: str


@cache
def known_versions() -> tuple[KnownVersions, ...]:
    """Return the table of versions that are known to break FlexAttention."""
    text = (PACKAGE_DATA / "known_versions.toml").read_text("utf-8")
    return convert(tomllib.loads(text)["known"], tuple[KnownVersions, ...])


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Check the version of Python against the supported range."""
    found = ".".join(map(str, version))
    supported = _own_metadata()["Requires-Python"]
    if SpecifierSet(supported).contains(found, prereleases=True):
        return ok("Python", found, sys.executable)
    fix = f"flexinspect needs Python {supported}: make an environment with one of these versions."
    return error("Python", found, fix, sys.executable)


def check_packages() -> Iterator[Check]:
    """Check every required package against its range and the known versions, and optional ones."""
    for requirement in required_packages():
        yield check_package(requirement)
    for name, (purpose, extra) in OPTIONAL.items():
        version = installed_version(name)
        if version is not None:
            yield ok(name, version, group=PACKAGES)
        else:
            fix = f"pip install 'flexinspect[{extra}]'"
            yield note(name, f"not installed; it is only used for {purpose}", fix)


def required_packages() -> list[Requirement]:
    """Return what flexinspect requires, without its extras."""
    parsed = map(Requirement, _own_metadata().get_all("Requires-Dist") or [])
    return [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]


def check_package(requirement: Requirement) -> Check:
    """Check one required package by its metadata."""
    version = installed_version(requirement.name)
    install = f"pip install '{requirement.name}{requirement.specifier}'"
    if version is None:
        return error(requirement.name, "not installed", install)
    if not requirement.specifier.contains(version, prereleases=True):
        found = f"{version}, which is outside of {requirement.specifier}"
        return error(requirement.name, found, install)
    for known in known_versions():
        if known.package == requirement.name and _concerns(known, version):
            return warning(requirement.name, f"{version}: {known.effect}", known.fix, known.source)
    return ok(requirement.name, version, f"supported: {requirement.specifier}", group=PACKAGES)


def _concerns(known: KnownVersions, version: str) -> bool:
    try:
        release = Version(version).base_version
    except InvalidVersion:  # of a package that was built by hand
        return False
    return SpecifierSet(known.versions).contains(release, prereleases=True)


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_spacy_model() -> Check:
    """Check for the spaCy model that lemmatises answers, or its smaller replacement."""
    name, use = "spaCy model", "it is only used to compare answers by their lemmas"
    if installed_version("spacy") is None:
        return note(name, f"spaCy is not installed; {use}", "pip install spacy")
    for model in ("en_core_web_lg", "en_core_web_sm"):
        version = installed_version(model) or installed_version(model.replace("_", "-"))
        if version is not None:
            return ok(name, f"{model} {version}")
    return note(name, f"no English model; {use}", "python -m spacy download en_core_web_sm")


def _own_metadata() -> metadata.PackageMetadata:
    return metadata.metadata("flexinspect")


def torch_build(version: str) -> str:
    """Say what a torch version was built for: "CPU" of 2.13.0+cpu, "CUDA 12.8" of 2.13.0+cu128."""
    build = version.partition("+")[2]
    if cuda := re.fullmatch(r"cu(\d+)(\d)", build):
        return f"CUDA {cuda[1]}.{cuda[2]}"
    return {"cpu": "CPU"}.get(build, build)

"""The wheel holds both packages, the demo and the architectures, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.paths import REPOSITORY

ROOT = REPOSITORY


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in a freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [*(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d"), str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < 12e6
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_its_top_level_names_are_the_two_packages(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"flexinspect", "flexinspect_hooks"}


def test_it_ships_data_and_type_markers(names: list[str]) -> None:
    wanted = {
        "flexinspect/py.typed",
        "flexinspect_hooks/py.typed",
        "flexinspect/data/demo/model.safetensors",
        "flexinspect/data/demo/questions.jsonl",
        "flexinspect/data/architectures/llama3.2_3b_it.json",
    }
    assert wanted <= set(names)


def test_a_users_own_hooks_folder_does_not_get_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "__init__.py").write_text("raise RuntimeError('the user has one too')\n")
    done = subprocess.run(
        [sys.executable, "-m", "flexinspect", "models", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

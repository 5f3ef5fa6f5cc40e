"""Rules of the user's own are looked for before anything is loaded, and not imported for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flexinspect.cli.run import job_from_argv
from flexinspect.core.errors import MaskError
from flexinspect.inputs.declarations import module_exists


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a module and a package, which fail where they are imported."""
    fails = "raise AssertionError('imported')\n"
    (tmp_path / "rulesofmine.py").write_text(fails)
    (tmp_path / "packageofmine").mkdir()
    for name in ("__init__", "inner"):
        (tmp_path / "packageofmine" / f"{name}.py").write_text(fails)
    (tmp_path / "bareofmine").mkdir()  # a namespace package
    (tmp_path / "bareofmine" / "inner.py").write_text(fails)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "module",
    ["rulesofmine", "packageofmine", "packageofmine.inner", "bareofmine.inner", "sys", "os.path"],
)
def test_an_importable_module_exists_and_is_not_imported(here: Path, module: str) -> None:
    job = job_from_argv(["run", "--mask", f"{module}:f", "--out", "a.flextrace"])
    assert job.mask == f"{module}:f"
    assert not {name for name in sys.modules if "ofmine" in name}


@pytest.mark.parametrize(
    "module",
    ["nomod", "packageofmine.nomod", "rulesofmine.inner", "packageofmine..inner", "", ".inner"],
)
def test_a_missing_module_is_reported_before_torch_is_loaded(here: Path, module: str) -> None:
    assert not module_exists(module)
    with pytest.raises(MaskError, match="cannot be loaded") as caught:
        job_from_argv(["run", "--mask", f"{module}:f"])
    assert caught.value.exit_code == 2
    assert len(caught.value.message.splitlines()) == 1


def test_a_mask_mod_without_a_name_is_reported(here: Path) -> None:
    with pytest.raises(MaskError, match="a part of the name is empty"):
        job_from_argv(["run", "--mask", "rulesofmine:"])

"""The page about kernels: its Python prints its text, except for digits, and its commands parse."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import torch
from support.pages import blocks, commands, run_python, without_digits
from support.paths import DOCS

from flexinspect.cli.main import build_parser
from flexinspect.inputs.kernel_configs import read_table
from flexinspect_hooks.kernels.builtin_kernels import NAMES

PAGE = (DOCS / "kernels.md").read_text("utf-8")


def test_every_example_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    run_python(PAGE)
    printed = without_digits(capsys.readouterr().out)
    version = f"torch {torch.__version__}"
    for block in blocks(PAGE, "text")[:2]:
        for line in block.replace("torch 2.13.0+cpu", version).splitlines():
            assert without_digits(line) in printed


def test_every_command_of_the_page_is_one_that_the_parser_takes() -> None:
    lines = commands(PAGE)
    assert len(lines) == 7
    for line in lines:
        assert build_parser("kernels").parse_args(shlex.split(line)).command == "kernels"


def test_the_table_of_the_page_is_valid_and_every_kernel_is_described(tmp_path: Any) -> None:
    (table,) = blocks(PAGE, "toml")
    file = tmp_path / "kernels.toml"
    file.write_text(table, "utf-8")
    read = read_table(file)
    assert read.config[0].mask == "window:64"
    assert len(read.kernel[0].previous) == 2
    assert all(f"`{name}`" in PAGE for name in NAMES)


def test_every_class_that_the_code_can_name_is_on_the_page() -> None:
    from pathlib import Path

    import flexinspect_hooks.kernels as package

    folder = Path(str(package.__file__)).parent
    source = "".join(file.read_text("utf-8") for file in folder.glob("*.py"))
    pattern = r'(?:KernelDiagnosis|MaskFault|FormulaFault|InputFault)\(\s*"([a-z0-9-]+)"'
    kinds = {*re.findall(pattern, source), "lse-log2", "lse-max", "lse-unscaled"}
    kinds |= {"lse-shape", "inputs-changed"}
    assert len(kinds) > 15
    for kind in kinds:
        assert f"`{kind}`" in PAGE, kind

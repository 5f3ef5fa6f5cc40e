"""The page of the mask laboratory: its code runs, its tables are those of the program."""

from __future__ import annotations

import re
import shlex

import pytest
from support.pages import run_python
from support.paths import DOCS

from flexinspect.cli.main import build_parser, main
from flexinspect.masks.mask_expressions import mask_names, parse_mask
from flexinspect.masks.mask_presets import PRESETS
from flexinspect.masks.size_presets import PRESET_CONFIGS, MaskConfig
from flexinspect.masks.verification import CHECKS

PAGE = (DOCS / "masks.md").read_text("utf-8")
COMMANDS = re.findall(r"^\$ flexinspect (mask .*?)(?:  +#.*)?$", PAGE, re.M)


def test_the_table_of_sizes_has_the_values_of_the_presets() -> None:
    for key in MaskConfig.__struct_fields__:
        values = [str(getattr(config, key)) for config in PRESET_CONFIGS.values()]
        row = re.search(rf"^\| `{key}` \| (.*) \|$", PAGE, re.M)
        assert row is not None, key
        assert [cell.strip(" `") for cell in row[1].split("|")] == values


def test_every_mask_and_check_is_described() -> None:
    for name in (*mask_names(), *CHECKS):
        assert re.search(rf"`{name}[(`]", PAGE), name
    assert set(PRESETS) <= set(mask_names())


def test_every_command_is_one_that_the_parser_accepts() -> None:
    assert len(COMMANDS) > 9
    for command in COMMANDS:
        build_parser("mask").parse_args(shlex.split(command))
    segments = PRESET_CONFIGS["small"].segments()
    for text in re.findall(r'mask (?:\w+ --mask )?"(.*?)"', PAGE):
        parse_mask(text, segments)


def test_the_verification_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.search(r"\$ flexinspect mask small --verify\n((?:.+\n)+?)```", PAGE)
    assert shown is not None
    assert main(["mask", "small", "--verify"]) == 0
    assert capsys.readouterr().out == shown[1]


def test_the_python_code_runs() -> None:
    run_python(PAGE)

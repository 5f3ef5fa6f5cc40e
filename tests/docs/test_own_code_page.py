"""The page about one's own code lists the flags that a program accepts, as the refusal does."""

from __future__ import annotations

import argparse
import re

from support.paths import DOCS

from flexinspect.cli import run_flags
from flexinspect.cli.run import SCRIPT_FLAGS

GROUPS = ("a program of your own", "capture and output", "debugger", "breakpoints", "control")
NOT_FOR_A_PROGRAM = {"-m", "--hold", "--remote-help"}
"""Flags of these groups that name the program, keep our own model, or run nothing."""


def test_the_page_lists_the_flags_that_a_program_accepts() -> None:
    page = (DOCS / "own-code.md").read_text("utf-8")
    (listed,) = re.findall(r"^A program accepts these flags, .*?\. ", page, re.MULTILINE)
    assert tuple(re.findall(r"`(--[a-z-]+)`", listed)) == SCRIPT_FLAGS


def test_a_program_accepts_the_flags_of_the_groups_that_the_help_names() -> None:
    parser = argparse.ArgumentParser()
    run_flags.configure(parser)
    groups = {group.title: group for group in parser._action_groups}
    flags = {
        action.option_strings[0]
        for title in GROUPS
        for action in groups[title]._group_actions
        if action.option_strings
    }
    assert flags - NOT_FOR_A_PROGRAM == {*SCRIPT_FLAGS}

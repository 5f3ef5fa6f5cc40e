"""The recipes for contributors, followed literally in a copy of the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import DOCS, REPOSITORY, TESTS
from support.traces import sample_trace

STEP = re.compile(
    r"^(?P<verb>Create|Add to) `(?P<file>[^`]+)`(?P<rest>.*?):\n\n```\w+\n(?P<code>.*?)```",
    re.M | re.S,
)
LINE = re.compile(r"(?P<side>before|after) the line `(?P<line>.+)`")


def follow(page: str, root: Path) -> list[str]:
    """Do what a page says in a copy of the sources at `root`; returns the files it touched."""
    touched = []
    for step in STEP.finditer((DOCS / page).read_text("utf-8")):
        file = root / step["file"]
        touched.append(step["file"])
        if step["verb"] == "Create":
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(step["code"], "utf-8")
            continue
        match = LINE.search(step["rest"])
        assert match is not None, step["rest"]
        line, text = match["line"] + "\n", file.read_text("utf-8")
        assert text.count(line) == 1, f"{step['file']} has no such line: {line}"
        new = step["code"] + line if match["side"] == "before" else line + step["code"]
        file.write_text(text.replace(line, new), "utf-8")
    return touched


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of both packages, the tests' helpers and the pages."""
    root = tmp_path / "sources"
    ignored = shutil.ignore_patterns("__pycache__", "demo")
    for folder in ("flexinspect", "hooks", "tests/support", "docs/findings"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=ignored)
    shutil.copytree(TESTS / "panels", root / "tests" / "panels", ignore=ignored)
    (root / "flexinspect/data/demo").symlink_to(REPOSITORY / "flexinspect/data/demo")
    return root


def run(root: Path, *args: str) -> str:
    """Run Python in the copy. Returns what it printed."""
    path = os.pathsep.join(str(root / part) for part in ("", "hooks", "tests"))
    done = subprocess.run(
        [sys.executable, *args],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_panel_recipe_gives_a_panel_in_three_files(sources: Path, tmp_path: Path) -> None:
    assert len(follow("adding-a-panel.md", sources)) == 3
    trace = sample_trace(tmp_path / "run.flextrace")
    shown = run(sources, "-m", "flexinspect", "show", str(trace), "--panel", "choice")
    assert re.search(r"Step \d+: probability \d\.\d{3}\.", shown)
    run(
        sources, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/panels/test_choice_panel.py"
    )


def test_the_rule_recipe_gives_a_finding_in_three_files(sources: Path) -> None:
    assert len(follow("adding-a-rule.md", sources)) == 3
    code = (
        "from support.rules import *\n"
        "from flexinspect.rules.engine import load_rules\n"
        "found = load_rules()\n"
        "assert not found.failed, found.failed\n"
        "kind = found.finding_kinds['text.unsure-choice']\n"
        "print(kind.meaning)\n"
    )
    assert "improbable" in run(sources, "-c", code)


def test_the_preset_recipe_gives_a_mask_in_one_file(sources: Path) -> None:
    assert set(follow("adding-a-mask-preset.md", sources)) == {"flexinspect/masks/mask_presets.py"}
    code = (
        "from support.tiny import make_pieces\n"
        "from flexinspect.masks.mask_presets import preset\n"
        "from flexinspect.records.prompt import SegmentKind, compose_prompt\n"
        "prompt = compose_prompt(make_pieces(), max_new_tokens=2)\n"
        "cells = preset('own-segment-only', prompt.segments).dense(prompt.segments[-1].start)\n"
        "second = [s for s in prompt.segments if s.kind is SegmentKind.PARAPHRASE][1]\n"
        "row = cells[second.start]\n"
        "assert row[second.start] and not row[: second.start].any()\n"
    )
    run(sources, "-c", code)


def test_the_model_recipe_gives_a_name_and_a_family(sources: Path) -> None:
    follow("adding-a-model-family.md", sources)
    assert "starcoder2_3b" in run(sources, "-m", "flexinspect", "models")
    code = (
        "from support.tiny import make_model\n"
        "from flexinspect_hooks.capture.model_layers import attention_layers\n"
        "assert sorted(attention_layers(make_model('starcoder2')).values()) == [0, 1, 2]\n"
    )
    run(sources, "-c", code)

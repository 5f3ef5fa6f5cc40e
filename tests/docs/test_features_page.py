"""docs/features.md names a command or a call for each feature, and each of them works."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import DEMO, DOCS, REPOSITORY, TESTS
from support.warm_python import Ran, run

from tools.features_page import PAGE, Feature, Section, page, read_features

SECTIONS = {section.title: section for section in read_features()}

FILES = {
    "questions.jsonl": json.dumps({"id": "1", "paraphrases": ["Who?", "Who is it?"]}) + "\n",
    "webqa.jsonl": json.dumps({"question": "Where is Kyoto?", "answers": ["Japan"]}) + "\n",
    "flexinspect.toml": f'[models]\nmy_model = "{DEMO}"\n',
    "my_masks.py": "def window(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx\n",
    "my_data.py": """\
from flexinspect import ParaPharaseDataset


class Questions(ParaPharaseDataset):
    def load_dataset(self):
        question = "What is the capital of France?"
        return [{"id": "1", "paraphrases": [question, question], "answers": ["Paris"]}]
""",
    "segments.toml": """\
mask = "segment-isolation"
segments = [
    { start = 1, stop = 7, label = "paraphrase 1" },
    { start = 8, stop = 13, label = "paraphrase 2" },
]
""",
    "my_kernel.py": """\
import torch.nn.functional as F


def attention(q, k, v, *, scale=None):
    return F.scaled_dot_product_attention(q, k[:, :, :-1], v[:, :, :-1], scale=scale)
""",
}
"""The files of a user that the commands of the page name."""

FIRST = "flexinspect run --no-ui --max-samples 2 --verbose --log-file debug.log --out run.flextrace"
"""The command that records the trace of the other commands."""


class Folder:
    """A folder in which each command and each program runs once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.output = functools.cache(self._run)

    def command(self, line: str) -> Ran:
        """Run a command line of the page."""
        program, *arguments = shlex.split(line)
        assert program in ("flexinspect", "python"), line
        return self.output(*(("-m", "flexinspect") if program == "flexinspect" else ()), *arguments)

    def _run(self, *arguments: str) -> Ran:
        wide = {**os.environ, "COLUMNS": "120"}  # lines that a narrow terminal would break
        command = [sys.executable, *arguments]
        done = run(command, cwd=self.path, capture_output=True, text=True, env=wide)
        return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("features")
    for name, text in FILES.items():
        (path / name).write_text(text, "utf-8")
    for program in (DOCS / "examples" / "train.py", TESTS / "support" / "faulty_wrapper.py"):
        shutil.copy(program, path)
    made = Folder(path)
    assert made.command(FIRST).code == 0, made.command(FIRST)
    return made


def test_the_page_is_made_of_the_rows() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m tools.features_page"


def test_every_row_has_something_that_proves_it() -> None:
    rows = [row for section in SECTIONS.values() for row in section.feature]
    for row in rows:
        assert row.prints or row.reads or row.tests, row.what
        assert bool(row.prints) == bool(row.commands or row.python), row.what
    names = [(section.title, row.what) for section in SECTIONS.values() for row in section.feature]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("title", SECTIONS)
def test_every_command_of_a_section_prints_what_the_page_says(title: str, folder: Folder) -> None:
    wrong = [problem for row in SECTIONS[title].feature for problem in problems(row, folder)]
    assert not wrong, "\n".join(wrong)


def problems(row: Feature, folder: Folder) -> Iterator[str]:
    """Yield what is not as the row says."""
    ran = [folder.command(line) for line in row.commands]
    if row.python:
        ran.append(folder.output("-c", row.python))
    for one in ran:
        if one.code != row.code:
            yield f"{row.what}: exit code {one.code}: {one.err[-500:]}"
    output = "\n".join(one.out + one.err for one in ran)
    for text in row.prints:
        if text not in output:
            yield f"{row.what}: {text!r} is not in: {output[-3000:]}"


@pytest.mark.parametrize("title", SECTIONS)
def test_every_file_and_test_of_a_section_exists(title: str) -> None:
    section: Section = SECTIONS[title]
    for row in section.feature:
        for path, texts in row.reads.items():
            held = (REPOSITORY / path).read_text("utf-8")
            assert [text for text in texts if text not in held] == [], row.what
        for node in row.tests:
            file, _, name = node.partition("::")
            assert name in names_of_tests(file), f"{row.what}: {node}"
        for path in row.use:
            assert not re.fullmatch(r"[\w/]+\.md", path) or (REPOSITORY / path).is_file(), path


@functools.cache
def names_of_tests(file: str) -> frozenset[str]:
    """Return the names of the tests of a file."""
    tree = ast.parse((REPOSITORY / file).read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = (node.name for node in ast.walk(tree) if isinstance(node, kinds))
    return frozenset(name for name in found if name.startswith("test_"))

"""The command that opens a file at a line, for the editors that people use."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexinspect.core.errors import UsageError
from flexinspect.tui.code_editor import editor_command

FILE = Path("/home/me/gen.py")


@pytest.mark.parametrize(
    ("environ", "arguments", "needs_terminal"),
    [
        ({"EDITOR": "vim"}, ["vim", "+31", "/home/me/gen.py"], True),
        ({"EDITOR": "nano -l"}, ["nano", "-l", "+31", "/home/me/gen.py"], True),
        ({"EDITOR": "vim", "VISUAL": "hx"}, ["hx", "/home/me/gen.py:31"], True),
        ({"VISUAL": "code --wait"}, ["code", "--wait", "--goto", "/home/me/gen.py:31"], False),
        ({"EDITOR": "/usr/bin/subl"}, ["/usr/bin/subl", "/home/me/gen.py:31"], False),
        ({"EDITOR": "emacs 'x"}, ["emacs 'x", "+31", "/home/me/gen.py"], True),
    ],
)
def test_each_editor_gets_the_line_as_it_takes_it(
    environ: dict[str, str], arguments: list[str], needs_terminal: bool
) -> None:
    assert editor_command(FILE, 31, environ) == (arguments, needs_terminal)


def test_vs_code_is_found_where_no_editor_is_named(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.write_text("#!/bin/sh\n")
    code.chmod(0o755)
    found = editor_command(FILE, 3, {"PATH": str(tmp_path)})
    assert found == (["code", "--goto", "/home/me/gen.py:3"], False)


def test_without_an_editor_one_sentence_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"No editor is known to open /home/me/gen\.py:3"
    ) as caught:
        editor_command(FILE, 3, {"PATH": str(tmp_path)})
    assert "export EDITOR" in caught.value.hint

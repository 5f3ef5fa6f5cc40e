"""`debug_logging`: the standard log, to stderr or to a file that is rotated."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

import pytest
import torch

from flexinspect import PyTorchDebugger, debug_logging
from flexinspect.core.errors import UsageError


def test_a_line_has_time_name_level_and_message(tmp_path: Path) -> None:
    with debug_logging(tmp_path / "debug.log"):
        PyTorchDebugger().analyze_tensor(torch.tensor([math.nan]), "x")
    PyTorchDebugger().analyze_tensor(torch.tensor([math.nan]), "after")
    (line,) = (tmp_path / "debug.log").read_text("utf-8").splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - flexinspect\.debugging - WARNING - "
        r"NaN in x \(1 values, 1\)\.",
        line,
    )


def test_the_level_is_restored_and_the_handler_removed(tmp_path: Path) -> None:
    logger = logging.getLogger("flexinspect.debugging")
    before = (logger.level, list(logger.handlers))
    log = debug_logging(tmp_path / "debug.log")
    assert logger.level == logging.DEBUG
    log.close()
    log.close()
    assert (logger.level, logger.handlers) == before


def test_the_file_is_rotated_and_so_many_are_kept(tmp_path: Path) -> None:
    with debug_logging(tmp_path / "debug.log", max_bytes=500, backups=2):
        for number in range(50):
            logging.getLogger("flexinspect.debugging").debug("line %d", number)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "debug.log",
        "debug.log.1",
        "debug.log.2",
    ]
    assert all(path.stat().st_size <= 500 for path in tmp_path.iterdir())
    assert "line 49" in (tmp_path / "debug.log").read_text("utf-8")


def test_signs_precede_the_line_on_request(tmp_path: Path) -> None:
    with debug_logging(tmp_path / "debug.log", signs=True):
        logging.getLogger("flexinspect.debugging").error("bad")
    assert (tmp_path / "debug.log").read_text("utf-8").startswith("❌ ")


def test_without_a_file_lines_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with debug_logging():
        logging.getLogger("flexinspect.debugging").debug("here")
    captured = capsys.readouterr()
    assert (captured.out, captured.err.endswith("DEBUG - here\n")) == ("", True)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        debug_logging(tmp_path / "absent" / "debug.log")

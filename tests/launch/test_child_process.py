"""The process of a program: what it printed is passed on, however it ends."""

from __future__ import annotations

import os
import selectors
import time
from pathlib import Path

import psutil
import pytest

from flexinspect.launch import child_process
from flexinspect.launch.child_process import ScriptProcess
from flexinspect.records.job import ScriptJob


class LateSelector(selectors.DefaultSelector):
    """Its first wait ends without an event, while the program prints and is killed."""

    n_waits = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return no events at first, and only when the program has ended."""
        LateSelector.n_waits += 1
        if LateSelector.n_waits > 1:
            return super().select(timeout)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            children = psutil.Process().children()
            if any(one.status() == psutil.STATUS_ZOMBIE for one in children):
                return []
            time.sleep(0.01)
        raise AssertionError("the program did not end")


def test_what_a_killed_program_printed_is_read_although_the_reader_was_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nos.write(1, b'the last words')\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setattr(LateSelector, "n_waits", 0)
    monkeypatch.setattr(child_process.selectors, "DefaultSelector", LateSelector)
    source, target = os.pipe()
    process = ScriptProcess(
        ScriptJob(out=str(tmp_path / "t.flextrace"), program=str(script)), stdout=target
    )
    process._reader.join(60)
    assert process.poll() == -9
    os.close(target)
    assert os.read(source, 100) == b"the last words"
    os.close(source)

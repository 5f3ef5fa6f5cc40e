"""`flexinspect open` and the start of the interface, as far as no terminal is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.traces import sample_trace

from flexinspect.errors import TraceError
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.salvage import forget, mended, what_is_left


def flexinspect(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flexinspect", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )


def test_without_a_terminal_open_says_what_does_without_one(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "a.flextrace")
    done = flexinspect("open", str(path))
    assert done.returncode == 2
    assert "The interface needs a terminal" in done.stderr
    assert "flexinspect show" in done.stderr
    assert "Traceback" not in done.stderr


def test_alone_without_a_terminal_it_prints_its_help() -> None:
    done = flexinspect()
    assert done.returncode == 0
    assert "flexinspect open run.flextrace" in done.stdout


@pytest.mark.parametrize("flag", ["--step", "--port", "--layer"])
def test_a_number_that_is_none_is_refused(flag: str) -> None:
    done = flexinspect("open", "a.flextrace", flag, "-1x")
    assert done.returncode == 2
    assert "whole number" in done.stderr or "expected one argument" in done.stderr


def test_the_interface_loads_no_torch(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "a.flextrace")
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from flexinspect.app import InspectorApp\n"
        "from flexinspect.panels.registry import load_panel, panel_names\n"
        "async def main():\n"
        f"    app = InspectorApp(Path({str(path)!r}))\n"
        "    async with app.run_test(size=(150, 50)) as pilot:\n"
        "        await pilot.press('right')\n"
        "        await pilot.pause(0.5)\n"
        "asyncio.run(main())\n"
        "[load_panel(name) for name in panel_names()]\n"
        "print(sorted({'torch', 'transformers', 'flexinspect_hooks'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_trace_that_is_cut_short_is_read_up_to_the_cut(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "a.flextrace")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(TraceError, match="cut short"):
        TraceReader(path)
    copy = mended(path)
    assert copy is not None
    assert copy.stat().st_size == len(whole)
    assert any("Readable in it:" in line for line in what_is_left(copy))
    with TraceReader(copy) as reader:
        assert reader.run()["level"] == "advanced"
    forget(copy)
    assert not copy.exists()
    assert path.read_bytes() == whole[: len(whole) * 3 // 4]


def test_only_a_trace_that_is_cut_short_is_mended(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "a.flextrace")
    assert mended(path) is None
    other = tmp_path / "b.flextrace"
    other.write_bytes(b"something else " * 100)
    assert mended(other) is None
    assert what_is_left(other) == [
        "The file has 1500 bytes.",
        "Nothing in it can be read as a trace.",
    ]
    assert mended(tmp_path / "none") is None

"""The interface on an imported trace: it opens, steps, and says what is not recorded."""

from __future__ import annotations

from pathlib import Path

from support.dumps import described_folder, unpack_dump
from support.tui import place, press, screen_text, settle, until

from flexinspect.cli.main import main
from flexinspect.tui.app import InspectorApp

NO_MASK = "The mask of this layer was not recorded"


async def test_imported_traces_are_stepped_through_and_what_they_lack_is_named(
    tmp_path: Path,
) -> None:
    traces = [tmp_path / "attention.flextrace", tmp_path / "passes.flextrace"]
    described_folder(tmp_path / "described")
    unpack_dump("sglang-passes", tmp_path / "passes")
    for folder, trace in zip(("described", "passes"), traces, strict=True):
        assert main(["import", str(tmp_path / folder), "-o", str(trace)]) == 0
    app = InspectorApp(traces[0])
    async with app.run_test(size=(150, 44)) as pilot:
        await settle(pilot)
        await until(pilot, lambda: "Imported from my engine" in screen_text(app))
        await press(pilot, "right")
        assert place(app).step == 1
        text = screen_text(app)
        assert "⟨5⟩" in text
        assert "flex uncompiled" not in text
    app = InspectorApp(traces[1])
    async with app.run_test(size=(150, 44)) as pilot:
        await settle(pilot)
        await until(pilot, lambda: NO_MASK in screen_text(app))
        assert "The trace was imported from SGLang's tensor dump" in screen_text(app)
        await press(pilot, "right", "right", "right")
        assert place(app).step == 3

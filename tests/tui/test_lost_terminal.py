"""A terminal that is closed while the interface writes: the interface still ends."""

from __future__ import annotations

import asyncio
import os
import threading

from textual.drivers._writer_thread import MAX_QUEUED_WRITES, WriterThread

from flexinspect.tui.app import InspectorApp
from flexinspect.tui.lost_terminal import ForgivingFile, ignore_failed_writes


def test_the_writer_of_a_closed_terminal_takes_all_writes_and_stops() -> None:
    master, terminal = os.openpty()
    os.close(master)
    writer = WriterThread(ForgivingFile(os.fdopen(terminal, "w")))  # type: ignore[arg-type]
    writer.start()

    def write() -> None:
        for _ in range(3 * MAX_QUEUED_WRITES):
            writer.write("x" * 10_000)
        writer.stop()

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(20)
    assert not writing.is_alive()


def test_the_interface_uses_a_driver_that_ignores_failed_writes() -> None:
    async def make() -> tuple[object, object]:
        app = InspectorApp()
        driver = app.get_driver_class()(app)
        return driver, driver._file  # type: ignore[attr-defined]

    driver, file = asyncio.run(make())
    assert type(driver).__name__ == ignore_failed_writes(type(driver)).__name__  # type: ignore[arg-type]
    assert isinstance(file, ForgivingFile)

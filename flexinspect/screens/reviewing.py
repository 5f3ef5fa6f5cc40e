"""Rules look at a finished trace while somebody steps through it, in a process of their own.

In a thread they would take the interpreter from whoever draws.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path

from textual import work
from textual.screen import Screen

from flexinspect.errors import FlexInspectError
from flexinspect.feed import Feed
from flexinspect.review import Review, command, result_of, tasks
from flexinspect.rules.catalogue import catalogue
from flexinspect.trace.append import statements
from flexinspect.trace.reader import TraceReader


class ReviewingScreen(Screen[None]):
    """A screen on a trace that lets rules look at it, and looks again when they have."""

    _reviewed: tuple[Path | None, int] | None = None

    def look(self) -> None:
        """Take in what has changed in the trace."""
        raise NotImplementedError

    def review_once(self, feed: Feed, pool: Executor, held: int = 0) -> None:
        """Let rules look that have not yet, beside all else; of one file once.

        While the model is held after `held` generations, once for each number of them; what is
        said then is of what there was, so at the end they look again, and that can be stored.
        """
        if self._reviewed != (feed.path, held):
            self._reviewed = (feed.path, held)
            if not held and feed.reader is not None:
                feed.reader.take_back()
            self._review(feed, pool)

    @work(exclusive=True, group="review")
    async def _review(self, feed: Feed, pool: Executor) -> None:
        said = await review_in_background(feed, pool)
        if said is not None:
            self.look()
        if said:
            self.notify(said, severity="warning", markup=False, timeout=20)


async def review_in_background(feed: Feed, pool: Executor) -> str | None:
    """Let the rules look that have not yet; None when there is none, else what to say about it.

    Afterwards the feed's reader says what they found, stored or not.
    """
    reader = feed.reader
    if reader is None:
        return None
    loop = asyncio.get_running_loop()
    if not await loop.run_in_executor(pool, needed, reader):
        return None
    done = await _reviewed(reader)
    if done.unstored:
        reader.add(statements(done.unstored))
    return done.note


def needed(reader: TraceReader) -> bool:
    """Tell whether a rule has not looked at something yet."""
    try:
        return bool(tasks(reader, catalogue().rules))
    except FlexInspectError:
        return False  # the panels say what is wrong with the trace


async def _reviewed(reader: TraceReader) -> Review:
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    words = command(reader.path)
    process = await asyncio.create_subprocess_exec(
        *words, stdin=nothing, stdout=pipe, stderr=nothing, start_new_session=True
    )
    try:
        text, _ = await process.communicate()
    finally:
        if process.returncode is None:  # the interface is closed
            with suppress(ProcessLookupError):
                process.kill()
    try:
        return result_of(text.decode())
    except ValueError:
        return Review(
            note="The rules that look at a finished trace failed; see the findings command."
        )

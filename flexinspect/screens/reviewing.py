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
from flexinspect.feed import TraceSession
from flexinspect.review import Review, pending_tasks, review_command, review_from_json
from flexinspect.rules.catalogue import load_rules
from flexinspect.trace.append import review_statements
from flexinspect.trace.reader import TraceReader


class ReviewScreen(Screen[None]):
    """A screen on a trace that lets rules look at it, and looks again when they have."""

    _last_review: tuple[Path | None, int] | None = None

    def poll_trace(self) -> None:
        """Take in what has changed in the trace."""
        raise NotImplementedError

    def review_once(self, session: TraceSession, pool: Executor, n_held: int = 0) -> None:
        """Let rules look that have not yet, beside all else; of one file once.

        While the model is held after `held` generations, once for each number of them; what is
        said then is of what there was, so at the end they look again, and that can be stored.
        """
        if self._last_review != (session.path, n_held):
            self._last_review = (session.path, n_held)
            if not n_held and session.reader is not None:
                session.reader.remove_added_reviews()
            self._review(session, pool)

    @work(exclusive=True, group="review")
    async def _review(self, session: TraceSession, pool: Executor) -> None:
        message = await review_in_background(session, pool)
        if message is not None:
            self.poll_trace()
        if message:
            self.notify(message, severity="warning", markup=False, timeout=20)


async def review_in_background(session: TraceSession, pool: Executor) -> str | None:
    """Let the rules look that have not yet; None when there is none, else what to say about it.

    Afterwards the feed's reader says what they found, stored or not.
    """
    reader = session.reader
    if reader is None:
        return None
    loop = asyncio.get_running_loop()
    if not await loop.run_in_executor(pool, needs_review, reader):
        return None
    done = await _run_review(reader)
    if done.unstored:
        reader.add_reviews(review_statements(done.unstored))
    return done.note


def needs_review(reader: TraceReader) -> bool:
    """Tell whether a rule has not looked at something yet."""
    try:
        return bool(pending_tasks(reader, load_rules().rules))
    except FlexInspectError:
        return False  # the panels say what is wrong with the trace


async def _run_review(reader: TraceReader) -> Review:
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    words = review_command(reader.path)
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
        return review_from_json(text.decode())
    except ValueError:
        return Review(
            note="The rules that look at a finished trace failed; see the findings command."
        )

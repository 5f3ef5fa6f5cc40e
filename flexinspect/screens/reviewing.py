"""Rules look at a finished trace while somebody steps through it, in a process of their own.

In a thread they would take the interpreter from whoever draws.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from contextlib import suppress

from flexinspect.errors import FlexInspectError
from flexinspect.feed import Feed
from flexinspect.review import Review, command, result_of, tasks
from flexinspect.rules.catalogue import catalogue
from flexinspect.trace.append import statements
from flexinspect.trace.reader import TraceReader


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

"""Whose turn it is where several threads run one model: a session follows one at a time.

A thread has its turn while a forward of it is under way, and through a call of `generate`.
"""

from __future__ import annotations

import sys
from threading import RLock, get_ident

from flexinspect_hooks.hook import CaptureContext

THREAD_OVERLAP = (
    "A forward of another thread came while one of this generation was under way: one thread is "
    "followed at a time, and the other's forwards were not recorded."
)


class ThreadOwnership:
    """Knows which thread is followed. Hold `lock` between asking and beginning."""

    def __init__(self, context: CaptureContext) -> None:
        self.lock = RLock()
        self._context = context
        self._generate_thread = 0

    def is_other_thread_active(self) -> bool:
        """Say whether a thread that is still there has the turn, and it is not this one."""
        me = get_ident()
        others = [
            one for one in (self._generate_thread, self._context.thread) if one not in (0, me)
        ]
        return bool(others) and any(one in sys._current_frames() for one in others)

    def acquire(self) -> None:
        """This thread calls `generate`."""
        self._generate_thread = get_ident()

    def release(self) -> None:
        """The call is over."""
        self._generate_thread = 0

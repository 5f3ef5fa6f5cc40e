"""Capture runs on two threads of torch, as it does for users."""

from support.thread_fixtures import two_threads
from support.weight_fixtures import made

__all__ = ["made", "two_threads"]

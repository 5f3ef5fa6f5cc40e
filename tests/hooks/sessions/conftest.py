"""Capture runs on two threads of torch, as it does for users."""

from support.thread_fixtures import two_threads

__all__ = ["two_threads"]

"""Fixtures of the interface."""

from support.interface_fixtures import no_review, own_state, trace, with_review

__all__ = ["no_review", "own_state", "trace", "with_review"]

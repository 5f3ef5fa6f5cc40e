"""Imports without the cyclic garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from flexinspect.core.garbage_collection import no_garbage_collection


class Knot:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Leave the objects of other tests to the collector."""
    yield
    gc.unfreeze()


def test_what_the_body_creates_is_left_out_of_later_collections() -> None:
    with no_garbage_collection():
        assert not gc.isenabled()
        created = Knot()
    assert gc.isenabled()
    assert not any(one is created for one in gc.get_objects())  # it has no frozen objects
    later = Knot()
    assert any(one is later for one in gc.get_objects())


def test_what_was_garbage_before_is_freed() -> None:
    before = weakref.ref(Knot())
    with no_garbage_collection():
        assert before() is None


def test_garbage_is_collected_again_after_an_exception() -> None:
    with pytest.raises(ImportError), no_garbage_collection():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

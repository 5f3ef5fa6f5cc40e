"""Finding live objects in a process with several threads."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from flexinspect_hooks.python_internals.live_objects import live_objects


class Base:
    pass


class Derived(Base):
    pass


def test_objects_of_a_class_and_its_subclasses_are_found() -> None:
    one, other, module = Base(), Derived(), nn.Linear(2, 2)
    found = live_objects(Base)
    assert any(each is one for each in found)
    assert any(each is other for each in found)
    assert len(found) == 2
    assert any(each is module for each in live_objects(nn.Module))


def test_a_class_that_computes_its_type_or_its_hash_runs_no_code() -> None:
    class Unhashable(type):
        def __eq__(cls, other: object) -> bool:
            raise AssertionError

    class Lazy(metaclass=Unhashable):
        @property
        def __class__(self) -> Any:  # type: ignore[misc]
            raise AssertionError

    lazy: Any = Lazy()
    assert not any(each is lazy for each in live_objects(Base))


def test_objects_are_not_kept_alive() -> None:
    one = Base()
    reference = weakref.ref(one)
    assert live_objects(Base) == [one]
    del one
    assert reference() is None


@pytest.fixture
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("many_switches")
def test_other_threads_can_make_tuples_meanwhile() -> None:
    errors: list[BaseException] = []
    is_over = threading.Event()

    def make_tuples() -> None:
        try:
            while not is_over.is_set():
                tuple(one for one in range(1000))
        except SystemError as error:
            errors.append(error)

    threads = [threading.Thread(target=make_tuples) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        live_objects(Base)
    is_over.set()
    for thread in threads:
        thread.join()
    assert not errors

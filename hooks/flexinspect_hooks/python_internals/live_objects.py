"""Finds the live objects of a class in the process, safely beside other threads."""

from __future__ import annotations

import gc
from itertools import chain, compress, repeat, tee
from typing import Any, TypeVar

T = TypeVar("T")


def live_objects(base: type[T]) -> list[T]:
    """Return the objects of a class and its subclasses that the garbage collector tracks.

    A list of all objects also holds the tuples that other threads are about to fill, and each of
    those threads fails: `tuple(iterator)` raises SystemError if anything else refers to its tuple
    (https://github.com/python/cpython/issues/39117). So the list is made, filtered and emptied by
    one call into C, in which no other thread runs. It is emptied because it holds the iterators,
    which hold it. Types are compared by the hashes of `object`, of which each object that is alive
    has its own: the class of a lazy object may be computed when it is read, a metaclass may define
    its own hash, and `id` calls the audit hooks of the process, in which threads switch (filelock,
    which torch imports, installs one on Python 3.12 and later).
    """
    hashes = {object.__hash__(one) for one in _with_subclasses(base)}
    lists, same_lists, emptied = tee(map(gc.get_objects, (None,)), 3)
    types = map(map, repeat(type), same_lists)
    type_hashes = map(map, repeat(object.__hash__), types)
    are_wanted = map(map, repeat(hashes.__contains__), type_hashes)
    wanted: Any = chain.from_iterable(map(compress, lists, are_wanted))
    found = list(chain(wanted, map(list.clear, emptied)))
    found.pop()  # what `list.clear` returned
    return found


def _with_subclasses(base: type) -> set[type]:
    found, waiting = {base}, [base]
    while waiting:
        new: set[type] = {*type.__subclasses__(waiting.pop())} - found
        found |= new
        waiting += new
    return found

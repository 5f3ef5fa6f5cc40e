"""The cache of panels: values are computed once and their bytes counted once."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, cast

import numpy as np
import pytest
from msgspec import Struct

from flexinspect.panels import panel_source as module
from flexinspect.panels.panel_source import Source


@pytest.fixture
def source() -> Source:
    return Source(cast(Any, None))


def test_a_key_that_is_stored_again_counts_its_bytes_once(source: Source) -> None:
    source._store("key", "old", 100)
    source._store("key", "new", 40)
    assert source._bytes == 40
    assert source.get_or_create("key", lambda: "other", len) == "new"


def test_the_oldest_values_are_dropped_when_the_cache_is_full(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CACHE_BYTES", 10)
    for key in "abc":
        source.get_or_create(key, lambda: "12345", len)
    assert (list(source._cache), source._bytes) == (["b", "c"], 10)
    assert source.get_or_create("huge", lambda: "1" * 11, len) == "1" * 11
    assert "huge" not in source._cache


def test_after_a_failed_computation_the_waiting_threads_compute_the_value_once(
    source: Source,
) -> None:
    made: list[str] = []
    first_is_in, go_on, second_is_in = (threading.Event() for _ in range(3))

    def fail() -> str:
        first_is_in.set()
        assert go_on.wait(5)
        raise OSError("unreadable")

    def make() -> str:
        made.append("made")
        second_is_in.set()
        time.sleep(0.1)
        return "1234"

    def first() -> None:
        with pytest.raises(OSError, match="unreadable"):
            source.get_or_create("key", fail, len)

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert first_is_in.wait(5)
    threads.append(threading.Thread(target=source.get_or_create, args=("key", make, len)))
    n_users = sys.getrefcount(source._key_locks["key"])
    threads[1].start()
    while sys.getrefcount(source._key_locks["key"]) <= n_users:
        time.sleep(0.001)
    go_on.set()
    assert second_is_in.wait(5)  # the first has failed and gone, the second makes it
    threads[0].join()
    assert source.get_or_create("key", make, len) == "1234"
    for thread in threads:
        thread.join()
    assert made == ["made"]
    assert source._bytes == 4
    assert not source._key_locks


class Wide(Struct):
    """Twelve small fields, then a large one."""

    small: tuple[int, ...]
    large: object


def test_an_array_in_any_field_counts_and_a_long_nested_value_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    array = np.zeros(1 << 20, np.uint8)
    assert module.estimate_bytes([Wide((1,) * 12, array)] * 64) > 64 << 20
    calls: list[object] = []
    estimate = module.estimate_bytes

    def counted(value: object, n_sampled: int = module.N_SAMPLED) -> int:
        calls.append(value)
        return estimate(value, n_sampled)

    monkeypatch.setattr(module, "estimate_bytes", counted)
    rows = [[float(n)] * 1000 for n in range(1000)]
    assert counted(rows) == pytest.approx(64 * 1001 * 1000, rel=0.01)
    assert len(calls) < 500


def test_of_a_value_that_changes_only_the_newest_is_kept(source: Source) -> None:
    made: list[int] = []

    def make(stamp: int) -> str:
        made.append(stamp)
        return f"value {stamp}"

    for stamp in (1, 1, 2, 2, 1):
        assert source.get_newest("key", stamp, lambda stamp=stamp: make(stamp)) == f"value {stamp}"
    assert made == [1, 2, 1]
    assert len(source._cache) == 1

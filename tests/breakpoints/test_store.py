"""The store of breakpoints: hits, options and switches."""

from __future__ import annotations

import pytest

from flexinspect.breakpoints.grammar import ExpressionError
from flexinspect.breakpoints.store import BreakpointStore, HitAction


def hits(store: BreakpointStore, n: int) -> list[str]:
    return [store.record_hit(1).value for _ in range(n)]


def test_a_breakpoint_stops_at_every_hit() -> None:
    store = BreakpointStore()
    info = store.add("entropy>3")
    assert (info.id, info.text, info.is_enabled) == (1, "entropy > 3", True)
    assert hits(store, 3) == ["stop", "stop", "stop"]
    assert store.list()[0].n_hits == 3


def test_hits_counts_from_one_and_ignore_passes_over() -> None:
    for text in ("nan [hits=3]", "nan [ignore=2]"):
        store = BreakpointStore()
        store.add(text)
        assert hits(store, 4) == ["pass", "pass", "stop", "stop"]


def test_once_stops_once_and_disables_the_breakpoint() -> None:
    store = BreakpointStore()
    store.add("nan", hits=2, once=True)
    assert hits(store, 4) == ["pass", "stop", "pass", "pass"]
    assert not store.list()[0].is_enabled
    assert store.enabled() == ()


def test_log_never_stops() -> None:
    store = BreakpointStore()
    store.add("nan [log]")
    assert store.record_hit(1) is HitAction.LOG
    assert store.list()[0].log_only


def test_a_breakpoint_can_be_disabled_enabled_and_removed() -> None:
    store = BreakpointStore()
    assert store.version == 0
    store.add("nan [off]")
    store.add("inf")
    assert [each.info.id for each in store.enabled()] == [2]
    assert store.record_hit(1) is HitAction.PASS
    before = store.version
    assert store.enable(1, True).is_enabled
    assert store.version != before
    store.remove(2)
    assert [each.id for each in store.list()] == [1]
    store.add("fallback")
    assert [each.id for each in store.list()] == [1, 3]
    with pytest.raises(KeyError):
        store.remove(2)
    with pytest.raises(KeyError):
        store.enable(9, False)


def test_on_change_is_called_for_each_change() -> None:
    versions: list[int] = []
    store = BreakpointStore()
    store.on_change = lambda: versions.append(store.version)
    store.add("nan [once]")
    store.enable(1, False)
    store.enable(1, True)
    store.record_hit(1)
    # record_hit does not call on_change; the stop action does, after it has stopped
    assert (versions, store.version) == ([1, 2, 3], 4)
    store.remove(1)
    assert versions == [1, 2, 3, 5]


def test_hits_alone_do_not_change_the_version() -> None:
    store = BreakpointStore()
    store.add("nan")
    before = store.version
    hits(store, 5)
    assert store.version == before


def test_an_invalid_condition_is_not_added() -> None:
    store = BreakpointStore(finding_ids=lambda: ("mask.leak",))
    for text in ("entropi > 3", "finding text.*", "nan [sometimes]"):
        with pytest.raises(ExpressionError):
            store.add(text)
    assert store.list() == ()

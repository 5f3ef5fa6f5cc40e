"""The book of breakpoints: hits, options and switches."""

from __future__ import annotations

import pytest

from flexinspect.breakpoints.grammar import ExpressionError
from flexinspect.breakpoints.store import BreakpointStore, HitAction


def hits(book: BreakpointStore, n: int) -> list[str]:
    return [book.record_hit(1).value for _ in range(n)]


def test_a_breakpoint_stops_at_every_hit() -> None:
    book = BreakpointStore()
    info = book.add("entropy>3")
    assert (info.id, info.text, info.is_enabled) == (1, "entropy > 3", True)
    assert hits(book, 3) == ["stop", "stop", "stop"]
    assert book.list()[0].n_hits == 3


def test_hits_counts_from_one_and_ignore_passes_over() -> None:
    for text in ("nan [hits=3]", "nan [ignore=2]"):
        book = BreakpointStore()
        book.add(text)
        assert hits(book, 4) == ["pass", "pass", "stop", "stop"]


def test_once_stops_once_and_disables_the_breakpoint() -> None:
    book = BreakpointStore()
    book.add("nan", hits=2, once=True)
    assert hits(book, 4) == ["pass", "stop", "pass", "pass"]
    assert not book.list()[0].is_enabled
    assert book.enabled() == ()


def test_log_never_stops() -> None:
    book = BreakpointStore()
    book.add("nan [log]")
    assert book.record_hit(1) is HitAction.LOG
    assert book.list()[0].log_only


def test_a_breakpoint_can_be_disabled_enabled_and_removed() -> None:
    book = BreakpointStore()
    assert book.version == 0
    book.add("nan [off]")
    book.add("inf")
    assert [each.info.id for each in book.enabled()] == [2]
    assert book.record_hit(1) is HitAction.PASS
    before = book.version
    assert book.enable(1, True).is_enabled
    assert book.version != before
    book.remove(2)
    assert [each.id for each in book.list()] == [1]
    book.add("fallback")
    assert [each.id for each in book.list()] == [1, 3]
    with pytest.raises(KeyError):
        book.remove(2)
    with pytest.raises(KeyError):
        book.enable(9, False)


def test_on_change_is_called_for_each_change() -> None:
    versions: list[int] = []
    book = BreakpointStore()
    book.on_change = lambda: versions.append(book.version)
    book.add("nan [once]")
    book.enable(1, False)
    book.enable(1, True)
    book.record_hit(1)
    assert (versions, book.version) == ([1, 2, 3], 4)  # told by who stops, when he has
    book.remove(1)
    assert versions == [1, 2, 3, 5]


def test_hits_alone_do_not_change_the_version() -> None:
    book = BreakpointStore()
    book.add("nan")
    before = book.version
    hits(book, 5)
    assert book.version == before


def test_an_invalid_condition_is_not_added() -> None:
    book = BreakpointStore(finding_ids=lambda: ("mask.leak",))
    for text in ("entropi > 3", "finding text.*", "nan [sometimes]"):
        with pytest.raises(ExpressionError):
            book.add(text)
    assert book.list() == ()

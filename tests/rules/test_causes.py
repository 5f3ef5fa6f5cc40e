"""A consequence of another finding becomes a note that names it; other findings do not change."""

from __future__ import annotations

from itertools import permutations

from flexinspect.records.finding import Finding, Severity
from flexinspect.rules.engine import link_causes

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def finding(finding_id: str, severity: Severity, *layers: int) -> Finding:
    several = layers if len(layers) > 1 else ()
    return Finding(finding_id, severity, "So it is.", step=0, layer=layers[0], layers=several)


def test_a_mask_lost_by_a_fallback_is_a_note_that_says_so() -> None:
    mask, path = link_causes(
        [finding("mask.not-applied", ERROR, 1), finding("path.fallback", WARNING, 1)]
    )
    assert (mask.severity, mask.evidence["cause"]) == (NOTE, "path.fallback")
    assert mask.sentence == "So it is. This follows from path.fallback."
    assert path.severity is ERROR


def test_a_leak_of_a_layer_with_shifted_borders_is_their_consequence() -> None:
    shifted, leak = link_causes(
        [finding("segments.shifted", WARNING, 0, 1), finding("mask.leak", WARNING, 0, 1)]
    )
    assert (shifted.severity, leak.severity) == (WARNING, NOTE)


def test_a_mask_of_another_layer_has_another_cause() -> None:
    both = [finding("mask.not-applied", ERROR, 0), finding("path.fallback", ERROR, 1)]
    assert link_causes(both) == both


def test_a_note_is_not_a_cause() -> None:
    both = [finding("mask.not-applied", ERROR, 1), finding("path.bypass", NOTE, 1)]
    assert link_causes(both) == both


def test_a_leak_with_several_possible_causes_follows_from_shifted_borders() -> None:
    leak, fallback = finding("mask.leak", ERROR, 0), finding("path.fallback", WARNING, 0)
    shifted = finding("segments.shifted", WARNING, 0)
    for found in permutations([leak, fallback, shifted]):
        linked = {one.id: one for one in link_causes(found)}
        assert linked["mask.leak"].evidence["cause"] == "segments.shifted"
        assert linked["path.fallback"] == fallback
        assert linked["segments.shifted"].severity is ERROR


def test_a_note_about_borders_does_not_hide_another_cause() -> None:
    drift, leak = finding("segments.drift", NOTE, 0), finding("mask.leak", ERROR, 0)
    *_, linked = link_causes([finding("path.bypass", WARNING, 0), drift, leak])
    assert linked.evidence["cause"] == "path.bypass"


def test_a_layer_that_lost_its_window_differs_from_others_for_that_reason() -> None:
    found = [finding("mask.layers-differ", WARNING, 2), finding("mask.window-lost", WARNING, 2)]
    differ, lost = link_causes(found)
    assert (differ.severity, lost.severity) == (NOTE, WARNING)
    assert link_causes([finding("mask.layers-differ", WARNING, 1), found[1]])[0].severity is WARNING

"""Each finding of numbers, attention, calls and text names the next step, and has its page."""

from __future__ import annotations

import pytest
from support.paths import DOCS

from flexinspect.rules.attention import attention_shape
from flexinspect.rules.engine import FindingKind
from flexinspect.rules.numerics import nan_and_inf, output_ranges
from flexinspect.rules.text import chosen_tokens

PAGES = DOCS / "findings"
KINDS: dict[str, FindingKind] = {
    finding_id: kind
    for rule in (
        nan_and_inf.NumbersRule,
        output_ranges.OutputRangeRule,
        attention_shape.AttentionShapeRule,
        attention_shape.CallFactsRule,
        chosen_tokens.TextRule,
        chosen_tokens.TokenChoiceRule,
    )
    for finding_id, kind in rule.findings.items()
}


@pytest.mark.parametrize("finding_id", KINDS)
def test_a_kind_of_finding_is_complete(finding_id: str) -> None:
    kind = KINDS[finding_id]
    for words in (kind.meaning, kind.why, kind.confirm, kind.fix):
        assert len(words.split()) > 3
    place = {"generation": 0, "branch": 0, "step": 1, "layer": 2}
    assert kind.query.format(**place).startswith("SELECT ")
    assert "generation = 0 AND branch = 0" in kind.query.format(**place)


@pytest.mark.parametrize("finding_id", KINDS)
def test_a_kind_of_finding_has_its_page(finding_id: str) -> None:
    page = (PAGES / f"{finding_id}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# `{finding_id}`\n")
    for part in ("\n> ", "Why it matters", "How to confirm", "Likely fix", "Not reported"):
        assert part in page

"""The results of `benchmarks/training_bugs`, and their tables in the documentation."""

from __future__ import annotations

import json

import pytest

from benchmarks.common import RESULTS
from benchmarks.training_bugs import bugs, clean, further, page

FACTS = json.loads((RESULTS / "training-bugs.json").read_text("utf-8"))
INVARIANTS = json.loads((RESULTS / "inferred-invariants.json").read_text("utf-8"))


def test_the_page_has_the_tables_of_the_last_measurements() -> None:
    text = page.PAGE.read_text("utf-8")
    assert page.filled(text, FACTS) == text
    assert page.with_invariants(text, INVARIANTS) == text


def test_the_last_measurement_has_every_program_and_the_page_has_a_row_of_each() -> None:
    text = page.PAGE.read_text("utf-8")
    for group, names in (("bugs", bugs.BUGS), ("further", further.BUGS), ("clean", clean.PROGRAMS)):
        assert [*FACTS[group]] == [*names]
        assert group == "further" or [*INVARIANTS[group]] == [*names]
        assert all(f"\n| {name} |" in text or f"\n| [{name}]" in text for name in names)


def test_a_row_keeps_its_name_and_gets_the_result() -> None:
    head = "## Further errors\n\n"
    row = "| [trl-1625](link): a title | silent |"
    result = FACTS["further"]["trl-1625"]
    changed = {**result, "step": 7, "steps_after": 2, "false_alarms": ["a"], "named_when_fixed": 1}
    found = page.filled(head + row, {"further": {"trl-1625": changed}})
    finding = "[`training.padding`](findings/training.padding.md), `padding-in-loss`"
    assert found == f"{head}| [trl-1625](link): a title | named | {finding} | 7 | 2 | 2 |"


@pytest.mark.parametrize("heading", ["## Generations", "# Further errors"])
def test_tables_below_other_headings_stay(heading: str) -> None:
    text = f"{heading}\n| trl-1625 | x |"
    assert page.filled(text, FACTS) == text


def test_every_error_is_named_within_two_steps_and_no_correct_program_has_an_alarm() -> None:
    for one in (*FACTS["bugs"].values(), *FACTS["further"].values()):
        assert (one["score"], one["false_alarms"], one["named_when_fixed"]) == ("named", [], 0)
        assert one["steps_after"] <= 2
    assert not any(one["false_alarms"] for one in FACTS["clean"].values())

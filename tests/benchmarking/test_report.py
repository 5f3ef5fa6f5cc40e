"""The page of the benchmarks is what its generator writes from the results."""

from __future__ import annotations

from benchmarks.common import RESULTS
from benchmarks.report import PAGE, QUESTIONS, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m benchmarks.report"


def test_every_question_has_its_own_result() -> None:
    results = [question.result for question in QUESTIONS]
    assert len(results) == len(set(results))
    assert all((RESULTS / f"{name}.json").is_file() for name in results)

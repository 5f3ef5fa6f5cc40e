"""Majority, flags, whose token won, and the comparison of methods, on results made by hand."""

from __future__ import annotations

import pytest

from flexinspect.core.errors import UsageError
from flexinspect.lab.agreement import majority_vote, sample_flags, token_shares
from flexinspect.lab.lab_result import (
    AloneAnswer,
    LabResult,
    MethodAnswer,
    OrderAnswer,
    OwnChoice,
    TokenVote,
)
from flexinspect.lab.method_comparison import PairedTest, compare
from flexinspect.lab.scoring import Lemmatizer, rule_lemmas
from flexinspect.lab.settings import parse_counts, parse_methods
from flexinspect.lab.traced_samples import traced_samples

RULES = Lemmatizer("rules", rule_lemmas)


def result(
    index: int, alone: list[str], flex: str, *, expected: str = "a", orders: tuple[str, ...] = ()
) -> LabResult:
    n = len(alone)
    return LabResult(
        index=index,
        sample_id=f"s{index}",
        expected=(expected,) if expected else (),
        alone=tuple(AloneAnswer(text, "eos", -1.0) for text in alone),
        answers=(MethodAnswer("flex", n, flex, "eos"),),
        orders=tuple(OrderAnswer(tuple(reversed(range(n))), text) for text in orders),
    )


def flags(one: LabResult, method: str = "flex") -> list[str]:
    found = sample_flags(one, method, len(one.alone))
    assert found is not None
    return found.texts()


def test_the_majority_ignores_case_and_a_tie_goes_to_the_first_paraphrase() -> None:
    vote = majority_vote(["Rome", "paris", "Paris."])
    assert (vote.text, vote.n_votes, vote.is_tie) == ("paris", 2, False)
    tie = majority_vote(["c", "b", "b", "c", "a"])
    assert (tie.text, tie.n_votes, tie.n, tie.is_tie) == ("c", 2, 5, True)


def test_flags_say_what_an_answer_equals() -> None:
    assert flags(result(0, ["a", "a", "b"], "A")) == ["equals majority (2 of 3)"]
    assert flags(result(0, ["a", "a", "b"], "b")) == ["follows paraphrase 3"]
    assert flags(result(0, ["a", "b", "b", "a"], "a")) == ["follows paraphrases 1, 4"]
    assert flags(result(0, ["a", "a", "b"], "c")) == ["follows no paraphrase"]
    moved = result(0, ["a", "a", "b"], "b", orders=("a", "b"))
    assert flags(moved) == ["follows paraphrase 3", "order-dependent (1 of 2 other orders)"]
    assert flags(moved, "majority") == ["equals majority (2 of 3)"]


def vote(own: list[tuple[float, float]]) -> TokenVote:
    choices = tuple(OwnChoice(p, "t", best) for p, best in own)
    return TokenVote(1, "t", 0.5, choices)


def test_disputed_tokens_are_won_by_the_paraphrase_that_gives_them_most() -> None:
    votes = (
        vote([(0.9, 0.9), (0.8, 0.8), (0.7, 0.7)]),  # all three would choose it
        vote([(0.1, 0.9), (0.8, 0.8), (0.7, 0.7)]),  # two would; the second the most
        vote([(0.1, 0.9), (0.3, 0.5), (0.7, 0.7)]),  # one would
        vote([(0.4, 0.5), (0.3, 0.5), (0.2, 0.7)]),  # nobody's own choice
    )
    shares = token_shares([MethodAnswer("avg", 3, "t", "eos", votes)], 3)
    kinds = (shares.n_unanimous, shares.n_majority, shares.n_minority, shares.n_nobody)
    assert (shares.n, kinds, shares.wins) == (4, (1, 1, 1, 1), (1, 1, 1))


def test_methods_are_compared_on_the_same_samples() -> None:
    results = [
        *(result(k, ["a", "a", "b"], "a") for k in range(6)),
        *(result(k, ["b", "b", "a"], "a") for k in range(6, 11)),
        result(11, ["a", "a", "a"], "b"),
        LabResult(index=12, sample_id="s12", error="no memory"),
    ]
    found = compare(results, ["flex", "per-prompt", "majority"], [3], RULES)
    assert (found.n, found.n_scored, found.n_failed, found.lemmatizer) == (12, 12, 1, "rules")
    scores = {one.method: one for one in found.scores}
    assert scores["flex"].exact.value == 11 / 12
    assert scores["flex"].interval == "Wilson"
    assert scores["majority"].exact.value == 7 / 12
    per_prompt = (6 * 2 + 5 * 1 + 3) / 36
    assert scores["per-prompt"].exact.value == pytest.approx(per_prompt)
    assert scores["per-prompt"].interval == "bootstrap"
    test = next(one for one in found.tests if one.second == "majority" and one.score == "exact")
    assert isinstance(test, PairedTest)
    assert (test.first, test.only_first, test.only_second) == ("flex", 5, 1)
    assert test.p == 2 * (1 + 6) / 64
    assert test.p_adjusted == test.p  # the only pair with a p-value
    assert test.difference.value == pytest.approx(4 / 12)
    untested = next(one for one in found.tests if one.second == "per-prompt")
    assert (untested.p, untested.p_adjusted) == (None, None)
    assert [one.method for one in found.flags] == ["flex", "majority"]
    flex = next(one for one in found.flags if one.method == "flex")
    assert (flex.n, flex.n_majority, flex.n_paraphrase, flex.n_none) == (12, 6, 5, 1)


def test_a_mean_over_paraphrases_has_no_p_value_even_where_all_agree() -> None:
    results = [result(k, ["ab"[k % 2]] * 3, "a") for k in range(6)]
    found = compare(results, ["flex", "per-prompt", "majority"], [3], RULES)
    exact = {(one.first, one.second): one.p for one in found.tests if one.score == "exact"}
    assert exact["flex", "per-prompt"] is exact["per-prompt", "majority"] is None
    assert exact["flex", "majority"] == 2 / 2**3


def test_samples_without_expected_answers_are_compared_but_not_scored() -> None:
    found = compare([result(0, ["a", "b"], "a", expected="")], ["flex", "majority"], [2], RULES)
    assert (found.n, found.n_scored, found.scores, found.tests) == (1, 0, (), ())
    assert found.flags[0].n == 1


def test_traces_are_chosen_by_number_or_by_what_was_answered() -> None:
    right, wrong = result(3, ["a", "b"], "a"), result(4, ["a", "b"], "b")
    split = result(5, ["a"], "a")
    both = (*split.answers, MethodAnswer("avg", 1, "b", "eos"))
    split = LabResult(index=5, sample_id="s", expected=("a",), answers=both)
    chosen = {
        choice: [traced_samples(choice)(one) for one in (right, wrong, split)]
        for choice in ("none", "all", "wrong", "disagree", "0,3-4")
    }
    assert chosen == {
        "none": [False, False, False],
        "all": [True, True, True],
        "wrong": [False, True, False],
        "disagree": [False, False, True],
        "0,3-4": [True, True, False],
    }
    with pytest.raises(UsageError, match="--traces some"):
        traced_samples("some")


@pytest.mark.parametrize(
    ("text", "counts"), [("5", (5,)), ("1-5", (1, 2, 3, 4, 5)), ("5,1,3", (1, 3, 5))]
)
def test_numbers_of_paraphrases(text: str, counts: tuple[int, ...]) -> None:
    assert parse_counts(text) == counts


@pytest.mark.parametrize("text", ["", "0", "5-1", "a", "1-", "-3", "1000"])
def test_what_is_no_number_of_paraphrases_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--num-paraphrases"):
        parse_counts(text)


def test_methods_keep_one_order_and_an_unknown_one_is_refused() -> None:
    assert parse_methods("majority, flex,per_prompt") == ("flex", "per-prompt", "majority")
    with pytest.raises(UsageError, match="no method 'mean'") as caught:
        parse_methods("flex,mean")
    assert "weighted_avg" in str(caught.value.hint)

"""The comparison of methods over all samples: accuracies with intervals, and paired tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.lab import significance
from flexinspect.lab.agreement import TokenShares, answer_of, sample_flags, token_shares
from flexinspect.lab.lab_result import LabResult
from flexinspect.lab.scoring import Lemmatizer, is_exact_match
from flexinspect.lab.settings import FLEX, FUSING, PER_PROMPT
from flexinspect.lab.significance import Floats, Interval

Judge = Callable[[str, Iterable[str]], bool]

SCORES = ("exact", "lemma")


class MethodScore(Struct, frozen=True):
    """The accuracy of a method with `count` paraphrases, over `n` samples with expected answers.

    That of per-prompt is the mean over its paraphrases. `interval` says how the intervals were
    made: "Wilson", or "bootstrap" over samples for means.
    """

    method: str
    count: int
    n: int
    exact: Interval
    lemma: Interval
    interval: str


class PairedTest(Struct, frozen=True):
    """Two methods on the same samples, judged by `score`.

    `only_first` and `only_second` are the samples that only one of them answers right. `difference`
    is the first's accuracy minus the second's, with a bootstrap interval over samples. `p` is
    McNemar's exact test, `p_adjusted` the same by Holm's method over all pairs of the score. Both
    are None for a pair with a mean over paraphrases, which is not right or wrong on a sample; the
    two numbers then count samples where one is more right.
    """

    first: str
    second: str
    score: str
    only_first: int
    only_second: int
    difference: Interval
    p: float | None
    p_adjusted: float | None = None


class FlagCounts(Struct, frozen=True):
    """How many answers of a method equal the majority, some paraphrase, or none; of `n`.

    `n_ordered` of them were repeated in other orders, and `n_order_dependent` then changed.
    """

    method: str
    n: int
    n_majority: int
    n_paraphrase: int
    n_none: int
    n_ordered: int
    n_order_dependent: int


class MethodComparison(Struct, frozen=True):
    """All that the results say; tests, flags and tokens are for the most paraphrases.

    `n` samples were answered, `n_scored` of them have expected answers, `n_failed` have an error.
    `lemmatizer` made the lemmas. `tokens` has an entry for each method that fuses.
    """

    n: int
    n_scored: int
    n_failed: int
    lemmatizer: str
    count: int
    scores: tuple[MethodScore, ...] = ()
    tests: tuple[PairedTest, ...] = ()
    flags: tuple[FlagCounts, ...] = ()
    tokens: tuple[tuple[str, TokenShares], ...] = ()
    seconds: tuple[tuple[str, float], ...] = ()


def compare(
    results: Sequence[LabResult],
    methods: Sequence[str],
    counts: Sequence[int],
    lemmatizer: Lemmatizer,
) -> MethodComparison:
    """Compare methods over results; those with an error are counted and left out."""
    answered = [one for one in results if not one.error]
    scored = [one for one in answered if one.expected]
    judges: dict[str, Judge] = {"exact": is_exact_match, "lemma": lemmatizer.is_match}
    right = {
        (method, count): {name: _right(scored, method, count, judges[name]) for name in SCORES}
        for count in counts
        for method in methods
    }
    scores = tuple(_score(*key, values) for key, values in right.items()) if scored else ()
    count = counts[-1]
    series = {method: right[method, count] for method in methods}
    return MethodComparison(
        n=len(answered),
        n_scored=len(scored),
        n_failed=len(results) - len(answered),
        lemmatizer=lemmatizer.name,
        count=count,
        scores=scores,
        tests=tuple(_tests(series, count)) if scored else (),
        flags=tuple(_flag_counts(answered, one, count) for one in methods if one != PER_PROMPT),
        tokens=tuple(_tokens(answered, methods, count)),
        seconds=tuple(_seconds(answered).items()),
    )


def _right(results: Sequence[LabResult], method: str, count: int, judge: Judge) -> Floats:
    """Return how right a method is on each sample, (n,): 0 or 1, or the share of paraphrases."""
    if method == PER_PROMPT:
        shares = (
            [judge(one.text, result.expected) for one in result.alone[:count]] for result in results
        )
        return np.array([np.mean(share) for share in shares], np.float64)
    texts = (answer_of(result, method, count) or "" for result in results)
    pairs = zip(texts, results, strict=True)
    return np.array([judge(text, result.expected) for text, result in pairs], np.float64)


def _is_mean(method: str, count: int) -> bool:
    return method == PER_PROMPT and count > 1


def _score(method: str, count: int, values: dict[str, Floats]) -> MethodScore:
    is_mean = _is_mean(method, count)
    exact, lemma = (
        significance.bootstrap_interval(values[name])
        if is_mean
        else significance.wilson_interval(int(values[name].sum()), len(values[name]))
        for name in SCORES
    )
    interval = "bootstrap" if is_mean else "Wilson"
    return MethodScore(method, count, len(values["exact"]), exact, lemma, interval)


def _tests(series: dict[str, dict[str, Floats]], count: int) -> Iterable[PairedTest]:
    """Yield the tests of all pairs of methods with `count` paraphrases."""
    for score in SCORES:
        found = [
            _test(pair, score, count, series[pair[0]][score], series[pair[1]][score])
            for pair in combinations(series, 2)
        ]
        tested = [one for one in found if one.p is not None]
        adjusted = significance.holm_adjusted([one.p for one in tested if one.p is not None])
        by_pair = {(one.first, one.second): p for one, p in zip(tested, adjusted, strict=True)}
        for one in found:
            yield replace(one, p_adjusted=by_pair.get((one.first, one.second)))


def _test(
    pair: tuple[str, str], score: str, count: int, of_first: Floats, of_second: Floats
) -> PairedTest:
    difference = of_first - of_second
    only_first, only_second = int((difference > 0).sum()), int((difference < 0).sum())
    interval = significance.bootstrap_interval(difference)
    has_mean = any(_is_mean(method, count) for method in pair)
    p = None if has_mean else significance.mcnemar_exact(only_first, only_second)
    return PairedTest(*pair, score, only_first, only_second, interval, p)


def _flag_counts(results: Sequence[LabResult], method: str, count: int) -> FlagCounts:
    flags = [one for one in (sample_flags(each, method, count) for each in results) if one]
    kinds = [one.kind for one in flags]
    return FlagCounts(
        method=method,
        n=len(flags),
        n_majority=kinds.count("majority"),
        n_paraphrase=kinds.count("paraphrase"),
        n_none=kinds.count("none"),
        n_ordered=sum(one.n_orders > 0 for one in flags),
        n_order_dependent=sum(one.n_differ > 0 for one in flags),
    )


def _tokens(
    results: Sequence[LabResult], methods: Sequence[str], count: int
) -> Iterable[tuple[str, TokenShares]]:
    for method in methods:
        if method in (FLEX, *FUSING):
            wanted = (method, count)
            answers = (
                answer
                for result in results
                for answer in result.answers
                if (answer.method, answer.count) == wanted
            )
            yield method, token_shares(answers, count)


def _seconds(results: Sequence[LabResult]) -> dict[str, float]:
    """Return the seconds of each part, added up over samples."""
    total: dict[str, float] = {}
    for result in results:
        for name, value in result.seconds.items():
            total[name] = total.get(name, 0.0) + value
    return {name: round(value, 3) for name, value in total.items()}

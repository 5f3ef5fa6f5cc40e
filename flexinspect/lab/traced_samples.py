"""Which samples of the laboratory get a trace: by number, or by what the methods answered."""

from __future__ import annotations

from collections.abc import Callable

from flexinspect.lab.lab_result import LabResult
from flexinspect.lab.scoring import is_exact_match, normalized
from flexinspect.lab.settings import FLEX, listed_samples


def traced_samples(traces: str) -> Callable[[LabResult], bool]:
    """Return which samples get a trace. Raises `UsageError` for another choice."""
    choices: dict[str, Callable[[LabResult], bool]] = {
        "none": lambda _: False,
        "all": lambda _: True,
        "wrong": _is_wrong,
        "disagree": _disagrees,
    }
    if traces in choices:
        return choices[traces]
    ranges = listed_samples(traces)
    return lambda result: any(result.index in one for one in ranges)


def _is_wrong(result: LabResult) -> bool:
    """Whether the answer of flex to all paraphrases is not an expected one."""
    flex = [one for one in result.answers if one.method == FLEX]
    return bool(flex and result.expected) and not is_exact_match(flex[-1].text, result.expected)


def _disagrees(result: LabResult) -> bool:
    """Whether the methods give different answers to all paraphrases."""
    count = max((one.count for one in result.answers), default=0)
    texts = {normalized(one.text) for one in result.answers if one.count == count}
    return len(texts) > 1

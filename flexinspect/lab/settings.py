"""What a laboratory run is to do, as plain data that can be pickled and compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from flexinspect.core.errors import UsageError
from flexinspect.core.text import did_you_mean
from flexinspect.records.job import Job

FLEX, PER_PROMPT, MAJORITY = "flex", "per-prompt", "majority"
FUSING = ("avg", "max", "weighted_avg", "weighted_max")
"""Methods that fuse the distributions of the paraphrases' own prompts at each token."""
METHODS = (FLEX, PER_PROMPT, *FUSING, MAJORITY)

TRACE_CHOICES = ("none", "wrong", "disagree", "all")
MAX_PARAPHRASES = 5
_OF_RUN = ("out", "max_samples", "threads", "argv", "overwrite", "control", "num_paraphrases")
"""Fields of a job that change no result."""


class LabSettings(Struct, frozen=True, kw_only=True):
    """One laboratory run: the generation's settings, the methods, and the numbers of paraphrases.

    `job` has the model, the dataset, the mask and the decoding. `counts` are the numbers of
    paraphrases, ascending. `orders` is how many other orders of the paraphrases are tried.
    `traces` is an entry of `TRACE_CHOICES` or samples as "0,3-5"; they go to `folder`.
    """

    job: Job
    methods: tuple[str, ...] = METHODS
    counts: tuple[int, ...] = (MAX_PARAPHRASES,)
    orders: int = 2
    traces: str = "none"
    folder: str = ""

    def compared(self) -> dict[str, Any]:
        """Return the settings that the results depend on, for the header of their file."""
        settings: dict[str, Any] = msgspec.to_builtins(self)
        del settings["folder"], settings["traces"]
        for name in _OF_RUN:
            del settings["job"][name]
        return settings


def parse_methods(text: str) -> tuple[str, ...]:
    """Return methods from "flex,avg" or "all", in the order of `METHODS`. Raises `UsageError`."""
    if text.strip() == "all":
        return METHODS
    given = [part.strip().replace("per_prompt", PER_PROMPT) for part in text.split(",")]
    for name in given:
        if name not in METHODS:
            known = f"The methods are {', '.join(METHODS)}."
            hint = f"{did_you_mean(name, METHODS)} {known}".lstrip()
            raise UsageError(f"There is no method {name!r}.", hint=hint)
    return tuple(name for name in METHODS if name in given)


def parse_counts(text: str) -> tuple[int, ...]:
    """Return numbers of paraphrases from "5", "1-5" or "1,3,5". Raises `UsageError`."""
    counts: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,3})(?:\s*-\s*(\d{1,3}))?\s*", part)
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            what = f"--num-paraphrases {text} is not a number of paraphrases."
            raise UsageError(what, hint="Write 5, 1-5 or 1,3,5.")
        counts.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(counts))


def check_traces(text: str, methods: Sequence[str]) -> None:
    """Raise `UsageError` for a choice of traces that cannot be made."""
    if text not in TRACE_CHOICES:
        listed_samples(text)
    if text != "none" and FLEX not in methods:
        what = "--traces records the answers of flex, which is not among the methods."
        raise UsageError(what, hint="Add flex to --methods, or leave --traces out.")


def listed_samples(text: str) -> Sequence[range]:
    """Return the samples of "0,3-5" as ranges. Raises `UsageError`."""
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", part)
        if match is None:
            known = ", ".join(TRACE_CHOICES)
            what = f"--traces {text} is neither one of {known} nor samples."
            raise UsageError(what, hint="Write for instance --traces 0,7 or --traces wrong.")
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranges

"""The names of the language: what each means, of what kind it is, and where it is known."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from flexinspect.findings import Severity
from flexinspect.records import PATHS


class Kind(StrEnum):
    """What a name or a written value is; the words are those of an error."""

    NUMBER = "a number"
    BYTES = "an amount of memory"
    TEXT = "a text"


@dataclass(frozen=True, slots=True)
class Word:
    """A name with a value. `choices` are all the texts that it may be, empty where it is free.

    `of_layers` says that each layer has one of its own; `early` that it is known at an attention
    call already, before the step is over.
    """

    name: str
    kind: Kind
    help: str
    choices: tuple[str, ...] = ()
    of_layers: bool = False
    early: bool = False


_WORDS = (
    Word("entropy", Kind.NUMBER, "entropy of the newest row's distribution, in nats"),
    Word("margin", Kind.NUMBER, "logit of the best token minus the second"),
    Word("prob", Kind.NUMBER, "probability of the chosen token, before processors"),
    Word("logprob", Kind.NUMBER, "its natural logarithm"),
    Word("rank", Kind.NUMBER, "rank of the chosen token; 0 is the best"),
    Word("token", Kind.TEXT, "the text that the chosen token adds"),
    Word("token_id", Kind.NUMBER, "the id of the chosen token"),
    Word("step", Kind.NUMBER, "the step; 0 is the prompt", early=True),
    Word("phase", Kind.TEXT, "prefill or decode", ("prefill", "decode"), early=True),
    Word("generation", Kind.NUMBER, "the generation, from 0", early=True),
    Word("branch", Kind.NUMBER, "the branch, 0 for the base", early=True),
    Word("q_len", Kind.NUMBER, "rows that the step, or the layer's call, computes", early=True),
    Word("kv_len", Kind.NUMBER, "keys that its rows may see, these rows included", early=True),
    Word("wall_ms", Kind.NUMBER, "how long the step took, in milliseconds"),
    Word("rss", Kind.BYTES, "memory of the process"),
    Word("kv_cache", Kind.BYTES, "memory of the KV cache"),
    Word("cuda_allocated", Kind.BYTES, "GPU memory in use"),
    Word("cuda_reserved", Kind.BYTES, "GPU memory that torch holds"),
    Word("cuda_peak", Kind.BYTES, "its highest so far"),
    Word("layer", Kind.NUMBER, "the layer, from 0", of_layers=True, early=True),
    Word("path", Kind.TEXT, "how the layer's attention ran", PATHS, of_layers=True, early=True),
    Word("gate", Kind.NUMBER, "how far the attention mass is from 1", of_layers=True),
    Word("norm", Kind.NUMBER, "norm of the layer's output", of_layers=True),
    Word("std", Kind.NUMBER, "standard deviation of the layer's output", of_layers=True),
    Word("mean", Kind.NUMBER, "mean of the layer's output", of_layers=True),
    Word("min", Kind.NUMBER, "smallest value of the layer's output", of_layers=True),
    Word("max", Kind.NUMBER, "largest value of the layer's output", of_layers=True),
)
WORDS = {word.name: word for word in _WORDS}

NAN, INF, EMPTY_ROW, FALLBACK = "nan", "inf", "empty-row", "fallback"
SIGHTS = {
    NAN: "a NaN: in a layer's output or the logits, or @ modules of this name",
    INF: "an infinity, in the same places",
    EMPTY_ROW: "a row of attention that sees no key",
    FALLBACK: "an attention call that left FlexAttention",
}
"""Conditions by themselves: something was seen, anywhere or @ modules of a name."""

FINDING = "finding"
FINDING_HELP = "a finding that is new in this step: finding mask.*, finding * >= warning"
SEVERITIES = tuple(severity.value for severity in Severity)

COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
KEYWORDS = ("and", "or", "not", "in")
NAMES = (*WORDS, *SIGHTS, FINDING)

UNITS = {
    "B": 1,
    "kB": 1000,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
}

OPTIONS = {
    "hits=": "stop from this hit on, for instance hits=3",
    "ignore=": "pass over so many hits first, for instance ignore=10",
    "once": "stop once, then switch off",
    "log": "record an event instead of stopping",
    "off": "begin switched off",
}

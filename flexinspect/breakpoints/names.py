"""The names of the expression language: their meaning, their kind, and when they are known."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from flexinspect.records.finding import Severity
from flexinspect.records.step import PATHS


class ValueKind(StrEnum):
    """Kind of a name or a constant; the values are used in error messages."""

    NUMBER = "a number"
    BYTES = "an amount of memory"
    TEXT = "a text"


@dataclass(frozen=True, slots=True)
class ValueName:
    """A name with a value. `choices` lists all values of a text; it is empty for a free text."""

    name: str
    kind: ValueKind
    help: str
    choices: tuple[str, ...] = ()


_NUMBER, _BYTES, _TEXT = ValueKind
_VALUE_NAMES = (
    ValueName("entropy", _NUMBER, "entropy of the newest row's distribution, in nats"),
    ValueName("margin", _NUMBER, "logit of the best token minus the second"),
    ValueName("prob", _NUMBER, "probability of the chosen token, before processors"),
    ValueName("logprob", _NUMBER, "its natural logarithm"),
    ValueName("rank", _NUMBER, "rank of the chosen token; 0 is the best"),
    ValueName("token", _TEXT, "the text that the chosen token adds"),
    ValueName("token_id", _NUMBER, "the id of the chosen token"),
    ValueName("step", _NUMBER, "the step; 0 is the prompt"),
    ValueName("phase", _TEXT, "prefill or decode", ("prefill", "decode")),
    ValueName("generation", _NUMBER, "the generation, from 0"),
    ValueName("branch", _NUMBER, "the branch, 0 for the base"),
    ValueName("q_len", _NUMBER, "rows that the step, or the layer's attention call, computes"),
    ValueName("kv_len", _NUMBER, "keys that these rows may attend to, including themselves"),
    ValueName("wall_ms", _NUMBER, "duration of the step, in milliseconds"),
    ValueName("rss", _BYTES, "memory of the process"),
    ValueName("kv_cache", _BYTES, "memory of the KV cache"),
    ValueName("cuda_allocated", _BYTES, "GPU memory in use"),
    ValueName("cuda_reserved", _BYTES, "GPU memory reserved by torch"),
    ValueName("cuda_peak", _BYTES, "peak of GPU memory in use"),
    ValueName("layer", _NUMBER, "the layer, from 0"),
    ValueName("path", _TEXT, "how the layer's attention ran", PATHS),
    ValueName("gate", _NUMBER, "distance of the attention sum from 1 (LSE check)"),
    ValueName("norm", _NUMBER, "norm of the layer's output"),
    ValueName("std", _NUMBER, "standard deviation of the layer's output"),
    ValueName("mean", _NUMBER, "mean of the layer's output"),
    ValueName("min", _NUMBER, "smallest value of the layer's output"),
    ValueName("max", _NUMBER, "largest value of the layer's output"),
)
VALUE_NAMES = {word.name: word for word in _VALUE_NAMES}

PER_LAYER_NAMES = ("layer", "path", "gate", "norm", "std", "mean", "min", "max")
"""Names of which each layer has its own value."""

NAN, INF, EMPTY_ROW, FALLBACK = "nan", "inf", "empty-row", "fallback"
OBSERVATIONS = {
    NAN: "a NaN in a layer's output or the logits, or @ modules whose name matches",
    INF: "an infinity, in the same places",
    EMPTY_ROW: "a row that attends to no key",
    FALLBACK: "an attention call that fell back from FlexAttention",
}
"""Conditions without a comparison: something was observed, anywhere or @ modules of a name."""

FINDING = "finding"
FINDING_HELP = "a finding that is new in this step: finding mask.*, finding * >= warning"
SEVERITIES = tuple(severity.value for severity in Severity)

COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
KEYWORDS = ("and", "or", "not", "in")
ALL_NAMES = (*VALUE_NAMES, *OBSERVATIONS, FINDING)

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

OPTION_HELP = {
    "hits=": "stop from this hit on, for example hits=3",
    "ignore=": "ignore this many hits first, for example ignore=10",
    "once": "stop once, then disable it",
    "log": "record an event instead of stopping",
    "off": "add it disabled",
}

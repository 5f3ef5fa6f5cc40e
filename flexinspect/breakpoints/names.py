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
    """A name with a value. `choices` lists all values of a text; it is empty for a free text.

    `is_per_layer`: each layer has its own value. `is_known_at_call`: it is known at an attention
    call, before the step ends.
    """

    name: str
    kind: ValueKind
    help: str
    choices: tuple[str, ...] = ()
    is_per_layer: bool = False
    is_known_at_call: bool = False


_VALUE_NAMES = (
    ValueName("entropy", ValueKind.NUMBER, "entropy of the newest row's distribution, in nats"),
    ValueName("margin", ValueKind.NUMBER, "logit of the best token minus the second"),
    ValueName("prob", ValueKind.NUMBER, "probability of the chosen token, before processors"),
    ValueName("logprob", ValueKind.NUMBER, "its natural logarithm"),
    ValueName("rank", ValueKind.NUMBER, "rank of the chosen token; 0 is the best"),
    ValueName("token", ValueKind.TEXT, "the text that the chosen token adds"),
    ValueName("token_id", ValueKind.NUMBER, "the id of the chosen token"),
    ValueName("step", ValueKind.NUMBER, "the step; 0 is the prompt", is_known_at_call=True),
    ValueName(
        "phase", ValueKind.TEXT, "prefill or decode", ("prefill", "decode"), is_known_at_call=True
    ),
    ValueName("generation", ValueKind.NUMBER, "the generation, from 0", is_known_at_call=True),
    ValueName("branch", ValueKind.NUMBER, "the branch, 0 for the base", is_known_at_call=True),
    ValueName(
        "q_len",
        ValueKind.NUMBER,
        "rows that the step, or the layer's attention call, computes",
        is_known_at_call=True,
    ),
    ValueName(
        "kv_len",
        ValueKind.NUMBER,
        "keys that these rows may attend to, including themselves",
        is_known_at_call=True,
    ),
    ValueName("wall_ms", ValueKind.NUMBER, "duration of the step, in milliseconds"),
    ValueName("rss", ValueKind.BYTES, "memory of the process"),
    ValueName("kv_cache", ValueKind.BYTES, "memory of the KV cache"),
    ValueName("cuda_allocated", ValueKind.BYTES, "GPU memory in use"),
    ValueName("cuda_reserved", ValueKind.BYTES, "GPU memory reserved by torch"),
    ValueName("cuda_peak", ValueKind.BYTES, "peak of GPU memory in use"),
    ValueName(
        "layer", ValueKind.NUMBER, "the layer, from 0", is_per_layer=True, is_known_at_call=True
    ),
    ValueName(
        "path",
        ValueKind.TEXT,
        "how the layer's attention ran",
        PATHS,
        is_per_layer=True,
        is_known_at_call=True,
    ),
    ValueName(
        "gate",
        ValueKind.NUMBER,
        "distance of the attention sum from 1 (LSE check)",
        is_per_layer=True,
    ),
    ValueName("norm", ValueKind.NUMBER, "norm of the layer's output", is_per_layer=True),
    ValueName(
        "std", ValueKind.NUMBER, "standard deviation of the layer's output", is_per_layer=True
    ),
    ValueName("mean", ValueKind.NUMBER, "mean of the layer's output", is_per_layer=True),
    ValueName("min", ValueKind.NUMBER, "smallest value of the layer's output", is_per_layer=True),
    ValueName("max", ValueKind.NUMBER, "largest value of the layer's output", is_per_layer=True),
)
VALUE_NAMES = {word.name: word for word in _VALUE_NAMES}

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

"""The correct generations that are drawn: axes, their values, and which do not go together.

A case is drawn from the product of all axes by its seed alone. Combinations that this table knows
to be no correct program are drawn again, and so are those that transformers itself refuses: each
further attempt of a seed is another case.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct

ENCODERS = ("t5", "bart")
"""Families with an encoder."""
WINDOWED = ("gemma2", "gemma3", "gpt_oss")
"""Families that always have layers with a window; it is wide unless the mask is `sliding`."""
WITH_WINDOW = (*WINDOWED, "mistral", "mixtral", "qwen2", "qwen3", "phi3")
"""Families that can have layers with a window."""
BY_FLEX = ("isolated", "fused")
"""Masks of a prompt with segments, which FlexAttention applies; see `declarations`."""

QUANTISED = ("quanto", "hqq", "fp8")
"""Caches with smaller keys; the first two need a package each."""
_FREQUENT = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "olmo2", "gpt2", "gpt_neox")
_RARE = ("gemma2", "falcon", "gpt_oss", "mixtral")
AXES: Mapping[str, Mapping[str | int, int]] = {
    "family": {
        **dict.fromkeys(_FREQUENT, 2),
        **dict.fromkeys(_RARE, 3),
        "bamba": 6,
        "t5": 12,
        "bart": 12,
    },
    "mask": {"none": 3, "causal": 3, "sliding": 3, "isolated": 12, "fused": 12},
    "declared": {"no": 2, "yes": 3},
    "kernel": {"sdpa": 3, "eager": 4, "flex": 2},
    "cache": {
        "dynamic": 4,
        "static": 3,
        "sliding": 5,
        "none": 2,
        "quanto": 1,
        "hqq": 1,
        "fp8": 1,
        "paged": 4,
    },
    "loop": {"generate": 2, "own": 3},
    "choice": {
        "greedy": 4,
        "sampling": 3,
        "several": 2,
        "beams": 3,
        "beam-sampling": 2,
        "assisted": 10,
        "lookup": 10,
    },
    "batch": {1: 3, 2: 3, 3: 2, 4: 2},
    "padding": {"none": 2, "left": 4, "right": 5},
    "dtype": {"float32": 2, "bfloat16": 1, "float16": 1},
    "adapter": {"none": 6, "by-hand": 1, "merged": 1, "peft": 1},
    "placement": {"plain": 8, "dispatched": 1, "sharded-file": 1},
}
"""The values of each axis, with weights that make up for combinations that do not exist.

Offloaded caches are not among them: transformers needs CUDA for these.
"""


class Case(Struct, frozen=True):
    """One correct generation: a value of each axis."""

    family: str
    mask: str
    declared: str
    kernel: str
    cache: str
    loop: str
    choice: str
    batch: int
    padding: str
    dtype: str
    adapter: str
    placement: str


def draw(seed: int, attempt: int = 0) -> Case:
    """Return the case of a seed; each attempt draws another one."""
    rng = random.Random(f"{seed}/{attempt}")
    while True:
        drawn = {
            name: rng.choices(list(values), list(values.values()))[0]
            for name, values in AXES.items()
        }
        case = msgspec.convert(drawn, Case)
        if not any(is_wrong(case) for is_wrong in IMPOSSIBLE):
            return case


def _segments(case: Case) -> bool:
    by_flex = case.mask in BY_FLEX
    plain = case.kernel == "flex" and case.padding == "none" and case.loop == "own"
    is_plain = plain and case.family not in (*ENCODERS, "bamba", *WINDOWED)
    return (by_flex and not is_plain) or (case.declared == "yes" and not by_flex)


def _encoder(case: Case) -> bool:
    if case.family not in ENCODERS:
        return False
    is_odd = case.mask != ("none" if case.padding == "none" else "causal")
    return is_odd or case.loop == "own" or case.kernel == "flex"


def _masks(case: Case) -> bool:
    without_window = case.mask == "sliding" and case.family not in WITH_WINDOW
    # Without the mask of a padded batch, padding is read.
    return without_window or (case.padding != "none" and case.mask == "none")


def _kernels(case: Case) -> bool:
    # The program's own kernel knows neither soft caps nor sinks.
    if case.family in ("gemma2", "gpt_oss"):
        return case.kernel != "eager"
    return case.kernel == "flex" and case.cache == "paged"


def _padding(case: Case) -> bool:
    if case.padding != "none" and case.batch == 1:
        return True
    # A sequence goes on behind its padding only if the program says where each row stands.
    is_own = case.loop == "own" or case.family in ENCODERS
    # A window over the slots of a cache counts the padding in it.
    has_gap = case.cache != "none" and case.mask == "sliding" and case.family not in ENCODERS
    return case.padding == "right" and (not is_own or case.family == "bamba" or has_gap)


def _caches(case: Case) -> bool:
    if case.cache == "sliding" and (case.mask != "sliding" or case.loop == "generate"):
        return True
    if case.cache == "paged":
        is_simple = case.choice in ("greedy", "sampling") and case.loop == "generate"
        simple = is_simple and case.padding == "none" and case.mask in ("none", "sliding")
        return not simple or case.family in (*ENCODERS, "bamba")
    if case.family in ENCODERS:
        return case.cache not in ("dynamic", "static", "none")
    has_window = case.mask == "sliding" or case.family in WINDOWED
    if case.cache in QUANTISED and has_window:
        return True  # transformers quantises only layers without a window
    return case.family == "bamba" and case.cache not in ("dynamic", "none")


def _choices(case: Case) -> bool:
    if case.loop == "own":
        return case.choice not in ("greedy", "sampling")
    is_assisted = case.choice in ("assisted", "lookup")
    # The model's own window of keys is lost where rejected keys are cropped.
    return is_assisted and (case.batch > 1 or case.cache != "dynamic" or case.family == "bamba")


def _adapters(case: Case) -> bool:
    has_experts = case.family in ("mixtral", "gpt_oss")
    is_odd = case.family in ("gpt2", "falcon", *ENCODERS, "bamba")
    return case.adapter != "none" and (is_odd or (has_experts and case.adapter == "peft"))


IMPOSSIBLE: Sequence[Callable[[Case], bool]] = (
    *(_segments, _encoder, _masks, _kernels, _padding, _caches, _choices, _adapters),
)
"""Each says whether a case is no correct program, or one that nobody can write."""

"""Plain data, as JSON and TOML have it, with something wrong in it."""

from __future__ import annotations

import random
from typing import Any

LEAVES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**63, 10**30, 1e308, float("inf"), float("nan"), "", [], {}),
    *(
        "x" * 100_000,
        "\x1b[2J\x07",
        "\u202eabc",
        "a\0b",
        "\ud800",
        "{0.__class__}",
        "%s%n",
        "../..",
    ),
    *("/dev/zero", "/proc/self/mem", "((((((a+)+)+)+)+)+)$", "os:system", "a" * 300 + "/b"),
    *(
        [None],
        [[0, 1]],
        [[[]]],
        {"": ""},
        {"a": {"b": []}},
        list(range(5000)),
        ["\x1b[31m"],
        -(2**63),
    ),
)


def changed(value: Any, rng: random.Random) -> Any:
    """Return a copy of plain data with one leaf, key or list changed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        rest = {**value}
        if rng.random() < 0.15:
            rest[str(rng.choice(LEAVES))[:1000]] = rest.pop(key)
        else:
            rest[key] = changed(rest[key], rng)
        return rest
    if isinstance(value, list) and value and rng.random() < 0.8:
        rest_ = [*value]
        at = rng.randrange(len(rest_))
        rest_[at] = changed(rest_[at], rng)
        return rest_ * rng.choice((1, 1, 1, 1000))
    return rng.choice(LEAVES)

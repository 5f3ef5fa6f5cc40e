"""Sentences about weights in another order, or with values that no quantisation gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from flexinspect.core.text import format_layers, printable

_MAX_NAMES = 3
_KINDS = {
    "experts": ("experts", "The router sends tokens to other experts than those it was made for."),
    "neurons": ("neurons", "Each neuron is multiplied by the output weights of another one."),
    "heads": ("heads", "What one head computes is used as that of another one."),
    "rows of heads": (
        "dimensions of the heads",
        "Dimensions of heads that belong together are at different places.",
    ),
    "channels": ("hidden channels", "This weight reads, or writes, each channel as another one."),
    "tokens": ("tokens", "The token that is predicted is read as another one."),
}


def describe_orders(facts: Mapping[str, Any]) -> str:
    """Say which weights have their rows, or columns, in which orders."""
    noun, effect = _KINDS[facts["kind"]]
    first, *others = (_side(one, noun) for one in facts["sides"])
    first = f"The {first[4:]}" if first.startswith("the ") else first
    names = f"{first}; {'; '.join(others)}"
    inverse = " One order is the inverse of the other." if facts["is_inverse"] else ""
    module = ""
    if facts.get("class"):
        module = f" {printable(facts['module'])} is the program's {printable(facts['class'])}."
    return f"{names}.{module}{inverse} {effect}"


def _side(side: Mapping[str, Any], noun: str) -> str:
    listed = [printable(one) for one in side["names"]]
    n = len(listed) - _MAX_NAMES
    names = ", ".join(listed[:_MAX_NAMES]) + (f" and {n} more" if n > 0 else "")
    have = "has its" if len(listed) == 1 and not listed[0].startswith("the ") else "have the"
    if side["is_same"]:
        return f"{names} {have} {noun} in the order in which they were made"
    order = side["order"]
    if order is None:
        moved = ", ".join(f"{old} is now {new}" for old, new in side["moved"] if new >= 0)
        moved = moved or "they are in another part"
        return f"{names} {have} {noun} in another order ({moved})"
    dots = ", ..." if side["n"] > len(order) else ""
    numbers = ", ".join(map(str, order))
    return f"{names} {have} {noun} in the order {numbers}{dots}{_pattern(order)}"


def _pattern(order: Sequence[int]) -> str:
    """Say what an order is, empty if it is no common one."""
    n = len(order)
    if n > 2 and list(order) == [one ^ 1 for one in range(n)]:
        return " (neighbours are exchanged, as by the wrong order of two values in a byte)"
    return " (reversed)" if n > 2 and all(a - b == 1 for a, b in pairwise(order)) else ""


def describe_wrapped(facts: Mapping[str, Any]) -> str:
    """Say how many elements of a weight have the other sign."""
    module = f" ({printable(facts['class'])})" if facts.get("class") else ""
    return (
        f"{printable(facts['name'])}{module} is what it was to within {100 * facts['error']:.2g} % "
        f"of its norm, but {facts['wrapped']} elements in {facts['rows']} of {facts['of_rows']} "
        f"rows, among the largest of their rows, have the other sign: {facts['was']:.3g} became "
        f"{facts['is']:.3g}. Integers that exceed their range wrap around, as 128 becomes -128 in "
        "int8: the scale is too small, or a clamp is missing."
    )


def describe_twice(facts: Mapping[str, Any]) -> str:
    """Say which adapters are merged and still active."""
    where = f" of {format_layers(facts['layers'], 1 << 20)}" if facts["layers"] else ""
    return (
        f"{printable(facts['name'])} ({printable(facts['class'])}){where} still adds its adapter, "
        "whose product was merged into its base weight: the adapter counts twice."
    )


def describe_scaled(facts: Mapping[str, Any]) -> str:
    """Say by which factors a module's weight differs from the one in whose place it is."""
    low, high = (f"{facts[one]:.3g}" for one in ("low", "high"))
    axis = f"each of the {facts['axis']}"
    how = "times a factor" if facts["kind"] == "factor" else "plus a value"
    cause = (
        "nothing else in the layer takes them back, as is right only for factors that were learned"
    )
    if facts["is_sure"]:
        cause = "the integers are right, their scales, zero points or signs are those of others"
    return (
        f"{printable(facts['name'])} was replaced by a {printable(facts['class'])} that multiplies "
        f"by the weight that was made {how} for {axis}, from {low} to {high}, and a small "
        f"error: {cause}."
    )

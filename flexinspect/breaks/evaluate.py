"""Whether an expression holds, under what is known: yes, no, or not known.

"and", "or" and "not" are those of three values (Kleene): what is not known matters only where it
could change the answer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flexinspect.breaks.facts import Facts, Sighting, Value
from flexinspect.breaks.globs import is_finding, is_module
from flexinspect.breaks.tree import (
    And,
    Compare,
    Contains,
    Expression,
    Found,
    Member,
    Name,
    Not,
    Number,
    Operand,
    Or,
    Seen,
    Text,
    is_of_layers,
    sights_in,
    to_text,
)
from flexinspect.breaks.words import INF, NAN, UNITS
from flexinspect.findings import Finding, Severity


@dataclass(frozen=True, slots=True)
class Unknown:
    """Whether it holds cannot be said: these names, or conditions, are not known."""

    missing: tuple[str, ...]

    def __bool__(self) -> bool:
        """What is not known stops nothing."""
        return False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an expression holds, and in which layer (None: it names nothing that layers have)."""

    holds: bool | Unknown
    layer: int | None = None


def evaluate(expression: Expression, facts: Facts) -> bool | Unknown:
    """Return whether an expression holds.

    One that names what each layer has holds if it does so, as a whole, for one of the layers.
    """
    return judge(expression, facts).holds


def judge(expression: Expression, facts: Facts) -> Verdict:
    """Return whether an expression holds, and for which layer."""
    if not is_of_layers(expression):
        return Verdict(_Judge(facts, None).tree(expression))
    if not facts.layers:
        return Verdict(Unknown(("layer",)))
    missing: list[str] = []
    for layer in facts.layers:
        holds = _Judge(facts, layer).tree(expression)
        if holds is True:
            return Verdict(True, layer)
        if isinstance(holds, Unknown):
            missing += holds.missing
    return Verdict(Unknown(tuple(dict.fromkeys(missing))) if missing else False)


_OPS: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class _Judge:
    """Judges a tree for the step as a whole, or for one of its layers."""

    def __init__(self, facts: Facts, layer: int | None) -> None:
        self._facts, self._layer = facts, layer
        own = facts.layers.get(layer, {}) if layer is not None else {}
        self._values = {**facts.values, **own}

    def tree(self, tree: Expression) -> bool | Unknown:
        """Return whether a tree holds."""
        if isinstance(tree, Not):
            inner = self.tree(tree.inner)
            return inner if isinstance(inner, Unknown) else not inner
        if isinstance(tree, And):
            return _joined(map(self.tree, tree.parts), decides=False)
        if isinstance(tree, Or):
            return _joined(map(self.tree, tree.parts), decides=True)
        if isinstance(tree, Seen):
            return self._seen(tree)
        if isinstance(tree, Found):
            return self._found(tree)
        return self._relation(tree)

    def _relation(self, tree: Compare | Member | Contains) -> bool | Unknown:
        if isinstance(tree, Compare):
            left, right = self._value(tree.left), self._value(tree.right)
            if isinstance(left, Unknown):
                return left
            if isinstance(right, Unknown):
                return right
            return _OPS[tree.op](left, right)  # type: ignore[arg-type]  # checked when it was read
        value = self._value(tree.name)
        if isinstance(value, Unknown):
            return value
        if isinstance(tree, Contains):
            return tree.part.value in str(value)
        return value in [self._value(one) for one in tree.values]

    def _value(self, operand: Operand) -> Value | Unknown:
        if isinstance(operand, Name):
            known = self._values.get(operand.name)
            return Unknown((operand.name,)) if known is None else known
        if isinstance(operand, Text):
            return operand.value
        return _amount(operand)

    def _seen(self, tree: Seen) -> bool | Unknown:
        if any(self._is_meant(tree, sighting) for sighting in self._facts.sightings):
            return True
        # A record has the NaNs of layers and logits; those of other modules are looked for by name.
        by_name = tree.place is not None and tree.kind in (NAN, INF)
        wanted = to_text(tree) if by_name else tree.kind
        return False if wanted in self._facts.looked else Unknown((to_text(tree),))

    def _is_meant(self, tree: Seen, sighting: Sighting) -> bool:
        if sighting.kind != tree.kind or self._layer not in (None, sighting.layer):
            return False
        return tree.place is None or is_module(tree.place, sighting.module)

    def _is_here(self, layer: int | None) -> bool:
        return self._layer is None or layer is None or layer == self._layer

    def _found(self, tree: Found) -> bool | Unknown:
        if self._facts.findings is None:
            return Unknown((to_text(tree),))
        return any(self._is_wanted(tree, finding) for finding in self._facts.findings)

    def _is_wanted(self, tree: Found, finding: Finding) -> bool:
        layers = finding.layers or (finding.layer,)
        if not any(map(self._is_here, layers)) or not is_finding(tree.pattern, finding.id):
            return False
        if tree.op is None or tree.severity is None:
            return True
        return _OPS[tree.op](_badness(finding.severity), _badness(Severity(tree.severity)))


def evidence(tree: Seen | Found, facts: Facts, layer: int | None) -> str:
    """Return in words what made a condition true, empty where nothing did."""
    judged = _Judge(facts, layer)
    if isinstance(tree, Seen):
        seen = (one.what for one in facts.sightings if judged._is_meant(tree, one))
        return next(seen, "")
    found = (one for one in facts.findings or () if judged._is_wanted(tree, one))
    return next((f"{one.id}: {one.sentence}" for one in found), "")


def layer_seen(expression: Expression, facts: Facts) -> int | None:
    """Return the layer of the first sighting that an expression asks for, None without one."""
    judged, wanted = _Judge(facts, None), sights_in(expression)
    meant = (one for one in facts.sightings if any(judged._is_meant(seen, one) for seen in wanted))
    return next((one.layer for one in meant if one.layer is not None), None)


def _joined(parts: Iterable[bool | Unknown], *, decides: bool) -> bool | Unknown:
    """Join conditions: one that `decides` settles it, else one that is not known leaves it open."""
    missing: list[str] = []
    for part in parts:
        if isinstance(part, Unknown):
            missing += part.missing
        elif part is decides:
            return decides
    return Unknown(tuple(dict.fromkeys(missing))) if missing else not decides


def _amount(number: Number) -> float:
    return number.value * UNITS[number.unit] if number.unit else number.value


def _badness(severity: Severity) -> int:
    order = list(Severity)
    return len(order) - order.index(severity)

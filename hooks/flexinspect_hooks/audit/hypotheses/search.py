"""Searches the hypothesis that gives a program's numbers at a divergence.

A first forward ends after the layer of the divergence. A hypothesis that agrees there is run to the
end, in that layer alone, from it on, and in all layers; the one that agrees with most of the step
counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from flexinspect_hooks.audit.evidence.audited_sequence import AuditedStep
from flexinspect_hooks.audit.evidence.expert_routing import settle
from flexinspect_hooks.audit.evidence.graph_steps import is_graph_step, read_graph_step
from flexinspect_hooks.audit.evidence.row_comparison import Divergence, RowComparison
from flexinspect_hooks.audit.forward.forward_edits import ForwardEdit, Scope
from flexinspect_hooks.audit.forward.forward_run import (
    HEADS,
    HIDDEN,
    KEY,
    LOGITS,
    QUERY,
    VALUE,
    Point,
    Run,
)
from flexinspect_hooks.audit.hypotheses import Hypothesis, edits_of
from flexinspect_hooks.audit.hypotheses.probe import FaultProbe
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel

MIN_GAIN = 10
"""A hypothesis must come this many times closer to the numbers than the correct forward."""

_MIN_TIE_SECONDS = 0.5
_ROUNDING = 1e-7

_BEFORE_HEADS = (QUERY, KEY, VALUE)
_UP_TO_HEADS = (*_BEFORE_HEADS, HEADS)

Report = Callable[[str, float | None], None]


class Explanation(Struct, frozen=True):
    """A hypothesis that gives the program's numbers.

    `difference` is that of the quantity of the divergence, or if smaller the largest over the
    step's quantities that agree; `agree` of `total` quantities of the step do. `later` of `n_later`
    later steps agree as a whole. `inside` of `n_inside` queries, keys and values do, where the
    program lays them out as the reference does. `layers` are those in which the fault is, None for
    all. `ties` are the sentences of other faults that give the same numbers.
    """

    edits: tuple[ForwardEdit, ...]
    layers: tuple[int, ...] | None
    difference: float
    agree: int
    total: int
    later: int
    n_later: int
    inside: int = 0
    n_inside: int = 0
    ties: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether everything that was compared in the step agrees."""
        return self.agree == self.total

    @property
    def is_certain(self) -> bool:
        """Whether everything that was compared in this step and in later ones agrees."""
        is_rest = self.later == self.n_later and self.inside == self.n_inside
        return self.is_complete and is_rest


class AgreeingHeads(Struct, frozen=True):
    """Heads whose attention agrees, of `total`, where that of others does not.

    `sentence` is that of the fault with which they agree, empty for the correct forward.
    """

    sentence: str
    agree: tuple[int, ...]
    total: int


class SearchResult(Struct, frozen=True):
    """The explanation, if any, and what was tried: names and number of forwards' edits.

    `heads` are set where most heads of the diverging attention agree with a forward. `part` is the
    sentence of a fault that gives the queries, keys and values, but not the attention over them.
    """

    explanation: Explanation | None
    tried: tuple[str, ...]
    n_tried: int
    is_cut: bool
    heads: AgreeingHeads | None = None
    part: str = ""


class Search:
    """Tries hypotheses on one divergence until `deadline`, a time of `time.perf_counter`."""

    def __init__(
        self,
        reference: ReferenceModel,
        comparison: RowComparison,
        base: Run,
        probe: FaultProbe,
        divergence: Divergence,
        *,
        deadline: float,
        report: Report = lambda what, fraction: None,
        router_noise: Mapping[int, float] | None = None,
    ) -> None:
        self._reference, self._comparison, self._base = reference, comparison, base
        self._router_noise = router_noise or {}
        self._probe, self._at = probe, divergence
        self._deadline, self._report = deadline, report
        self._step = comparison.step_of(divergence)
        steps = comparison.steps
        self._later = steps[steps.index(self._step) + 1 :]
        self._heads: AgreeingHeads | None = None
        self._part = ""
        self._n_inside, self._started = 0, time.perf_counter()
        self._suspects: tuple[int, ...] = ()
        """The layers in which the fault may be, where they were not seen."""

    def find(self, hypotheses: Sequence[Hypothesis]) -> SearchResult:
        """Return the best explanation: one fault, else two faults together."""
        edits = sorted(edits_of(hypotheses, self._probe), key=self._is_unlikely)
        tried: dict[str, None] = {}
        best: Explanation | None = None
        if self._at.point[0] in _UP_TO_HEADS and self._at.point[1] is not None:
            plain = self._run([], stop_after=self._at.point[1])
            self._count_heads("", plain)
            agree, total = self._comparison.agreement_inside(self._step, plain, self._at.point[1])
            self._n_inside = total if agree else 0  # else they are laid out in another way
        if is_graph_step(self._step):
            layers = sorted(self._reference.blocks)
            known = read_graph_step(self._comparison, self._step, self._run([]), layers)
            self._suspects = known.suspects if known is not None else ()
        n = 0
        for n, edit in enumerate(edits, 1):
            if time.perf_counter() > self._deadline:
                return self._result(best, tried, n - 1, is_cut=True)
            self._report(f"trying {edit.name}", n / len(edits))
            tried.setdefault(edit.name)
            found = self._try((edit,))
            if found is not None and _rank(found) > _rank(best):
                best = found
                if found.is_certain:
                    best = self._with_ties(found, edits[n:])
                    break
            elif found is not None and best is not None and self._is_tie(found, best):
                best = replace(best, ties=(*best.ties, edit.sentence))
        if best is not None and not best.is_complete:
            best, cut = self._combine(best, edits)
            return SearchResult(best, tuple(tried), n, is_cut=cut)
        return self._result(best, tried, n, is_cut=False)

    def _result(
        self, best: Explanation | None, tried: Iterable[str], n_tried: int, *, is_cut: bool
    ) -> SearchResult:
        return SearchResult(best, tuple(tried), n_tried, is_cut, self._heads, self._part)

    def _is_unlikely(self, edit: ForwardEdit) -> bool:
        """Whether a fault acts elsewhere than where the first difference is; it is tried later."""
        is_rotated = self._at.point[0] in (QUERY, KEY)
        return is_rotated and edit.rope is None and edit.positions is None

    def _with_ties(self, best: Explanation, edits: Sequence[ForwardEdit]) -> Explanation:
        """Look for other faults that explain as much, for as long as the first one took."""
        now = time.perf_counter()
        deadline = min(self._deadline, now + max(now - self._started, _MIN_TIE_SECONDS))
        for edit in edits:
            if time.perf_counter() > deadline:
                break
            found = self._try((edit,))
            if found is not None and self._is_tie(found, best):
                best = replace(best, ties=(*best.ties, edit.sentence))
        return best

    def _is_tie(self, found: Explanation, best: Explanation) -> bool:
        """Whether another fault explains as much, as closely, and is not the same in other words.

        It is the same where it gives the same forward, bit by bit.
        """
        is_close = found.difference <= MIN_GAIN * max(best.difference, _ROUNDING)
        if _rank(found) != _rank(best) or not is_close:
            return False
        one, other = (
            self._run([(each.edits[0], self._scope(each.layers))], stop_after=self._at.point[1])
            for each in (found, best)
        )
        return any(not torch.equal(tensor, other[point]) for point, tensor in one.items())

    def _count_heads(self, sentence: str, values: dict[Point, Tensor]) -> None:
        """Keep the heads that agree with a forward, if they are more than half and the most yet."""
        total = int(getattr(self._probe.config, "num_attention_heads", 1))
        agree = self._comparison.agreeing_heads(self._step, values, self._at.point[1], total)
        most = len(self._heads.agree) if self._heads is not None else total // 2
        if most < len(agree) < total:
            self._heads = AgreeingHeads(sentence, agree, total)

    def _combine(
        self, first: Explanation, edits: Sequence[ForwardEdit]
    ) -> tuple[Explanation, bool]:
        """Add a second fault greedily where the first one explains a part of the step."""
        best, scope_1 = first, self._scope(first.layers)
        rest = self._comparison.first(self._run([(first.edits[0], scope_1)]))
        for number, edit in enumerate(edits):
            if time.perf_counter() > self._deadline:
                return best, True
            self._report(f"trying {first.edits[0].name} with {edit.name}", number / len(edits))
            if edit.name == first.edits[0].name:
                continue
            for scope in self._scopes(edit, None if rest is None else rest.point[1]):
                run = [(first.edits[0], scope_1), (edit, scope)]
                placed = replace(edit, sentence=edit.sentence + _where(scope))
                found = self._judge((first.edits[0], placed), run, None)
                if found is not None and _rank(found) > _rank(best):
                    best = found
            if best.is_complete:
                break
        return best, False

    def _try(self, edits: tuple[ForwardEdit, ...]) -> Explanation | None:
        """Return the explanation by one edit, in the layers where it agrees with most."""
        edit, best = edits[0], None
        layer = self._at.point[1]
        if layer is not None and not edit.prefix:
            scope = self._scopes(edit)[0]
            values = self._run([(edit, scope)], stop_after=layer)
            if not self._agrees(values, layer) and not self._agrees_before_experts(values, layer):
                if self._at.point[0] in _UP_TO_HEADS:
                    self._count_heads(edit.sentence, values)
                if not self._part and self._agrees_before_heads(values, layer):
                    self._part = edit.sentence
                return None
        for scope in self._scopes(edit):
            found = self._judge(edits, [(edit, scope)], scope.layers)
            if found is not None and _rank(found) > _rank(best):
                best = found
        return best

    def _scopes(self, edit: ForwardEdit, layer: int | None = None) -> list[Scope]:
        """Return the layers in which an edit may be: from that of the divergence, or another."""
        layer = self._at.point[1] if layer is None else layer
        numbers = sorted(self._reference.blocks)
        if layer is None and not edit.whole_model:
            return [self._scope(None), *(self._scope((one,)) for one in self._suspects)]
        if edit.whole_model or layer is None:
            return [self._scope(None)]
        others = [self._scope(numbers[numbers.index(layer) :: 2])]  # every other layer
        others = others if edit.name.startswith("mask.") else []
        if layer == numbers[0]:
            return [self._scope(None), self._scope((layer,)), *others]
        later = tuple(number for number in numbers if number >= layer)
        kinds = getattr(self._reference.config, "layer_types", None)
        scopes = [self._scope((layer,)), self._scope(later), *others]
        if kinds is not None:
            same = tuple(n for n in numbers if n < len(kinds) and kinds[n] == kinds[layer])
            scopes.append(self._scope(same))
        return scopes

    def _scope(self, layers: Sequence[int] | None) -> Scope:
        first = self._step.first_row if self._probe.is_decode else 0
        return Scope(first, None if layers is None else frozenset(layers))

    def _run(
        self, edits: Sequence[tuple[ForwardEdit, Scope]], stop_after: int | None = None
    ) -> dict[Point, Tensor]:
        """Return the values of a forward with edits; none if an edit does not fit this model."""
        ids = self._comparison.sequence.ids
        rows = list(self._comparison.logit_rows)
        run = replace(self._base, edits=edits, stop_after=stop_after, values={})
        prefix = next((edit.prefix for edit, _ in edits if edit.prefix), ())
        try:
            if not prefix:
                return self._reference.run(ids, run, rows)
            return _run_with_prefix(self._reference, run, prefix, ids, rows)
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
            if not edits:
                raise
            return {}

    def _settled(self, edits: Sequence[tuple[ForwardEdit, Scope]]) -> dict[Point, Tensor]:
        """Return the values of a forward to its end, with the program's experts near a tie."""
        values, layer = self._run(edits), self._at.point[1]
        if not values or layer is None or not self._agrees_before_experts(values, layer):
            return values
        run = replace(self._base, edits=edits, values={}, routes={})
        ids, rows = self._comparison.sequence.ids, self._comparison.logit_rows
        values = self._reference.run(ids, run, list(rows))
        noise = self._router_noise
        return settle(self._reference, self._comparison, run, values, noise).values

    def _agrees(self, values: dict[Point, Tensor], layer: int) -> bool:
        """Whether a forward that ended after the layer gives the program's numbers there."""
        worst, agree, total = self._comparison.agreement(values, [self._step], layer)
        if not 0 < total == agree:
            return False
        # Where the rounding of what follows is large, the gain shows in the quantity itself.
        closest = min(worst, self._difference_there(values))
        return closest * MIN_GAIN <= self._at.difference

    def _agrees_before_heads(self, values: dict[Point, Tensor], layer: int) -> bool:
        """Whether the diverging queries, keys or values of a layer agree."""
        if self._at.point[0] not in _BEFORE_HEADS or not values:
            return False
        rest = self._comparison.first(values)
        is_later = rest is None or rest.step > self._at.step
        is_later = is_later or (rest is not None and rest.point == (HEADS, layer))
        return is_later and self._difference_there(values) * MIN_GAIN <= self._at.difference

    def _agrees_before_experts(self, values: dict[Point, Tensor], layer: int) -> bool:
        """Whether the layer agrees up to its experts, among which rounding may decide."""
        if not self._router_noise or self._at.point[0] == HIDDEN:
            return False
        attention = {p: one for p, one in values.items() if p != (HIDDEN, layer)}
        return self._agrees(attention, layer)

    def _judge(
        self,
        edits: tuple[ForwardEdit, ...],
        run: Sequence[tuple[ForwardEdit, Scope]],
        layers: frozenset[int] | None,
    ) -> Explanation | None:
        values = self._settled(run)
        if not values:
            return None
        layer = self._at.point[1]
        up_to = layer if layer is not None and self._at.point[0] != LOGITS else None
        if up_to is not None and not self._agrees(values, up_to):
            return None
        worst, agree, total = self._comparison.agreement(values, [self._step], None)
        if up_to is None and (agree < total or worst * MIN_GAIN > self._at.difference):
            return None
        later = sum(self._is_explained(values, step) for step in self._later)
        if agree < total:  # the difference where it agrees
            worst = self._comparison.agreement(values, [self._step], up_to)[0]
        worst = min(worst, self._difference_there(values))
        chosen = None if layers is None else tuple(sorted(layers))
        inside = 0
        if self._n_inside and layer is not None:
            inside = self._comparison.agreement_inside(self._step, values, layer)[0]
        n_later, n_inside = len(self._later), self._n_inside
        return Explanation(
            edits, chosen, worst, agree, total, later, n_later, inside=inside, n_inside=n_inside
        )

    def _difference_there(self, values: dict[Point, Tensor]) -> float:
        """Return by how much the quantity of the divergence still differs in the step."""
        there = self._comparison.differences(self._step, values, self._at.point.__eq__)
        return next((float(differences.max()) for _, differences, _ in there), float("inf"))

    def _is_explained(self, values: dict[Point, Tensor], step: AuditedStep) -> bool:
        _, agree, total = self._comparison.agreement(values, [step], None)
        return agree == total


def _where(scope: Scope) -> str:
    layers = sorted(scope.layers or ())
    if not layers:
        return ""
    return f" in layer {layers[0]}" if len(layers) == 1 else f" from layer {layers[0]} on"


def _rank(found: Explanation | None) -> tuple[Any, ...]:
    if found is None:
        return (-1,)
    # Equal agreement: the fault in all layers, then fewer faults.
    is_general = found.layers is None
    return (found.agree, found.later, found.inside, is_general, -len(found.edits))


def _run_with_prefix(
    reference: ReferenceModel,
    run: Run,
    prefix: Sequence[int],
    ids: Sequence[int],
    rows: Sequence[int],
) -> dict[Point, Tensor]:
    """Return the values of `ids` with other ids before them."""
    n = len(prefix)
    positions = torch.arange(n + len(ids), device=reference.device)[None]
    whole = replace(run, positions=positions, masks={}, biases={}, edits=(), hooks=())
    values = reference.run([*prefix, *ids], whole, [row + n for row in rows])
    cut = {}
    for point, tensor in values.items():
        if point[0] == LOGITS:
            cut[point] = tensor
        else:
            cut[point] = tensor[:, :, n:] if tensor.dim() == 4 else tensor[:, n:]
    return cut

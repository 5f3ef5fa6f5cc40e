"""Steps whose layers ran inside a compiled graph: only their logits and their cache are known.

The keys that each layer wrote into the cache say how far the forward was right: those of layer n
are made from the output of layer n - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.audit.evidence.audited_sequence import AuditedStep
from flexinspect_hooks.audit.evidence.row_comparison import RowComparison
from flexinspect_hooks.audit.forward.forward_run import HIDDEN, KEY, LOGITS, VALUE, Point


class GraphStep(Struct, frozen=True):
    """What the cache says of a step: layers with right keys and values, and the first wrong one.

    `suspects` are the layers in which the error may be.
    """

    right: tuple[int, ...]
    wrong: int | None
    suspects: tuple[int, ...]


def is_graph_step(step: AuditedStep) -> bool:
    """Whether nothing but logits and cached rows is known of a step of a program."""
    evidence = step.evidence
    is_known = (LOGITS, None) in evidence.values and evidence.logit_ids is None
    return is_known and not any(name == HIDDEN for name, _ in evidence.values)


def read_graph_step(
    comparison: RowComparison,
    step: AuditedStep,
    clean: Mapping[Point, Tensor],
    layers: Sequence[int],
) -> GraphStep | None:
    """Return what the cache says of a step, None if its layers were seen."""
    if not is_graph_step(step):
        return None
    known: dict[int, bool] = {}
    for (name, layer), differences, _ in comparison.differences(step, clean):
        if name in (KEY, VALUE) and layer is not None:
            limit = comparison.limits.get((name, layer), 0.0)
            known[layer] = known.get(layer, True) and float(differences.max()) <= limit
    if not known:
        return GraphStep((), None, ())
    wrong = next((layer for layer in sorted(known) if not known[layer]), None)
    right = tuple(layer for layer in sorted(known) if wrong is None or layer < wrong)
    # After the last right keys come the attention and the MLP of that layer.
    first = right[-1] if right else min(layers)
    last = max(layers) if wrong is None else wrong
    return GraphStep(right, wrong, tuple(one for one in sorted(layers) if first <= one <= last))

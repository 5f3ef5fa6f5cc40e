"""Which experts a token goes to, where rounding decides it.

A router sends each row to the experts with the best scores. Where the last expert that is chosen
and the first one that is not are closer than the noise of the scores, a correct program may choose
either. There the choice of the program counts: the one under which its rows agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn

from flexinspect_hooks.audit.evidence.row_comparison import (
    NOISE_MULTIPLE,
    Divergence,
    RowComparison,
)
from flexinspect_hooks.audit.forward.forward_run import ExpertChoice, Point, Run

MAX_ROWS = 32
"""Rows whose choice of experts is taken from the program."""


def is_router(module: nn.Module) -> bool:
    """Whether a module gives scores of all experts, and weights and experts of each row."""
    return "router" in type(module).__name__.lower() and hasattr(module, "top_k")


def routed(output: Any, run: Run, layer: int) -> Any:
    """Keep the choice of a router, and return its output with the choice that the run asks for.

    Nothing changes if the weights are neither the softmax of the scores at the chosen experts nor
    the same divided by their sum.
    """
    if not isinstance(output, tuple) or len(output) != 3:
        return output
    scores, weights, experts = output
    if scores.dim() != 2 or weights.shape != experts.shape or experts.is_floating_point():
        return output
    run.routes[layer] = ExpertChoice(scores.detach(), experts.detach())
    chosen = run.experts.get(layer)
    rows = [row for at, row in run.other_experts if at == layer and row < len(experts)]
    if chosen is None and not rows:
        return output
    wanted = experts.clone() if chosen is None else chosen.to(experts)
    if rows:
        best = scores[rows].topk(experts.shape[1] + 1, dim=-1).indices
        wanted[rows] = torch.cat((best[:, :-2], best[:, -1:]), 1)
    again = _weights(scores, weights, experts, wanted)
    return output if again is None else (scores, again, wanted)


def _weights(scores: Tensor, weights: Tensor, experts: Tensor, wanted: Tensor) -> Tensor | None:
    shares = scores.float().softmax(-1)
    own, other = shares.gather(1, experts), shares.gather(1, wanted)
    for divides in (True, False):
        if divides:
            own_weights, other_weights = (one / one.sum(1, keepdim=True) for one in (own, other))
        else:
            own_weights, other_weights = own, other
        if torch.allclose(own_weights, weights.float(), rtol=0.02, atol=1e-3):
            return other_weights.to(weights.dtype)
    return None


class Settled(Struct, frozen=True):
    """The run under the program's choice of experts, its values, and its first divergence.

    `noise` is that of the scores of each layer's router.
    """

    base: Run
    values: dict[Point, Tensor]
    divergence: Divergence | None
    noise: Mapping[int, float]


def settle(
    reference: Any,
    comparison: RowComparison,
    base: Run,
    values: dict[Point, Tensor],
    noise: Mapping[int, float],
) -> Settled:
    """Let rows go to their next expert where they diverge and noise decides it.

    `values` are those of the run `base`, which may have edits; `noise` is `router_noise`.
    """
    found = comparison.first(values)
    while found is not None and len(base.other_experts) < MAX_ROWS:
        for layer in _undecided(base, found, noise):
            others = (*base.other_experts, (layer, found.row))
            other = replace(base, other_experts=others, values={}, routes={})
            tried = reference.run(comparison.sequence.ids, other, comparison.logit_rows)
            now = comparison.first(tried)
            if now is None or (now.point, now.row) != (found.point, found.row):
                base, values, found = other, tried, now
                break
        else:
            break
    return Settled(base, values, found, noise)


def router_noise(base: Run, noisy: Sequence[Mapping[int, ExpertChoice]]) -> dict[int, float]:
    """Return by how much noise changes the scores of each layer's router.

    `noisy` are the choices of the runs with noise, which have the experts of `base`.
    """
    clean = base.routes
    return {layer: _noise(route, [one[layer] for one in noisy]) for layer, route in clean.items()}


def _undecided(base: Run, found: Divergence, noise: Mapping[int, float]) -> list[int]:
    """Return the layers up to a divergence where noise decides about its row, the closest first."""
    at = found.point[1]
    layers = [layer for layer in noise if at is None or layer <= at]
    margins = {layer: _margin(base.routes[layer], found.row) for layer in layers}
    close = [layer for layer in layers if margins[layer] <= NOISE_MULTIPLE * noise[layer]]
    tried = set(base.other_experts)
    return sorted((n for n in close if (n, found.row) not in tried), key=lambda n: margins[n])


def describe_other(rows: Sequence[tuple[int, int]]) -> str:
    """Return in words which rows have the program's choice of experts."""
    layer, row = rows[0]
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return (
        "rounding decides between two experts, so the program's choice is taken (layer "
        f"{layer}, position {row}{more})"
    )


def _noise(route: ExpertChoice, others: Sequence[ExpertChoice]) -> float:
    return max((float((one.scores - route.scores).abs().max()) for one in others), default=0.0)


def _margin(route: ExpertChoice, row: int) -> float:
    k = route.experts.shape[1]
    if row >= len(route.scores) or k >= route.scores.shape[1]:
        return float("inf")
    best = route.scores[row].float().topk(k + 1).values
    return float(best[k - 1] - best[k])

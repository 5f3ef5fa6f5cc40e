"""Where rounding decides between two experts, the program's choice counts, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import ids, make_model

from flexinspect_hooks.audit.evidence.expert_routing import describe_other, router_noise, settle
from flexinspect_hooks.audit.evidence.row_comparison import Divergence
from flexinspect_hooks.audit.forward.forward_run import HIDDEN, Run
from flexinspect_hooks.audit.forward.weights import snapshot
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel

TOKENS = ids(9, 3)
LAYER, ROW = 1, 5


class OtherChoice:
    """Compares with the values of a program whose row went to its next best expert."""

    def __init__(self, reference: ReferenceModel) -> None:
        self.sequence, self.logit_rows = self, [len(TOKENS) - 1]
        self.ids = TOKENS
        self.theirs = reference.run(TOKENS, run(((LAYER, ROW),)))

    def first(self, values: Any) -> Divergence | None:
        for layer in (0, 1):
            point = (HIDDEN, layer)
            distance = (values[point] - self.theirs[point])[0].norm(dim=-1)
            if distance.max() > 1e-4:
                return Divergence(0, point, int(distance.argmax()), float(distance.max()), 1e-4)
        return None


def run(others: tuple[tuple[int, int], ...] = ()) -> Run:
    return Run(torch.arange(len(TOKENS))[None], other_experts=others)


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    model = make_model("mixtral", num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2)
    return ReferenceModel(snapshot(model))


@pytest.mark.parametrize("noise", [0.0, 10.0])
def test_the_next_best_expert_is_tried_only_within_the_noise_of_the_scores(
    reference: ReferenceModel, noise: float
) -> None:
    base = run()
    values = reference.run(TOKENS, base)
    noisy = {
        layer: type(route)(route.scores + noise, route.experts)
        for layer, route in base.routes.items()
    }
    comparison: Any = OtherChoice(reference)
    settled = settle(reference, comparison, base, values, router_noise(base, [noisy]))
    assert (settled.divergence is None) == (noise > 0)
    assert settled.base.other_experts == (((LAYER, ROW),) if noise else ())


def test_a_run_with_the_experts_of_another_gives_the_same_numbers(
    reference: ReferenceModel,
) -> None:
    base = run()
    values = reference.run(TOKENS, base)
    again = run()
    again.experts = {layer: route.experts for layer, route in base.routes.items()}
    assert torch.allclose(reference.run(TOKENS, again)[HIDDEN, 1], values[HIDDEN, 1])


def test_the_note_names_the_first_row() -> None:
    assert "(layer 1, position 5 and 1 more)" in describe_other(((1, 5), (0, 7)))

"""Order: how far the next token's logits move when two segments are swapped."""

from __future__ import annotations

from typing import Any

import pytest
from support.planted_leaks import isolated, mask_for, model_of, only
from support.tiny import ids

import flexinspect
from flexinspect.analysis.proof_results import Proof
from flexinspect.core.errors import UsageError
from flexinspect.records.finding import Severity

SPANS = ((1, 6, "a"), (6, 11, "b"))
INPUT_IDS = [1, *ids(5, 1), *ids(5, 2), *ids(2, 3)]
RESET = [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7]


def order(**options: Any) -> Proof:
    model = model_of()
    cells = isolated(SPANS, len(INPUT_IDS))
    arguments = {"attention_mask": mask_for(model, cells), "segments": SPANS, **options}
    proof: Proof = flexinspect.prove("order", model, INPUT_IDS, **arguments)
    return proof


def test_with_continuous_positions_the_order_moves_the_logits() -> None:
    proof = order()
    finding = only(proof, "proof.order")
    assert finding.severity is Severity.NOTE
    assert proof.holds
    assert finding.evidence["moved"] > 0.1
    assert "Swapping a and b moves the next token's logits by up to " in finding.sentence
    assert "(contiguous positions)" in finding.sentence
    assert proof.facts["swaps"][0]["first"] == "a"


def test_with_restarting_positions_the_order_does_not() -> None:
    finding = only(order(position_ids=RESET), "proof.order")
    assert finding.evidence["moved"] < 1e-4
    assert finding.sentence.startswith("The order of the segments does not matter: 1 pair swapped")


def test_segments_of_different_length_cannot_be_swapped_in_ids() -> None:
    with pytest.raises(
        UsageError, match="No two segments have the same number of tokens"
    ) as caught:
        order(segments=[(1, 5, "a"), (6, 11, "b")])
    # The command line and Python raise the same error, so the hint names what each of them can do.
    hint = str(caught.value.hint)
    assert "--declare FILE" in hint
    assert "segments= in Python" in hint
    assert "flexinspect prove order --prompt" in hint

"""Proposals that a program verifies as a tree, in one forward behind the cache."""

from __future__ import annotations

import torch
from support.audits import Audit
from support.tiny import ids, make_model
from torch import Tensor
from transformers import DynamicCache

TREE = torch.tensor(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]
).bool()
DEPTHS = TREE.sum(-1) - 1


def verify(model: torch.nn.Module, positions: Tensor) -> None:
    text = ids(8, 3)
    cache = DynamicCache(config=model.config)
    model(torch.tensor([text]), past_key_values=cache)
    allowed = torch.cat([torch.ones(5, 8, dtype=torch.bool), TREE], 1)
    mask = torch.zeros(1, 1, 5, 13).masked_fill(~allowed, torch.finfo(torch.float32).min)
    nodes = torch.tensor([[5, 9, 12, 7, 3]])
    model(
        nodes,
        attention_mask=mask,
        position_ids=(8 + positions)[None],
        past_key_values=cache,
    )


def test_a_tree_with_positions_of_its_depths_agrees(audit: Audit) -> None:
    model = make_model("llama")
    (verdict,), findings, events = audit(model, lambda: verify(model, DEPTHS))
    assert findings == []
    assert verdict.divergence is None
    assert "13 rows agree" in events[0]


def test_a_tree_with_other_positions_than_its_depths_differs(audit: Audit) -> None:
    model = make_model("llama")
    wrong = DEPTHS + torch.tensor([0, 0, 0, 1, 1])
    (finding,) = audit(model, lambda: verify(model, wrong))[1]
    assert "rotated for other positions" in finding.sentence


def test_a_second_choice_that_repeats_the_prompt_is_no_token_that_is_fed_again(
    audit: Audit,
) -> None:
    model = make_model("llama")
    text = ids(8, 3)

    def draft() -> None:
        with torch.no_grad():
            rows = list(text)
            model(torch.tensor([rows]))
            rows.append(rows[-1])  # no cache: the model reads it once
            for _ in range(3):
                rows.append(int(model(torch.tensor([rows])).logits[0, -1].argmax()))

    assert not [one for one in audit(model, draft)[1] if "fed again" in one.sentence]

"""Position ids of a prompt that begin again in each declared segment are named as such."""

from __future__ import annotations

from pathlib import Path

import torch
from support.audits import decode, make_audit
from support.tiny import make_model

SEGMENTS = ((0, 5, "one"), (5, 12, "other"))


def test_positions_that_begin_again_in_each_declared_segment_are_named(tmp_path: Path) -> None:
    model = make_model("llama")
    restarted = torch.cat([torch.arange(stop - start) for start, stop, _ in SEGMENTS])[None]
    rotary = type(model.model.rotary_emb).forward

    def forward(hidden: torch.Tensor, position_ids: torch.Tensor) -> object:
        is_prompt = position_ids.shape[1] == restarted.shape[1]
        return rotary(model.model.rotary_emb, hidden, restarted if is_prompt else position_ids)

    model.model.rotary_emb.forward = forward
    _, findings, _ = make_audit(tmp_path)(model, lambda: decode(model), segments=SEGMENTS)
    assert ["begin again in each declared segment" in one.sentence for one in findings] == [True]

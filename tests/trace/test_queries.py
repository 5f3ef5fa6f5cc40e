"""Facts that are read out of a trace."""

from __future__ import annotations

from pathlib import Path

import torch
from support.planting import planted
from support.tiny import ids, make_model

from flexinspect.trace.queries import question_text
from flexinspect.trace.reader import open_trace


def test_the_question_of_a_padded_prompt_is_its_text(tmp_path: Path) -> None:
    model, words = make_model("llama"), ids(5, 3)
    prompt = torch.tensor([[0, 0, 0, *words]])
    mask = (prompt != 0).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    planted(tmp_path, model, lambda: model(prompt, attention_mask=mask, position_ids=positions))
    with open_trace(tmp_path / "planted.flextrace") as reader:
        assert question_text(reader, 0).split() == [str(word) for word in words]

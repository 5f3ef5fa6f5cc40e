"""A beam search of two prompts whose cache gets the rows of the other prompt is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.audits import Audit
from support.tiny import ids, make_model
from torch import Tensor
from transformers import DynamicCache

BEAMS = 3


@torch.no_grad()
def search(model: Any, prompts: Tensor, *, has_offset: bool) -> None:
    """Search with a cache whose rows are reordered, with or without the offset of each prompt."""
    n = len(prompts)
    cache = DynamicCache()
    table = model(prompts, past_key_values=cache).logits[:, -1].log_softmax(-1)
    cache.batch_repeat_interleave(BEAMS)
    scores, tokens = table.topk(BEAMS, dim=-1)
    for _ in range(3):
        last = tokens.reshape(n * BEAMS, 1)
        table = model(last, past_key_values=cache).logits[:, -1].log_softmax(-1)
        total = (scores[..., None] + table.view(n, BEAMS, -1)).view(n, -1)
        scores, flat = total.topk(BEAMS, dim=-1)
        parents, tokens = flat // table.shape[-1], flat % table.shape[-1]
        offset = torch.arange(n)[:, None] * BEAMS if has_offset else 0
        cache.reorder_cache((parents + offset).reshape(-1))


@pytest.mark.parametrize("has_offset", [True, False])
def test_beams_of_the_second_prompt_that_continue_the_first_ones_cache(
    audit: Audit, has_offset: bool
) -> None:
    model = make_model("llama")
    prompts = torch.tensor([ids(11, 1), ids(11, 2)])
    _, findings, _ = audit(model, lambda: search(model, prompts, has_offset=has_offset))
    if has_offset:
        assert findings == []
        return
    first = next(one for one in findings if "step 2: from batch row 3" in one.sentence)
    change = "Before step 2 the cache of all layers was changed: its batch rows are now those of"
    assert change in first.sentence

"""KV heads repeated for grouped-query attention: only a wrong order is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from support.masked_traces import model_on, registered
from support.planting import of, one, planted
from support.tiny import ids
from torch import Tensor

from flexinspect.records.finding import Severity


def test_keys_repeated_as_a_whole_are_an_error_but_head_by_head_are_not(tmp_path: Path) -> None:
    found = {}
    for way in ("repeat", "repeat_interleave"):

        def attention(
            module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, way: str = way, **kw: Any
        ) -> Any:
            groups = q.shape[1] // k.shape[1]
            if way == "repeat":
                k, v = (part.repeat(1, groups, 1, 1) for part in (k, v))
            else:
                k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
            is_causal = q.shape[2] > 1
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=kw["scaling"])
            return out.transpose(1, 2).contiguous(), None

        with registered(attention) as name:
            model = model_on(name)
            prompt = torch.tensor([ids(12, 0)])
            run = lambda model=model, prompt=prompt: model.generate(  # noqa: E731
                prompt, max_new_tokens=3, do_sample=False
            )
            found[way] = planted(tmp_path, model, run, name=way)
    finding = one(found["repeat"], "attention.keys-tiled")
    assert (finding.severity, finding.layers, finding.step) == (Severity.ERROR, (0, 1, 2), 0)
    assert "the keys of 4 query heads were repeated as a whole" in finding.sentence
    assert of(found["repeat_interleave"], "attention.keys-tiled") == []

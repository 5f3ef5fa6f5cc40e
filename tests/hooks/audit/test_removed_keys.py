"""Steps after a program removed keys from its cache, as in StreamingLLM (arXiv 2309.17453)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.audits import Audit, make_audit
from support.tiny import ids, make_model
from transformers import DynamicCache

SINKS, BUDGET, PROMPT = 4, 12, 14


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    return make_audit(tmp_path)


def keep_sinks_and_newest(cache: Any) -> None:
    for layer in cache.layers:
        n = layer.keys.shape[2]
        if n > BUDGET:
            kept = torch.cat([torch.arange(SINKS), torch.arange(n - BUDGET + SINKS, n)])
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]


def stream(model: Any, *, shift: int = 0, n: int = 6) -> None:
    """Decode by hand with the positions of the text, in decode steps moved by `shift`."""
    rows, cache, seen = torch.tensor([ids(PROMPT, 3)]), DynamicCache(), 0
    for _ in range(n):
        first = seen + shift * bool(seen)
        positions = torch.arange(first, first + rows.shape[1])[None]
        logits = model(rows, position_ids=positions, past_key_values=cache).logits
        seen += rows.shape[1]
        keep_sinks_and_newest(cache)
        rows = logits[:, -1:].argmax(-1)


def test_keys_removed_before_each_step_are_found_and_the_steps_agree(audit: Audit) -> None:
    model = make_model("llama").eval()
    (verdict,), findings, _ = audit(model, lambda: stream(model))
    assert verdict.notes == [
        "5 times from step 1 on, the cache kept its first 4 and its newest keys"
    ]
    assert not findings
    assert verdict.largest < 1e-4
    assert not verdict.not_judged


def test_positions_that_are_late_by_one_are_named_beside_the_removed_keys(audit: Audit) -> None:
    model = make_model("llama").eval()
    (verdict,), findings, _ = audit(model, lambda: stream(model, shift=-1))
    assert [one.id for one in findings] == ["audit.reproduced"]
    assert "position ids that the program passed (from 13 on, where the text is at 14)" in (
        findings[0].sentence
    )
    assert verdict.divergence is not None
    assert verdict.divergence.step == 1


class ShortCache(DynamicCache):
    """A cache that removes keys when a layer has returned them, inside a call of `generate`."""

    def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        given = super().update(keys, values, layer, *args, **kwargs)
        keep_sinks_and_newest(self)
        return given


def test_keys_that_a_cache_removes_in_a_call_of_generate_leave_one_generation(
    audit: Audit,
) -> None:
    model = make_model("llama").eval()
    prompt = torch.tensor([ids(PROMPT, 3)])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    verdicts, _, _ = audit(
        model,
        lambda: model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=ShortCache(),
            **options,
        ),
    )
    assert [one.generation for one in verdicts] == [0]

"""Caches of a program that keep keys and values in int8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.audits import Audit
from support.tiny import ids, make_model
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from flexinspect.records.finding import Severity


class Int8Layer(DynamicLayer):
    """Keeps codes, and a scale for each head and call, or only that of the newest call."""

    keeps_scales = True
    error = 0.0

    def quantize(self, table: Tensor, old: list[tuple[Tensor, Tensor]]) -> Tensor:
        scale = table.abs().amax((2, 3), keepdim=True) / 127
        old.append(((table / scale).round() + self.error, scale))
        scales = [one[1] if self.keeps_scales else scale for one in old]
        return torch.cat([code * by for (code, _), by in zip(old, scales, strict=True)], 2)

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key, value)
            self.kept: tuple[list[Any], list[Any]] = ([], [])
        self.keys, self.values = (
            self.quantize(one, old) for one, old in zip((key, value), self.kept, strict=True)
        )
        return self.keys, self.values


class NewestScale(Int8Layer):
    keeps_scales = False


class OffByTwo(Int8Layer):
    error = 2.0


def decode_with(model: Any, layer: type[Int8Layer]) -> None:
    cache = Cache(layers=[layer() for _ in range(model.config.num_hidden_layers)])
    rows = torch.tensor([ids(12, 3)])
    for _ in range(4):
        rows = model(rows, past_key_values=cache).logits[:, -1:].argmax(-1)


def test_a_cache_that_only_rounds_is_a_note(audit: Audit) -> None:
    model = make_model("llama")
    (finding,) = audit(model, lambda: decode_with(model, Int8Layer))[1]
    assert finding.severity is Severity.NOTE
    assert "each value is the nearest step, as a quantized cache has it" in finding.sentence


def test_codes_that_get_the_newest_scale_are_named_with_their_factors(audit: Audit) -> None:
    model = make_model("llama")
    (finding,) = audit(model, lambda: decode_with(model, NewestScale))[1]
    assert finding.severity is Severity.WARNING
    assert "(by head), as codes are that get the scale of newer rows" in finding.sentence


@pytest.mark.parametrize("layer", [OffByTwo])
def test_codes_that_are_not_the_nearest_ones_are_no_note(
    audit: Audit, layer: type[Int8Layer]
) -> None:
    model = make_model("llama")
    (finding,) = audit(model, lambda: decode_with(model, layer))[1]
    assert finding.severity is Severity.WARNING

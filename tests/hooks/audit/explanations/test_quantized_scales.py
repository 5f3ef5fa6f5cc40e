"""Scales that multiply the wrong axis of integers are found; other schemes are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.audits import Audit, decode
from support.tiny import make_model
from torch import Tensor, nn

from flexinspect.records.finding import Severity
from flexinspect.records.step import EventRecord, GenerationRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.numerics.changed_weights import SCALES_EVENT, ChangedWeightsRule
from flexinspect_hooks.audit.explanations.quantized_scales import wrong_scales

N = 48


class Quantized(nn.Module):
    """A linear layer with integers `codes`; `weigh` makes its weight of them and the scales."""

    def __init__(
        self,
        codes: Tensor,
        weigh: Callable[[Tensor, Tensor], Tensor],
        scale: Tensor,
        bias: Tensor | None = None,
        other: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("codes", codes.to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("other", other)
        self.weigh = weigh
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        codes: Any = self.codes
        weight = self.weigh(codes.to(x.dtype), self.scale.to(x.dtype))  # type: ignore[operator]
        if self.other is not None:
            weight = weight * self.other
        return nn.functional.linear(x, weight, self.bias)


def weight() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(N, N) * torch.exp(0.5 * torch.randn(N, 1))


def quantize(w: Tensor, dim: int, top: int = 127) -> tuple[Tensor, Tensor]:
    """Return codes and scales (N,), one for each row (dim 1) or column (dim 0)."""
    scale = w.abs().amax(dim, keepdim=True) / top
    return (w / scale).round(), scale.flatten()


def by_row(codes: Tensor, scale: Tensor) -> Tensor:
    return codes * scale[:, None]


def by_column(codes: Tensor, scale: Tensor) -> Tensor:
    return codes * scale


def by_row_transposed(codes: Tensor, scale: Tensor) -> Tensor:
    return (codes * scale[:, None]).T


def by_column_transposed(codes: Tensor, scale: Tensor) -> Tensor:
    return (codes * scale).T


WRONG = [
    (1, by_column, ("outputs", "inputs")),
    (0, by_row, ("inputs", "outputs")),
    (0, by_row_transposed, ("outputs", "inputs")),  # codes (inputs, outputs)
]
RIGHT = [(1, by_row), (0, by_column), (0, by_column_transposed), (1, by_row_transposed)]


def found_in(module: nn.Module) -> list[dict[str, Any]]:
    return list(wrong_scales(nn.ModuleDict({"one": module})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top", [127, 7])
@pytest.mark.parametrize(("dim", "weigh", "axes"), WRONG)
def test_scales_of_the_other_axis_are_found(
    dim: int, weigh: Any, axes: tuple[str, str], top: int, dtype: torch.dtype
) -> None:
    w = weight()
    if top == 7:
        w = w.sign() * w.abs() ** 3  # few large weights, so that not each column has a 7
    codes, scale = quantize(w if dim else w.T.contiguous(), dim, top)
    module = Quantized(codes, weigh, scale, torch.randn(N)).to(dtype)
    (facts,) = found_in(module)
    assert (facts["made_for"], facts["used_for"]) == axes
    assert facts["class"] == "Quantized"


@pytest.mark.parametrize("top", [127, 7])
@pytest.mark.parametrize(("dim", "weigh"), RIGHT)
def test_scales_of_the_right_axis_are_not(dim: int, weigh: Any, top: int) -> None:
    codes, scale = quantize(weight(), dim, top)
    assert not found_in(Quantized(codes, weigh, scale))


def test_other_schemes_are_not_judged() -> None:
    w = weight()
    codes, scale = quantize(w, 1)
    whole = w.abs().max() / 127
    assert not found_in(Quantized((w / whole).round(), by_row, whole.expand(N).clone()))
    # A factor of the inputs that was moved into the weight before it was quantised.
    inputs = torch.exp(torch.randn(N))
    moved, rows = quantize(w * inputs, 1)
    assert not found_in(Quantized(moved, by_row, rows, other=1 / inputs))
    even = w / w.abs().amax(1, keepdim=True)
    moved, rows = quantize(even * inputs / (even * inputs).abs().amax(1, keepdim=True), 1)
    uneven = rows * torch.linspace(1, 1.03, N)
    assert not found_in(Quantized(moved, by_row, uneven, other=1 / inputs))
    # A zero point for each row.
    assert not found_in(Quantized(codes, lambda q, s: (q - 3) * s, scale))
    # Groups of 16 inputs.
    groups = (w.view(N, -1, 16).abs().amax(-1) / 127).repeat_interleave(16, 1)
    in_groups = Quantized((w / groups).round(), lambda q, s: q * groups, scale)
    assert not found_in(in_groups)
    # Clipped weights.
    clipped = (w / (0.3 * w.abs().max() / 127)).round().clamp(-127, 127)
    assert not found_in(Quantized(clipped, by_row, torch.full((N,), 0.01)))


def test_a_module_that_raises_or_is_no_linear_layer_is_left_alone() -> None:
    codes, scale = quantize(weight(), 1)

    def fail(q: Tensor, s: Tensor) -> Tensor:
        raise ValueError

    assert not found_in(Quantized(codes, fail, scale))
    assert not found_in(Quantized(codes[:, :32], by_row, scale))


@pytest.mark.parametrize("broken", [True, False])
def test_a_run_reports_it_and_its_steps_are_judged(audit: Audit, broken: bool) -> None:
    model = make_model("llama")
    attention = model.model.layers[1].self_attn
    codes, scale = quantize(attention.o_proj.weight.detach(), 1)
    attention.o_proj = Quantized(codes, by_column if broken else by_row, scale)
    verdicts, findings, _ = audit(model, lambda: decode(model))
    assert not findings
    assert [(one.n_steps, one.divergence) for one in verdicts] == [(3, None)]
    facts = list(wrong_scales(model))
    assert [one["module"] for one in facts] == (["model.layers.1.self_attn.o_proj"] * broken)


def test_the_rule_names_the_module_and_both_axes() -> None:
    facts = {
        "module": "model.layers.2.self_attn.o_proj",
        "class": "Int8Linear",
        "made_for": "outputs",
        "used_for": "inputs",
        "shape": [64, 64],
    }
    context, rule = RuleContext(), ChangedWeightsRule()
    context.start_generation(GenerationRecord(0, "s", "m", "c", (), ()))
    rule.on_generation_start(context)
    (finding,) = rule.on_event(EventRecord(SCALES_EVENT, "", 0.0, 0, None, facts))
    assert finding.severity is Severity.ERROR
    assert finding.layer == 2
    assert "by a scale for each of its inputs, but they were quantised with one for each of its "
    assert "outputs" in finding.sentence
    other = replace(EventRecord("phase", "", 0.0), data={})
    assert not list(rule.on_event(other))

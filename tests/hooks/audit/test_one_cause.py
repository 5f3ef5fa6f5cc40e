"""A failed check of recorded attention, and the audit of the same layer, are one cause."""

from __future__ import annotations

from typing import Any

import pytest
from support.audits import Audit, decode
from support.tiny import make_model
from torch import Tensor
from transformers.models.llama import modeling_llama

from flexinspect.records.finding import Finding, Severity
from flexinspect.rules.numerics.audit_findings import UNEXPLAINED

CHECK = "observer.check-failed"


def attend_with(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> Any:
    """Attend as transformers' eager function does, with scores times `warm` plus `bias`."""
    groups = module.num_key_value_groups
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * module.scaling * more.get("warm", 1.0)
    if mask is not None:
        scores = scores + mask
    weights = (scores + more.get("bias", 0.0) * scores.sin()).softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous(), None


def findings_of(
    audit: Audit, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...], **more: float
) -> list[Finding]:
    """Audit a model whose attention is changed in some layers."""
    model = make_model("llama")
    model.set_attn_implementation("eager")

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Any:
        changed = more if module.layer_idx in layers else {}
        return attend_with(module, q, k, v, mask, **changed)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "eager_attention_forward", attend)
        _, found, _ = audit(model, lambda: decode(model), kinds="")
    return [one for one in found if one.id == CHECK or one.id.startswith("audit.")]


@pytest.mark.parametrize(
    ("layers", "more"),
    [
        pytest.param((1,), {"bias": 2.0}, id="another formula in one layer"),
        pytest.param((0, 1, 2), {"warm": 3.0}, id="a temperature in all layers"),
    ],
)
def test_a_failed_check_follows_from_the_audit_of_its_layer(
    audit: Audit,
    monkeypatch: pytest.MonkeyPatch,
    layers: tuple[int, ...],
    more: dict[str, float],
) -> None:
    found = findings_of(audit, monkeypatch, layers, **more)
    (cause,) = (one.id for one in found if one.severity is not Severity.NOTE)
    assert cause == UNEXPLAINED
    notes = [one for one in found if one.id == CHECK]
    assert notes
    assert {one.severity for one in notes} == {Severity.NOTE}
    assert {one.evidence["cause"] for one in notes} == {cause}
    assert all(f"This follows from {cause}." in one.sentence for one in notes)


def test_a_correct_model_has_neither(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings_of(audit, monkeypatch, ()) == []

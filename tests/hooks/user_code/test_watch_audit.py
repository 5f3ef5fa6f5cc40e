"""`flexinspect.watch(model, audit=…)`: the steps of a block are audited when it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import ids, make_model

import flexinspect
from flexinspect.core.errors import UsageError
from flexinspect.rules.numerics.audit_findings import AUDIT_EVENT


def generate(model: Any) -> None:
    model.generate(torch.tensor([ids(12, 3)]), max_new_tokens=4, do_sample=False)


def audits(watched: Any) -> list[str]:
    with watched.reader() as reader:
        return [row.event.text for row in reader.events() if row.event.kind == AUDIT_EVENT]


@pytest.mark.parametrize("audit", [True, 30, 0.5])
def test_a_correct_block_agrees(tmp_path: Path, audit: bool | float) -> None:
    model = make_model("llama")
    with flexinspect.watch(model, out=tmp_path / "t.flextrace", audit=audit) as watched:
        generate(model)
    [text] = audits(watched)
    assert "4 steps, 15 rows agree with the untouched implementation" in text
    assert not [one for one in watched.findings() if one.id.startswith("audit.")]


def test_a_fault_is_among_the_findings(tmp_path: Path) -> None:
    model = make_model("llama")
    for block in model.model.layers:
        block.self_attn.scaling = 1.0
    with flexinspect.watch(model, out=tmp_path / "t.flextrace", audit=True) as watched:
        generate(model)
        assert not [one for one in watched.findings() if one.id.startswith("audit.")]
    [found] = [one for one in watched.findings() if one.id.startswith("audit.")]
    assert found.id == "audit.reproduced"
    assert "scale" in found.sentence


def test_without_the_argument_nothing_is_audited(tmp_path: Path) -> None:
    model = make_model("llama")
    with flexinspect.watch(model, out=tmp_path / "t.flextrace") as watched:
        generate(model)
    assert audits(watched) == []


def test_an_exception_of_the_block_is_not_replaced_and_its_steps_are_audited(
    tmp_path: Path,
) -> None:
    model = make_model("llama")
    watched = flexinspect.watch(model, out=tmp_path / "t.flextrace", audit=True)
    with pytest.raises(ValueError, match="of the program"), watched:
        generate(model)
        raise ValueError("of the program")
    assert len(audits(watched)) == 1


def test_an_interrupted_block_is_not_audited(tmp_path: Path) -> None:
    model = make_model("llama")
    watched = flexinspect.watch(model, out=tmp_path / "t.flextrace", audit=True)
    with pytest.raises(KeyboardInterrupt), watched:
        generate(model)
        raise KeyboardInterrupt
    assert audits(watched) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"audit": 0}, "seconds above 0"),
        ({"audit": -1.0}, "seconds above 0"),
        ({"audit": float("nan")}, "seconds above 0"),
        ({"audit": "yes"}, "seconds above 0"),
        ({"audit": True, "level": "basic"}, "needs level advanced"),
    ],
)
def test_a_wrong_argument_gets_one_sentence(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    path = tmp_path / "t.flextrace"
    with pytest.raises(UsageError, match=words):
        flexinspect.watch(make_model("llama"), out=path, **options)
    assert not path.exists()

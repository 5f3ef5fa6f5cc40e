"""Windows of an attention of the program that the configuration has not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.audits import Audit, decode
from support.tiny import make_model
from transformers import AttentionInterface

from flexinspect.records.finding import Severity

WINDOW = 5


def attention_of(
    layers: tuple[int, ...], *, offset: bool, sinks: int = 0, closed: float = -torch.inf
) -> Callable[..., Any]:
    """Return an attention with a window in some layers; without `offset` rows count from 0."""

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any
    ) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
        n, n_keys = query.shape[2], key.shape[2]
        keys, rows = torch.arange(n_keys)[None], torch.arange(n_keys - n, n_keys)[:, None]
        allowed = keys <= rows
        if module.layer_idx in layers:
            counted = rows if offset else torch.arange(n)[:, None]
            allowed &= (counted - keys < WINDOW) | (keys < sinks)
        scores = (query @ key.mT * scaling).masked_fill(~allowed, closed)
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    return attend


@pytest.fixture
def model_with() -> Iterator[Callable[..., Any]]:
    def make(attention: Callable[..., Any]) -> Any:
        AttentionInterface.register("own-window", attention)
        model = make_model("llama", num_hidden_layers=4)
        model.set_attn_implementation("own-window")
        return model

    yield make
    AttentionInterface._global_mapping.pop("own-window")


@pytest.mark.parametrize(
    ("layers", "where"), [((1, 3), "in layers 1, 3"), ((2,), "in this layer only")]
)
def test_a_window_that_decode_steps_do_not_have_is_named(
    audit: Audit, model_with: Any, layers: tuple[int, ...], where: str
) -> None:
    model = model_with(attention_of(layers, offset=False))
    (finding,) = audit(model, lambda: decode(model))[1]
    assert (finding.id, finding.severity) == ("audit.reproduced", Severity.WARNING)
    assert (
        "with a sliding window of 5 keys in the rows of the prompt, but not in those of decode "
        f"steps {where}" in finding.sentence
    )


@pytest.mark.parametrize(
    ("layers", "sinks"), [((1, 3), 0), ((2,), 2), ((0, 1, 2, 3), 0), ((0, 2), 1)]
)
def test_a_window_of_all_rows_is_a_note(
    audit: Audit, model_with: Any, layers: tuple[int, ...], sinks: int
) -> None:
    model = model_with(attention_of(layers, offset=True, sinks=sinks))
    (finding,) = audit(model, lambda: decode(model))[1]
    assert (finding.id, finding.severity) == ("audit.reproduced", Severity.NOTE)
    assert "with a sliding window of 5 keys" in finding.sentence
    assert ("that keeps the first" in finding.sentence) == bool(sinks)
    assert "the program's attention may mean it" in finding.sentence


def test_a_window_that_does_not_close_its_keys_is_no_note(audit: Audit, model_with: Any) -> None:
    model = model_with(attention_of((1,), offset=True, closed=0.0))
    (finding,) = audit(model, lambda: decode(model))[1]
    assert finding.severity is not Severity.NOTE

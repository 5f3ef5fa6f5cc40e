"""Documents packed into one row, whose position ids begin again where the mask has no border."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface

LENGTHS = (7, 9, 6)
ROW = torch.tensor([ids(sum(LENGTHS), 3)])
JOINED = "mask.joined-documents"


def restarting(*lengths: int) -> Tensor:
    """Position ids (keys,) of packed documents."""
    return torch.cat([torch.arange(n) for n in lengths])


def documents(*lengths: int) -> Tensor:
    """The document of each position (keys,)."""
    return torch.cat([torch.full((n,), number) for number, n in enumerate(lengths)])


def forward(model: Any, **arguments: Any) -> Any:
    positions = restarting(*LENGTHS)[None]
    return partial(model, ROW, position_ids=positions, use_cache=False, **arguments)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_mask_of_all_ones_joins_the_documents_that_position_ids_divide(
    tmp_path: Path, backend: str
) -> None:
    model = make_model("llama")
    model.set_attn_implementation(backend)
    run = forward(model, attention_mask=torch.ones_like(ROW))
    finding = one(planted(tmp_path, model, run), JOINED)
    assert (finding.layers, finding.step, finding.positions) == ((0, 1, 2), 0, (7, 16))
    assert finding.sentence == (
        "Position ids of the prompt begin again 2 times, as those of packed documents do, but the "
        "mask of all 3 layers has no border at columns 7, 16: a document attends to the one before "
        "it."
    )
    assert serious(planted(tmp_path, model, forward(model), name="right")) == []


def test_one_missing_border_is_named(tmp_path: Path) -> None:
    model, document = make_model("llama"), documents(7, 15)
    open_ = (document[:, None] == document).tril()[None, None]
    finding = one(planted(tmp_path, model, forward(model, attention_mask=open_)), JOINED)
    assert (finding.positions, finding.evidence["documents"]) == ((16,), 3)


def attend_within(table: Tensor, *, by_row: bool) -> None:
    """Register FlexAttention within documents (batch, keys), or those of row 0 for all rows."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kw: Any
    ) -> Any:
        def within(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            row = table[b if by_row else 0]
            return (row[q_idx] == row[kv_idx]) & (q_idx >= kv_idx)

        n = query.shape[2]
        mask = create_block_mask(within, len(query), None, n, n, device="cpu")
        out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("packed", attention)
    AttentionMaskInterface.register("packed", lambda *_, **__: None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_batch_row_with_the_documents_of_row_0_is_named(tmp_path: Path) -> None:
    lengths, model = ((6, 6, 6), (4, 9, 5)), make_model("llama")
    rows = torch.tensor([ids(18, 3), ids(18, 4)])
    positions = torch.stack([restarting(*one) for one in lengths])
    table = torch.stack([documents(*one) for one in lengths])

    def run() -> None:
        model(rows, position_ids=positions, use_cache=False)

    attend_within(table, by_row=False)
    model.set_attn_implementation("packed")
    finding = one(planted(tmp_path, model, run), JOINED)
    assert (finding.evidence["batch_row"], finding.evidence["columns"]) == (1, [4, 13])
    assert "Position ids of batch row 1 of 2 begin again 2 times" in finding.sentence
    attend_within(table, by_row=True)
    assert of(planted(tmp_path, model, run, name="right"), JOINED) == []


def test_padding_and_positions_that_go_on_are_no_documents(tmp_path: Path) -> None:
    model, mask = make_model("llama"), torch.ones_like(ROW)
    mask[:, :5] = 0
    padded = (mask.cumsum(1) - 1).clamp(min=0)  # the padding has position 0, as the first token
    run = partial(model, ROW, position_ids=padded, attention_mask=mask, use_cache=False)
    assert of(planted(tmp_path, model, run), JOINED) == []
    run = partial(model, ROW, attention_mask=torch.ones_like(ROW), use_cache=False)
    assert of(planted(tmp_path, model, run, name="plain"), JOINED) == []

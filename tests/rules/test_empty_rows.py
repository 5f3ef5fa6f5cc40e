"""Rows that see no key, and the rows that read them, in models and in standalone calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captures import capture
from support.cases import found_in_case, found_in_trace, segments
from support.ownmasks import attend_by, causal, isolated, with_cache
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model
from torch import Tensor

from flexinspect.records.finding import Severity

PROMPT = 14
EMPTY = "mask.empty-row"


def prompt_ids() -> Tensor:
    return torch.tensor([ids(PROMPT, 3)])


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """Generate with a tiny model under a mask of cells, and return the findings."""

    def go(cells: Any, family: str = "llama", *, flex: bool = False, **watch: Any) -> Any:
        model = make_model(family)
        attend_by(model, cells, flex=flex)
        return planted(tmp_path, model, lambda: with_cache(model, prompt_ids(), 3), **watch)

    return go


def test_the_case_of_separators_without_a_segment_names_rows_and_first_reader() -> None:
    found = found_in_case("w02_orphan_tokens", segments((1, 7), (9, 15)))
    finding = one(found, EMPTY)
    assert (finding.severity, finding.step, finding.positions) == (Severity.WARNING, 0, (0, 7, 8))
    assert (finding.layers, finding.evidence["first_reader"]) == ((0, 1, 2), 15)
    assert finding.sentence.startswith("3 rows of bos and separator 1 see no key at all (first:")
    assert finding.sentence.endswith("and 2 other rows (first: position 15) read them.")
    assert finding.why
    assert finding.fix


def test_padding_that_no_row_reads_is_a_note_on_every_backend() -> None:
    found = found_in_case("s04_left_padding")
    assert [(f.id, f.severity, f.positions) for f in found if f.id == EMPTY] == [
        (EMPTY, Severity.NOTE, (0, 1, 2))
    ] * 3
    assert all("3 rows of padding see no key at all" in f.sentence for f in of(found, EMPTY))
    assert serious(found) == []


def test_a_padded_batch_makes_no_more_than_a_note() -> None:
    assert serious(found_in_case("c2_padded_batch")) == []


@pytest.mark.parametrize(("family", "layer"), [("gpt_neox", 2), ("qwen3", 0)])
def test_one_row_of_one_layer_that_later_rows_read(
    run: Callable[..., Any], family: str, layer: int
) -> None:
    found = run(
        lambda at, rows, keys: causal(at, rows, keys) & ((rows != 5) | (at != layer)), family
    )
    finding = one(found, EMPTY)
    assert (finding.layer, finding.layers, finding.positions) == (layer, (), (5,))
    assert (finding.severity, finding.evidence["first_reader"]) == (Severity.WARNING, 6)


def test_decode_rows_that_see_nothing_from_a_step_on(run: Callable[..., Any]) -> None:
    found = run(lambda at, rows, keys: causal(at, rows, keys) & (rows < PROMPT + 1), flex=True)
    finding = one(found, EMPTY)
    assert (finding.step, finding.severity) == (2, Severity.ERROR)
    assert "it is the newest row, which predicts the next token" in finding.sentence


def test_a_mask_without_empty_rows_makes_no_finding(run: Callable[..., Any]) -> None:
    assert of(run(isolated([(1, 5), (6, 10)], 11)), EMPTY) == []


# -- standalone calls ------------------------------------------------------------------------------

STANDALONE = """
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
torch.manual_seed(0)
def call(rule, rows, keys):
    q, k = torch.randn(1, 2, rows, 16), torch.randn(1, 2, keys, 16)
    flex_attention(q, k, k, block_mask=create_block_mask(rule, None, None, rows, keys, "cpu"))
call(lambda b, h, q, k: (k <= q) & (q != 3), 8, 8)
call(lambda b, h, q, k: (k <= q) & (q >= 3) & (k >= 3), 8, 8)
call(lambda b, h, q, k: k < 0, 1, 6)
call(lambda b, h, q, k: k <= q + 3, 3, 6)
"""


def test_standalone_calls_distinguish_rows_that_are_read_from_padding(tmp_path: Path) -> None:
    script = tmp_path / "trial.py"
    script.write_text(STANDALONE)
    out = tmp_path / "script.flextrace"
    assert capture(script, out).code == 0
    read, padding, nothing = of(found_in_trace(out), EMPTY)
    assert (read.generation, read.severity, read.positions) == (0, Severity.WARNING, (3,))
    assert read.sentence == (
        "Row 3 of 8 sees no key at all in this call; FlexAttention gives it zeros (a dense softmax "
        "would give NaN), and 4 other rows (first: position 4) read it."
    )
    assert (padding.generation, padding.severity) == (1, Severity.NOTE)
    assert padding.sentence.startswith("3 rows 0-2 of 8 see no key at all in this call; ")
    assert (nothing.generation, nothing.severity) == (2, Severity.WARNING)

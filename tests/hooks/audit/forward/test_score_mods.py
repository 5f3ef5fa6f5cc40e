"""What a score_mod does to cells and heads is read from its values alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexinspect_hooks.audit.forward.score_mods import additive_bias, heads_of_other_groups
from flexinspect_hooks.audit.hypotheses.score_mod_faults import set_cells


@given(kv_heads=st.integers(2, 4), size=st.integers(2, 4), n=st.integers(2, 6))
def test_a_table_per_key_head_is_wrong_only_where_it_is_indexed_by_the_remainder(
    kv_heads: int, size: int, n: int
) -> None:
    table = torch.arange(1.0, kv_heads + 1)
    heads = kv_heads * size

    def bias(index: Any) -> Any:
        def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return score - table[index(h)] * (q - kv)

        found = additive_bias(mod, heads, n, torch.device("cpu"))
        assert found is not None
        return found

    wrong = heads_of_other_groups(bias(lambda h: h % kv_heads), kv_heads)
    assert wrong == [h for h in range(heads) if h % kv_heads != h // size]
    assert wrong
    assert not heads_of_other_groups(bias(lambda h: h // size), kv_heads)
    assert not heads_of_other_groups(bias(lambda h: h * 0), kv_heads)


def test_heads_that_all_differ_or_that_share_no_keys_are_not_judged() -> None:
    each = torch.arange(8.0)[:, None, None].expand(8, 3, 3)
    assert not heads_of_other_groups(each, 2)
    assert not heads_of_other_groups((each % 2), 8)
    assert not heads_of_other_groups((each % 2), 1)


@pytest.mark.parametrize("value", [0.0, 5.0, -1e9, float("-inf")])
def test_cells_that_are_set_are_named_unless_the_constant_closes_them(value: float) -> None:
    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where((h == 1) & (kv < 2) & (q >= 3), value, score)

    found = set_cells(mod, 4, range(10, 16), 16)
    if value < -1:
        assert found is None
        return
    assert found is not None
    words = f"the keys 0 to 1 to {value:g} in head 1, for the rows of the positions 13 to 15"
    assert words in found.text(10)


def test_scores_that_are_scaled_capped_or_all_replaced_have_no_set_cells() -> None:
    def capped(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return 2 * torch.tanh(score / 2)

    def uniform(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * 0

    def raising(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        raise RuntimeError

    for mod in (capped, uniform, raising):
        assert set_cells(mod, 2, range(4), 4) is None

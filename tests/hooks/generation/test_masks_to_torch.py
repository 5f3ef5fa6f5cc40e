"""Mask specs become mask_mods and block masks that are equal to the numpy masks."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flexinspect.core.errors import DatasetError, MaskError
from flexinspect.inputs import datasets
from flexinspect.masks import key_blocks, mask_presets
from flexinspect.masks.key_blocks import BLOCK_SIZE, block_tables
from flexinspect.masks.mask_presets import MaskSpec, causal
from flexinspect_hooks.ensemble.ensemble_run import load_mask_mod
from flexinspect_hooks.generation.mask_source import (
    ForwardWindow,
    SpecMaskSource,
    SpecTables,
    UserMaskSource,
    arithmetic_mask_mod,
    check_mask_mod,
    head_groups,
    window_block_tables,
)

CPU = torch.device("cpu")


@st.composite
def specs(draw: st.DrawFn) -> MaskSpec:
    """Any mask spec in normal form over a few dozen positions."""
    starts = sorted(draw(st.sets(st.integers(1, 40), max_size=6)) | {0})
    low = [draw(st.one_of(st.integers(0, 40), st.just(mask_presets.UNREACHABLE))) for _ in starts]
    head = [draw(st.integers(0, 40)) for _ in starts]
    return MaskSpec("any", tuple(starts), tuple(head), tuple(low))


@st.composite
def windows(draw: st.DrawFn) -> ForwardWindow:
    """A prefill, a decode row, or a chunk, perhaps with the oldest keys dropped."""
    q_offset, q_len = draw(st.integers(0, 30)), draw(st.integers(1, 12))
    kv_offset = draw(st.integers(0, q_offset))
    return ForwardWindow(q_len, q_offset + q_len - kv_offset, q_offset, kv_offset)


def dense(spec: MaskSpec, window: ForwardWindow) -> np.ndarray[Any, Any]:
    whole = spec.dense(window.q_len, window.kv_offset + window.kv_len, q_offset=window.q_offset)
    return whole[:, window.kv_offset :]


def evaluate(mask_mod: Any, window: ForwardWindow, heads: int = 1) -> torch.Tensor:
    """The cells of a mask_mod under vmap, one group of heads after the other."""
    indices = [torch.arange(n) for n in (heads, window.q_len, window.kv_len)]
    return torch.cat(list(head_groups(mask_mod, torch.tensor(0), *indices)))


@settings(max_examples=60, deadline=None)
@given(specs(), windows())
def test_both_forms_of_mask_mod_equal_numpy_under_vmap(
    spec: MaskSpec, window: ForwardWindow
) -> None:
    expected = dense(spec, window)
    tables = SpecTables(spec, 64, CPU)
    for mask_mod in (arithmetic_mask_mod(spec, window), tables.mask_mod(window)):
        assert (evaluate(mask_mod, window).numpy() == expected).all()


@settings(max_examples=60, deadline=None)
@given(specs(), windows())
def test_arithmetic_mask_mods_may_be_called_with_index_grids(
    spec: MaskSpec, window: ForwardWindow
) -> None:
    mask_mod = arithmetic_mask_mod(spec, window)
    zero = torch.zeros((), dtype=torch.int64)
    q, kv = torch.arange(window.q_len)[:, None], torch.arange(window.kv_len)[None]
    grid = mask_mod(zero, zero, q, kv).expand(window.q_len, window.kv_len)
    assert (grid.numpy() == dense(spec, window)).all()


@pytest.mark.parametrize(("n_q", "n_kv", "offset"), [(300, 300, 0), (256, 256, 0), (1, 301, 300)])
def test_block_tables_equal_those_of_create_block_mask(n_q: int, n_kv: int, offset: int) -> None:
    spec = MaskSpec("two", (0, 140), (0, 3), (0, 140))
    window = ForwardWindow(n_q, n_kv, offset)
    mine = window_block_tables(spec, window)
    theirs = create_block_mask(
        arithmetic_mask_mod(spec, window), None, None, n_q, n_kv, device="cpu"
    )
    source = SpecMaskSource(spec, length=400, device=CPU, compiled=False)
    made = source.block_mask(window, None)
    assert made.to_dense().equal(theirs.to_dense())
    for ours, name in ((mine.partial, "kv"), (mine.full, "full_kv")):
        counts = getattr(theirs, f"{name}_num_blocks")[0, 0]
        assert ours.sum(axis=1).tolist() == counts.tolist()


@settings(max_examples=200, deadline=None)
@given(specs(), st.integers(0, 45))
def test_the_tables_of_one_row_equal_those_made_from_its_cells(spec: MaskSpec, q_idx: int) -> None:
    wide = MaskSpec(
        "wide",
        tuple(8 * s for s in spec.starts),
        tuple(8 * h for h in spec.prefix_stops),
        tuple(min(8 * low, mask_presets.UNREACHABLE) for low in spec.local_starts),
    )
    q_idx *= 8
    mine = key_blocks.row_block_tables(wide, q_idx, q_idx + 1)
    cells = block_tables(wide, 1, q_idx + 1, q_offset=q_idx)
    assert (mine.partial == cells.partial | cells.full).all()
    assert not mine.full.any()


def test_a_decode_step_computes_its_one_row_and_never_a_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row_counts: list[int] = []
    original = MaskSpec.dense

    def spy(self: MaskSpec, n_q: int, *args: Any, **kwargs: Any) -> Any:
        row_counts.append(n_q)
        return original(self, n_q, *args, **kwargs)

    monkeypatch.setattr(MaskSpec, "dense", spy)
    source = SpecMaskSource(causal(), length=5000, device=CPU, compiled=False)
    source.block_mask(ForwardWindow(1, 4001, 4000), None)
    assert all(n_rows <= 1 for n_rows in row_counts)
    row_counts.clear()
    block_tables(causal(), 1000, 1000)
    assert max(row_counts) <= BLOCK_SIZE


def test_a_user_mask_mod_gets_the_row_offset_of_a_decode_step() -> None:
    user_source = UserMaskSource(lambda b, h, q, kv: kv <= q, name="mine", device=CPU)
    block_mask = user_source.block_mask(ForwardWindow(1, 9, 8), None)
    k = torch.randn(1, 1, 9, 16)
    out = flex_attention(torch.zeros(1, 1, 1, 16), k, k, block_mask=block_mask)
    torch.testing.assert_close(out[0, 0, 0], k[0, 0].mean(0))


@pytest.mark.parametrize(
    ("mask_mod", "message"),
    [
        (lambda b, h, q, kv: True, "Python bool"),
        (lambda b, h, q, kv: (q - kv).float(), "float32"),
        (lambda b, h, q, kv: (kv <= q).reshape(1), r"shape \(1,\)"),
        (lambda b, h, q, kv, x: kv <= q, "failed when called"),
        (lambda b, h, q, kv: kv <= q if q > 0 else kv == q, "cannot be vectorised"),
        (lambda b, h, q, kv: kv <= q if h > 0 else kv == q, "cannot be vectorised"),
    ],
)
def test_a_mask_mod_that_flex_would_refuse_is_refused(mask_mod: Any, message: str) -> None:
    with pytest.raises(MaskError, match=message):
        check_mask_mod(mask_mod, "mine", CPU)


def test_a_mask_function_may_take_indices_or_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own_masks")
    module.plain = lambda b, h, q, kv: kv <= q  # type: ignore[attr-defined]
    module.made = lambda segments: lambda b, h, q, kv: kv < len(segments)  # type: ignore[attr-defined]
    module.defaults = lambda b, h, q, kv, more=0: kv <= q  # type: ignore[attr-defined]
    module.any = lambda *indices: indices[3] <= indices[2]  # type: ignore[attr-defined]
    module.odd = lambda a, b: a  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    module.none = lambda segments: None  # type: ignore[attr-defined]
    module.fails = lambda segments: segments[99]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_masks", module)
    two, five = torch.tensor(2), torch.tensor(5)
    for name in ("plain", "defaults", "any"):
        assert bool(load_mask_mod(f"own_masks:{name}", ())(two, two, five, two))
    assert not bool(load_mask_mod("own_masks:made", ())(two, two, five, two))
    for spec in ("own_masks:odd", "own_masks:number", "own_masks:none", "builtins:dict"):
        with pytest.raises(MaskError, match="must take"):
            load_mask_mod(spec, ())
    with pytest.raises(MaskError, match="failed when called with the prompt's segments: IndexErr"):
        load_mask_mod("own_masks:fails", ())
    with pytest.raises(MaskError, match="cannot be loaded"):
        load_mask_mod("own_masks:absent", ())
    with pytest.raises(MaskError, match="cannot be loaded"):
        load_mask_mod("no_such_module_here:f", ())


def test_modules_that_exit_when_imported_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_itself.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(MaskError, match="cannot be loaded: SystemExit: 7"):
        load_mask_mod("ends_itself:mask_mod", ())
    with pytest.raises(DatasetError, match="failed: SystemExit: 7"):
        datasets.load("ends_itself:Set")

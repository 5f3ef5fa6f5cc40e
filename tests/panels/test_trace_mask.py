"""The masks of a trace over positions equal the dense masks that were written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import mask_trace
from support.mask_trace import BARE, CAUSAL, HEADS, N_PROMPT, RIGHT, SLIDING, TABLES, WRONG

from flexinspect.core.errors import UsageError
from flexinspect.masks import mask_presets
from flexinspect.masks.known_masks import dense
from flexinspect.masks.verification import verify_mask
from flexinspect.panels.base import TracePlace
from flexinspect.panels.mask.trace_mask import TraceMask, load_trace_mask
from flexinspect.panels.panel_source import Source
from flexinspect.trace.reader import open_trace

N = N_PROMPT + 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    path = mask_trace.write(tmp_path_factory.mktemp("trace") / "run.flextrace")
    return Source(open_trace(path))


def load(source: Source, layer: int, view: str = "executed", **options: object) -> TraceMask:
    head = options.pop("head", 0)
    place = TracePlace(layer=layer, head=head)  # type: ignore[arg-type]
    return load_trace_mask(source, place, view, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", [RIGHT, WRONG, CAUSAL, HEADS, SLIDING])
@pytest.mark.parametrize("head", [0, 1])
def test_executed_cells_are_those_of_the_layer(source: Source, layer: int, head: int) -> None:
    found = load(source, layer, head=head)
    assert (found.n_rows, found.n_keys, found.n_unknown) == (N, N, 0)
    expected = mask_trace.dense_mask(layer, head=head)
    assert (dense(found.mask, N, N) == expected).all()
    rows, keys = np.array([16, 2, 9], np.int32), np.array([3, 2], np.int32)
    assert (found.mask.cells(rows, keys) == expected[np.ix_(rows, keys)]).all()


def test_a_step_shows_the_rows_up_to_it(source: Source) -> None:
    found = load(source, RIGHT, last_step=0)
    assert (found.n_rows, found.n_keys) == (N_PROMPT, N_PROMPT)
    assert load(source, RIGHT, last_step=2).n_rows == N_PROMPT + 2


def test_the_declared_mask_leaves_out_dropped_keys(source: Source) -> None:
    declared = load(source, RIGHT, "declared").mask
    spec = mask_presets.preset("segment-isolation", mask_trace.SEGMENTS)
    assert (dense(declared, N, N) == spec.dense(N)).all()
    sliding = load(source, SLIDING)
    assert verify_mask(
        sliding.mask,
        sliding.segments,
        n_rows=N,
        n_keys=N,
        declared=sliding.declared,
        checks=("declared",),
    ).passed


def test_received_blocks_are_visited_ones(source: Source) -> None:
    found = load(source, TABLES, "received")
    assert found.n_unknown == 0
    assert dense(found.mask, N, N)[:N_PROMPT, :N_PROMPT].all()  # one block of 128
    causal = load(source, CAUSAL, "received")
    assert (dense(causal.mask, N, N) == mask_trace.dense_mask(CAUSAL)).all()


def test_words_and_segments_come_from_the_trace(source: Source) -> None:
    found = load(source, WRONG)
    assert found.words[1] == "Which"
    assert [s.label for s in found.segments] == [s.label for s in mask_trace.SEGMENTS]
    assert found.segments[-1].stop == N
    result = verify_mask(found.mask, found.segments, n_rows=N, n_keys=N, declared=found.declared)
    assert result.failed == ("isolation", "fusion", "declared")
    assert result.heads[0].isolation.first == (9, 2)


@pytest.mark.parametrize("layer", [BARE, TABLES])
def test_cells_that_were_not_recorded_are_one_sentence(source: Source, layer: int) -> None:
    with pytest.raises(UsageError, match="were not recorded") as error:
        load(source, layer)
    assert "--level advanced" in (error.value.hint or "")


def test_a_run_without_a_declared_mask_has_no_declared_view(tmp_path: Path) -> None:
    source = Source(open_trace(mask_trace.write(tmp_path / "run.flextrace", about={})))
    assert load(source, RIGHT).declared is None
    with pytest.raises(UsageError, match="No mask was declared"):
        load(source, RIGHT, "declared")


def test_a_generation_of_many_steps_is_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexinspect.panels.mask import mask_grid, trace_mask

    for module, name, value in (
        (mask_grid, "MAX_STEPS", 8),
        (mask_grid, "WINDOW_STEPS", 2),
        (mask_grid, "PART_STEPS", 2),
        (trace_mask, "WINDOW_STEPS", 2),
    ):
        monkeypatch.setattr(module, name, value)
    path = mask_trace.write(tmp_path / "long.flextrace", n_steps=30)
    found = load(Source(open_trace(path)), WRONG)
    n = N_PROMPT + 29
    assert (found.n_rows, found.n_unknown) == (n, 0)
    assert (dense(found.mask, n, n) == mask_trace.dense_mask(WRONG, 30)).all()

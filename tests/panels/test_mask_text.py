"""The text of the mask panel: the cursor, counts, the whole mask described."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from support import mask_trace
from support.mask_trace import Shown, sentence

from flexinspect.drawing.theme import Theme
from flexinspect.masks import mask_presets
from flexinspect.panels.mask.mask_text import format_counts
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import GenerationRecord
from flexinspect.trace.file.writer import TraceWriter

PLAIN = Theme("none")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return Shown(mask_trace.write(tmp_path_factory.mktemp("mask") / "t.flextrace"))


@pytest.mark.parametrize(
    ("layer", "q", "kv", "view", "expected"),
    [
        (
            *(mask_trace.RIGHT, 9, 2, "executed"),
            (
                'row 9 "this" (paraphrase 2) does not attend to 2 "city" (paraphrase 1): '
                "another paraphrase, separated by segment-isolation"
            ),
        ),
        (
            *(mask_trace.RIGHT, 9, 6, "executed"),
            (
                'row 9 "this" (paraphrase 2) does not attend to 6 "↵" (separator 1): '
                "another paraphrase, separated by segment-isolation"
            ),
        ),
        (
            *(mask_trace.RIGHT, 2, 9, "executed"),
            (
                'row 2 "city" (paraphrase 1) does not attend to 9 "this" (paraphrase 2): '
                "it comes later (causal)"
            ),
        ),
        (
            *(mask_trace.RIGHT, 9, 8, "executed"),
            'row 9 "this" (paraphrase 2) attends to 8 "is" (paraphrase 2)',
        ),
        (
            *(mask_trace.WRONG, 10, 8, "executed"),
            (
                'row 10 "place" (paraphrase 2) does not attend to 8 "is" (paraphrase 2): '
                "lost, segment-isolation opens it, but it was not executed"
            ),
        ),
        (
            *(mask_trace.WRONG, 9, 2, "executed"),
            (
                'row 9 "this" (paraphrase 2) attends to 2 "city" (paraphrase 1): '
                "leaked, segment-isolation closes it"
            ),
        ),
        (
            *(mask_trace.WRONG, 9, 2, "declared"),
            (
                'row 9 "this" (paraphrase 2) should not attend to 2 "city" (paraphrase 1): '
                "another paraphrase, separated by segment-isolation"
            ),
        ),
        (
            *(mask_trace.WRONG, 9, 2, "received"),
            (
                'row 9 "this" (paraphrase 2) and 2 "city" (paraphrase 1): '
                "their block of 128 x 128 is partial, the mask_mod decides"
            ),
        ),
        (
            *(mask_trace.BARE, 9, 2, "received"),
            (
                'row 9 "this" (paraphrase 2) and 2 "city" (paraphrase 1): '
                "the executed mask was not recorded here"
            ),
        ),
    ],
)
def test_the_cursor_explains_whether_a_row_attends_to_a_key(
    shown: Shown, layer: int, q: int, kv: int, view: str, expected: str
) -> None:
    assert sentence(shown, layer, q, kv, view=view) == expected


def test_rows_that_see_nothing_are_reported_and_counted(tmp_path: Path) -> None:
    spec = mask_presets.preset("segment-isolation", mask_trace.SEGMENTS, separators="isolated")
    about = mask_trace.declared(spec, "isolated")
    empty = Shown(mask_trace.write(tmp_path / "t.flextrace", spec=spec, about=about))
    assert sentence(empty, 0, 6, 2).endswith(
        "the row attends to no key, as set by --separators isolated"
    )
    assert '2 rows attend to no key: 6 "↵" (separator 1), 12 "↵" (separator 2).' in empty.words(
        0, 2
    )
    assert sentence(empty, 0, 6, 2, view="declared").endswith(
        "rows of separators attend to no key (--separators isolated)"
    )
    assert format_counts(empty.load(0, 2, q=6, kv=2)).startswith("row 6: 0 of 7 keys open · key 2")


def test_a_compiled_call_names_the_block_that_loses_or_leaks(tmp_path: Path) -> None:
    path = mask_trace.write(tmp_path / "t.flextrace", compiled=True)
    with TraceWriter.create(tmp_path / "u.flextrace", {"model": "x"}) as writer:
        spec = mask_presets.preset("segment-isolation", mask_trace.SEGMENTS)
        masked = mask_trace.MaskedSteps(spec, layers=(mask_trace.WRONG,), compiled=True)
        writer.begin_generation(
            GenerationRecord(
                *(0, "s", spec.name, "contiguous", mask_trace.SEGMENTS, mask_trace.tokens()),
                declared=mask_trace.declared(spec),
            )
        )
        step = masked.step(0)
        tables = {"partial": np.zeros((1, 1, 1), np.bool_), "full": np.ones((1, 1, 1), np.bool_)}
        writer.write_step(replace(step, masks=(replace(step.masks[0], **tables),)))
        step = masked.step(1)
        closed = {"partial": np.zeros((1, 1, 1), np.bool_), "cells": np.zeros((1, 1, 16), np.bool_)}
        writer.write_step(replace(step, masks=(replace(step.masks[0], **closed),)))
    blocks = Shown(tmp_path / "u.flextrace")
    assert "its block is full, so the mask_mod is not called" in sentence(
        blocks, mask_trace.WRONG, 9, 2, 1
    )
    assert "its block is not visited" in sentence(blocks, mask_trace.WRONG, 15, 2, 1)
    assert "its block" not in sentence(Shown(path), mask_trace.WRONG, 9, 2)


def test_rows_and_columns_are_counted(shown: Shown) -> None:
    counts = format_counts(shown.load(mask_trace.RIGHT, 3, q=9, kv=7))
    dense = mask_trace.dense_mask(mask_trace.RIGHT)
    n_open, n_rows = dense[9].sum(), dense[:, 7].sum()
    assert counts == f"row 9: {n_open} of 10 keys open · key 7: open to {n_rows} of 18 rows"
    assert (
        format_counts(shown.load(mask_trace.RIGHT, 3))
        == 'token 17 "w17" (generated) sees 18 of 18 keys'
    )
    assert format_counts(shown.load(mask_trace.RIGHT, 0)) == 'token 14 ":" (cue) sees 15 of 15 keys'


def test_the_whole_mask_is_described(shown: Shown) -> None:
    lines = shown.panel.describe(shown.load(mask_trace.WRONG, 3))
    dense = mask_trace.dense_mask(mask_trace.WRONG)
    assert lines[0] == (
        "The mask of layer 1, the same for all heads, generation 0, at step 3: 18 rows, 18 keys, "
        "view 'ran', verified ✓ (error 3e-06)."
    )
    assert lines[1] == (
        "The step received a block mask, 1 x 18 in blocks of 128 x 128, mask_mod user.rule, "
        "fingerprint L1s3g0b0."
    )
    assert lines[2] == f"{dense.sum()} of 324 cells are open ({100 * dense.sum() / 324:.1f} %)."
    assert lines[3] == (
        "The declared mask is segment-isolation; the executed mask differs: lost 2 · leaked 1."
    )
    assert lines[4] == (
        "First leaked pair (executed, declared closed): "
        'row 9 "this" (paraphrase 2), key 2 "city" (paraphrase 1).'
    )
    assert lines[5] == (
        "First lost pair (declared open, not executed): "
        'row 10 "place" (paraphrase 2), key 8 "is" (paraphrase 2).'
    )
    assert "Every recorded row attends to a key." in lines


def test_segments_are_set_against_each_other(shown: Shown) -> None:
    lines = shown.panel.describe(shown.load(mask_trace.WRONG, 3))
    table = {line[3:19].strip(): line.split()[-7:] for line in lines if line[:2].strip().isdigit()}
    assert table["paraphrase 1"] == ["open", "open", "-", "-", "-", "-", "-"]
    assert table["paraphrase 2"] == ["open", "0.04", "closed", "0.93", "-", "-", "-"]
    assert table["cue"] == ["open"] * 6 + ["-"]


def test_a_mask_that_looks_ahead_is_named_so(tmp_path: Path) -> None:
    path = tmp_path / "t.flextrace"
    step = mask_trace.MaskedSteps(mask_presets.causal(), layers=(0,)).step(0)
    mask = replace(step.masks[0], kind="none", cells=np.ones((1, 15, 15), np.bool_))
    with TraceWriter.create(path, {"model": "x"}) as writer:
        writer.begin_generation(
            GenerationRecord(0, "s", "own", "contiguous", mask_trace.SEGMENTS, mask_trace.tokens())
        )
        writer.write_step(replace(step, masks=(mask,)))
    lines = Shown(path).panel.describe(Shown(path).load())
    row = next(line for line in lines if line.startswith(" 1 paraphrase 1"))
    assert row.split()[-7:] == ["open", *["ahead"] * 5, "-"]
    assert any("no mask (every key is open)" in line for line in lines)


def test_many_segments_are_described_in_sentences(tmp_path: Path) -> None:
    segments = [Segment(n, n + 1, f"paraphrase {n}", SegmentKind.PARAPHRASE, n) for n in range(20)]
    spec = mask_presets.preset("segment-isolation", segments)
    path = tmp_path / "t.flextrace"
    step = mask_trace.MaskedSteps(spec, layers=(0,)).step(0)
    with TraceWriter.create(path, {"model": "x"}) as writer:
        writer.begin_generation(
            GenerationRecord(
                *(0, "s", spec.name, "contiguous", tuple(segments), mask_trace.tokens()),
                declared=mask_trace.declared(spec),
            )
        )
        writer.write_step(step)
    text = Shown(path).words()
    assert "paraphrase 9: open paraphrase 9; closed paraphrase 0, paraphrase 1," in text


def test_text_of_the_model_is_made_printable(tmp_path: Path) -> None:
    path = tmp_path / "t.flextrace"
    bad = [replace(t, text="\x1b[31m\n", token="\x1b") for t in mask_trace.tokens()]
    segments = [replace(s, label=f"\x1b]0;{s.label}\x07") for s in mask_trace.SEGMENTS]
    with TraceWriter.create(path, {"model": "x"}) as writer:
        writer.begin_generation(
            GenerationRecord(0, "s", "own", "contiguous", tuple(segments), tuple(bad))
        )
        writer.write_step(mask_trace.MaskedSteps(mask_presets.causal(), layers=(0,)).step(0))
    hostile = Shown(path)
    drawn = hostile.text(q=3, kv=2) + hostile.words(q=3, kv=2).splitlines()
    assert all(line.isprintable() for line in drawn)
    assert "\\x1b" in "".join(drawn)

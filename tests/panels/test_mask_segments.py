"""The two levels of the mask panel: the matrix of segments, the tokens with a map, and the row of
the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import mask_trace
from support.mask_trace import Shown

from flexinspect.drawing.theme import Theme
from flexinspect.masks import mask_presets
from flexinspect.masks.viewport import LEAKED, LOST, OPEN
from flexinspect.panels.mask.mask_layout import MaskOptions
from flexinspect.panels.mask.mask_pixels import map_strips
from flexinspect.panels.mask.mask_segments import count_pairs
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import GenerationRecord
from flexinspect.trace.file.writer import TraceWriter

PLAIN = Theme("none")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return Shown(mask_trace.write(tmp_path_factory.mktemp("mask") / "t.flextrace"))


def written(path: Path, segments: tuple[Segment, ...]) -> Shown:
    """Return a trace of one causal step with these segments."""
    with TraceWriter.create(path, {"model": "x"}) as writer:
        writer.begin_generation(
            GenerationRecord(0, "s", "own", "contiguous", segments, mask_trace.tokens())
        )
        writer.write_step(mask_trace.MaskedSteps(mask_presets.causal(), layers=(0,)).step(0))
    return Shown(path)


def act(shown: Shown, action: str, layer: int = mask_trace.WRONG, **kwargs: Any) -> Any:
    request = shown.request(layer, 3, **kwargs)
    return shown.panel.on_action(action, shown.panel.load(shown.source, request), request)


def test_pairs_of_segments_are_counted_cell_by_cell(shown: Shown) -> None:
    every = range(len(mask_trace.SEGMENTS))
    pairs = count_pairs(shown.load(mask_trace.WRONG, 3).mask_view, every, every)
    dense = mask_trace.dense_mask(mask_trace.WRONG)
    declared = mask_trace.dense_mask(mask_trace.RIGHT)
    causal = np.tri(18, dtype=np.bool_)
    for row, of_row in enumerate(mask_trace.SEGMENTS):
        for key, of_key in enumerate(mask_trace.SEGMENTS):
            cells = np.s_[of_row.start : of_row.stop, of_key.start : of_key.stop]
            assert pairs.open[row, key] == dense[cells].sum()
            assert pairs.past[row, key] == causal[cells].sum()
            assert pairs.lost[row, key] == (declared & ~dense)[cells].sum()
            assert pairs.leaked[row, key] == (dense & ~declared)[cells].sum()
    part = count_pairs(shown.load(mask_trace.WRONG, 3).mask_view, range(3, 6), range(1, 4))
    assert np.array_equal(part.past, pairs.past[3:6, 1:4])
    assert np.array_equal(part.leaked, pairs.leaked[3:6, 1:4])


def test_the_segments_are_above_the_tokens_where_there_is_room(shown: Shown) -> None:
    text = shown.text(mask_trace.WRONG, 3, (120, 40), look=PLAIN, view="auto")
    assert text[0].split()[:4] == ["row", "↓", "key", "→"]
    assert text[0].split()[4:8] == ["0", "bos", "1", "paraphrase…"]
    rows = {line[:16].strip(): line[16:].split() for line in text[1:8]}
    assert rows["1 paraphrase 1"] == ["open", "open", *["-"] * 5]
    assert rows["3 paraphrase 2"] == ["open", "0.04", "+1", "closed", "0.93", "-1", *["-"] * 3]
    assert rows["6 generated"][:3] == ["open", "0.93", "-1"]
    assert text[8].strip() == ""
    assert text[9].startswith("row ↓ key →    │bos │paraphrase 1")
    assert shown.load(mask_trace.WRONG, 3).layout.first_zoom == 0


@pytest.mark.parametrize("size", [(78, 18), (38, 16)])
def test_zooming_out_of_the_whole_mask_leads_to_its_segments(
    shown: Shown, size: tuple[int, int]
) -> None:
    assert shown.load(mask_trace.WRONG, 3, size).matrix is None
    options = act(shown, "zoom.out", size=size)
    assert options == MaskOptions(view="executed", zoom=-1)
    text = shown.text(mask_trace.WRONG, 3, size, look=PLAIN, view="auto", zoom=-1)
    assert len(text) <= size[1]
    assert "+1" in text[4]
    assert "-1" in text[4]
    assert "leaked" in "".join(text[8:])
    note = shown.paint(mask_trace.WRONG, 3, size, view="auto", zoom=-1).note
    assert note.startswith(("L1 H0=all · ", "layer 1 · head 0 (all heads alike) · "))
    assert note.endswith(" · segments")
    assert act(shown, "zoom.out", size=size, zoom=-1) is None
    assert act(shown, "zoom.in", size=size, zoom=-1).zoom == 0


def test_enter_on_a_pair_leads_to_its_words(shown: Shown) -> None:
    options = act(shown, "cursor.enter", size=(38, 16), zoom=-1, q=9, kv=2)
    data = shown.load(mask_trace.WRONG, 3, (38, 16), zoom=options.zoom, q=9, kv=2)
    assert (data.layout.grid.row_scale, data.layout.cell_width) == (1, 3)
    assert data.cursor == (9, 2)


def test_a_difference_has_a_colour_and_a_sign(shown: Shown) -> None:
    strips = shown.paint(mask_trace.WRONG, 3, (120, 40)).strips
    colours = {
        segment.text.strip(): segment.style.bgcolor for segment in strips[4] if segment.style
    }
    assert colours["0.04 +1"] != colours["0.93 -1"] != colours["closed"]


def test_a_prompt_without_segments_has_one_level(tmp_path: Path) -> None:
    bare = written(tmp_path / "t.flextrace", ())
    data = bare.load()
    assert (data.matrix, data.layout.first_zoom) == (None, 0)
    assert bare.load(zoom=-1).layout.zoom == 0


def test_many_segments_are_shown_around_the_cursor(tmp_path: Path) -> None:
    names = [Segment(n, n + 1, f"part {n}", SegmentKind.PARAPHRASE, n) for n in range(15)]
    many = written(tmp_path / "t.flextrace", tuple(names))
    options = MaskOptions(zoom=-1, q=0, kv=0)
    for _ in range(14):
        request = replace(many.request(size=(38, 12)), options=options)
        data = many.panel.load(many.source, request)
        assert data.matrix is not None
        assert options.q in data.matrix.pairs.rows
        assert options.kv in data.matrix.pairs.keys
        options = many.panel.on_action("cursor.down", data, request)
    assert options.q == 14
    text = many.text(size=(38, 12), look=PLAIN, zoom=-1, q=14)
    assert any(line.startswith("14 part 14▸") for line in text)


def test_a_click_on_a_pair_finds_its_first_difference(shown: Shown) -> None:
    request = shown.request(mask_trace.WRONG, 3, (120, 40))
    data = shown.panel.load(shown.source, request)
    assert data.matrix is not None

    def clicked(row: int, key: int, *, click: bool = True) -> Any:
        x = data.matrix.head + key * data.matrix.cell if data.matrix else 0
        return shown.panel.on_mouse(x, row + 1, data, request, click=click)

    assert (clicked(3, 1).q, clicked(3, 1).kv) == (9, 2)
    assert (clicked(3, 3).q, clicked(3, 3).kv) == (10, 8)
    assert (clicked(5, 3).q, clicked(5, 3).kv) == (13, 7)
    assert clicked(3, 1, click=False) is None


# -- tokens ---------------------------------------------------------------------------------------


def test_zooming_in_leads_to_the_first_difference_in_words(shown: Shown) -> None:
    options = act(shown, "zoom.in", size=(62, 14), view="difference")
    assert (options.zoom, options.q, options.kv) == (1, 9, 2)
    text = shown.text(mask_trace.WRONG, 3, (62, 14), look=PLAIN, view="difference", zoom=1, q=9)
    assert any(line.startswith("      this▸") for line in text)
    assert act(shown, "zoom.in", size=(62, 14), view="executed").q is None
    assert act(shown, "zoom.in", size=(62, 14), view="difference", q=4, kv=3).q == 4


def test_keys_count_while_an_earlier_one_is_loading(shown: Shown) -> None:
    request = shown.request(mask_trace.WRONG, 3, (62, 14), zoom=0)
    data = shown.panel.load(shown.source, request)
    for expected in (1, 2, 3):
        options = shown.panel.on_action("zoom.in", data, request)
        assert isinstance(options, MaskOptions)
        assert options.zoom == expected
        request = replace(request, options=options)


def test_a_zoomed_window_has_the_cursor_in_its_middle(shown: Shown) -> None:
    grid = shown.load(mask_trace.WRONG, 3, (50, 12), zoom=2, q=9, kv=9).layout.grid
    assert abs(grid.row + grid.height // 2 - 9) <= 1
    assert abs(grid.key + grid.width // 2 - 9) <= 1


def test_the_cell_under_the_cursor_has_brackets(shown: Shown) -> None:
    picture = shown.paint(mask_trace.WRONG, 3, (120, 40), q=9, kv=2, view="difference")
    (line,) = [strip.text for strip in picture.strips if "▸" in strip.text and "this" in strip.text]
    assert line[15:].index("[   ]") == 10


def test_a_map_shows_where_the_window_is(shown: Shown) -> None:
    data = shown.load(mask_trace.WRONG, 3, (78, 18), zoom=2, q=9, kv=2, view="difference")
    grid = data.layout.map_grid
    assert grid is not None
    assert {LOST, LEAKED, OPEN} <= set(np.unique(data.map_states).tolist())
    strips = map_strips(data, PLAIN)
    marked = "".join(s.text for strip in strips for s in strip if s.style and s.style.reverse)
    assert 0 < len(marked) < sum(strip.cell_length for strip in strips)
    texts = [
        strip.text
        for strip in shown.paint(mask_trace.WRONG, 3, (78, 18), zoom=2, look=PLAIN).strips
    ]
    assert texts[0].endswith(map_strips(shown.load(1, 3, (78, 18), zoom=2), PLAIN)[0].text)
    for size, zoom in (((78, 18), 0), ((58, 18), 2)):
        assert shown.load(mask_trace.WRONG, 3, size, zoom=zoom).layout.map_grid is None


# -- the row of the step --------------------------------------------------------------------------


def test_the_row_of_the_step_is_a_strip_of_its_own(shown: Shown) -> None:
    data = shown.load(mask_trace.SLIDING, 2, (78, 18), zoom=2)
    dense = mask_trace.dense_mask(mask_trace.SLIDING)
    assert data.strip_states is not None
    assert np.array_equal(data.strip_states[0] == OPEN, dense[16])
    text = shown.text(mask_trace.SLIDING, 2, (78, 18), zoom=2, look=PLAIN)
    assert 'token 16 "w16" (generated) sees 6 of 17 keys' in [line.strip() for line in text]
    (row,) = [line for line in text if "6/17▶" in line]
    assert row.partition("▶")[2].strip() == "·" * 33 + "█" * 18 + "·" * 3
    wide = shown.text(mask_trace.SLIDING, 2, (120, 40), look=PLAIN)
    assert any("sees 6 of 17▶" in line for line in wide)


def test_a_narrow_panel_leaves_out_the_segment(shown: Shown) -> None:
    text = shown.text(mask_trace.SLIDING, 2, (38, 16), look=PLAIN)
    assert 'token 16 "w16" sees 6 of 17 keys' in [line.strip() for line in text]


def test_a_small_panel_has_no_strip(shown: Shown) -> None:
    assert shown.load(0, 3, (78, 11)).strip_states is None
    assert shown.load(0, 3, (78, 12)).layout.strip == 1
    assert shown.load(0, 3, (78, 16)).layout.strip == 2

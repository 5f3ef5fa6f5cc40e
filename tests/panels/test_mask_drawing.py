"""The mask panel drawn, moved, zoomed and pointed at."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import mask_trace
from support.mask_trace import Shown

from flexinspect.drawing.theme import Theme
from flexinspect.masks.viewport import CLOSED, N_STATES, OPEN
from flexinspect.panels.base import Navigate, Request, TracePlace
from flexinspect.panels.mask import mask_text
from flexinspect.panels.mask.mask_data import MaskData, segment_number
from flexinspect.panels.mask.mask_layout import MaskOptions, column_edges, mask_layout, zoom_steps
from flexinspect.panels.mask.mask_panel import MaskPanel
from flexinspect.panels.mask.mask_pixels import CURSOR, GENERATED, grid_tints, mask_palette
from flexinspect.panels.panel_registry import with_options
from flexinspect.panels.panel_source import Source
from flexinspect.trace.reader import open_trace

PLAIN = Theme("none")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return Shown(mask_trace.write(tmp_path_factory.mktemp("mask") / "t.flextrace"))


# -- drawing --------------------------------------------------------------------------------------


def test_the_whole_mask_with_its_words_and_segments(shown: Shown) -> None:
    assert shown.text(mask_trace.RIGHT, 3, (80, 24), look=PLAIN, q=9, kv=2) == [
        "row ↓ key →    │  │paraphrase 1  │  │paraphrase 2  │  │cue  │genera…            ",
        "               <boWhicitis it ?  ↵  Whais thipla?  ↵  Ans:  w15w16w17           ",
        "         <bos> ███···················································           ",
        "         Which ██████················································           ",
        "          city █████████·············································           ",
        "            is ████████████··········································           ",
        "            it ███████████████·······································           ",
        "             ? ██████████████████····································           ",
        "             ↵ █████████████████████·································           ",
        "          What ███··················███······························           ",
        "            is ███··················██████···························           ",
        "          this▸███··················█████████························           ",
        "         place ███··················████████████·····················           ",
        "             ? ███··················███████████████··················           ",
        "             ↵ ███··················██████████████████···············           ",
        "        Answer ██████████████████████████████████████████············           ",
        "             : █████████████████████████████████████████████·········           ",
        "           w15 ████████████████████████████████████████████████······           ",
        "           w16 ███████████████████████████████████████████████████···           ",
        "           w17▶██████████████████████████████████████████████████████           ",
        'token 17 "w17" (generated) sees 18 of 18 keys                                   ',
        " sees 18 of 18▶██████████████████████████████████████████████████████           ",
        'row 9 "this" (paraphrase 2) does not attend to 2 "city" (paraphrase 1)          ',
        "█ open  · closed                                                                ",
    ]


def test_a_small_panel_shows_it_in_half_blocks(shown: Shown) -> None:
    text = shown.text(mask_trace.RIGHT, 3, (38, 14), look=PLAIN)
    assert text[:11] == [
        "       ││parap 1 │ │para 2 │ │  │gen… ",
        "bos    █▄▄····························",
        "para 1 █████▄·························",
        "       ████████▄▄·····················",
        "para 2 █▀▀▀▀▀▀▀▀▀▀▀▄··················",
        "     8 █···········███▄▄··············",
        "       █···········██████▄▄···········",
        "cue    █▄▄▄▄▄▄▄▄▄▄▄██████████▄▄·······",
        "       █████████████████████████▄▄····",
        "gener…▶█████████████████████████████▄▄",
        " 18/18▶███████████████████████████████",
    ]
    assert all(len(line) == 38 for line in text)


def test_without_colours_a_difference_has_letters(shown: Shown) -> None:
    text = shown.text(mask_trace.WRONG, 3, (80, 24), look=PLAIN, view="difference")
    assert text[11].startswith("          this ███···+++···")
    assert text[12].startswith("         place ███··················███---██████")


@pytest.mark.slow
def test_every_size_is_filled_and_never_exceeded(shown: Shown) -> None:
    looks = cycle((Theme(), Theme("256"), PLAIN, Theme()))  # each size and option meets several
    for width in (1, 2, 3, 5, 7, 12, 20, 34, 38, 56, 80, 120, 200):
        for height in (1, 2, 3, 4, 5, 7, 10, 12, 14, 24, 26, 40, 90):
            for options in (
                *({}, {"zoom": -1}, {"q": 3, "kv": 9, "zoom": 9}),
                {"blocks": True, "zoom": 2, "view": "difference"},
            ):
                size, look = (width, height), next(looks)
                picture = shown.paint(mask_trace.WRONG, 2, size, look=look, **options)
                assert 0 < len(picture.strips) <= height
                assert {strip.cell_length for strip in picture.strips} == {width}
                assert all(sum(s.cell_length for s in strip) == width for strip in picture.strips)


def test_generated_rows_and_the_cursor_have_tints_of_their_own(shown: Shown) -> None:
    tints = grid_tints(shown.load(mask_trace.RIGHT, 3, q=9, kv=2))
    assert tints[9, 2] == CURSOR
    assert (tints[15:, 3:] == GENERATED).all()
    assert (tints[:9, 15:] == GENERATED).all()
    block = tints[7:9, 7:12]
    assert len(set(block.ravel().tolist())) == 1
    assert tints[7, 5] != tints[7, 7]
    assert tints[12, 12] == tints[11, 11]  # a separator goes with its paraphrase


def test_no_two_states_of_a_tint_look_alike() -> None:
    rgb = mask_palette().rgb
    assert len(rgb) % N_STATES == 0
    for tint in range(len(rgb) // N_STATES):
        colours = np.array(rgb[tint * N_STATES : (tint + 1) * N_STATES], int)
        between = [np.abs(a - b).sum() for n, a in enumerate(colours) for b in colours[:n]]
        assert min(between) > 20


def test_what_is_partly_open_is_darker_than_open_and_lighter_than_closed() -> None:
    rgb = np.array(mask_palette().rgb, float) @ (0.299, 0.587, 0.114)
    for tint in range(len(rgb) // N_STATES):
        light = rgb[tint * N_STATES : tint * N_STATES + OPEN + 1]
        assert (np.diff(light) > 0).all()
        assert light[1] - light[0] > 20
        assert light[OPEN] - light[OPEN - 1] > 20


def test_the_note_names_view_place_scale_and_lse_check(shown: Shown) -> None:
    picture = shown.paint(mask_trace.RIGHT, 3)
    where = "layer 0 · head 0 (all heads alike)"
    assert picture.note == f"{where} · ran · verified ✓ (error 3e-06) · zoom 2:1 x 5:1"
    assert not picture.alarm
    picture = shown.paint(mask_trace.WRONG, 3, (38, 14))
    assert picture.note == "L1 H0=all · lost 2 · leaked 1 · ran · verified ✓ (error 3e-06) · 1:1"
    assert picture.alarm
    assert shown.text(mask_trace.WRONG, 3)[-2].startswith("first leaked pair (executed, declared")


def test_a_narrow_note_begins_with_the_layer_and_the_chosen_head(shown: Shown) -> None:
    for head in (0, 1):
        place = TracePlace(step=3, layer=mask_trace.WRONG, head=head)
        note = shown.paint(size=(38, 14), at=place).note
        assert note.startswith(f"L1 H{head}=all · lost 2 · leaked 1")


@pytest.mark.parametrize(
    ("lse_error", "note", "alarm"),
    [
        (None, "not checked", False),
        (0.5, "LSE error 5e-01: not what ran", True),
        (float("nan"), "LSE error nan: not what ran", True),
    ],
)
def test_a_failed_or_missing_lse_check_is_reported(
    tmp_path: Path, lse_error: float | None, note: str, alarm: bool
) -> None:
    checked = Shown(mask_trace.write(tmp_path / "t.flextrace", 2, lse_error=lse_error))
    picture = checked.paint(mask_trace.RIGHT, 1)
    assert f" · ran · {note} · " in picture.note
    assert picture.alarm is alarm
    assert ("is not what ran" in checked.words(mask_trace.RIGHT, 1)) is alarm


# -- zoom, cursor, mouse --------------------------------------------------------------------------


def follow(shown: Shown, action: str, options: MaskOptions, **kwargs: Any) -> Any:
    request = replace(shown.request(mask_trace.RIGHT, 3, **kwargs), options=options)
    return shown.panel.on_action(action, shown.panel.load(shown.source, request), request)


def test_zooming_ends_at_the_whole_mask_and_at_single_cells(shown: Shown) -> None:
    options, scales = MaskOptions(zoom=-1), []
    for _ in range(20):
        data = shown.panel.load(
            shown.source, replace(shown.request(0, 3, (38, 10)), options=options)
        )
        scales.append((data.layout.zoom, data.layout.grid.row_scale, data.layout.cell_width))
        found = follow(shown, "zoom.in", options, size=(38, 10))
        if found is None:
            break
        options = found
    assert [scale[1:] for scale in scales[1:]] == [(2, 1), (1, 3), (1, 6), (1, 10)]
    assert [zoom for zoom, _, _ in scales] == [-1, 0, 1, 2, 3]
    assert follow(shown, "zoom.out", MaskOptions(), size=(38, 10)).zoom == -1
    assert follow(shown, "zoom.out", MaskOptions(zoom=-1), size=(38, 10)) is None
    assert follow(shown, "zoom.out", options, size=(38, 10)).zoom == 2


def test_a_zoomed_window_shows_the_current_row_and_its_own_key(shown: Shown) -> None:
    for step in range(4):
        data = shown.load(0, step, (30, 10), zoom=9)
        grid = data.layout.grid
        assert data.current is not None
        assert grid.row <= data.current[-1] < grid.row_stop
        assert grid.key <= data.current[-1] < grid.key_stop


def test_a_window_of_any_zoom_is_part_of_the_whole(shown: Shown) -> None:
    whole = mask_trace.dense_mask(mask_trace.WRONG)
    for zoom in range(6):
        data = shown.load(mask_trace.WRONG, 3, (38, 10), zoom=zoom, q=10, kv=8)
        grid = data.layout.grid
        for y in range(grid.height):
            for x in range(grid.width):
                row, key = grid.row + y * grid.row_scale, grid.key + x * grid.key_scale
                cells = whole[row : row + grid.row_scale, key : key + grid.key_scale]
                assert (data.states[y, x] == OPEN) == cells.all()
                assert (data.states[y, x] == CLOSED) == (not cells.any())


def test_the_cursor_moves_by_cells_and_takes_the_window_along(shown: Shown) -> None:
    options = follow(shown, "cursor.left", MaskOptions(zoom=9), size=(30, 10))
    assert (options.q, options.kv) == (17, 17)
    for _ in range(9):
        options = follow(shown, "cursor.up", options, size=(30, 10))
    for _ in range(9):
        options = follow(shown, "cursor.left", options, size=(30, 10))
    assert (options.q, options.kv) == (8, 8)
    data = shown.panel.load(shown.source, replace(shown.request(0, 3, (30, 10)), options=options))
    grid = data.layout.grid
    assert grid.row <= 8 < grid.row_stop
    assert grid.key <= 8 < grid.key_stop


def test_the_cursor_stays_on_the_mask(shown: Shown) -> None:
    assert follow(shown, "cursor.up", MaskOptions(q=0, kv=0)) is None
    assert follow(shown, "cursor.down", MaskOptions(q=17, kv=0)) is None
    assert follow(shown, "cursor.right", MaskOptions(q=17, kv=17)) is None
    data = shown.load(0, 3, q=99, kv=99)
    assert data.cursor == (17, 17)


def test_a_token_that_was_searched_for_is_the_cursor(shown: Shown) -> None:
    data = shown.load(at=TracePlace(step=3, pos=9))
    assert data.cursor == (9, 9)


def test_enter_goes_to_the_step_that_fed_the_row(shown: Shown) -> None:
    assert follow(shown, "cursor.enter", MaskOptions(q=16, kv=2)) == Navigate(step=2)
    assert follow(shown, "cursor.enter", MaskOptions(q=4, kv=2)) == Navigate(step=0, pos=4)
    assert follow(shown, "cursor.enter", MaskOptions()) is None


def test_the_view_is_flipped_through_all_four(shown: Shown) -> None:
    options, views = MaskOptions(), []
    for _ in range(5):
        views.append(options.view)
        options = follow(shown, "view.flip", options)
    assert views == ["auto", "received", "declared", "difference", "executed"]
    assert follow(shown, "view.blocks", MaskOptions()).blocks
    assert follow(shown, "something.else", MaskOptions()) is None


def at_cell(data: MaskData, row: int, key: int) -> tuple[int, int]:
    frame = data.layout
    x = frame.left + int(column_edges(frame.grid, frame.columns)[key - frame.grid.key])
    return x, frame.top + (row - frame.grid.row) * frame.cell_height // 2


@pytest.mark.parametrize("size", [(120, 40), (38, 14), (80, 24)])
def test_the_mouse_puts_the_cursor_where_it_is(shown: Shown, size: tuple[int, int]) -> None:
    request = shown.request(0, 3, size)
    data = shown.panel.load(shown.source, request)
    for row, key in ((0, 0), (8, 4), (16, 17)):
        x, y = at_cell(data, row, key)
        found = shown.panel.on_mouse(x, y, data, request, click=False)
        assert isinstance(found, MaskOptions)
        assert (found.q, found.kv) == (row, key)
    assert shown.panel.on_mouse(0, 0, data, request, click=True) is None
    assert shown.panel.on_mouse(size[0], size[1], data, request, click=True) is None


def test_pointing_at_the_cursor_again_changes_nothing(shown: Shown) -> None:
    request = shown.request(0, 3, q=4, kv=2)
    data = shown.panel.load(shown.source, request)
    assert shown.panel.on_mouse(*at_cell(data, 4, 2), data, request, click=True) is None


def test_zoom_steps_begin_with_the_whole_and_end_with_large_cells() -> None:
    for shape in ((1, 1), (18, 18), (73, 73), (4096, 4096), (32768, 32768), (1524, 100_000)):
        for lines, columns in ((1, 1), (10, 30), (36, 105), (60, 200)):
            steps = zoom_steps(shape, lines, columns)
            whole = steps[0]
            assert -(-shape[0] // whole.row_scale) * whole.height <= max(2 * lines, 1)
            assert -(-shape[1] // whole.key_scale) * whole.width <= columns
            assert steps[-1][:2] == (1, 1)
            assert steps[-1].width == (10 if columns > 1 else 1)
            sizes = [s.row_scale * s.key_scale / s.width / s.height for s in steps]
            assert all(b < a for a, b in pairwise(sizes))


def test_rows_and_keys_have_scales_of_their_own() -> None:
    def scales(*args: Any) -> tuple[int, int]:
        grid = mask_layout(*args, MaskOptions(), step_row=0).grid
        return grid.row_scale, grid.key_scale

    assert scales(118, 34, (75, 75), (0, 0)) == (2, 1)
    assert scales(118, 34, (785, 785), (0, 0)) == (15, 8)
    assert scales(118, 34, (1524, 51187), (0, 0)) == (32, 512)


@pytest.mark.parametrize("size", [(78, 18), (118, 34), (198, 49)])
@pytest.mark.parametrize("n", [40, 75, 100, 400, 961])
def test_the_whole_mask_takes_most_of_the_panel(size: tuple[int, int], n: int) -> None:
    layout = mask_layout(*size, (n, n), (0, 0), MaskOptions(), step_row=0, n_segments=6)
    assert layout.columns >= (size[0] - layout.left) * 0.65
    assert layout.matrix + layout.top + layout.lines >= (size[1] - 5) * 0.75


def test_the_cells_of_a_coarse_scale_fill_the_width() -> None:
    layout = mask_layout(78, 18, (75, 75), (0, 0), MaskOptions())
    assert (layout.left, layout.columns, layout.grid.width) == (11, 67, 38)
    assert layout.cell_at(11, layout.top) == (0, 0)
    assert layout.cell_at(77, layout.top) == (0, 74)
    assert layout.cell_at(78, layout.top) is None
    hit = [layout.cell_at(x, layout.top) for x in range(11, 78)]
    assert [cell[1] for cell in hit if cell] == sorted(cell[1] for cell in hit if cell)
    assert len(set(hit)) == 38


def test_a_window_stands_still_while_the_focus_moves_within_half_of_it() -> None:
    starts = [
        mask_layout(80, 24, (4000, 4000), (row, row), MaskOptions(zoom=6)).grid.row
        for row in range(2000, 2100)
    ]
    assert len(set(starts)) <= 100 * 2 // 20


def test_segments_are_found_by_position() -> None:
    found = [segment_number(mask_trace.SEGMENTS, pos) for pos in (0, 1, 6, 7, 14, 15, 999)]
    assert found == [0, 1, 2, 3, 5, 6, 6]
    assert segment_number((), 3) == -1


def test_the_panel_has_its_name_help_and_options() -> None:
    panel = MaskPanel()
    assert panel.name == "mask"
    assert panel.depends_on_size
    assert all(line.endswith(".") for line in panel.help)
    assert panel.initial_options == MaskOptions()


def test_options_can_be_given_as_text() -> None:
    given = {"view": "difference", "blocks": "yes", "zoom": "2", "q": "45", "kv": "none"}
    found = with_options(MaskPanel(), given)
    assert found == MaskOptions("difference", True, 2, 45, None)


def test_a_repeated_load_keeps_what_it_made(shown: Shown, tmp_path: Path) -> None:
    fresh = Source(open_trace(shown.path))
    request: Callable[[int], Request[MaskOptions]] = lambda step: Request(  # noqa: E731
        TracePlace(step=step), MaskOptions(), 120, 40
    )
    first = shown.panel.load(fresh, request(1))
    second = shown.panel.load(fresh, request(2))
    assert first.states is second.states
    assert first.mask_view.parts[0] is second.mask_view.parts[0]


@pytest.mark.parametrize("size", [(38, 10), (38, 16), (78, 18), (118, 34)])
def test_the_meaning_of_a_difference_is_readable_at_every_size(
    shown: Shown, size: tuple[int, int]
) -> None:
    lines = shown.text(mask_trace.WRONG, 3, size, view="auto")
    assert len(lines) <= size[1]
    assert all(len(line) == size[0] for line in lines)
    note = shown.paint(mask_trace.WRONG, 3, size, view="auto").note
    assert "lost 2 · leaked 1" in note[: size[0] - 4]
    legend = "\n".join(lines).partition("first leaked pair")[2]
    assert "leaked" in legend
    assert "lost" in legend


def test_the_first_leaked_pair_is_whole_where_there_is_room(shown: Shown) -> None:
    wide = " ".join(" ".join(shown.text(mask_trace.WRONG, 3, (60, 60), view="auto")).split())
    assert "leaked: should be closed" in wide
    assert "lost: should be open" in wide
    (pair, *_) = mask_text.describe_first_pairs(shown.load(mask_trace.WRONG, 3))
    assert pair in wide


def test_the_legend_names_the_tints_on_screen(shown: Shown) -> None:
    legend = "\n".join(shown.text(mask_trace.RIGHT, 3, q=9, kv=2)[-3:])
    assert "■■ cursor" in legend
    assert "■■ generated" in legend
    assert "■■ neighbouring segments" in legend
    assert "cursor" not in "\n".join(shown.text(mask_trace.RIGHT, 3)[-3:])
    blocks = "\n".join(shown.text(mask_trace.RIGHT, 3, blocks=True)[-3:])
    assert "■■ partial" in blocks
    assert "■■ full" not in blocks

"""The weights of the X-ray equal a dense softmax, and are not shown if they are not what ran."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace
from support.attention_trace import N_PROMPT, Made, SyntheticGeneration
from support.tui import screen_lines, settle, until

from flexinspect.drawing.theme import Theme
from flexinspect.masks.attention_row import UNCHECKED
from flexinspect.panels import xray_loading
from flexinspect.panels.attention import row_recompute
from flexinspect.panels.attention.attention_data import NO_OPEN_KEY
from flexinspect.panels.base import Request, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import load_token_window
from flexinspect.panels.tokens_panel import TokensOptions, TokensPanel
from flexinspect.panels.xray import WEIGHT_SIGNS, WEIGHTS, Direction, RowWeights, WeightsOf
from flexinspect.panels.xray_loading import load_xray
from flexinspect.records.step import Array, StepRecord
from flexinspect.trace.array_parts import StoredArray
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.status_lines import draw_token_strip

PLAIN = Theme("none")


def load(
    source: Source, of: WeightsOf, place: TracePlace, direction: Direction = "sees"
) -> RowWeights:
    found = load_xray(source, place, load_token_window(source, place, 64), direction, of)
    assert found is not None
    assert found.weights is not None
    return found.weights


def described(source: Source, of: WeightsOf, place: TracePlace) -> list[str]:
    request = Request(place, TokensOptions(xray="sees", weights=of))
    return TokensPanel().describe(TokensPanel().load(source, request))


def dense(synthetic: SyntheticGeneration, layer: int, head: int) -> npt.NDArray[np.float64]:
    """Return the softmax of all rows over all keys, (rows, keys), in one piece."""
    n = synthetic.q.shape[2]
    key = synthetic.k[layer, head // (synthetic.heads // synthetic.kv_heads)].astype(float)
    scores = synthetic.q[layer, head].astype(float) @ key.T * 0.5
    is_open = np.stack([np.pad(synthetic.cells(row), (0, n - row - 1)) for row in range(n)])
    parts = np.where(is_open, np.exp(scores), 0.0)
    weights: npt.NDArray[np.float64] = parts / parts.sum(axis=1, keepdims=True)
    return weights


def row_of(weights: RowWeights, n: int) -> list[float]:
    return [weights.by_pos.get(pos, 0.0) for pos in range(n)]


@pytest.mark.parametrize("window", [None, 5], ids=["full cache", "sliding cache"])
def test_every_row_equals_a_dense_softmax(made: Made, window: int | None) -> None:
    synthetic, source = made(window=window)
    n = synthetic.q.shape[2]
    rows = [(TracePlace(layer=1, head=2, pos=pos), pos) for pos in range(N_PROMPT)]
    rows += [(TracePlace(0, 0, step, 1, 2), N_PROMPT + step - 1) for step in range(1, 4)]
    each = [[dense(synthetic, layer, head) for head in range(4)] for layer in range(2)]
    expected: dict[WeightsOf, npt.NDArray[np.float64]]
    for place, row in rows:
        expected = {"head": each[1][2], "layer": np.mean(each[1], 0), "mean": np.mean(each, (0, 1))}
        for of, weights in expected.items():
            found = load(source, of, place)
            np.testing.assert_allclose(row_of(found, n), weights[row], atol=1e-6)


def test_the_weights_of_a_window_are_shares_of_the_whole_row(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexinspect.panels.token_window.CHUNK_TOKENS", 2)
    synthetic, source = made(n_steps=29)
    place = TracePlace(step=28, head=1)
    window = load_token_window(source, place, 2)
    found = load_xray(source, place, window, "sees", "head")
    assert found is not None
    assert found.weights is not None
    expected = synthetic.weights(0, 1, N_PROMPT + 27)
    assert window.start > 20
    assert min(found.weights.by_pos) == window.start
    for pos, weight in found.weights.by_pos.items():
        assert weight == pytest.approx(expected[pos], abs=1e-6)
    top = np.argsort(-expected)[:10].tolist()
    assert [pos for pos, _, _ in found.weights.heaviest] == top
    assert min(top) < window.start
    assert found.weights.heaviest[0][1] == f" w{top[0]}"


def test_the_heaviest_token_is_highest_where_most_heads_have_no_open_key(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source = made(n_steps=1)
    weights = np.zeros(N_PROMPT)
    weights[2] = 0.1  # that of one head of ten
    mean = xray_loading._MeanRow(weights, UNCHECKED)
    monkeypatch.setattr(xray_loading, "_mean_row", lambda *_: mean)
    found = load(source, "layer", TracePlace(pos=6))
    assert found.level(2) == len(WEIGHT_SIGNS) - 1


def test_one_row_of_one_head_is_read_and_nothing_else(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    synthetic, source = made(n_steps=1)
    n_items: list[int] = []
    read = StoredArray.read

    def counting(self: StoredArray, reader: TraceReader, start: int, stop: int) -> Array:
        n_items.append(stop - start)
        return read(self, reader, start, stop)

    monkeypatch.setattr(StoredArray, "read", counting)
    monkeypatch.delattr(TraceReader, "mask")
    monkeypatch.setattr(row_recompute, "MAX_CACHED_MASK_CELLS", 1)
    assert load(source, "head", TracePlace(pos=6, head=3)).by_pos
    width = synthetic.width
    # The queries of the row and of the newest one, for its check; the keys of one head.
    assert sorted(n_items) == [width, width, N_PROMPT * width]
    n_items.clear()
    assert load(source, "head", TracePlace(pos=6, head=3)).by_pos
    assert not n_items


def test_the_text_names_the_heads_the_check_and_the_heaviest_tokens(made: Made) -> None:
    synthetic, source = made()
    lines = described(source, "head", TracePlace(step=2, layer=1, head=3))
    at = next(n for n, line in enumerate(lines) if line.startswith("Attention of"))
    assert lines[at].startswith("Attention of layer 1, head 3 (LSE error ")
    weights = synthetic.weights(1, 3, N_PROMPT + 1)
    top = int(weights.argmax())
    assert lines[at + 1].split() == [f"{weights[top]:.4f}", str(top), "'", f"w{top}'"]
    assert load(source, "layer", TracePlace(step=2)).of == "layer 0, mean of 4 heads"
    assert load(source, "mean", TracePlace(step=2)).of == "2 layers, mean of 8 heads"


def test_an_older_row_names_the_check_of_the_newest(made: Made) -> None:
    _, source = made()
    assert load(source, "head", TracePlace(pos=6)).check.startswith("newest row: LSE error")


def test_a_row_that_is_not_what_ran_has_no_weights(made: Made) -> None:
    def scaled(step: StepRecord) -> StepRecord:
        calls = [replace(c, scale=0.1) if c.layer == 1 else c for c in step.calls]
        return replace(step, calls=tuple(calls))

    _, source = made(change=scaled)
    for of in WEIGHTS[1:]:
        found = load(source, of, TracePlace(step=1, layer=1))
        assert found.is_mismatch
        assert not found.by_pos
        assert found.summary().startswith("layer 1, head 0: This is not what ran:")
    assert load(source, "layer", TracePlace(step=1, layer=0)).by_pos
    request = Request(TracePlace(step=1, layer=1), TokensOptions(xray="sees", weights="head"))
    picture = TokensPanel().paint(TokensPanel().load(source, request), request, PLAIN)
    assert picture.alarm


def test_what_is_missing_is_a_sentence(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    _, advanced = made(level="advanced")
    for of in WEIGHTS[1:]:
        assert load(advanced, of, TracePlace(step=1)).summary() == row_recompute.EXTREME_ONLY
    _, some = made(stored=(1,))
    assert "layer 0 are not stored" in load(some, "head", TracePlace(step=1)).summary()
    assert load(some, "mean", TracePlace(step=1)).of == "1 layer, mean of 4 heads"
    assert load(some, "mean", TracePlace(step=1), "seen by").summary() == xray_loading.ONLY_SEES
    monkeypatch.setattr(xray_loading, "MAX_MEAN_BYTES", 10)
    assert (
        "more than the limit of 0 MiB" in load(some, "mean", TracePlace(step=1, layer=1)).summary()
    )


def test_a_row_without_open_keys_says_so(made: Made) -> None:
    def closed(step: StepRecord) -> StepRecord:
        cells = step.masks[0].cells
        assert cells is not None
        cells = cells.copy()
        cells[:, 6] = False
        return replace(step, masks=(replace(step.masks[0], cells=cells),))

    _, source = made(n_steps=1, change=closed)
    assert load(source, "head", TracePlace(pos=6)).summary() == NO_OPEN_KEY


@pytest.mark.parametrize("even", [0.1, 1e-5])
def test_the_scale_goes_from_a_tenth_of_an_even_share_to_the_heaviest_token(even: float) -> None:
    middle = (even / 10 * 0.6) ** 0.5
    weights = {0: 0.6, 1: middle * 1.01, 2: middle / 1.01, 3: even / 10, 4: 1e-9, 5: 0.0}
    row = RowWeights("head", "", even, weights, [(0, "a", 0.6)])
    assert [row.level(pos) for pos in range(7)] == [7, 4, 3, 0, 0, 0, None]


def test_equal_weights_are_all_the_heaviest() -> None:
    row = RowWeights("head", "", 0.5, {0: 0.5, 1: 0.5}, [(0, "a", 0.5)])
    assert (row.level(0), row.level(1)) == (7, 7)


@pytest.mark.parametrize("depth", ["none", "truecolor"])
def test_the_strip_shows_weights_below_the_tokens_and_by_their_colour(
    made: Made, depth: str
) -> None:
    _, source = made()
    place, theme = TracePlace(step=1), Theme(depth)  # type: ignore[arg-type]
    window = load_token_window(source, place, 64)
    found = load_xray(source, place, window, "sees", "mean")
    assert found is not None
    assert found.weights is not None
    (tokens, signs), row = draw_token_strip(window, 80, theme, found)
    styles = {segment.text: segment.style for segment in tokens}
    by_level: dict[int, set[object]] = {}
    for cell, column in zip(row.cells, row.columns, strict=False):
        level = found.weights.level(cell.pos)
        if found.states.get(cell.pos) != "open" or cell.pos == found.pos or level is None:
            continue
        assert signs.text[column] == WEIGHT_SIGNS[level]
        if len(cell.text) > 1 and not cell.invisible and not cell.special:
            by_level.setdefault(level, set()).add(str(styles[cell.text]))
    assert len(by_level) > 2
    if depth == "truecolor":
        assert all(len(own) == 1 for own in by_level.values())
        assert len(set.union(*by_level.values())) == len(by_level)


async def test_one_key_weighs_the_xray_and_follows_the_head(made: Made) -> None:
    _, source = made()
    app = InspectorApp(Path(source.reader.path), place=TracePlace(step=2))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("W")
        await until(pilot, lambda: screen_lines(app)[4].startswith("layer 0, head 0 (LSE error"))
        assert "sees" in screen_lines(app)[3]
        assert set(screen_lines(app)[2]) & set(WEIGHT_SIGNS)
        await pilot.press("]")
        await until(pilot, lambda: screen_lines(app)[4].startswith("layer 0, head 1 "))
        await pilot.press("W")
        await until(pilot, lambda: screen_lines(app)[4].startswith("layer 0, mean of 4 heads"))
        await pilot.press("a")  # what sees the token
        await until(pilot, lambda: screen_lines(app)[4].startswith("Attention weights are"))
        await pilot.press("W")  # back to what it sees
        await until(pilot, lambda: screen_lines(app)[4].startswith("layer 0, mean of 4 heads"))
        await pilot.press("W", "W")
        await until(pilot, lambda: "━" in screen_lines(app)[2])
        await settle(pilot)
        assert not screen_lines(app)[4].startswith("layer")

"""The functions of the notebook, with the keys of its configurations."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from flexinspect import masks
from flexinspect.core.errors import UsageError
from flexinspect.figures import notebook_figures
from flexinspect.masks import draw_flowchart, visualize_attention_mask

CUSTOM_CONFIG = {
    "num_paraphrases": 4,
    "tokens_per_paraphrase": 30,
    "separator_tokens": 3,
    "num_generated_tokens": 10,
    "display_mode": "sampled",
    "max_display_positions": 30,
}


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    from matplotlib import pyplot

    pyplot.close("all")


def test_a_full_picture_returns_the_whole_matrix() -> None:
    figure, matrix, positions = visualize_attention_mask()
    n = 3 * 15 + 2 * 2 + 5
    assert positions.tolist() == list(range(n))
    assert matrix.shape == (n, n)
    assert not np.triu(matrix, 1).any()
    assert matrix[49].sum() == 50
    assert not matrix[17:32, :15].any()
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)


def test_a_sampled_picture_returns_the_positions_that_it_shows() -> None:
    figure, matrix, positions = visualize_attention_mask(CUSTOM_CONFIG, language="zh", theme="dark")
    assert len(positions) <= 30
    assert matrix.shape == (len(positions),) * 2
    assert {0, 33, 66, 99, 129} <= set(positions.tolist())
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert {"段1", "段4", "可以关注"} <= texts


def test_the_figure_is_one_that_pyplot_shows() -> None:
    from matplotlib import pyplot

    figure, _, _ = visualize_attention_mask({"num_paraphrases": 2})
    assert pyplot.figure(figure.number) is figure
    assert pyplot.fignum_exists(draw_flowchart().number)


def test_the_flowchart_has_the_size_of_its_configuration() -> None:
    figure = draw_flowchart({"figure_size": (7, 8), "color_output": "#102030"})
    assert tuple(figure.get_size_inches()) == (7, 8)
    assert {text.get_text() for text in figure.axes[0].texts} >= {"Input", "Output", "Mask"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_paraphrase": 3}, "unknown field `num_paraphrase`"),
        ({"num_paraphrases": 0}, "in num_paraphrases"),
        ({"display_mode": "all"}, "display_mode"),
    ],
)
def test_a_wrong_key_is_one_sentence(config: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        visualize_attention_mask(config)
    with pytest.raises(UsageError, match="unknown field `color`"):
        draw_flowchart({"color": "#000000"})


def test_both_places_have_the_same_signatures() -> None:
    for name in ("draw_flowchart", "visualize_attention_mask"):
        here = getattr(notebook_figures, name)
        assert inspect.signature(getattr(masks, name)) == inspect.signature(here)


def test_importing_masks_imports_neither_numpy_nor_matplotlib() -> None:
    code = "import sys, flexinspect.masks; print({'numpy', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

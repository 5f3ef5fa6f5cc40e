"""What the newest row of a mask sees, over its heads."""

from __future__ import annotations

import numpy as np

from flexinspect.rules.masks.mask_views import StepMaskView


def test_the_newest_row_sees_a_key_that_any_of_its_heads_sees() -> None:
    cells = np.array([[[1, 1, 0], [1, 0, 0]], [[0, 0, 0], [0, 0, 1]]], np.bool_)
    view = StepMaskView("f", (0, 2), cells, 5, 2)
    assert view.newest_row.tolist() == [True, False, True]
    assert view.visible_positions().tolist() == [5, 7]
    assert StepMaskView("f", (0,), cells[:1], 5, 2).newest_row.tolist() == [True, False, False]

"""What a program changes in the weights of models that are made during a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexinspect_hooks.changed_weights.made_weights import MadeWeights


@pytest.fixture
def made() -> Iterator[MadeWeights]:
    """The weights of the models that the test makes, as they were made."""
    weights = MadeWeights()
    stop = weights.watch()
    yield weights
    stop()

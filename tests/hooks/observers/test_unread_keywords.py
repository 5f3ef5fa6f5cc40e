"""Keywords that the code of an attention function never reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from flexinspect_hooks.observers.attention.unread_keywords import unread_keywords

PASSED = {"softcap": 50.0, "sliding_window": None, "s_aux": object(), "dropout": 0.0}


def ignores(module: Any, query: Any, **kwargs: Any) -> Any:
    return query


def takes_and_ignores(module: Any, query: Any, softcap: Any = None, **kwargs: Any) -> Any:
    return query


def reads_a_cap(module: Any, query: Any, **kwargs: Any) -> Any:
    return query * kwargs["softcap"]


def reads_inside(module: Any, query: Any, softcap: Any = None, **kwargs: Any) -> Any:
    def score_mod(score: Any) -> Any:
        return score / softcap

    return score_mod(query) + module.sinks


def reads_the_module(module: Any, query: Any, **kwargs: Any) -> Any:
    return query * module.attn_logit_softcapping + module.sinks


def hands_on(module: Any, query: Any, **kwargs: Any) -> Any:
    return ignores(module, query, **kwargs)


@pytest.mark.parametrize(
    ("function", "unread"),
    [
        (ignores, ["softcap", "s_aux"]),
        (takes_and_ignores, ["softcap", "s_aux"]),
        (partial(ignores, None), ["softcap", "s_aux"]),
        (reads_a_cap, ["s_aux"]),
        (reads_inside, []),
        (reads_the_module, []),
        (hands_on, []),
        (len, []),
    ],
)
def test_the_code_tells_which_keywords_are_read(
    function: Callable[..., Any], unread: list[str]
) -> None:
    assert unread_keywords(function, PASSED) == unread

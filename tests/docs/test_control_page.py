"""docs/control.md lists what there is."""

from __future__ import annotations

import re
from typing import get_args

from support.paths import DOCS

from flexinspect.control.messages import State
from flexinspect_hooks.control.http_routes import ROUTES

PAGE = (DOCS / "control.md").read_text()


def test_the_page_lists_every_route_with_its_body_and_answer() -> None:
    rows = re.findall(r"^\| `(\w+) (/\S+)` \| (?:`(\w+)`)? ?\| `(\w+)` \|$", PAGE, re.MULTILINE)
    there = {
        (
            route.method,
            route.path,
            route.body.__name__ if route.body else "",
            route.response.__name__,
        )
        for route in ROUTES
    }
    assert set(rows) == there


def test_the_page_explains_every_state() -> None:
    for state in get_args(State):
        assert f"| `{state}` |" in PAGE

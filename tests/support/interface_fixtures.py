"""What the tests of the interface share."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexinspect.tui import trace_session
from support.traces import sample_trace


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep what the interface remembers, and the user's settings, out of the tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    return tmp_path / "state"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A finished trace of two generations of six steps."""
    return sample_trace(tmp_path / "sample.flextrace")


@pytest.fixture(autouse=True)
def no_review(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run no rule on the traces of these tests, so that new rules change nothing."""
    if "with_review" not in request.fixturenames:
        monkeypatch.setattr(trace_session, "needs_review", lambda reader: False)


@pytest.fixture
def with_review() -> None:
    """Run the rules."""

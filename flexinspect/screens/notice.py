"""The notice above the panels: what the process is doing before there is a token, how it ended."""

from __future__ import annotations

import time

from textual.content import Content
from textual.widgets import Static

from flexinspect.feed import RunStatus
from flexinspect.text import escape_unprintable

BAR_WIDTH = 30

STAGES = (
    ("starting",),
    ("importing torch",),
    ("importing transformers",),
    ("downloading", "reading weights", "making weights"),
    ("generating", "compiling"),
)
"""What comes before the first token of a run of ours, by the first words of the phases."""


def banner_text(status: RunStatus, seconds: int = 0) -> tuple[str, str]:
    """Return what is to be said, and its class: "", "busy" or "bad".

    `seconds` is how long the phase has lasted.
    """
    if status.error_lines:
        return "\n".join((_format_title(status), *status.error_lines)), "bad"
    if status.live and status.last_step is None:
        lasted = f" ({seconds} s)" if seconds else ""
        lines = [(escape_unprintable(status.phase) or "waiting") + lasted]
        stage = next((n for n, names in enumerate(STAGES) if status.phase.startswith(names)), None)
        if status.fraction is not None:
            lines[0] += f"  {_format_bar(status.fraction)} {100 * status.fraction:.0f} %"
        elif stage is not None:
            lines[0] += f"  {_format_bar(stage / len(STAGES))} {stage + 1} of {len(STAGES)}"
        else:
            lines[0] += " …"
        return "\n".join(
            [*lines, *([escape_unprintable(status.detail)] if status.detail else [])]
        ), "busy"
    if status.last_step is None:
        return "This trace holds no step: the run ended before its first token.", "bad"
    return "", ""


def _format_bar(fraction: float) -> str:
    done = round(BAR_WIDTH * min(max(fraction, 0.0), 1.0))
    return "━" * done + "╌" * (BAR_WIDTH - done)


_TITLES = {
    "dead": "The trace was never ended.",
    "damaged": "This trace cannot be read from its beginning; what can be read is shown.",
    "failed": "The run failed",
    "interrupted": "The run was interrupted",
}


def _format_title(status: RunStatus) -> str:
    title = _TITLES.get(status.state, "The run went wrong.")
    if status.state not in ("failed", "interrupted"):
        return title
    if status.last_step is None and status.generations < 2:
        return f"{title} before its first token."
    return f"{title}. What was recorded before is here."


class StatusBanner(Static):
    """A few lines that are there only when there is something to say."""

    def __init__(self) -> None:
        super().__init__("", id="notice", markup=False)
        self.display = False
        self._phase, self._since = "", time.monotonic()
        self._shown_text = ""

    def show_status(self, status: RunStatus) -> None:
        """Show what the status has to say, or nothing at all; costs nothing when unchanged."""
        if status.phase != self._phase:
            self._phase, self._since = status.phase, time.monotonic()
        text, kind = banner_text(status, int(time.monotonic() - self._since))
        if text == self._shown_text:
            return
        self._shown_text = text
        self.display = bool(text)
        self.set_class(kind == "bad", "bad")
        self.update(Content(text))

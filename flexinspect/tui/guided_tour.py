"""The guided tour: seven steps that wait for the key that they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from textual.content import Content
from textual.widgets import Static

EXHIBIT = "spans-without-bos"
"""The run of the museum that the tour leads through."""


class TourStep(NamedTuple):
    """A text, in which {keys} is the key of `action`, the action that ends the step."""

    action: str
    text: str


STEPS = (
    TourStep(
        "step.next",
        "Three wordings of a question about Gabon were read apart from each other. The answer "
        "names another country, and Python raised no error. Press {keys} to go to its next token.",
    ),
    TourStep(
        "tokens.xray",
        "The first lines are the text. Press {keys} to X-ray it: what this token sees stays lit.",
    ),
    TourStep(
        "finding.next",
        "The diagnosis names what the rules found. Press {keys} to go to the place of the fault.",
    ),
    TourStep(
        "finding.read",
        "✖ below a token: a link to the current token that should be closed. □: one that should be "
        "open. Press {keys} to read all of the finding.",
    ),
    TourStep(
        "view.flip",
        "The mask panel shows what differs from the mask that was declared. Press {keys} to see "
        "the mask that ran.",
    ),
    TourStep(
        "layout.token",
        "Layouts answer questions. Press {keys} for: why was this token chosen?",
    ),
    TourStep(
        "app.help",
        "Press {keys} for all keys. Then record your own program: flexinspect run script.py",
    ),
)

IN_WINDOW = "Press {escape} to close this window; then the tour goes on."
"""Shown while a window is open, which takes the keys; a second line would be covered by it."""

END = "This was the tour. 'flexinspect museum' has more faults to find; {quit} quits."


class TourLine(Static):
    """Shows the step of the tour that waits; an action that is done moves it on."""

    DEFAULT_CSS = "TourLine { height: auto; padding: 0 1; background: $accent 20%; }"

    def __init__(self, keys_of: Callable[[str], str]) -> None:
        super().__init__("", id="tour", markup=False)
        self._keys_of = keys_of
        self.position = 0
        """The number of steps that were done."""
        self._is_covered = False

    def on_mount(self) -> None:
        self._show_step()

    def note_action(self, name: str) -> None:
        """Go to the next step if the action is the one that the current step waits for."""
        if self.position < len(STEPS) and STEPS[self.position].action == name:
            self.position += 1
            self._show_step()

    def cover(self, *, is_covered: bool) -> None:
        """Say how to close a window that has opened over the trace; afterwards show the step."""
        if is_covered != self._is_covered:
            self._is_covered = is_covered
            self._show_step()

    def _show_step(self) -> None:
        if self._is_covered:
            before, _, after = IN_WINDOW.partition("{escape}")
            self.update(Content.assemble(before, (" esc ", "reverse bold"), after))
            return
        if self.position == len(STEPS):
            self.update(Content(END.format(quit=self._keys_of("app.quit"))))
            return
        step = STEPS[self.position]
        key = self._keys_of(step.action).split(" ")[0]
        number = f"{self.position + 1} of {len(STEPS)}  "
        before, _, after = step.text.partition("{keys}")
        content = Content.assemble((number, "bold"), before, (f" {key} ", "reverse bold"), after)
        self.update(content)

"""Going from finding to finding, and reading all of one."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from flexinspect.analysis.reports import collect
from flexinspect.core.text import capitalize
from flexinspect.panels.findings_of_place import (
    evidence_panel,
    load_summary,
    navigate_to_finding,
    next_finding,
)
from flexinspect.panels.findings_panel import HEADINGS, describe_finding
from flexinspect.records.finding import Finding
from flexinspect.trace.query_results import FindingRow
from flexinspect.tui.diagnosis_card import DiagnosisCard
from flexinspect.tui.navigation import Navigation, PlacedScreen
from flexinspect.tui.screens.text_screens import TextScreen
from flexinspect.tui.trace_session import TraceSession


def read_paragraphs(finding: Finding, tokens: collect.PositionTexts) -> list[tuple[str, str]]:
    """Return (heading, text) of all there is to read about a finding, the fix first."""
    paragraphs = [("", finding.sentence)]
    paragraphs += [(heading, getattr(finding, name)) for name, heading in HEADINGS.items()]
    # Without the sentence and the texts above.
    texts = replace(finding, sentence="", **dict.fromkeys(HEADINGS, ""))
    lines = [text for text, _ in describe_finding(texts, tokens) if text]
    paragraphs.append(("Evidence", "\n".join(lines)))
    return [pair for pair in paragraphs if pair[1]]


class FindingCommands:
    """Shows findings in turn, with the panel and the card of each."""

    def __init__(
        self,
        screen: PlacedScreen,
        session: TraceSession,
        navigation: Navigation,
        card: DiagnosisCard,
    ) -> None:
        self._screen, self._session = screen, session
        self._navigation, self._card = navigation, card
        self.last: FindingRow | None = None
        """The finding that was last navigated to."""

    def go_to_finding(self, direction: Literal[1, -1]) -> None:
        """Go to the next finding, wrapping around; findings at one place are visited in turn.

        The first one is the worst, which the card shows.
        """
        source, place = self._session.source, self._screen.place
        if source is None:
            return
        row = load_summary(source, place).row if self.last is None else None
        row = row or next_finding(source.reader, place, direction, self.last)
        if row is None:
            self._screen.app.notify("There is no finding in this trace.")
            return
        if row == self.last:
            self._screen.app.notify("There is no other finding in this trace.")
        self.last = row
        self._show_finding(row.finding)

    def _show_finding(self, finding: Finding) -> None:
        """Go to the place of a finding, with the panel that shows the evidence."""
        self._navigation.jump(navigate_to_finding(finding))
        self._screen.slots.bring_panel(evidence_panel(finding))
        self._card.show_finding(finding)

    async def read_finding(self) -> None:
        """Show all of the card's finding; the keys of the next one go on from there."""
        app, keys = self._screen.app, {"n": "1", "N": "-1"}
        if self._card.finding is None:  # typed ahead of the first frame
            self._card.loader.request_load()
            await self._card.loader.wait_idle()
        while (finding := self._card.finding) is not None:
            reader = self._session.reader
            texts = collect.read_position_texts(reader, finding) if reader is not None else ()
            title = f"{capitalize(finding.severity)}: {finding.id}"
            window = TextScreen(title, read_paragraphs(finding, texts), keys, ("n next finding",))
            answer = await app.push_screen_wait(window)
            if answer is None:
                return
            self.go_to_finding(1 if answer == "1" else -1)
            await self._card.loader.wait_idle()
        app.notify("There is no finding at this place.")

"""The summary of a trace: the same facts as text and HTML, and no markup from the model's text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.traces import sample_trace

from flexinspect.analysis.summary import MAX_FINDINGS, TraceSummary, summarize_trace
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import GenerationRecord, StepRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

HOSTILE = "Layer 2 said <script>alert('x')</script> & \x1b[2J\nmore"


class Page(HTMLParser):
    """The tags, attributes and texts of HTML; fails when a tag is not closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.styles: list[str] = []
        self.names: set[str] = set()
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}
        self.styles += [value or "" for name, value in attrs if name == "style"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def seen() -> TraceSummary:
    findings = (
        Finding("numbers.nan", Severity.ERROR, HOSTILE, 1, 0, 3, 2, 0),
        Finding("rows.empty", Severity.WARNING, "Row 4 sees no key.", 0),
        Finding("run.note", Severity.NOTE, "Beams are not followed."),
    )
    path = Path("/tmp/a & b/<i>x.flextrace")
    return TraceSummary(path, "finished", 2, 9, len(findings), findings)


def test_text_and_html_have_the_same_content(seen: TraceSummary) -> None:
    html = re.sub(" +", " ", " ".join(Page(seen.html()).texts))
    assert "(finished): 2 generations, 9 steps, 3 findings" in html
    for line in re.sub(" +", " ", seen.text()).splitlines():
        for part in line.strip().split(": ", 1):
            assert part in html


def test_a_guessed_border_comes_with_the_command_that_declares_it(seen: TraceSummary) -> None:
    fix = "flexinspect declare TRACE --move 1 (D in the interface) writes the segments."
    guess = Finding(
        "segments.suspect-border", Severity.NOTE, "Odd.", evidence={"shift": 1}, fix=fix
    )
    summary = replace(seen, findings=(*seen.findings, guess), n_findings=4)
    command = "flexinspect declare '/tmp/a & b/<i>x.flextrace' --move 1"
    assert command in summary.text().splitlines()
    assert command in "\n".join(Page(summary.html()).texts)
    assert "flexinspect declare" not in seen.text()


def test_nothing_of_a_trace_becomes_markup(seen: TraceSummary) -> None:
    page = Page(seen.html())
    assert set(page.tags) == {
        *("div", "strong", "table", "thead", "tbody", "tr", "th", "td", "span", "pre", "code")
    }
    assert page.names == {"style"}
    assert r"Layer 2 said <script>alert('x')</script> & \x1b[2J\nmore " in page.texts
    assert "\x1b" not in seen.html() + seen.text()


def test_the_html_loads_nothing_and_leaves_the_colours_to_the_page(seen: TraceSummary) -> None:
    assert not re.search(r"url\(|@import|https?:|<link|<img|src=", seen.html())
    coloured = [style for style in Page(seen.html()).styles if re.search("color: #", style)]
    assert len(coloured) == 3
    assert all("background: #" in style for style in coloured)


@pytest.mark.parametrize("background", ["#b3261e", "#f2b705", "#3b6ea5"])
def test_the_severities_are_readable_on_their_own_background(
    seen: TraceSummary, background: str
) -> None:
    (style,) = [each for each in Page(seen.html()).styles if background in each]
    colour = re.search(r"(?<![-\w])color: #(\w+)", style)
    assert colour is not None
    light, dark = sorted((luminance(background[1:]), luminance(colour[1] * 2)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_finding_has_its_severity_and_place_in_a_row(seen: TraceSummary) -> None:
    rows = re.findall(r"<tr>(.*?)</tr>", seen.html())
    cells = [re.sub("<[^>]*>", "|", row) for row in rows]
    assert re.findall(r"[^|]+", cells[0]) == ["severity", "where", "finding"]
    assert re.findall(r"[^|]+", cells[1])[:2] == ["error", "generation 1, step 3, layer 2, head 0"]
    assert re.findall(r"[^|]+", cells[2]) == [
        *("warning", "generation 0", "Row 4 sees no key. ", "[rows.empty]")
    ]


def test_without_findings_there_is_no_table(seen: TraceSummary) -> None:
    calm = replace(seen, findings=(), n_findings=0)
    assert "<table" not in calm.html()
    assert "0 findings" in calm.html()


def test_the_command_can_be_pasted_into_a_shell(seen: TraceSummary) -> None:
    assert seen.text().endswith("flexinspect open '/tmp/a & b/<i>x.flextrace'")


def test_a_trace_is_read_and_its_findings_come_worst_first(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "a.flextrace")
    with open_trace(path) as reader:
        seen = summarize_trace(reader, path)
    assert (seen.state, seen.n_generations, seen.n_steps) == ("finished", 2, 12)
    assert [finding.id for finding in seen.findings] == ["numbers.nan"]
    assert seen.text().splitlines()[1] == "  error: Layer 2 made the first NaN.  [numbers.nan]"


def test_many_findings_are_counted_and_the_worst_are_shown(tmp_path: Path) -> None:
    notes = [Finding("a.note", Severity.NOTE, f"Note {n}.", step=0) for n in range(6)]
    found = (*notes, Finding("a.nan", Severity.ERROR, "NaN.", step=0))
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(GenerationRecord(0, "a", "causal", "contiguous", (), ()))
        writer.write_step(StepRecord(0, 0, "prefill", 4, 0, 4, 1.0, 1.0, 0.1, findings=found))
    with open_trace(path) as reader:
        seen = summarize_trace(reader, path)
    lines = seen.text().splitlines()
    assert lines[1:3] == ["  error: NaN.  [a.nan]", "  note: Note 0.  [a.note]"]
    assert lines[-2] == f"  and {7 - MAX_FINDINGS} more"
    assert f"<div>and {7 - MAX_FINDINGS} more</div>" in seen.html()

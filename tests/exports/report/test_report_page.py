"""The page of a report is complete in itself, and no text of a trace becomes part of its HTML."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.earlier_traces import unpack
from support.poisoned_traces import poisoned_copies
from support.traces import sample_trace

from flexinspect.core.errors import TraceError
from flexinspect.core.keyboard import KEYS
from flexinspect.exports.report.page import browser_key
from flexinspect.exports.report.report_file import make_page
from flexinspect.exports.report.trace_contents import ReportRequest
from flexinspect.trace.reader import open_trace

pytestmark = pytest.mark.slow

MARK = "</script></style><!-- ]]> <img class=poison src=x onerror=alert(1)>\"' onclick=poison &lt;"
ADDRESSES = ("src", "href", "action", "data", "poster", "srcset", "formaction")


class Elements(HTMLParser):
    """The elements of a page, their attributes, and the text of its scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.comments: list[str] = []
        self.shown: list[str] = []
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag if tag in self.texts else ""
        if self._inside:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside][-1] += data
        else:
            self.shown.append(data)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def kinds(self) -> set[tuple[str, tuple[str, ...]]]:
        """Return each kind of element: its name and the names of its attributes."""
        return {(tag, tuple(attributes)) for tag, attributes in self.found}


def page_of(path: Path) -> str:
    with open_trace(path) as reader:
        return make_page(reader, ReportRequest(), lambda *_: None)[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(sample_trace(tmp_path_factory.mktemp("page") / "sample.flextrace"))


def test_it_asks_for_nothing_and_runs_only_its_own_script(page: str) -> None:
    elements = Elements(page)
    policy = next(a["content"] for tag, a in elements.found if "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    runs = [text for text in elements.texts["script"] if text.startswith('"use strict"')]
    for kind, (text,) in (("script", runs), ("style", elements.texts["style"])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    for _, attributes in elements.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        for name in ADDRESSES:
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"https?://|@import|url\(", page)


def test_every_element_that_the_script_names_is_there_once(page: str) -> None:
    ids = [a["id"] for _, a in Elements(page).found if "id" in a]
    assert len(ids) == len(set(ids))
    named = set(re.findall(r"(?:byId|getElementById)\(\"([\w-]+)\"\)", page))
    assert len(named) > 30
    assert named <= set(ids)


def test_findings_texts_and_manifest_need_no_script(page: str) -> None:
    shown = "".join(Elements(page).shown)
    for text in ("Layer 2 made the first NaN.", "Jane Austen", "as expected", "paraphrase 1"):
        assert text in shown
    assert "versions.torch" in shown
    assert "#g=0&amp;s=3&amp;layer=2" in page


def test_controls_have_names(page: str) -> None:
    elements = Elements(page).found
    canvases = [attributes for tag, attributes in elements if tag == "canvas"]
    assert len(canvases) >= 6
    assert all(one.get("aria-label") and one.get("role") for one in canvases)
    sections = [attributes for tag, attributes in elements if tag == "section"]
    assert all(one.get("aria-labelledby") for one in sections)


def test_the_keys_are_those_of_the_interface(page: str) -> None:
    keys = {key.id: key.keys for key in KEYS}
    for action in ("step.next", "step.last", "layer.next", "finding.next", "generation.previous"):
        for key in keys[action]:
            assert browser_key(key).replace("<", "\\u003c").replace(">", "\\u003e") in page
    assert browser_key("shift+left") == "Shift+ArrowLeft"
    assert browser_key("greater_than_sign") == ">"


@pytest.mark.parametrize("name", ["branches", "extreme", "training"])
def test_no_text_of_a_trace_becomes_an_element(name: str, tmp_path: Path) -> None:
    whole, path = unpack(name, tmp_path), tmp_path / "poisoned.flextrace"
    clean = Elements(page_of(whole))
    known = clean.kinds() | Elements(page_of(sample_trace(tmp_path / "s.flextrace"))).kinds()
    n_pages = n_shown = 0
    for column in poisoned_copies(whole, path, MARK):
        try:
            page = page_of(path)
        except TraceError:
            continue  # the column holds no free text, so that the trace counts as damaged
        elements = Elements(page)
        assert elements.kinds() <= known, column
        assert not elements.comments, column
        assert "<img" not in page, column
        n_pages += 1
        n_shown += "class=poison" in "".join(elements.shown)
    assert n_pages > 25
    assert n_shown >= 4


def test_control_characters_and_direction_marks_are_visible(tmp_path: Path) -> None:
    whole, path = unpack("generation", tmp_path), tmp_path / "poisoned.flextrace"
    for column in poisoned_copies(whole, path, "\x1b[2J\u202e\x00"):
        try:
            page = page_of(path)
        except TraceError:
            continue
        assert not {"\x1b", "\u202e", "\x00"} & set(page), column

"""Every finding that a rule can make has its page, and its row in the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.paths import DOCS

from flexinspect.rules.engine import load_rules
from tools.finding_pages import finding_kinds, generated_pages

FOLDER = DOCS / "findings"
COLUMNS = ["id", "finding", "class", "public case", "found by", "cost"]
KNOWN = load_rules()
SECTIONS = [
    *("Why it matters", "How to confirm", "Likely fix"),
    *("How it is found, and what it costs", "Not reported", "Public cases"),
]


def table() -> list[list[str]]:
    lines = (FOLDER / "README.md").read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]


def rows() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for id_, *rest in table()[2:]:
        match = re.fullmatch(r"\[`(.+)`\]\((.+)\.md\)", id_)
        assert match is not None, id_
        assert match[1] == match[2]
        assert match[1] not in found, "an id has two rows"
        found[match[1]] = rest
    return found


def test_all_registered_rules_load() -> None:
    assert KNOWN.failed == {}
    assert KNOWN.rules


def test_no_two_rules_declare_the_same_id() -> None:
    ids = [id_ for rule in KNOWN.rules for id_ in rule.findings]
    assert len(ids) == len(set(ids))


def test_the_table_is_whole() -> None:
    assert table()[0] == COLUMNS
    assert all(cell for row in rows().values() for cell in row)
    assert all(len(row) == len(COLUMNS) - 1 for row in rows().values())


def test_the_pages_say_what_the_kinds_say() -> None:
    for page, text in generated_pages().items():
        assert page.read_text() == text, "run: python -m tools.finding_pages"


@pytest.mark.parametrize("id_", KNOWN.finding_kinds)
def test_a_finding_has_its_page_and_its_row(id_: str) -> None:
    page = FOLDER / f"{id_}.md"
    assert page.is_file()
    assert id_ in page.read_text().splitlines()[0]
    assert id_ in rows()


@pytest.mark.parametrize("id_", finding_kinds())
def test_the_table_gives_the_meaning_of_a_finding(id_: str) -> None:
    assert rows()[id_][0] == finding_kinds()[id_].meaning


@pytest.mark.parametrize("id_", finding_kinds())
def test_a_page_has_one_form(id_: str) -> None:
    page = (FOLDER / f"{id_}.md").read_text()
    title, blank, severity, *_ = page.splitlines()
    kind = finding_kinds()[id_]
    assert (title, blank) == (f"# `{id_}`", "")
    assert severity == f"Severity: {kind.severities}."
    assert re.findall(r"^\*\*(.+)\.\*\*", page, re.M)[-6:] == SECTIONS
    assert "\n> " in page


def test_a_page_without_a_generated_section_gets_it(tmp_path: Path) -> None:
    for page in FOLDER.glob("*.md"):
        text = re.sub(r"\*\*Likely fix\.\*\* .*\n\n", "", page.read_text())
        (tmp_path / page.name).write_text(text)
    before = (tmp_path / "cache.lost.md").read_text()
    written = generated_pages(tmp_path)[tmp_path / "cache.lost.md"]
    assert "**Likely fix.**" not in before
    assert "**Likely fix.** Pass the cache that a forward returns" in written


def test_the_cost_column_matches_offline_only() -> None:
    cost = {id_: row[-1] for id_, row in rows().items()}
    for rule in KNOWN.rules:
        for id_ in rule.findings:
            assert cost[id_].startswith("afterwards" if rule.offline_only else "live"), id_


def test_every_page_is_in_the_table() -> None:
    assert {page.stem for page in FOLDER.glob("*.md")} - {"README"} <= set(rows())


def test_the_readme_counts_the_rules_and_the_kinds_of_findings() -> None:
    counts = f"{len(KNOWN.rules)} rules check every run for [{len(KNOWN.finding_kinds)} kinds of"
    assert counts in (DOCS.parent / "README.md").read_text("utf-8")

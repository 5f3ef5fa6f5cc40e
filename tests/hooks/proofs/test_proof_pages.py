"""Every finding of a proof has its texts, its page, and a query that a trace answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from support.paths import DOCS
from support.traces import sample_trace

from flexinspect.analysis.proof_results import (
    PROOF_FINDINGS,
    PROOF_KINDS,
    Proof,
    format_amount,
    proof_finding,
)
from flexinspect.core.errors import UsageError
from flexinspect.records.finding import Severity
from flexinspect.trace.reader import open_trace

PAGES = DOCS / "findings"
PARTS = (
    *("**What it says.**", "**Why it matters.**", "**How to confirm.**", "**Likely fix.**"),
    *("**How it is found, and what it costs.**", "**Not reported.**", "**Public cases.**"),
)


@pytest.mark.parametrize("finding_id", PROOF_FINDINGS)
def test_an_id_has_all_its_texts(finding_id: str) -> None:
    kind = PROOF_FINDINGS[finding_id]
    assert finding_id.startswith("proof.")
    for text in (kind.meaning, kind.why, kind.confirm, kind.fix, kind.query):
        assert len(text) > 15


@pytest.mark.parametrize("finding_id", PROOF_FINDINGS)
def test_an_id_has_a_page_with_an_example_and_every_part(finding_id: str) -> None:
    page = (PAGES / f"{finding_id}.md").read_text("utf-8")
    assert page.startswith(f"# `{finding_id}`\n")
    assert "\n> " in page
    assert [part for part in PARTS if part not in page] == []


@pytest.mark.parametrize("finding_id", PROOF_FINDINGS)
def test_the_query_of_an_id_finds_rows_in_a_trace(finding_id: str, tmp_path: Path) -> None:
    finding = proof_finding(finding_id, "A sentence.", step=1, layer=2)
    with open_trace(sample_trace(tmp_path / "sample.flextrace")) as reader:
        assert list(reader._query(finding.query, ()))


def test_a_proof_holds_unless_something_is_an_error() -> None:
    note, leak = proof_finding("proof.isolated", "Fine."), proof_finding("proof.leak", "Leak.")
    assert Proof("isolation", ("did",), (note,)).holds
    bad = Proof("isolation", ("did",), (note, leak))
    assert not bad.holds
    assert str(bad) == "did\nerror: Leak.\nnote: Fine."
    assert [one["severity"] for one in bad.as_json()["findings"]] == ["error", "note"]
    assert leak.severity is Severity.ERROR
    assert leak.why


def test_a_proof_is_stored_with_the_generation_of_its_sample(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "sample.flextrace")
    made = Proof(
        "isolation", (), (proof_finding("proof.isolated", "Fine."),), {"sample": "sample-1"}
    )
    assert made.add_to(path) == 1
    with open_trace(path) as reader:
        (stored,) = [one for one in reader.findings() if one.id == "proof.isolated"]
    assert stored.generation == 1
    assert stored.query.endswith("WHERE generation = 1")
    other = replace(made, facts={"sample": "sample-9"})
    with pytest.raises(UsageError, match="no generation of sample 'sample-9'"):
        other.add_to(path)
    assert other.add_to(path, 0) == 0


def test_token_texts_cannot_move_the_cursor() -> None:
    proof = Proof("isolation", ("a\x1b[31m",), (proof_finding("proof.leak", "b\nc"),))
    assert "\x1b" not in str(proof)
    assert str(proof).count("\n") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (3e-7, "3e-07"),
        (0.0016, "0.0016"),
        (5.81, "5.8"),
        (107.3, "107"),
        (3e5, "3e+05"),
    ],
)
def test_sizes_are_short(value: float, text: str) -> None:
    assert format_amount(value) == text


def test_there_is_a_check_for_every_kind() -> None:
    from flexinspect_hooks.proofs import check_of

    assert [check_of(kind).__name__ for kind in PROOF_KINDS] == [
        f"check_{kind}" for kind in PROOF_KINDS
    ]

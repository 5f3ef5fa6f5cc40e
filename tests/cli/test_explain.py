"""`flexinspect explain` says what each finding means without the files of the documentation."""

from __future__ import annotations

import json

import pytest

from flexinspect.cli.main import main
from tools.finding_pages import finding_kinds


def test_an_id_is_explained_with_its_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "segments.shifted"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    kind = finding_kinds()["segments.shifted"]
    assert printed.startswith("segments.shifted (warning; error where a mask was declared")
    for text in (f"({kind.severities})", kind.why, kind.confirm, kind.fix):
        assert " ".join(text.split()) in printed


def test_a_severity_that_varies_says_when(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "segments.suspect-border"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("segments.suspect-border (note; warning if all borders miss by one")
    assert main(["explain", "segments.odd-border"]) == 0
    assert capsys.readouterr().out.startswith("segments.odd-border  (warning)")


def test_a_pattern_explains_several_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "proof.*"]) == 0
    printed = capsys.readouterr().out
    heads = [line.split()[0] for line in printed.splitlines() if line.startswith("proof.")]
    assert heads == sorted(id_ for id_ in finding_kinds() if id_.startswith("proof."))


def test_without_an_id_every_kind_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(finding_kinds())
    assert main(["explain", "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)) == sorted(finding_kinds())


def test_an_unknown_id_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "segments.shift"]) == 2
    err = capsys.readouterr().err
    assert "There is no finding 'segments.shift'." in err
    assert "Did you mean segments.shifted?" in err

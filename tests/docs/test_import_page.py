"""The example of docs/import.md, followed literally."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pages import blocks
from support.paths import DOCS

from flexinspect.cli.main import main
from flexinspect.core import plugins
from flexinspect.importers.described_folder import DESCRIPTION_FILE
from flexinspect.records.imported import RECORD_KINDS
from flexinspect.trace.reader import open_trace

PAGE = (DOCS / "import.md").read_text("utf-8")


def test_the_example_is_a_dump_that_is_imported_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (description,) = blocks(PAGE, "json")
    program = blocks(PAGE, "python")[-1]
    Path(DESCRIPTION_FILE).write_text(description, "utf-8")
    exec(compile(program, "import.md", "exec"), {})
    assert main(["import", ".", "-o", "run.flextrace"]) == 0
    with open_trace("run.flextrace") as reader:
        assert reader.generation(0).answer == "Jane"
        for step in range(2):
            (call,) = reader.calls(0, step)
            assert call.check_kind == "lse"
            assert (call.lse_error or 0) < 1e-5
        assert "attention" in reader.run()["imported"]["holds"]


def test_the_page_names_every_format() -> None:
    for name in plugins.names(plugins.IMPORTERS):
        assert f"`--format {name}`" in PAGE


def test_every_rule_needs_known_kinds_of_records() -> None:
    from flexinspect.rules.engine import load_rules

    for rule in load_rules().rules:
        assert rule.needs, rule.name
        assert set(rule.needs) <= set(RECORD_KINDS)

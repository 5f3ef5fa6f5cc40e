"""`--paraphrases`: more wordings of a question, from templates or from a prepared file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexinspect.cli.run import checked_job, configure
from flexinspect.core.errors import DatasetError, UsageError
from flexinspect.inputs.paraphrases import TEMPLATES, add_paraphrases
from flexinspect.inputs.samples import Sample, choose_paraphrases

ADA = Sample("webqa-1", ("who is Ada?",), ("a",))


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def test_a_question_alone_names_the_ways_to_more_wordings() -> None:
    with pytest.raises(DatasetError) as raised:
        choose_paraphrases(ADA, 3)
    assert "has 1 paraphrase to choose from, not 3" in raised.value.message
    for way in ("--paraphrases templates", "FILE.jsonl", "docs/generation.md#paraphrases"):
        assert way in str(raised.value.hint)


def test_templates_come_after_the_question_and_differ() -> None:
    (sample,) = add_paraphrases([ADA], "templates")
    assert choose_paraphrases(sample, 3).paraphrases == (
        "who is Ada?",
        "Please answer this question: who is Ada?",
        "I would like to know: who is Ada?",
    )
    assert len(sample.paraphrases) == 1 + len(TEMPLATES)
    assert (sample.id, sample.answers) == (ADA.id, ADA.answers)


def test_own_templates_are_lines_with_the_question_in_them(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_text("Say: {question}\n\n{question} Tell me.\n", "utf-8")
    (sample,) = add_paraphrases([ADA], str(file))
    assert sample.paraphrases == ("who is Ada?", "Say: who is Ada?", "who is Ada? Tell me.")


@pytest.mark.parametrize(
    ("text", "message"),
    [("Say: {question}\nTell me\n", r"t\.txt:2: .* no {question}"), ("\n", "are empty")],
)
def test_a_template_without_the_question_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "t.txt").write_text(text, "utf-8")
    with pytest.raises(DatasetError, match=message):
        add_paraphrases([ADA], str(tmp_path / "t.txt"))
    with pytest.raises(DatasetError, match="cannot be read"):
        add_paraphrases([ADA], str(tmp_path / "none.txt"))


def test_prepared_paraphrases_are_found_by_id_or_by_question(tmp_path: Path) -> None:
    rows = (
        {"question": "Who  is ADA", "paraphrases": ["name Ada?"]},
        {"uuid": "u2", "paraphrase0": "x?", "paraphrase1": "y?", "paraphrase2": ""},
    )
    source = write(tmp_path / "p.jsonl", *rows)
    first, second = add_paraphrases([ADA, Sample("u2", ("x?",))], source)
    assert first.paraphrases == ("who is Ada?", "Who  is ADA", "name Ada?")
    assert second.paraphrases == ("x?", "y?")


def test_a_row_number_is_no_id_to_find_a_sample_by(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", {"question": "another?", "paraphrases": ["b?"]})
    with pytest.raises(DatasetError) as raised:
        add_paraphrases([ADA], source)
    assert "has no paraphrases of the sample webqa-1, 'who is Ada?'" in raised.value.message


def test_prompts_of_the_command_line_have_their_paraphrases() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    configure(parser)
    args = parser.parse_args(["--prompt", "a", "--paraphrases", "templates"])
    with pytest.raises(UsageError, match="--prompt gives them all"):
        checked_job(args)
    job = checked_job(parser.parse_args(["--paraphrases", "templates"]))
    assert getattr(job, "paraphrases", None) == "templates"

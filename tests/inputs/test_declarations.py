"""A declaration file has the arguments of `flexinspect.watch`; an invalid one is refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from flexinspect.core.errors import UsageError
from flexinspect.inputs.declarations import read_declaration
from flexinspect.records.job import Declaration, ScriptJob

WHOLE = """
mask = "shared-prefix"
separators = "isolated"
[[segments]]
start = 1
stop = 5
label = "shared instruction"
[[segments]]
start = 5
stop = 9
[[segments]]
text = "What is it?"
kind = "paraphrase"
[[segments]]
text = "Answer:"
label = "the end"
kind = "cue"
[[segments]]
text = "Cue me"
label = "cue one"
kind = "cue"
"""


def written(folder: Path, text: str, name: str = "d.toml") -> Path:
    file = folder / name
    file.write_text(text, "utf-8")
    return file


@pytest.mark.parametrize("name", ["d.toml", "d.json"])
def test_toml_and_json_give_the_same_declaration(name: str, tmp_path: Path) -> None:
    text = WHOLE if name.endswith("toml") else json.dumps(tomllib.loads(WHOLE))
    declaration = read_declaration(written(tmp_path, text, name))
    assert declaration == Declaration(
        (
            (1, 5, "shared instruction"),
            (5, 9, "span 5-8"),
            "What is it?",
            ("Answer:", "cue the end"),
            ("Cue me", "cue one"),
        ),
        "shared-prefix",
        "isolated",
    )


def test_texts_may_be_listed_alone_and_every_key_is_optional(tmp_path: Path) -> None:
    declaration = read_declaration(written(tmp_path, 'segments = ["one", "two"]'))
    assert declaration == Declaration(("one", "two"))
    assert read_declaration(written(tmp_path, "")) == Declaration()


def test_a_job_round_trips_with_its_declaration(tmp_path: Path) -> None:
    declaration = read_declaration(written(tmp_path, WHOLE))
    job = ScriptJob(
        out="a.flextrace",
        program="s.py",
        args=("x", "--y"),
        declaration=declaration,
        git={"dirty": True},
    )
    assert ScriptJob.from_json(job.to_json()) == job


BAD = {
    "not toml": ("mask =", "d.toml is not valid TOML (Invalid value"),
    "unknown key": (
        "masks = 'causal'",
        "unknown field `masks` (known: mask, separators, segments).\nDid you mean mask?",
    ),
    "unknown inside": (
        "[[segments]]\nbegin = 1",
        "segments[0] is not valid: Object contains unknown field `begin` (known: start, stop, te",
    ),
    "preset": ("mask = 'casual'", "The mask 'casual' is unknown; the presets are segme"),
    "no preset": ("mask = 'nope'", "\nFor another mask, leave mask out: the segments are compared"),
    "mask type": ("mask = 1", "is not valid in mask: Expected `str | null`, got `int`."),
    "separators": (
        "separators = 'no'",
        "in separators: Invalid enum value 'no' (known: attached, isolated).",
    ),
    "segments type": ("segments = 'x'", "in segments: Expected `array`, got `str`."),
    "one type": ("segments = [1]", "segments[0] is not valid: Expected `object`, got `int`."),
    "missing": ("[[segments]]\nstart = 1", "segments[0].stop is missing.\nA segment needs start"),
    "not a number": ("[[segments]]\nstart = '1'", "in start: Expected `int | null`, got `str`."),
    "not whole": ("[[segments]]\nstart = true", "in start: Expected `int | null`, got `bool`."),
    "negative": (
        "[[segments]]\nstart = -1",
        "segments[0] is not valid in start: Expected `int` >=",
    ),
    "order": ("[[segments]]\nstart = 4\nstop = 4", "segments[0] begins at 4 and ends at 4: start"),
    "both": (
        "[[segments]]\ntext = 'a'\nstart = 1",
        "segments[0] has both a text and positions; use",
    ),
    "no text": ("[[segments]]\ntext = ''", "in text: Expected `str` of length >= 1."),
    "empty": (
        "segments = ['']",
        "segments[0] is not valid in text: Expected `str` of le",
    ),
    "label": ("[[segments]]\ntext = 'a'\nlabel = 1", "in label: Expected `str`, got `int`."),
    "kind": (
        "[[segments]]\ntext = 'a'\nkind = 'generated'",
        "in kind: Invalid enum value 'generated' (known: bos, shared, paraphrase, separator, cue).",
    ),
    "overlap": (
        "[[segments]]\nstart = 1\nstop = 4\nlabel = 'a'\n[[segments]]\nstart = 3\nstop = 9",
        "segments has 'a' and 'span 3-8', which overlap at position 3.",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_declaration_is_reported_with_file_and_key(case: str, tmp_path: Path) -> None:
    text, sentence = BAD[case]
    with pytest.raises(UsageError) as caught:
        read_declaration(written(tmp_path, text))
    assert sentence in caught.value.sentence()
    assert "d.toml" in caught.value.message


def test_a_list_and_invalid_utf8_are_not_declarations(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Expected `object`, got `array`"):
        read_declaration(written(tmp_path, "[]", "d.json"))
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="it is not UTF-8 text"):
        read_declaration(tmp_path / "b.toml")

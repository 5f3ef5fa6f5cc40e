"""`flexinspect declare`: the segments that a run did not declare become a file for the next run."""

from __future__ import annotations

import json
import sqlite3
import tomllib
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import to_builtins
from support.undeclared import SECOND, TEXTS, THIRD, blocks, write

from flexinspect.cli.main import main
from flexinspect.inputs.declarations import read_declaration
from flexinspect.masks import mask_presets
from flexinspect.records.prompt import PromptPart, Segment, SegmentKind

Ran = tuple[int, str, str]
AS_MEANT = blocks([SECOND, THIRD], reader=THIRD)
ONE_EARLY = blocks([SECOND - 1, THIRD - 1], reader=THIRD - 1)


@pytest.fixture
def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    monkeypatch.chdir(tmp_path)

    def call(cells: Any, *args: str, texts: Sequence[str] = TEXTS, declared: Any = None) -> Ran:
        path = tmp_path / "run.flextrace"
        path.unlink(missing_ok=True)
        write(path, cells, texts, declared)
        code = main(["declare", str(path), *args])
        return code, *capsys.readouterr()

    return call


def test_the_segments_of_the_mask_become_a_declaration(run: Callable[..., Ran]) -> None:
    code, out, err = run(AS_MEANT)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "run.toml: 2 segments, preset segment-isolation",
        '  paraphrase 1  tokens 1-7  "What is the money of Japan?"',
        '  paraphrase 2  tokens 9-14  "Name its currency."',
        "next  flexinspect run --declare run.toml …",
    ]
    declared = read_declaration(Path("run.toml"))
    assert declared.mask == "segment-isolation"
    assert declared.segments == (
        ("What is the money of Japan?", "paraphrase 1"),
        ("Name its currency.", "paraphrase 2"),
    )


def test_suspect_borders_are_only_declared_with_a_choice(run: Callable[..., Ran]) -> None:
    code, out, err = run(ONE_EARLY)
    assert (code, out) == (2, "")
    assert "Every border of the executed mask is 1 token before the beginning of a line." in err
    assert "--move 1 puts every border 1 token later, --move 0 leaves them as they ran." in err
    assert not Path("run.toml").exists()


def test_borders_that_divide_lists_of_ids_are_described_by_the_lists(
    run: Callable[..., Ran],
) -> None:
    parts = [PromptPart("questions[0]", 1, SECOND), PromptPart("questions[1]", SECOND, THIRD)]
    texts = ["<bos>", *(f"<{n}>" for n in range(1, len(TEXTS)))]
    code, _, err = run(ONE_EARLY, texts=texts, declared={"parts": to_builtins(parts)})
    assert code == 2
    assert "The first border of the executed mask is 1 token before the beginning of q" in err
    assert "each other one is as far from the edge of a list of token ids." in err
    assert "--move 1 puts every border 1 token later" in err


def test_borders_without_a_move_for_all_are_moved_one_by_one(run: Callable[..., Ran]) -> None:
    code, _, err = run(blocks([SECOND - 1, THIRD], reader=THIRD))
    assert code == 2
    assert "--border OLD=NEW moves one border, --move 0 leaves them as they ran." in err


def test_moved_borders_declare_the_lines(run: Callable[..., Ran]) -> None:
    assert run(ONE_EARLY, "--move", "1")[0] == 0
    moved = tomllib.loads(Path("run.toml").read_text("utf-8"))
    run(AS_MEANT, "--overwrite")
    assert tomllib.loads(Path("run.toml").read_text("utf-8")) == moved


def test_borders_that_are_meant_as_they_ran_are_declared_by_their_positions(
    run: Callable[..., Ran],
) -> None:
    assert run(ONE_EARLY, "--move", "0")[0] == 0
    assert read_declaration(Path("run.toml")).segments == (
        ("What is the money of Japan?", "paraphrase 1"),
        (SECOND - 1, THIRD - 1, "paraphrase 2"),
    )
    assert "stop the one after its last." in Path("run.toml").read_text("utf-8")


def test_text_that_all_segments_see_is_not_declared(run: Callable[..., Ran]) -> None:
    cells = blocks([SECOND, THIRD, THIRD + 3], reader=THIRD + 3)
    cells[:, 1:SECOND] = np.tri(len(TEXTS), dtype=bool)[:, 1:SECOND]
    code, out, _ = run(cells, "--move", "0")
    assert code == 0
    assert out.splitlines()[0] == "run.toml: 2 segments, preset shared-prefix"
    assert "Name its currency" in out
    assert "money" not in out


@pytest.mark.parametrize("name", [*mask_presets.PRESETS])
def test_the_preset_that_ran_is_recognized(name: str, run: Callable[..., Ran]) -> None:
    spans = ((0, 1), (1, SECOND), (SECOND, THIRD), (THIRD, len(TEXTS)))
    kinds = (SegmentKind.BOS, *[SegmentKind.PARAPHRASE] * 2, SegmentKind.CUE)
    segments = [
        Segment(*span, str(kind), kind, n)
        for n, (span, kind) in enumerate(zip(spans, kinds, strict=True))
    ]
    code, _, err = run(mask_presets.preset(name, segments).dense(len(TEXTS)))
    if name in ("causal", "anchor-first"):  # two paraphrases, of which the second sees the first
        assert (code, "does not cut the prompt into segments" in err) == (2, True)
    else:
        assert code == 0
        # Without a shared text, and with a cue that sees the last one alone, they are the same.
        assert read_declaration(Path("run.toml")).mask == "segment-isolation"


def test_a_mask_that_is_no_preset_is_declared_without_one(run: Callable[..., Ran]) -> None:
    cells = AS_MEANT.copy()
    cells[SECOND:THIRD, 3] = True
    code, out, _ = run(cells)
    assert code == 0
    assert "the file declares no mask" in out
    assert read_declaration(Path("run.toml")).mask is None


def test_a_preset_is_recognized_whoever_sees_the_bos(run: Callable[..., Ran]) -> None:
    cells = ONE_EARLY.copy()
    cells[SECOND - 1 : THIRD - 1, 0] = False
    assert run(cells, "--move", "1")[0] == 0
    assert read_declaration(Path("run.toml")).mask == "segment-isolation"


def test_json_has_the_file_and_the_segments(run: Callable[..., Ran]) -> None:
    code, out, _ = run(AS_MEANT, "--json", "--out", "a b.toml")
    found = json.loads(out)
    assert (code, found["file"]) == (0, "a b.toml")
    assert found["declaration"]["preset"] == "segment-isolation"
    second = found["declaration"]["segments"][1]
    assert (second["start"], second["stop"]) == (SECOND, THIRD - 1)


@pytest.mark.parametrize(
    ("cells", "options", "sentence"),
    [
        (np.tri(len(TEXTS), dtype=bool), {}, "does not cut the prompt into segments"),
        (AS_MEANT, {"declared": {"segments": [{"text": "Name"}]}}, "were declared when it was"),
    ],
)
def test_what_cannot_be_declared_is_refused(
    cells: Any, options: dict[str, Any], sentence: str, run: Callable[..., Ran]
) -> None:
    code, out, err = run(cells, **options)
    assert (code, out, Path("run.toml").exists()) == (2, "", False)
    assert sentence in err


def test_a_file_is_not_replaced_unasked(run: Callable[..., Ran]) -> None:
    Path("run.toml").write_text("mine", "utf-8")
    code, _, err = run(AS_MEANT)
    assert (code, Path("run.toml").read_text("utf-8")) == (2, "mine")
    assert err.splitlines() == [
        "flexinspect: run.toml exists already.",
        "Name another --out, or add --overwrite.",
    ]
    assert run(AS_MEANT, "--overwrite")[0] == 0


def test_a_file_that_cannot_be_written_is_one_sentence(run: Callable[..., Ran]) -> None:
    code, _, err = run(AS_MEANT, "--out", "no/such/folder.toml")
    assert code == 2
    assert err.startswith("flexinspect: no/such/folder.toml cannot be written: No such file")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--move", "99"), "are not in order in the prompt"),
        (("--generation", "3"), "has no generation 3"),
    ],
)
def test_numbers_outside_the_trace_are_refused(
    args: tuple[str, ...], sentence: str, run: Callable[..., Ran]
) -> None:
    code, _, err = run(AS_MEANT, *args)
    assert code == 2
    assert sentence in err


def test_a_trace_without_executed_masks_has_nothing_to_declare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "basic.flextrace", AS_MEANT)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM arrays")
    assert main(["declare", str(path)]) == 2
    assert "has no executed mask of the whole prompt" in capsys.readouterr().err


def test_the_name_of_the_trace_adds_nothing_to_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / 'a\nmask = "causal"\n.flextrace', AS_MEANT)
    out = tmp_path / "out.toml"
    assert main(["declare", str(path), "--out", str(out)]) == 0
    assert read_declaration(out).mask == "segment-isolation"


def test_a_single_border_can_be_moved(run: Callable[..., Ran], tmp_path: Path) -> None:
    cells = blocks([SECOND - 1, THIRD], reader=THIRD)
    code, out, err = run(cells, "--border", f"{SECOND - 1}={SECOND}")
    assert (code, err) == (0, "")
    assert '  paraphrase 2  tokens 9-14  "Name its currency."' in out
    text = (tmp_path / "run.toml").read_text("utf-8")
    assert f"The border {SECOND - 1} is at {SECOND}." in text


@pytest.mark.parametrize(
    ("border", "sentence"),
    [
        ("3=4", "There is no border at 3; they are at 8, 15."),
        ("8=16", "The borders 16, 15 are not in order in the prompt."),
    ],
)
def test_a_border_that_is_not_there_or_leaves_its_place_is_refused(
    border: str, sentence: str, run: Callable[..., Ran]
) -> None:
    code, _, err = run(ONE_EARLY, "--border", border)
    assert code == 2
    assert sentence in " ".join(err.split())


def test_a_border_without_a_new_position_is_refused(
    run: Callable[..., Ran], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(ONE_EARLY, "--border", "8")
    assert "'8' is not OLD=NEW, for example 9=10" in capsys.readouterr().err

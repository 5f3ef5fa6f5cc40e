"""A redacted copy holds no word of the prompt, and keeps what findings are about."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.earlier_traces import NAMES, unpack

from flexinspect.cli.main import main
from flexinspect.core.errors import FlexInspectError
from flexinspect.trace.reader import open_trace
from flexinspect.trace.redaction import COMMON_WORDS, KEPT_FACTS, TENSORS, redact


def words_of(text: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[^\W\d_]{3,}", text)}


def schema_of(path: Path) -> str:
    with closing(sqlite3.connect(path)) as db:
        return " ".join(str(row[0]) for row in db.execute("SELECT sql FROM sqlite_schema"))


def sensitive_words(path: Path) -> set[str]:
    """Return the words of the prompt, the answers, the candidates and the output."""
    sql = (
        "SELECT text FROM tokens UNION SELECT text FROM candidates UNION SELECT answer FROM "
        "branches UNION SELECT text FROM output UNION SELECT expected FROM generations"
    )
    with closing(sqlite3.connect(path)) as db:
        text = " ".join(str(row[0]) for row in db.execute(sql))
    return words_of(text) - COMMON_WORDS - {"true", "false", "null"}


def texts_of(path: Path) -> str:
    """Return the texts of the columns that hold free text."""
    sql = (
        "SELECT text || token FROM tokens UNION SELECT text FROM candidates UNION SELECT answer "
        "FROM branches UNION SELECT expected || sample_id || declared FROM generations UNION "
        "SELECT stop_reason FROM branches UNION SELECT sentence || evidence FROM findings UNION "
        "SELECT text || data FROM events"
    )
    with closing(sqlite3.connect(path)) as db:
        return " ".join(str(row[0]) for row in db.execute(sql)).lower()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "interrupted"])
def test_no_word_of_the_prompt_is_left(name: str, tmp_path: Path) -> None:
    whole, copy = unpack(name, tmp_path), tmp_path / "copy.flextrace"
    words = sensitive_words(whole)
    redact(whole, copy)
    assert words & words_of(texts_of(copy)) == set()
    rare = {word for word in words if len(word) > 5} - words_of(schema_of(copy))
    data = copy.read_bytes().decode("latin-1").lower()  # free pages too
    assert {word for word in rare if f" {word} " in data or f'"{word} ' in data} == set()
    assert copy.stat().st_mode & 0o077 == 0


def test_what_ran_stays(tmp_path: Path) -> None:
    whole, copy = unpack("extreme", tmp_path), tmp_path / "copy.flextrace"
    done = redact(whole, copy)
    assert {*done.dropped_arrays} <= {*TENSORS}
    with open_trace(whole) as before, open_trace(copy) as after:
        assert set(after.run()) <= {*KEPT_FACTS, "redacted"}
        for generation in before.generations():
            number = generation.generation
            for one, other in zip(before.steps(number), after.steps(number), strict=True):
                assert (one.q_len, one.kv_after, one.entropy) == pytest.approx(
                    (other.q_len, other.kv_after, other.entropy), nan_ok=True
                )
                assert before.calls(number, one.step) == after.calls(number, one.step)
            tokens = [(a.token_id, b.token_id) for a, b in zip(
                before.tokens(number), after.tokens(number), strict=True
            )]  # fmt: skip
            assert len(set(tokens)) == len({a for a, _ in tokens}) == len({b for _, b in tokens})
        assert [f.finding.id for f in before.findings()] == [f.finding.id for f in after.findings()]


def test_tensors_stay_on_request(tmp_path: Path) -> None:
    whole, copy = unpack("extreme", tmp_path), tmp_path / "copy.flextrace"
    assert redact(whole, copy, keep_tensors=True).dropped_arrays == []


def test_a_trigger_of_a_stranger_is_not_run(tmp_path: Path) -> None:
    whole, copy = unpack("generation", tmp_path), tmp_path / "copy.flextrace"
    with closing(sqlite3.connect(whole)) as db, db:
        rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
        db.execute(f'CREATE TRIGGER "a ""b" AFTER INSERT ON run BEGIN {rows}; END')
    redact(whole, copy)
    with closing(sqlite3.connect(copy)) as db:
        (n,) = db.execute("SELECT count(*) FROM sqlite_schema WHERE type = 'trigger'").fetchone()
    assert n == 0


def test_damaged_json_is_left_out_of_a_copy(tmp_path: Path) -> None:
    whole = unpack("generation", tmp_path)
    with closing(sqlite3.connect(whole)) as db, db:
        db.execute("UPDATE generations SET declared = ?", ("[" * 20_000,))
        db.execute("UPDATE run SET value = '%s' WHERE key = 'model'")
    redact(whole, tmp_path / "copy.flextrace")
    with open_trace(tmp_path / "copy.flextrace") as reader:
        assert reader.run()["redacted"] is True


def test_a_target_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    whole = unpack("generation", tmp_path)
    with pytest.raises(FlexInspectError, match="cannot be written"):
        redact(whole, tmp_path / "none" / "copy.flextrace")


def test_the_command_writes_a_copy_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = unpack("generation", tmp_path)
    assert main(["redact", str(whole)]) == 0
    assert "token ids, and" in capsys.readouterr().out
    assert main(["redact", str(whole)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["redact", str(tmp_path / "none.flextrace")]) == 2
    left = {path.name for path in tmp_path.glob("*.flextrace")}
    assert left == {"generation.flextrace", "generation-redacted.flextrace"}

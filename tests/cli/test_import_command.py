"""`flexinspect import`: detection, words, output, and nothing half-written."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dumps import PROMPT, described_folder, unpack_dump
from support.paths import DEMO
from support.traces import sample_trace

from flexinspect.cli.main import main
from flexinspect.importers import described_folder as described
from flexinspect.importers.importer import ForwardPass
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

DUMPS = ("described", "sglang-dumper", "sglang-passes", "transformers-debugger")
PANELS = (
    *("tokens", "mask", "attention", "logits", "layers", "memory", "path", "findings", "run"),
    *("output", "branches", "gradients", "training", "gradstrip", "code"),
)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trace of each format, imported by the command."""
    folder = tmp_path_factory.mktemp("dumps")
    made = {}
    for name in DUMPS:
        dump = folder / name
        described_folder(dump) if name == "described" else unpack_dump(name, dump)
        made[name] = folder / f"{name}.flextrace"
        inner = dump / "tensors" if (dump / "tensors").is_dir() else dump
        assert main(["import", str(inner), "-o", str(made[name])]) == 0
    return made


@pytest.mark.parametrize("name", DUMPS)
def test_the_format_is_found_by_the_content(name: str, traces: dict[str, Path]) -> None:
    with open_trace(traces[name]) as reader:
        assert reader.run()["imported"]["format"] == name
        assert reader.state == "finished"


@pytest.mark.parametrize("name", DUMPS)
@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_shows_an_imported_trace_and_what_it_lacks(
    name: str, panel: str, traces: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["show", str(traces[name]), "--panel", panel, "--json"])
    shown = json.loads(capsys.readouterr().out)
    text = "\n".join(shown["lines"])
    assert code == (1 if shown["missing"] else 0)
    for claim in (
        "flex uncompiled",
        "flex compiled",
        "sdpa",
        "eager",
        "--level",
        "--grads",
        "Record ",
        "hook",
    ):
        assert claim not in text, text
    lacking = {"memory", "gradients", "training", "gradstrip", "output"}
    if not name.startswith(("described", "transformers")):
        lacking |= {"mask", "attention", "path", "code"}
    if panel in lacking:
        assert shown["missing"]
        assert "The trace was imported from" in text
    assert main(["show", str(traces[name]), "--panel", panel, "--picture"]) == code


def test_the_path_panel_names_no_kernel(
    traces: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["show", str(traces["transformers-debugger"]), "--panel", "path"])
    out = capsys.readouterr().out
    assert "Layers 0-1: kernel not recorded, mask" in out
    assert "Backend: unknown." in out


@pytest.mark.parametrize("name", DUMPS)
def test_findings_say_what_was_not_checked(
    name: str, traces: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["findings", str(traces[name]), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["findings"] == []
    assert "Not in the dump, so not checked:" in report["notes"][0]
    not_run = {"path", "caches", "memory", "failures", "observer"}
    assert report["rules"]
    assert not not_run & set(report["rules"])
    has_masks = name in ("described", "transformers-debugger")
    assert ("rows" in report["rules"]) == has_masks
    assert ("masks" in report["notes"][0].split(":")[1].split(".")[0]) != has_masks


def test_a_finding_of_an_imported_trace_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np
    from support.dumps import attention_step, save_safetensors

    folder = described_folder(tmp_path / "dump")
    tensors = attention_step(0, {}, 4)
    tensors["layers.0.hidden"] = np.full((4, 8), np.nan, np.float32)
    save_safetensors(folder / "step0.safetensors", tensors)
    trace = tmp_path / "run.flextrace"
    assert main(["import", str(folder), "-o", str(trace)]) == 0
    assert main(["findings", str(trace)]) == 1
    assert "numbers.nan" in capsys.readouterr().out


def test_a_tokenizer_gives_the_tokens_their_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    dump = unpack_dump("sglang-passes", tmp_path / "dump")
    for number, name in enumerate(("demo", str(DEMO), str(DEMO / "tokenizer.json"))):
        trace = tmp_path / f"{number}.flextrace"
        assert main(["import", str(dump), "-o", str(trace), "--tokenizer", name]) == 0
        with open_trace(trace) as reader:
            tokens = reader.tokens(0)[: len(PROMPT)]
            assert "".join(t.text for t in tokens) == tokenizer.decode(
                PROMPT, skip_special_tokens=False
            )
            assert [t.token for t in tokens] == [tokenizer.id_to_token(id_) for id_ in PROMPT]
            assert "words" in reader.run()["imported"]["holds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "There is no folder"),
        (["file"], "is not a folder"),
        (["empty"], "holds no dump of a known format"),
        (["dump", "--format", "sglang"], "There is no format 'sglang'"),
        (["dump", "--format", "sglang-passes"], "has no file Pass"),
        (["dump", "--format", "transformers-debugger"], "has no *_debug_tree_FULL_TENSORS.json"),
        (["dump", "--tokenizer", "empty"], "cannot be read"),
        (["dump", "--tokenizer", "nobody/nothing"], "is not on this machine"),
        (["dump", "-o", "none/run.flextrace"], "there is no folder"),
        (["dump", "-o", "empty"], "that is a folder"),
        (["dump", "-o", "file", "--overwrite"], "is not a trace, so it is not overwritten"),
    ],
)
def test_wrong_input_is_one_sentence_and_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    described_folder(tmp_path / "dump")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine", "utf-8")
    before = sorted(map(str, tmp_path.rglob("*")))
    assert main(["import", *arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert sorted(map(str, tmp_path.rglob("*"))) == before
    assert (tmp_path / "file").read_text("utf-8") == "mine"


def test_several_formats_in_one_folder_must_be_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = unpack_dump("sglang-passes", described_folder(tmp_path / "dump"))
    trace = str(tmp_path / "run.flextrace")
    assert main(["import", str(dump), "-o", trace]) == 2
    assert "several formats: described and sglang-passes" in capsys.readouterr().err
    assert main(["import", str(dump), "-o", trace, "--format", "sglang-passes"]) == 0


def test_an_older_trace_is_replaced_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump, trace = described_folder(tmp_path / "dump"), sample_trace(tmp_path / "run.flextrace")
    assert main(["import", str(dump), "-o", str(trace)]) == 2
    assert "the file exists already" in capsys.readouterr().err
    assert main(["import", str(dump), "-o", str(trace), "--overwrite"]) == 0
    with open_trace(trace) as reader:
        assert reader.run()["imported"]["source"] == "my engine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "run.flextrace"]


def test_an_interruption_leaves_no_half_trace_and_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dump, trace = described_folder(tmp_path / "dump"), sample_trace(tmp_path / "run.flextrace")
    before, whole = trace.read_bytes(), described._StepReader.passes

    def interrupted(reader: Any) -> Iterator[ForwardPass]:
        yield next(whole(reader))
        raise KeyboardInterrupt

    monkeypatch.setattr(described._StepReader, "passes", interrupted)
    assert main(["import", str(dump), "-o", str(trace), "--overwrite"]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert trace.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "run.flextrace"]


def test_a_read_only_folder_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    dump, closed = described_folder(tmp_path / "dump"), tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert main(["import", str(dump), "-o", str(closed / "run.flextrace")]) == 2
    assert "permission denied" in capsys.readouterr().err


def test_a_full_disk_names_the_trace_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorname = "SQLITE_FULL"
        raise error

    dump, trace = described_folder(tmp_path / "dump"), tmp_path / "run.flextrace"
    monkeypatch.setattr(TraceWriter, "_transaction", full)
    assert main(["import", str(dump), "-o", str(trace)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"flexinspect: The trace {trace} cannot be written: the disk is full."
    assert "generation itself continues" not in lines[1]
    assert [path.name for path in tmp_path.iterdir()] == ["dump"]


def test_json_says_what_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dump = described_folder(tmp_path / "dump")
    assert main(["import", str(dump), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["trace"] == str(tmp_path / "dump.flextrace")
    assert (made["source"], made["versions"]) == ("my engine", {"my engine": "1.4"})
    assert (made["n_generations"], made["n_steps"]) == (1, 2)
    assert {"masks", "attention"} <= set(made["holds"])
    assert {"kernel paths", "memory"} <= set(made["lacks"])
    assert main(["import", str(tmp_path / "none"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_text_of_a_dump_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = described_folder(tmp_path / "dump", source="a\x1b[31mb")
    trace = tmp_path / "run.flextrace"
    assert main(["import", str(dump), "-o", str(trace)]) == 0
    assert main(["findings", str(trace)]) == 0
    assert main(["show", str(trace)]) == 0
    assert "\x1b" not in capsys.readouterr().out

"""A folder of safetensors with a description: what it says becomes a trace, mistakes are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.dumps import attention_step, described_folder, save_safetensors

from flexinspect.cli.main import main
from flexinspect.core.errors import UsageError
from flexinspect.importers.importer import find_importer
from flexinspect.importers.trace_builder import write_trace
from flexinspect.importers.vocabulary import DumpVocabulary
from flexinspect.panels.attention.attention_data import AttentionOptions, load_attention
from flexinspect.panels.base import Request, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.trace.reader import TraceReader, open_trace


def import_folder(folder: Path, trace: Path | None = None) -> Path:
    importer = find_importer(folder, None)
    trace = trace or folder / "run.flextrace"
    write_trace(importer.open(folder, lambda: None), importer.name, trace, DumpVocabulary())
    return trace


def attention(reader: TraceReader, step: int, **place: int) -> Any:
    request = Request(TracePlace(step=step, **place), AttentionOptions())
    return load_attention(Source(reader), request)


def test_the_attention_of_every_step_is_that_of_the_dump(tmp_path: Path) -> None:
    with open_trace(import_folder(described_folder(tmp_path))) as reader:
        keys: dict[str, Any] = {}
        for step, rows in enumerate((4, 1)):
            own = attention_step(step, keys, rows)
            scores = own["layers.0.q"][1, -1] @ keys["k"][0].T * 0.5
            expected = np.exp(scores - own["layers.0.lse"][1, -1])
            data = attention(reader, step, head=1)
            assert data.tokens.weights == pytest.approx(expected, abs=1e-6)
            assert data.lse_check.kind == "lse"
            assert data.lse_check.value < 1e-6
            call = reader.calls(0, step)[0]
            assert (call.path, call.backend, call.kv_len) == ("unknown", "", keys["k"].shape[1])


def test_the_words_the_chosen_token_and_the_candidates_are_those_of_the_dump(
    tmp_path: Path,
) -> None:
    with open_trace(import_folder(described_folder(tmp_path))) as reader:
        assert [token.text for token in reader.tokens(0)] == ["<s>", "⟨5⟩", "⟨9⟩", "⟨7⟩", "⟨3⟩"]
        first, last = reader.logits(0, 0), reader.logits(0, 1)
        assert first is not None
        assert last is not None
        assert [candidate.token_id for candidate in first.candidates[:3]] == [15, 14, 13]
        assert (first.chosen_id, first.chosen_rank) == (3, 12)
        logits = np.linspace(-2, 3, 16)
        logprobs = logits - np.log(np.exp(logits).sum())
        assert first.chosen_logprob == pytest.approx(logprobs[3], abs=1e-5)
        assert first.entropy == pytest.approx(-(np.exp(logprobs) * logprobs).sum(), abs=1e-5)
        assert (last.chosen_id, last.chosen_rank) == (-1, -1)
        assert np.isnan(last.chosen_logprob)


def test_candidates_have_the_words_that_the_dump_gives_their_ids(tmp_path: Path) -> None:
    tokens = [1, {"id": 15, "text": "Who"}, 9, 7]
    steps = [{"file": "step0.safetensors", "chosen": {"id": 13, "text": " Jane"}}]
    folder = described_folder(tmp_path, tokens=tokens, steps=steps)
    with open_trace(import_folder(folder)) as reader:
        logits = reader.logits(0, 0)
        assert logits is not None
        texts = [candidate.text for candidate in logits.candidates[:3]]
    assert texts == ["Who", "⟨14⟩", " Jane"]


def test_a_log_sum_exp_that_does_not_fit_is_shown_as_a_mismatch(tmp_path: Path) -> None:
    folder = described_folder(tmp_path)
    tensors = attention_step(0, {}, 4)
    tensors["layers.0.lse"] = tensors["layers.0.lse"] + 0.5
    save_safetensors(folder / "step0.safetensors", tensors)
    with open_trace(import_folder(folder)) as reader:
        assert "This is not what ran" in attention(reader, 0).mismatch


def test_without_lse_the_output_is_the_check_and_without_both_there_is_none(
    tmp_path: Path,
) -> None:
    for missing, kind in ((["lse"], "output"), (["lse", "out"], None)):
        folder = described_folder(tmp_path / str(kind))
        tensors = attention_step(0, {}, 4)
        for name in missing:
            del tensors[f"layers.0.{name}"]
        save_safetensors(folder / "step0.safetensors", tensors)
        with open_trace(import_folder(folder)) as reader:
            data = attention(reader, 0)
            assert data.lse_check.kind == kind
            assert data.tokens is not None


def test_a_layer_without_a_mask_has_no_attention_and_the_others_do(tmp_path: Path) -> None:
    folder = described_folder(tmp_path)
    tensors = {**attention_step(0, {}, 4), **attention_step(1, {}, 4, layer=1)}
    del tensors["layers.1.mask"]
    save_safetensors(folder / "step0.safetensors", tensors)
    with open_trace(import_folder(folder)) as reader:
        assert [call.mask is None for call in reader.calls(0, 0)] == [False, True]
        mass = reader.array(0, 0, "attention.mass")
        assert mass is not None
        assert np.isfinite(mass[0]).all()
        assert np.isnan(mass[1]).all()
        assert "was not recorded" in attention(reader, 0, layer=1).missing_reason


def test_bfloat16_is_read_as_float(tmp_path: Path) -> None:
    folder = described_folder(tmp_path)
    tensors = attention_step(0, {}, 4)
    del tensors["layers.0.lse"]
    for name in ("q", "k", "v", "out"):
        bits = tensors[f"layers.0.{name}"].astype(np.float32).view(np.uint32)
        tensors[f"layers.0.{name}"] = ("BF16", (bits >> 16).astype(np.uint16))
    save_safetensors(folder / "step0.safetensors", tensors)
    with open_trace(import_folder(folder)) as reader:
        call = reader.calls(0, 0)[0]
        assert (call.dtype, call.check_kind) == ("bfloat16", "output")
        assert 0 < (call.lse_error or 0) < 0.05


def test_only_tokens_and_steps_are_needed(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "a.safetensors", {"other": np.zeros(2, np.float32)})
    description = {"tokens": [1, 2], "steps": [{"file": "a.safetensors"}]}
    (tmp_path / "flexinspect-import.json").write_text(json.dumps(description), "utf-8")
    with open_trace(import_folder(tmp_path)) as reader:
        assert reader.run()["imported"]["holds"] == ["tokens"]
        assert (reader.calls(0, 0), reader.logits(0, 0)) == ([], None)


SEGMENT = {"label": "a", "start": 0, "stop": 4}
STEP = {"file": "step0.safetensors"}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"tokens": []}, "tokens: there is no token"),
    ({"tokens": ["a"]}, r"tokens\[0\]: Expected"),
    ({"tokens": None}, "tokens: Expected `array`, got `null`"),
    ({"steps": []}, "steps: there must be 1 to"),
    ({"steps": [{}]}, r"steps\[0\]: Object missing required field `file`"),
    ({"steps": [{"file": "../x.safetensors"}]}, r"steps\[0\].file: '../x.safetensors' is not"),
    ({"steps": [{"file": "/etc/passwd"}]}, r"steps\[0\].file: '/etc/passwd' is not a file"),
    ({"steps": [{**STEP, "rows": 3}]}, r"steps\[0\].rows: 3 is not the number of tokens, 4"),
    ({"steps": [STEP, {**STEP, "rows": 0}]}, r"steps\[1\].rows: 0 is not"),
    ({"steps": [{**STEP, "chosen": "x"}]}, r"steps\[0\].chosen: Expected"),
    ({"steps": [{"file": "none.safetensors"}]}, "none.safetensors is missing, damaged or not"),
    ({"positions": [0, 1]}, "positions: 2 ids for 4 tokens"),
    ({"segments": [{**SEGMENT, "stop": 3}]}, "segments: they end at 3, but there are 4 tokens"),
    ({"segments": [{**SEGMENT, "start": 1}]}, r"segments\[0\]: 1 to 4 does not continue at 0"),
    ({"segments": [{**SEGMENT, "kind": "x"}]}, r"segments\[0\].kind: Invalid enum value 'x'"),
    ({"model": {"layers": 1_000_000}}, "model.layers: 1000000 is not 0 to 4096"),
    ({"models": {}}, "Object contains unknown field `models`"),
    ({"scale": "a"}, "scale: Expected `float"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES)
def test_a_mistake_is_one_sentence_with_file_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = described_folder(tmp_path / "dump", **change)
    with pytest.raises(UsageError, match=message) as raised:
        import_folder(folder, tmp_path / "run.flextrace")
    assert str(folder) in raised.value.message
    assert raised.value.message.count("\n") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["dump"]


TENSORS: list[tuple[str, Any, str]] = [
    ("layers.0.q", np.zeros((2, 3, 4), np.float32), r"shape \[2, 3, 4\], not \(any, 4, any\)"),
    ("layers.0.q", np.zeros((2, 4, 8), np.float32), "the queries .* do not fit the keys"),
    ("layers.0.v", np.zeros((2, 4, 4), np.float32), "1 key heads, but 2 of the values"),
    ("layers.0.mask", np.ones((4, 4), np.float32), "a mask is BOOL"),
    ("layers.0.mask", np.ones((3, 4, 4), np.bool_), "a mask of 3 heads for 2 heads"),
    ("layers.0.mask", np.ones((4, 5), np.bool_), r"shape \[1, 4, 5\], not \(any, 4, 4\)"),
    ("layers.0.lse", np.ones((2, 3), np.float32), r"not \(2, 4\)"),
    ("layers.0.hidden", np.ones((3, 8), np.float32), r"not \(4, any\)"),
    ("layers.9999999.q", np.ones((3, 8), np.float32), "tensors of layer 9999999; the model has"),
]


@pytest.mark.parametrize(("name", "array", "message"), TENSORS)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(
    tmp_path: Path, name: str, array: Any, message: str
) -> None:
    folder = described_folder(tmp_path / "dump")
    tensors = {**attention_step(0, {}, 4), name: array}
    save_safetensors(folder / "step0.safetensors", tensors)
    with pytest.raises(UsageError, match=message) as raised:
        import_folder(folder, tmp_path / "run.flextrace")
    assert "step0.safetensors" in raised.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["dump"]


def test_other_names_of_tensors_can_be_given(tmp_path: Path) -> None:
    folder = described_folder(
        tmp_path, tensors={"q": "block{layer}.query", "k": "block{layer}.key"}
    )
    tensors = attention_step(0, {}, 4)
    tensors["block0.query"] = tensors.pop("layers.0.q")
    tensors["block0.key"] = tensors.pop("layers.0.k")
    save_safetensors(folder / "step0.safetensors", tensors)
    with open_trace(import_folder(folder)) as reader:
        assert len(reader.calls(0, 0)) == 1


def test_a_file_of_two_gigabytes_and_a_deep_one_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "flexinspect-import.json"
    with file.open("wb") as out:
        out.truncate(2 << 30)  # a hole, which takes no space
    assert main(["import", str(tmp_path), "-o", str(tmp_path / "run.flextrace")]) == 2
    assert "has 2048 MiB; at most 512 MiB are read" in capsys.readouterr().err
    file.write_text("[" * 100_000, "utf-8")
    assert main(["import", str(tmp_path), "-o", str(tmp_path / "run.flextrace")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_first_step_without_values_leaves_the_later_outputs_unchecked(tmp_path: Path) -> None:
    folder, keys = described_folder(tmp_path), dict[str, Any]()
    for step, rows in enumerate((4, 1)):
        tensors = attention_step(step, keys, rows)
        tensors.pop("layers.0.lse", None)
        if step == 0:
            del tensors["layers.0.v"]
        save_safetensors(folder / f"step{step}.safetensors", tensors)
    with open_trace(import_folder(folder)) as reader:
        assert [reader.calls(0, step)[0].check_kind for step in (0, 1)] == [None, None]

"""Trees of transformers' model_addition_debugger: a committed one, and one that is made now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.dumps import PROMPT, unpack_dump, write_debug_tree

from flexinspect.core.errors import UsageError
from flexinspect.importers.importer import find_importer
from flexinspect.importers.trace_builder import write_trace
from flexinspect.importers.transformers_debugger import FULL, SUMMARY, parse_repr
from flexinspect.importers.vocabulary import DumpVocabulary
from flexinspect.panels.attention.attention_data import AttentionOptions, load_attention
from flexinspect.panels.base import Request, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.trace.reader import TraceReader, open_trace


def import_tree(folder: Path, trace: Path) -> TraceReader:
    importer = find_importer(folder, None)
    assert importer.name == "transformers-debugger"
    write_trace(importer.open(folder, lambda: None), importer.name, trace, DumpVocabulary())
    return open_trace(trace)


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    return unpack_dump("transformers-debugger", tmp_path / "trees")


def test_a_tree_with_tensors_holds_tokens_logits_outputs_and_attention(
    trees: Path, tmp_path: Path
) -> None:
    with import_tree(trees / "tensors", tmp_path / "a.flextrace") as reader:
        facts = reader.run()["imported"]
        assert facts["source"] == "transformers' model_addition_debugger"
        assert {"logits", "layer statistics", "masks", "attention"} <= set(facts["holds"])
        assert [token.token_id for token in reader.tokens(0)] == PROMPT
        calls = reader.calls(0, 0)
        assert [call.layer for call in calls] == [0, 1]
        assert {(call.path, call.backend) for call in calls} == {("unknown", "")}
        assert (calls[0].q_heads, calls[0].kv_heads, calls[0].head_dim) == (2, 1, 4)
        assert all((call.lse_error or 0) < 1e-5 for call in calls)
        mask = reader.mask(calls[0].mask or "")
        assert mask is not None
        assert mask.cells is not None
        assert (mask.kind, mask.cells[0].tolist()) == ("inferred", np.tri(5, dtype=bool).tolist())
        data = load_attention(Source(reader), Request(TracePlace(layer=1), AttentionOptions()))
        assert data.tokens is not None
        assert data.tokens.total == pytest.approx(1)


def test_a_tree_of_text_holds_ids_and_statistics_but_no_rounded_values(
    trees: Path, tmp_path: Path
) -> None:
    with (
        import_tree(trees / "text", tmp_path / "a.flextrace") as text,
        import_tree(trees / "tensors", tmp_path / "b.flextrace") as exact,
    ):
        assert [token.token_id for token in text.tokens(0)] == PROMPT
        assert text.logits(0, 0) is None
        assert text.calls(0, 0) == []
        pairs = zip(text.layer_stats(0, 0), exact.layer_stats(0, 0), strict=True)
        for rounded, full in pairs:
            assert (rounded.layer, rounded.module) == (full.layer, full.module)
            for name in ("min", "max", "std", "norm"):
                value = getattr(full, name)
                assert getattr(rounded, name) == pytest.approx(value, rel=2e-4)


def test_a_summary_alone_is_imported_without_tokens(trees: Path, tmp_path: Path) -> None:
    next((trees / "text").glob(f"*{FULL}")).unlink()
    with import_tree(trees / "text", tmp_path / "a.flextrace") as reader:
        assert reader.tokens(0) == []
        assert reader.layer_stats(0, 0)
        assert any("has no values" in note for note in reader.run()["imported"]["notes"])
        assert reader.segments(0)[0].stop == 5


def change_tensor(folder: Path, name: str, change: Any) -> None:
    """Change the elements of a tensor of a tree in place."""
    file = folder / f"LlamaForCausalLM.model.layers.{name}.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    elements = np.frombuffer(data, np.float32, offset=start)
    elements[:] = change(elements)
    file.write_bytes(data)


def test_attention_that_does_not_reproduce_the_output_is_not_shown(
    trees: Path, tmp_path: Path
) -> None:
    change_tensor(trees / "tensors", "1.self_attn.q_proj_outputs", lambda q: q + 1)
    with import_tree(trees / "tensors", tmp_path / "a.flextrace") as reader:
        assert [call.layer for call in reader.calls(0, 0)] == [0]
        assert reader.array(0, 0, "q", 1) is None


def test_a_nan_is_in_the_statistics_and_found(trees: Path, tmp_path: Path) -> None:
    def spoil(output: Any) -> Any:
        output[9] = np.nan  # row 1 of 8 values
        return output

    change_tensor(trees / "tensors", "0.mlp.down_proj_outputs", spoil)
    with import_tree(trees / "tensors", tmp_path / "a.flextrace") as reader:
        stats = {stat.module: stat for stat in reader.layer_stats(0, 0)}
        stat = stats["model.layers.0.mlp.down_proj"]
        assert (stat.n_nan, stat.n_inf, stat.bad_row) == (1, 0, 1)


def test_a_missing_file_of_a_tensor_leaves_that_tensor_out(trees: Path, tmp_path: Path) -> None:
    (trees / "tensors" / "LlamaForCausalLM.lm_head_outputs.safetensors").unlink()
    with import_tree(trees / "tensors", tmp_path / "a.flextrace") as reader:
        assert reader.logits(0, 0) is None
        assert len(reader.calls(0, 0)) == 2


def test_paths_of_a_tree_do_not_leave_its_folder(trees: Path, tmp_path: Path) -> None:
    tree = next((trees / "tensors").glob(f"*{FULL}"))
    text = tree.read_text("utf-8")
    other = tmp_path / "LlamaForCausalLM.lm_head_outputs.safetensors"
    (trees / "tensors" / other.name).rename(other)
    name = f"./{other.name}"
    assert name in text
    tree.write_text(text.replace(name, f"../../{other.name}"), "utf-8")
    with import_tree(trees / "tensors", tmp_path / "a.flextrace") as reader:
        assert reader.logits(0, 0) is None


WRONG: list[tuple[Any, str]] = [
    ([], "a node has no module_path"),
    ({"module_path": "A", "children": {}, "inputs": []}, "holds no tensor of"),
    ({"module_path": "A", "children": 3}, "invalid children or inputs"),
    ({"module_path": "A.layers.1000000.x"}, "names layer 1000000; layers 0 to 4095 are read"),
    ({"module_path": "A", "children": [{"x": 1}]}, "a node has no module_path"),
]


@pytest.mark.parametrize(("tree", "message"), WRONG)
def test_another_json_file_is_refused_in_one_sentence(
    tmp_path: Path, tree: Any, message: str
) -> None:
    (tmp_path / f"A{FULL}").write_text(json.dumps(tree), "utf-8")
    with pytest.raises(UsageError, match=message):
        import_tree(tmp_path, tmp_path / "a.flextrace")
    assert [path.name for path in tmp_path.iterdir()] == [f"A{FULL}"]


def test_two_trees_in_one_folder_are_refused(tmp_path: Path) -> None:
    for name in "AB":
        (tmp_path / f"{name}{SUMMARY}").write_text("{}", "utf-8")
    with pytest.raises(UsageError, match="holds the trees of 2 models"):
        find_importer(tmp_path, None).open(tmp_path, lambda: None)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["tensor([[1, 2],", "        [3, 4]])"], [[1, 2], [3, 4]]),
        (["tensor([5, -6], device='cuda:0')"], [5, -6]),
        (["tensor([1, 2], dtype=torch.int32)"], [1, 2]),
        (["tensor([1, 2,  ..., 8])"], None),
        (["tensor([1.5000e+00])"], None),
        (["tensor([[1], [2, 3]])"], None),
        ("tensor([1])", None),
    ],
)
def test_only_whole_integer_tensors_are_read_from_text(lines: Any, expected: Any) -> None:
    found = parse_repr(lines)
    assert (None if found is None else found.tolist()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_fresh_tree_agrees_with_the_model_that_wrote_it(tmp_path: Path, attention: str) -> None:
    import torch

    options: dict[str, Any] = {}
    if attention == "eager":
        closed = torch.tensor([[1, 1, 0, 1, 1]])
        options["attention_mask"] = closed
    tree = tmp_path / "tree"
    ran = write_debug_tree(tree, PROMPT, use_repr=False, attention=attention, **options)
    with import_tree(tree, tmp_path / "a.flextrace") as reader:
        logits = reader.logits(0, 0)
        assert logits is not None
        order = np.argsort(-ran["logits"], kind="stable")[:5]
        assert [c.token_id for c in logits.candidates[:5]] == order.tolist()
        assert [c.logit for c in logits.candidates[:5]] == pytest.approx(
            ran["logits"][order].tolist(), abs=1e-5
        )
        hidden = reader.array(0, 0, "hidden", 0)
        assert hidden == pytest.approx(ran["hidden"][0], abs=1e-5)
        calls = reader.calls(0, 0)
        assert len(calls) == 2
        mask = reader.mask(calls[0].mask or "")
        assert mask is not None
        assert mask.cells is not None
        expected = np.tri(5, dtype=bool)
        if attention == "eager":
            expected[:, 2] = False
        assert mask.kind == ("float" if attention == "eager" else "inferred")
        rows = expected.any(axis=1)  # a row without a key attends to all with the same weight
        assert mask.cells[0][rows].tolist() == expected[rows].tolist()

"""A damaged dump is imported or refused with a sentence, and leaves no half trace."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.dumps import described_folder, unpack_dump

from flexinspect.core.errors import FlexInspectError
from flexinspect.importers.importer import Importer, find_importer
from flexinspect.importers.trace_builder import write_trace
from flexinspect.importers.transformers_debugger import FULL
from flexinspect.importers.vocabulary import DumpVocabulary
from flexinspect.trace.reader import open_trace

FORMATS = ("described", "sglang-dumper", "sglang-passes", "transformers-debugger")
FAST = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module", params=FORMATS)
def dump(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A dump of each format, with its importer and all of its files."""
    folder = tmp_path_factory.mktemp(request.param)
    make = described_folder if request.param == "described" else None
    made = make(folder) if make else unpack_dump(request.param, folder)
    made = made / "tensors" if (made / "tensors").is_dir() else made
    files = sorted(path for path in made.rglob("*") if path.is_file())
    return made, find_importer(made, request.param), files


def import_or_refuse(folder: Path, importer: Importer) -> bool:
    """Import a dump; returns whether it was accepted. Any other error fails the test."""
    with tempfile.TemporaryDirectory() as out:
        trace = Path(out, "a.flextrace")
        try:
            dump = importer.open(folder, lambda: None)
            write_trace(dump, importer.name, trace, DumpVocabulary())
        except FlexInspectError as error:
            assert "\n" not in error.message
            assert list(Path(out).iterdir()) == []
            return False
        with open_trace(trace) as reader:
            for step in reader.steps(0):
                reader.record(0, step.step)
        return True


@FAST
@given(data=st.data())
def test_a_damaged_file_never_ends_in_a_traceback(dump: Any, data: st.DataObject) -> None:
    folder, importer, files = dump
    file = data.draw(st.sampled_from(files))
    whole = file.read_bytes()
    at = data.draw(st.integers(0, min(len(whole) - 1, 4000)))
    change = data.draw(st.sampled_from(("cut", "byte", "digit", "remove")))
    try:
        if change == "remove":
            file.unlink()
        elif change == "cut":
            file.write_bytes(whole[:at])
        else:
            new = data.draw(st.integers(48, 57) if change == "digit" else st.integers(0, 255))
            file.write_bytes(whole[:at] + bytes((new,)) + whole[at + 1 :])
        import_or_refuse(folder, importer)
    finally:
        file.write_bytes(whole)


PLAIN = st.none() | st.booleans() | st.integers(-5, 1 << 40) | st.text(max_size=9)
SHAPES = st.sampled_from(["torch.Size([1, 5, 8])", "torch.Size([0])", "torch.Size([1, 99999999])"])
TENSORS = st.fixed_dictionaries(
    {"shape": SHAPES | PLAIN, "dtype": st.just("torch.float32"), "value": PLAIN | st.lists(PLAIN)},
    optional={"mean": st.sampled_from(["tensor(nan)", "tensor(1.)", "x"]), "min": PLAIN},
)
VALUES = st.recursive(PLAIN | TENSORS, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
NAMES = st.sampled_from(
    [
        *("A", "A.model", "A.model.layers.0", "A.model.layers.0.self_attn"),
        *("A.model.layers.0.self_attn.q_proj", "A.model.layers.1.norm", "A.model.norm"),
        *("A.lm_head", "A.model.embed_tokens"),
    ]
)
NODES = st.fixed_dictionaries(
    {"module_path": NAMES},
    optional={
        "inputs": VALUES
        | st.fixed_dictionaries(
            {},
            optional={
                "args": VALUES,
                "kwargs": st.dictionaries(
                    st.sampled_from(["input_ids", "attention_mask", "position_embeddings"]), VALUES
                )
                | PLAIN,
            },
        ),
        "outputs": VALUES,
    },
)


@FAST
@given(nodes=st.lists(NODES, max_size=6))
def test_a_tree_of_any_values_never_ends_in_a_traceback(nodes: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = {"module_path": "A", "children": nodes}
        (folder / f"A{FULL}").write_text(json.dumps(tree), "utf-8")
        import_or_refuse(folder, find_importer(folder, "transformers-debugger"))


def test_a_whole_dump_of_each_format_is_accepted(dump: Any) -> None:
    folder, importer, _ = dump
    assert import_or_refuse(folder, importer)

"""The recorded code of a mask_mod: evaluated for any cell, it returns what torch returns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import make_model
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

import flexinspect
from flexinspect.masks import mask_presets
from flexinspect.masks.mask_mod_evaluation import Evaluation, SourceText, evaluate
from flexinspect.trace.queries import source_texts
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.generation.mask_source import (
    ForwardWindow,
    MaskMod,
    arithmetic_mask_mod,
    shift_mask_mod,
)
from flexinspect_hooks.observers.attention.mask_mod_code import MaskModCodes
from flexinspect_hooks.step_writer.mask_records import MAX_RUNS, MaskModValues, record_sources

N = 10
SEGMENT = torch.tensor([0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
ALLOWED = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]]).bool()
WINDOW = 3
CONFIG = SimpleNamespace(window=2)


def same_segment(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    same = SEGMENT[q_idx] == SEGMENT[kv_idx]
    return same & (q_idx >= kv_idx)


def by_table(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Two assignments to one name, and a table with two dimensions."""
    allowed = ALLOWED[SEGMENT[q], SEGMENT[k]]
    allowed = allowed & (k <= q)
    allowed |= k == 0
    return allowed


def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor, segment: Tensor = SEGMENT) -> Tensor:
    width = torch.where(h % 2 == 0, CONFIG.window, 5)
    return (q - k <= width) & (k <= q) & (segment[q] != 9)


def by_methods(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    near = (q - k).abs().lt(WINDOW)
    return torch.logical_or(near.logical_and(k.le(q)), ~(k > 0)) & (q // 2 >= k % 2 - 1)


def by_loop(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    found = torch.zeros_like(q, dtype=torch.bool)
    for start, stop in ((0, 4), (4, 7), (7, 10)):
        found = found | ((q >= start) & (q < stop) & (k >= start) & (k < stop))
    return found


class Sliding(nn.Module):
    """A callable object with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 3
        self.register_buffer("segment", SEGMENT.clone())

    def forward(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q - k).abs() < self.width) & (self.segment[q] >= 1)


def documents(offset: int) -> MaskMod:
    ids = SEGMENT + 7

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        def document(index: Tensor) -> Tensor:
            return ids[index + offset]

        return document(q) == document(k)

    return mask_mod


SPEC = mask_presets.MaskSpec("three", (0, 4, 7), (0, 1, 0), (0, 4, 0))
PRESET = arithmetic_mask_mod(SPEC, ForwardWindow(N, N, 0))
# Two lambdas in one line: the recorded one is the second.
LAMBDAS = (lambda b, h, q, k: q < k, lambda b, h, q, k: torch.where(q >= k, SEGMENT[q] == 2, False))
MASK_MODS: dict[str, Any] = {
    "same segment": same_segment,
    "table": by_table,
    "head": by_head,
    "methods": by_methods,
    "loop": by_loop,
    "module": Sliding().forward,
    "closure": documents(0),
    "lambda": LAMBDAS[1],
    "and": and_masks(same_segment, lambda b, h, q, k: q - k < WINDOW),
    "or": or_masks(same_segment, by_table),
    "preset": PRESET,
    "shifted": shift_mask_mod(same_segment, ForwardWindow(1, N, 0)),
}


class Recorder:
    """Records mask_mods as a step does."""

    def __init__(self) -> None:
        self._codes, self._values = MaskModCodes(), MaskModValues()
        self.sources: dict[str, SourceText] = {}
        self.n_put = 0

    def add_event(self, kind: str, text: str, data: dict[str, Any]) -> None:
        own = SourceText(data["source"], data["name"], data["line"], data["text"])
        assert kind == "source"
        assert own.source not in self.sources
        self.sources[own.source] = own

    def record(self, mask_mod: Any) -> Any:
        buffer = StepBuffer(torch.device("cpu"))
        code, new = self._codes.capture(mask_mod, buffer)
        values = buffer.values()
        self.n_put += len(values)
        self._values.read_tensors(values)
        record_sources(new, self)  # type: ignore[arg-type]
        return self._values.encode(code)

    def evaluate(self, mask_mod: Any, *indices: int) -> Evaluation:
        return evaluate(self.record(mask_mod), self.sources, indices)


@pytest.mark.parametrize("name", MASK_MODS)
def test_every_cell_is_what_torch_computes(name: str) -> None:
    mask_mod, recorder = MASK_MODS[name], Recorder()
    code = recorder.record(mask_mod)
    for h, q, k in product(range(2), range(N), range(N)):
        expected = bool(mask_mod(*map(torch.tensor, (0, h, q, k))))
        found = evaluate(code, recorder.sources, (0, h, q, k))
        assert found.is_open is expected, (h, q, k, found.reason)
        # A term alone, or all of them together, decide: none is left without a value.
        assert found.terms
        assert not found.reason


def test_the_deciding_condition_is_named_with_its_values() -> None:
    found = Recorder().evaluate(same_segment, 0, 0, 5, 2)
    (term,) = found.terms
    assert (term.text, term.with_values, term.value) == (
        "SEGMENT[q_idx] == SEGMENT[kv_idx]",
        "2 == 1",
        False,
    )
    lines = found.functions[0].lines
    assert lines[0].steps == ("2 == 1", "False")
    assert lines[0].lookups == ("SEGMENT[5] = 2", "SEGMENT[2] = 1")
    assert lines[1].steps == ("False & (5 >= 2)", "False & True", "False")
    assert [line.number - found.functions[0].text.line for line in lines] == [1, 2]


def test_an_open_cell_names_all_conditions_that_had_to_hold() -> None:
    found = Recorder().evaluate(same_segment, 0, 0, 5, 4)
    assert [term.with_values for term in found.terms] == ["2 == 2", "5 >= 4"]


def test_the_second_lambda_of_a_line_is_recorded() -> None:
    recorder = Recorder()
    recorder.record(LAMBDAS[1])
    (source,) = recorder.sources.values()
    assert source.text.startswith("lambda b, h, q, k: torch.where(")
    assert source.text.endswith("False)")


def test_a_tensor_is_read_once_and_again_after_a_change() -> None:
    ids = SEGMENT.clone()

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ids[q] == ids[k]

    recorder = Recorder()
    assert recorder.evaluate(mask_mod, 0, 0, 5, 2).is_open is False
    assert recorder.evaluate(mask_mod, 0, 0, 5, 2).is_open is False
    assert recorder.n_put == 1
    ids[2] = 2
    assert recorder.evaluate(mask_mod, 0, 0, 5, 2).is_open is True
    assert recorder.n_put == 2


def test_a_tensor_that_is_changed_before_it_is_written_keeps_its_value() -> None:
    ids, codes, values = SEGMENT.clone(), MaskModCodes(), MaskModValues()

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ids[q] == ids[k]

    buffer = StepBuffer(torch.device("cpu"))
    code, _ = codes.capture(mask_mod, buffer)
    ids.zero_()
    values.read_tensors(buffer.values())
    assert values.encode(code)["variables"]["ids"]["values"] == [0, 1, 2, 3]


def test_a_tensor_with_many_runs_has_only_its_shape_and_the_reason_says_so() -> None:
    noise = torch.arange(MAX_RUNS + 1)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (noise[q] > k) & (q >= k)

    recorder = Recorder()
    assert recorder.record(mask_mod)["variables"]["noise"] == {"shape": [MAX_RUNS + 1]}
    unknown = recorder.evaluate(mask_mod, 0, 0, 5, 2)
    assert unknown.is_open is None
    assert unknown.reason == f"the elements of noise ({MAX_RUNS + 1}) were not recorded"
    # A condition that is False decides without the other one.
    assert recorder.evaluate(mask_mod, 0, 0, 2, 5).is_open is False


def test_properties_of_the_users_objects_are_not_called() -> None:
    class Config:
        @property
        def width(self) -> int:
            raise AssertionError

    config = Config()

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < config.width

    found = Recorder().evaluate(mask_mod, 0, 0, 5, 2)
    assert found.is_open is None
    assert found.reason


def test_a_mask_mod_without_python_code_has_none() -> None:
    codes = MaskModCodes()
    code, new = codes.capture(torch.ge, StepBuffer(torch.device("cpu")))
    assert code is None
    assert not new


def test_a_file_that_was_edited_meanwhile_has_values_but_no_text(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    text = "n = 3\n\ndef mask_mod(b, h, q, k):\n    return q - k < n\n"
    path.write_text(text)
    namespace: dict[str, Any] = {"__name__": "edited"}
    exec(compile(text, str(path), "exec"), namespace)
    path.write_text("n = 3\n\ndef mask_mod(b, h, q, k):\n    return (q - k\n")
    recorder = Recorder()
    assert recorder.record(namespace["mask_mod"])["variables"] == {"n": 3}
    assert recorder.sources == {}


def test_code_by_exec_has_values_but_no_text() -> None:
    namespace: dict[str, Any] = {"n": 3}
    exec("def mask_mod(b, h, q, k):\n    return q - k < n", namespace)
    found = Recorder().evaluate(namespace["mask_mod"], 0, 0, 5, 2)
    assert found.is_open is None
    assert "source text" in found.reason


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("code") / "t.flextrace"
    model = make_model("llama").eval()
    model.set_attn_implementation("flex_attention")
    ids = torch.arange(N)[None] + 5
    mask = create_block_mask(same_segment, None, None, N, N, device="cpu")
    with torch.no_grad(), flexinspect.watch(model, out=path):
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    with open_trace(path) as reader:
        yield reader


def test_a_watched_model_records_the_code_of_its_mask(watched: Any) -> None:
    (name,) = watched.fingerprints()
    mask = watched.mask(name)
    assert mask.mask_mod_code["indices"] == "rows"
    sources = {own[0]: SourceText(*own) for own in source_texts(watched)}
    for q, k in product(range(N), range(N)):
        found = evaluate(mask.mask_mod_code, sources, (0, 0, q, k))
        assert found.is_open is bool(np.asarray(mask.cells)[0, q, k])


def test_tensors_of_inference_mode_are_recorded(tmp_path: Any) -> None:
    """Torch counts no modification of them, so each step copies them."""
    from support.ownmasks import attend_by, with_cache

    model = make_model("llama")
    with torch.inference_mode():
        table = torch.ones(64, dtype=torch.bool)

        def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
            return (keys <= rows) & table[keys]

        attend_by(model, cells, flex=True)
        with flexinspect.watch(model, out=tmp_path / "t.flextrace"):
            with_cache(model, torch.tensor([[1, 5, 6, 7]]), 2)
    with open_trace(tmp_path / "t.flextrace") as reader:
        assert [
            row.event.text for row in reader.events() if row.event.kind == "hook-disabled"
        ] == []
        assert len(reader.calls(0, 1)) == 3

"""Standalone calls of FlexAttention on tensors, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import ids, make_model
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flexinspect
from flexinspect.records.step import STANDALONE_CALLS, STANDALONE_MASKS, STANDALONE_RAISED
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.capture.recorder import Recorder
from flexinspect_hooks.sessions import standalone_calls
from flexinspect_hooks.sessions.standalone_calls import StandaloneCalls

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


class Bench:
    """A trace with a session for standalone calls."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = TraceWriter.create(path, {"bench": True})
        self.recorder = Recorder(self.writer)
        self.recorder.start()
        self.session = StandaloneCalls(self.writer, self.recorder, count(), level="advanced")
        self.session.__enter__()

    def close(self, state: str = "finished") -> TraceReader:
        self.session.__exit__(None, None, None)
        self.recorder.stop()
        self.writer.close(state)
        return open_trace(self.path)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "standalone.flextrace")
    yield made
    made.session.remove_hooks()


def qkv(q_len: int, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, 4, q_len, 16), *(torch.randn(1, 2, kv_len, 16) for _ in range(2))


def mask(mask_mod: Any, q_len: int, kv_len: int) -> Any:
    return create_block_mask(mask_mod, None, None, q_len, kv_len, device="cpu")


def causal_from(offset: int) -> Any:
    """Return a mask_mod that captures its offset; torch 2.11 would reuse a default argument."""

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + offset

    return causal


def test_a_decode_row_without_its_offset_shows_one_key_of_nine(bench: Bench) -> None:
    for offset in (0, 8):
        made = mask(causal_from(offset), 1, 9)
        flex_attention(*qkv(1, 9), block_mask=made, enable_gqa=True)
    reader = bench.close()
    found = [(g.sample_id, g.state) for g in reader.generations()]
    assert found == [(f"{STANDALONE_CALLS}, {n}", "finished") for n in (1, 2)]
    steps = [reader.step(number, 0) for number in range(2)]
    lengths = [(s.phase, s.q_len, s.kv_before, s.kv_after) for s in steps if s is not None]
    assert lengths == [("decode", 1, 8, 9)] * 2
    seen = []
    for number in range(2):
        (call,) = reader.calls(number, 0)
        assert (call.layer, call.path, call.q_heads, call.kv_heads) == (0, "flex uncompiled", 4, 2)
        assert call.lse_error is not None
        assert call.lse_error < 1e-5
        found = reader.mask(str(call.mask))
        assert found is not None
        assert found.cells is not None
        seen.append(int(found.cells.sum()))
        assert len(reader.builds(number, 0)) == 1
    assert seen == [1, 9]


def test_a_compiled_call_is_recorded_by_its_tables_and_an_uncompiled_one_by_its_mask_mod(
    bench: Bench,
) -> None:
    segment = torch.arange(256) // 128

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return segment[i] == segment[j]

    made = mask(same, 256, 256)
    segment.zero_()  # the tables are from before, the mask_mod reads the new values
    q, k, v = qkv(256, 256)
    flex_attention(q, k, v, block_mask=made, enable_gqa=True)
    compiled = torch.compile(flex_attention, backend="eager")
    compiled(q, k, v, block_mask=made, enable_gqa=True)
    reader = bench.close()
    open_cells = []
    for number, path in enumerate(("flex uncompiled", "flex compiled")):
        (call,) = reader.calls(number, 0)
        assert call.path == path
        found = reader.mask(str(call.mask))
        assert found is not None
        assert found.cells is not None
        open_cells.append(int(found.cells.sum()))
    assert open_cells == [256 * 256, 2 * 128 * 128]


def test_a_call_that_fails_is_an_event_with_its_lengths(bench: Bench) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        flex_attention(*qkv(1, 33), block_mask=mask(lambda b, h, i, j: j <= 31, 1, 32))
    reader = bench.close()
    (event,) = [row.event for row in reader.events() if row.event.kind == "kernel-failed"]
    assert (event.data["kv_len"], event.data["mask_kv"]) == (33, 32)
    (generation,) = reader.generations()
    assert (generation.sample_id, generation.state) == (STANDALONE_RAISED, "failed")
    assert (reader.n_steps(0), event.generation, event.step) == (0, 0, None)
    finding, note = reader.findings()
    assert (note.id, note.severity) == ("path.kernel-failed", "note")
    assert finding.sentence == (
        "KV length 33 but mask built for 32: flex_attention raised ValueError."
    )


def test_calls_of_a_model_that_is_watched_are_not_standalone(bench: Bench, tmp_path: Path) -> None:
    model = make_model("llama")
    with flexinspect.watch(model, out=tmp_path / "own.flextrace"):
        model(torch.tensor([ids(5, 1)]))
    assert bench.close().generations() == []


def test_masks_that_no_call_came_after_are_recorded_at_the_end(bench: Bench) -> None:
    flex_attention(*qkv(2, 2), block_mask=mask(lambda b, h, i, j: j <= i, 2, 2), enable_gqa=True)
    mask(lambda b, h, i, j: j <= i, 300, 400)
    create_block_mask(lambda b, h, i, j: j <= i, None, 8, 500, 600, device="cpu")
    reader = bench.close()
    samples = [row.sample_id for row in reader.generations()]
    assert samples == [f"{STANDALONE_CALLS}, 1", STANDALONE_MASKS]
    assert [build.q_len for build in reader.builds(0, 0)] == [2]
    built = reader.builds(1, 0)
    assert [(b.layer, b.heads, b.q_len, b.kv_len) for b in built] == [
        (None, None, 300, 400),
        (None, 8, 500, 600),
    ]
    step = reader.step(1, 0)
    assert step is not None
    assert (step.q_len, step.kv_after) == (500, 600)
    assert step.wall_ms == sum(build.wall_ms for build in built)
    assert reader.calls(1, 0) == []


def test_a_mask_that_cannot_be_built_is_an_event_with_its_grid(bench: Bench) -> None:
    def broken(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        raise MemoryError("no more")

    with pytest.raises(MemoryError):
        create_block_mask(broken, None, 8, 500, 600, device="cpu")
    reader = bench.close()
    (event,) = [row.event for row in reader.events() if row.event.kind == "kernel-failed"]
    rule = event.data.pop("rule")
    assert (rule["name"], rule["kind"], rule["captured"]) == ("broken", "mask_mod", [])
    assert [probe["raises"] for probe in rule["probes"]] == ["MemoryError: no more"] * 2
    assert event.data == {
        "layer": None,
        "kernel": "create_block_mask",
        "error": "MemoryError: no more",
        "q_len": 500,
        "kv_len": 600,
        "heads": 8,
    }
    assert reader.generations() == []


def test_a_mask_built_before_a_model_runs_is_the_models(bench: Bench, tmp_path: Path) -> None:
    model = make_model("llama")
    mask(lambda b, h, i, j: j <= i, 5, 5)
    with flexinspect.watch(model, out=tmp_path / "own.flextrace") as watched:
        model(torch.tensor([ids(5, 1)]))
    assert [build.q_len for build in watched.reader().builds(0, 0)] == [5]
    assert bench.close().generations() == []


def test_masks_built_in_a_models_layer_are_its_own_though_another_is_watched(
    tmp_path: Path,
) -> None:
    first, second = make_model("llama"), make_model("llama")

    def build(module: Any, args: Any) -> None:
        mask(lambda b, h, i, j: j <= i, 7, 7)

    first.model.layers[1].self_attn.register_forward_pre_hook(build)
    with (
        flexinspect.watch(first, out=tmp_path / "first.flextrace") as one,
        flexinspect.watch(second, out=tmp_path / "second.flextrace") as other,
    ):
        first(torch.tensor([ids(5, 1)]))
        second(torch.tensor([ids(5, 1)]))
    assert [(b.layer, b.q_len) for b in one.reader().builds(0, 0)] == [(1, 7)]
    assert other.reader().builds(0, 0) == []


def test_a_call_after_a_models_forward_failed_is_standalone(bench: Bench, tmp_path: Path) -> None:
    model = make_model("llama")

    def refuse(module: Any, args: Any) -> None:
        raise ValueError("not today")

    model.model.layers[1].self_attn.register_forward_pre_hook(refuse)
    with flexinspect.watch(model, out=tmp_path / "own.flextrace"):
        with pytest.raises(ValueError, match="not today"):
            model(torch.tensor([ids(5, 1)]))
        flex_attention(*qkv(2, 2), enable_gqa=True)
    assert [row.sample_id for row in bench.close().generations()] == [f"{STANDALONE_CALLS}, 1"]


def test_calls_past_the_limit_are_not_recorded_with_an_event(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone_calls, "MAX_STANDALONE_CALLS", 2)
    outputs = [flex_attention(*qkv(2, 2), enable_gqa=True) for _ in range(3)]
    mask(lambda b, h, i, j: j <= i, 2, 2)  # for a call that is not recorded
    outputs.append(flex_attention(*qkv(2, 2), enable_gqa=True))
    assert all(torch.equal(outputs[0], other) for other in outputs)
    reader = bench.close()
    assert len(reader.generations()) == 2
    (event,) = [row.event for row in reader.events() if row.event.kind == "not-recorded"]
    assert "2 calls outside of a model are recorded" in event.text

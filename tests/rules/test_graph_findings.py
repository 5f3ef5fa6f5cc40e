"""Too many new graphs are reported; the first two of a correct run are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import found_in_case
from support.patches import Own
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from transformers import AttentionInterface

from flexinspect.records.finding import Finding, Severity
from flexinspect.trace.reader import open_trace


@pytest.fixture(autouse=True)
def _no_graphs(flex_with_dynamo: None) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


MaskMod = Callable[[Any, Any, Any, Any], Any]


def by_exec(offset: int) -> MaskMod:
    made: dict[str, MaskMod] = {}
    exec(f"def mask_mod(b, h, q, k): return k <= q + {offset}", made)
    return made["mask_mod"]


def over_a_number(offset: int) -> MaskMod:
    return lambda b, h, q, k: k <= q + offset


class Growing:
    """Composes its mask_mod with one more mask_mod at each call."""

    def __init__(self) -> None:
        self._mask_mod = over_a_number(1000)

    def __call__(self, offset: int) -> MaskMod:
        self._mask_mod = and_masks(self._mask_mod, over_a_number(offset + 900))
        return self._mask_mod


class Compiled:
    """An attention function around compiled flex, whose mask_mod is made anew for each length."""

    def __init__(self, model: Any, name: str, make: Callable[[int], MaskMod], **how: Any) -> None:
        self._call: Any = torch.compile(flex_attention, backend="eager", **how)
        self._make, self._masks = make, dict[tuple[int, int], Any]()
        AttentionInterface.register(name, self)
        model.set_attn_implementation(name)

    def __call__(self, module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
        lengths = (query.shape[2], key.shape[2])
        if lengths not in self._masks:
            mask_mod = self._make(lengths[1] - lengths[0])
            self._masks[lengths] = create_block_mask(mask_mod, None, None, *lengths, device="cpu")
        given = {"block_mask": self._masks[lengths], "scale": kw["scaling"], "enable_gqa": True}
        return self._call(query, key, value, **given).transpose(1, 2).contiguous(), None


def run(tmp_path: Path, make: Callable[[int], MaskMod], new: int, **how: Any) -> list[Finding]:
    model = make_model("llama", num_hidden_layers=2)
    Compiled(model, f"compiled_{len(how)}_{new}", make, **how)
    input_ids = torch.tensor([ids(9, 1)])
    return planted(
        tmp_path, model, lambda: model.generate(input_ids, max_new_tokens=new, do_sample=False)
    )


def test_a_mask_mod_by_exec_at_each_decode_step(tmp_path: Path) -> None:
    found = one(run(tmp_path, by_exec, 7), "graphs.every-step")
    assert (found.step, found.severity) == (4, Severity.WARNING)
    assert found.evidence["steps"] == 6, "the words of the last step count"
    assert "6 new graphs in 6 decode steps in a row (steps 1 to 6, " in found.sentence
    assert "guard: mask_mod code object; the mask_mod" in found.sentence
    assert (found.times, found.last_step) == (3, 6)


def test_a_mask_mod_that_grows_by_composition(tmp_path: Path) -> None:
    found = one(run(tmp_path, Growing(), 6), "graphs.every-step")
    assert "mask_mod code object" in found.sentence


def test_lengths_that_are_marked_as_static(tmp_path: Path) -> None:
    found = one(run(tmp_path, over_a_number, 8, dynamic=False), "graphs.every-step")
    assert found.step == 6
    assert "guard: " in found.sentence
    assert "size mismatch" in found.evidence["reason"]


def test_uncompiled_flex_with_new_code_at_each_step_builds_graphs_too(tmp_path: Path) -> None:
    model = make_model("llama", num_hidden_layers=2)
    Own(model, mask_mod=by_exec)
    input_ids = torch.tensor([ids(9, 1)])
    found = planted(tmp_path, model, lambda: model.generate(input_ids, max_new_tokens=6))
    assert "for flex_attention (uncompiled)" in one(found, "graphs.every-step").sentence


def test_the_recompile_limit_in_the_middle_of_a_generation(tmp_path: Path) -> None:
    with torch._dynamo.config.patch(recompile_limit=4):
        found = one(run(tmp_path, by_exec, 8), "graphs.limit")
    assert (found.step, found.severity) == (4, Severity.WARNING)
    assert "reached its recompile limit in step 4 for flex_attention" in found.sentence


def test_past_the_recompile_limit_calls_run_uncompiled(tmp_path: Path) -> None:
    with torch._dynamo.config.patch(recompile_limit=4):
        found = run(tmp_path, by_exec, 8)
    assert {f.id for f in serious(found)} == {"graphs.limit", "graphs.every-step"}
    with open_trace(tmp_path / "planted.flextrace") as reader:
        paths = [{call.path for call in reader.calls(0, step)} for step in range(8)]
    assert paths == [{"flex compiled"}] * 4 + [{"flex uncompiled"}] * 4


def test_the_recompile_limit_that_raises(tmp_path: Path) -> None:
    model = make_model("llama", num_hidden_layers=2)
    Compiled(model, "compiled_full", by_exec, fullgraph=True)
    input_ids = torch.tensor([ids(9, 1)])

    def go() -> None:
        with pytest.raises(Exception, match="fullgraph"):
            model.generate(input_ids, max_new_tokens=9, do_sample=False)

    with torch._dynamo.config.patch(recompile_limit=3):
        found = planted(tmp_path, model, go)
    limit = one(found, "graphs.limit")
    assert (limit.step, limit.layer, limit.severity) == (3, 0, Severity.ERROR)
    assert of(found, "path.kernel-failed") == []


@pytest.mark.parametrize("make", [over_a_number, lambda offset: _over_a_tensor(offset)])
def test_two_graphs_and_none_after_are_correct(tmp_path: Path, make: Any) -> None:
    found = run(tmp_path, make, 8)
    assert [f for f in found if f.id.startswith("graphs.")] == []
    assert serious(found) == []


def _over_a_tensor(offset: int) -> MaskMod:
    held = torch.tensor(offset)
    return lambda b, h, q, k: k <= q + held


def test_five_graphs_in_five_calls_outside_of_a_model() -> None:
    found = one(found_in_case("p02_graph_every_step"), "graphs.every-step")
    assert found.generation == 3
    assert "5 new graphs in 5 calls in a row (generations 0 to 4, " in found.sentence
    assert 'guard: mask_mod code object; the mask_mod "rule" (<string>:1) is new' in found.sentence

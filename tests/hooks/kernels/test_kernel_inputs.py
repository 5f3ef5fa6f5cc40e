"""The inputs of kernels: those of the seed, positions that can be read, and q, k, v of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.attention_trace import SCALE, SyntheticGeneration, write
from support.planted_kernels import flash

from flexinspect.core.errors import UsageError
from flexinspect.inputs.kernel_configs import TracePoint, config_from
from flexinspect.records.step import ArrayRecord, StepRecord
from flexinspect_hooks.kernels.builtin_kernels import EAGER, built_in
from flexinspect_hooks.kernels.captured import captured_problem
from flexinspect_hooks.kernels.inputs import blind_share, make_problem, wrong_reads
from flexinspect_hooks.kernels.kernel_evaluation import evaluate
from flexinspect_hooks.kernels.oracle import Variation, attend, weights_of
from flexinspect_hooks.kernels.reference import Reference

CPU = torch.device("cpu")
SMALL = {"q_len": 24, "kv_len": 24, "head_dim": 16, "q_heads": 4, "kv_heads": 2, "mask": "causal"}


def problem(kind: str, **fields: Any) -> Any:
    return make_problem(config_from({**SMALL, **fields}), kind, 0, CPU)


def test_raw_is_the_range_of_the_seed() -> None:
    one = problem("raw", q_heads=2, dtype="bfloat16")
    shape = (1, 24, 2, 16)  # batch, rows, heads, head size
    q = torch.arange(0, 24 * 2 * 16, dtype=torch.bfloat16).reshape(shape)
    assert torch.equal(one.q.transpose(1, 2), q)
    assert torch.equal(one.k.transpose(1, 2), -q)
    assert torch.equal(one.v.transpose(1, 2), q)


def test_unit_is_the_same_range_scaled() -> None:
    raw, unit = problem("raw"), problem("unit")
    assert torch.allclose(unit.q, raw.q / raw.q.numel())
    assert torch.equal(unit.k, -unit.v)
    assert 0.99 < float(unit.q.max()) < 1


def test_the_same_seed_gives_the_same_inputs_and_another_others() -> None:
    config = config_from(SMALL)
    first, again, other = (make_problem(config, "normal", seed, CPU).q for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("length", [24, 300])
def test_positions_are_read_exactly_in_every_dtype(dtype: str, length: int) -> None:
    one = problem("token", dtype=dtype, q_len=length, kv_len=length, head_dim=64)
    out, _ = flash(one.q, one.k, one.v, one.cells, one.config.used_scale, None)
    wrong, n_reads = wrong_reads(one, out)
    assert wrong == []
    assert n_reads > 3 * length


def test_a_key_that_is_read_by_mistake_is_named() -> None:
    one = problem("token", head_dim=64)
    later = one.cells.roll(1, -1)
    later[..., 0] = True
    out, _ = flash(one.q, one.k, one.v, later, one.config.used_scale, None)
    wrong, _ = wrong_reads(one, out)
    assert wrong
    assert any(each.read[1] == each.row + 1 for each in wrong)  # the closed key after the row


def test_the_blind_share_is_that_of_trying_every_lost_key() -> None:
    one = problem("unit", dtype="float32", q_heads=2, head_dim=8)
    weights = weights_of(one, Variation.of(one))
    truth, tolerance = attend(one).out, 0.02
    unseen = total = 0
    for head in range(2):
        for row, key in one.cells[0, 0].nonzero().tolist():
            cells = one.cells.expand(1, 2, 24, 24).clone()
            cells[0, head, row, key] = False
            changed = attend(one, replace(Variation.of(one), cells=cells)).out
            is_only = int(one.cells[0, 0, row].sum()) == 1
            far = float((changed - truth)[0, head, row].abs().max())
            unseen += not (is_only or far > tolerance)
            total += 1
    share, n_tried = blind_share(one, weights, tolerance)
    assert n_tried == total
    assert share == pytest.approx(unseen / total)
    assert 0.1 < share < 0.9


# -- q, k, v of a trace ----------------------------------------------------------------------------


def with_values(step: StepRecord) -> StepRecord:
    rng = np.random.default_rng(step.step)
    keys = [array for array in step.arrays if array.stream == "k"]
    values = [
        ArrayRecord("v", rng.normal(size=key.array.shape).astype(np.float32), key.layer)
        for key in keys
    ]
    return replace(step, arrays=(*step.arrays, *values))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trace") / "run.flextrace"
    write(path, SyntheticGeneration(change=with_values))
    return str(path)


@pytest.mark.parametrize("step", [0, 2])
def test_a_captured_problem_has_the_keys_of_all_steps_and_the_executed_mask(
    trace: str, step: int
) -> None:
    one = captured_problem(TracePoint(trace, step=step, layer=1), CPU)
    n_keys = 10 + step
    assert one.q.shape == (1, 4, 1 if step else 10, 8)
    assert one.k.shape == one.v.shape == (1, 2, n_keys, 8)
    assert one.config.used_scale == SCALE
    made = SyntheticGeneration()
    assert torch.equal(one.k[0], torch.from_numpy(made.k[1, :, :n_keys]))
    assert one.cells[0, 0, -1].tolist() == made.cells(n_keys - 1).tolist()
    assert one.tokens[1] == " w1"
    assert f"step {step}, layer 1" in one.inputs_text


def test_a_kernel_on_captured_inputs_names_the_worst_token(trace: str) -> None:
    one = captured_problem(TracePoint(trace, step=1), CPU)
    bar = Reference(one, built_in(EAGER, CPU))

    def kernel(q: Any, k: Any, v: Any, *, attn_mask: Any = None, scale: float = 1.0) -> Any:
        return flash(q, k, v, attn_mask, scale, None)[0] + 1

    from flexinspect_hooks.kernels.calling import Kernel

    found = evaluate(Kernel("mine", kernel), bar)
    assert found.worst is not None
    assert found.worst.token == " w10"
    assert evaluate(built_in("sdpa", CPU), bar).is_same


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ({"step": 9}, "has no step 9 in generation 0; it has steps 0 to 3"),
        ({"layer": 7}, "has no layer 7; it has layers 0-1"),
    ],
)
def test_a_place_that_does_not_exist_gets_a_sentence(
    trace: str, place: dict[str, int], part: str
) -> None:
    with pytest.raises(UsageError) as caught:
        captured_problem(TracePoint(trace, **place), CPU)
    assert part in caught.value.message


def test_a_trace_without_values_says_how_to_record_them(tmp_path: Path) -> None:
    path = tmp_path / "run.flextrace"
    write(path, SyntheticGeneration())
    with pytest.raises(UsageError) as caught:
        captured_problem(TracePoint(str(path)), CPU)
    assert "v of layer 0 in step 0 is not recorded" in caught.value.message
    assert "--level extreme" in str(caught.value.hint)

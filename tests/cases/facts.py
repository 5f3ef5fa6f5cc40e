"""What the trace of each case must hold: the facts that a finding about it is made of.

Written against the reader alone. Steps are taken over all generations, in the order they ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flexinspect.records.step import CallRecord, InputsRecord, MaskRecord
from flexinspect.trace.query_results import StepRow
from flexinspect.trace.reader import TraceReader

Cells = npt.NDArray[np.bool_]


def causal(n: int) -> Cells:
    return np.tri(n, dtype=np.bool_)


def isolated(segments: Sequence[tuple[int, int]], n: int, generated: int) -> Cells:
    same = np.zeros((n, n), np.bool_)
    for start, stop in segments:
        same[start:stop, start:stop] = True
    same[generated:] = True
    found: Cells = same & causal(n)
    return found


def steps(trace: TraceReader) -> list[StepRow]:
    return [step for row in trace.generations() for step in trace.steps(row.generation)]


def calls(trace: TraceReader, step: StepRow) -> list[CallRecord]:
    return trace.calls(step.generation, step.step)


def inputs(trace: TraceReader) -> list[InputsRecord | None]:
    return [trace.inputs(step.generation, step.step) for step in steps(trace)]


def ids(trace: TraceReader, generation: int = 0) -> list[int]:
    return [token.token_id for token in trace.tokens(generation)]


def mask(trace: TraceReader, call: CallRecord) -> MaskRecord:
    found = trace.mask(str(call.mask))
    assert found is not None, call
    return found


def executed(trace: TraceReader, call: CallRecord) -> Cells:
    """Return the cells (rows, keys) that a call honoured, after its LSE check."""
    cells = mask(trace, call).cells
    assert cells is not None
    assert cells.shape[0] == 1
    assert call.lse_error is not None
    assert call.lse_error < (0.02 if call.dtype == "bfloat16" else 1e-3), call
    return np.asarray(cells[0])


def events(trace: TraceReader, kind: str) -> list[Any]:
    return [row.event for row in trace.events() if row.event.kind == kind]


def check_masks(trace: TraceReader, path: str, expected: Sequence[Cells], layers: int = 2) -> None:
    """Check that every layer of every step ran on a path with these cells, step by step."""
    found = steps(trace)
    assert len(found) == len(expected)
    for step, cells in zip(found, expected, strict=True):
        made = calls(trace, step)
        assert [(call.layer, call.path) for call in made] == [(n, path) for n in range(layers)]
        assert all(np.array_equal(executed(trace, call), cells) for call in made)


FLEX = "flex uncompiled"


def facts_w01(trace: TraceReader) -> None:
    wrong = isolated([(0, 6), (8, 14)], 15, 14)
    right = isolated([(1, 7), (9, 15)], 15, 15)
    check_masks(trace, FLEX, [wrong, wrong, right, right])
    assert (~wrong.any(1)).nonzero()[0].tolist() == [6, 7]
    assert wrong[14, [1, 9]].all()
    assert len(ids(trace)) == 15
    assert ids(trace)[0] == 1


def facts_w02(trace: TraceReader) -> None:
    cells = isolated([(1, 7), (9, 15)], 17, 15)
    check_masks(trace, FLEX, [cells], layers=3)
    assert (~cells.any(1)).nonzero()[0].tolist() == [0, 7, 8]
    assert cells[16, [7, 8]].all()


def facts_w04(trace: TraceReader) -> None:
    document = np.repeat([0, 1, 2], [5, 4, 5])
    right = causal(14) & (document[:, None] == document[None])
    check_masks(trace, FLEX, [causal(11), causal(11), right, right])
    assert 2 not in ids(trace, 1)
    assert ids(trace, 3).count(2) == 3


def facts_a01(trace: TraceReader) -> None:
    check_masks(trace, FLEX, [np.ones((12, 12), np.bool_)] * 2)
    for call in calls(trace, steps(trace)[0]):
        assert str(mask(trace, call).mask_mod).endswith("placeholder")


def facts_a02(trace: TraceReader) -> None:
    cells = isolated([(1, 7), (9, 15)], 15, 15)
    for number, step in enumerate(steps(trace)):
        first, second = calls(trace, step)
        assert (first.path, first.suppressed_exception) == (FLEX, None)
        assert np.array_equal(executed(trace, first), cells)
        if number < 2:
            assert (second.path, second.suppressed_exception) == (FLEX, None)
            assert np.array_equal(executed(trace, second), cells)
        else:
            assert second.path == "sdpa"
            assert second.suppressed_exception == "RuntimeError: the flex call failed"
            assert np.array_equal(executed(trace, second), causal(15))


def facts_a05(trace: TraceReader) -> None:
    bare, masked = steps(trace)[:2], steps(trace)[2:]
    for step in bare:
        for call in calls(trace, step):
            assert (call.path, mask(trace, call).kind) == ("sdpa", "none, causal")
            assert np.array_equal(executed(trace, call), causal(8))
    for step in masked:
        for call in calls(trace, step):
            assert (call.path, mask(trace, call).kind) == ("eager", "float")
            assert np.array_equal(executed(trace, call), isolated([(0, 4), (4, 8)], 8, 8))


def facts_a07(trace: TraceReader) -> None:
    check_masks(trace, FLEX, [np.ones((10, 10), np.bool_)] * 2 + [causal(10)] * 2)
    kinds = [mask(trace, call).kind for s in steps(trace) for call in calls(trace, s)]
    assert kinds == ["none"] * 4 + ["block"] * 4
    assert {call.backend for call in calls(trace, steps(trace)[0])} == {"mine"}


def facts_a09(trace: TraceReader) -> None:
    found = [
        (call, np.asarray(executed(trace, call)).sum())
        for s in steps(trace)
        for call in calls(trace, s)
    ]
    assert {mask(trace, call).kind for call, _ in found} == {"bool"}
    assert [(call.path, int(n)) for call, n in found] == [
        *[("sdpa", 55)] * 4,
        *[("eager", 100)] * 4,
        *[(FLEX, 100)] * 4,
    ]


def facts_s01(trace: TraceReader) -> None:
    cells = isolated([(1, 7), (9, 16)], 17, 16)
    cells[7, :8] = cells[8, :9] = True
    cells[9:, 7:9] = cells[:7, :1] = cells[9:16, :1] = True
    cut = cells.copy()
    cut[7:9, 1:7] = False
    check_masks(trace, FLEX, [cells, cells, cut, cut])
    reached = (cells | np.eye(17, dtype=np.bool_)).astype(int)
    assert not cells[9:16, 1:7].any()
    assert (reached @ reached)[9:16, 1:7].any()


def facts_s03(trace: TraceReader) -> None:
    check_masks(trace, FLEX, [isolated([(0, 5), (5, 10)], 11, 10)] * 4)
    runs = [one.positions for one in inputs(trace) if one is not None]
    assert runs == [((0, 11),)] * 2 + [((0, 5), (0, 6))] * 2


def facts_s04(trace: TraceReader) -> None:
    for step, path in zip(steps(trace), ("eager", "sdpa", FLEX), strict=True):
        for call in calls(trace, step):
            cells, averaged = executed(trace, call), mask(trace, call).uniform_rows
            assert call.path == path
            if path == "eager":
                assert averaged is not None
                assert averaged[0].nonzero()[0].tolist() == [0, 1, 2]
                assert cells[:3].all()
            else:
                assert averaged is None
                assert not cells[:3].any()
            assert np.array_equal(cells[3:], isolated([(3, 8)], 8, 8)[3:])
        real = trace.array(step.generation, 0, "inputs.mask")
        assert np.array_equal(real, [[False] * 3 + [True] * 5])
        assert trace.segments(step.generation)[0].label == "padding"


def facts_k01(trace: TraceReader) -> None:
    model = [step for step in steps(trace) if inputs_of(trace, step)]
    seen = [{int(executed(trace, call)[-1].sum()) for call in calls(trace, step)} for step in model]
    assert seen == [{9}, {1}, {1}, {1}, {9}, {10}, {11}, {12}]
    lengths = [(step.phase, step.kv_before, step.kv_after) for step in model[:3]]
    assert lengths == [("prefill", 0, 9), ("decode", 9, 10), ("decode", 10, 11)]


def inputs_of(trace: TraceReader, step: StepRow) -> InputsRecord | None:
    return trace.inputs(step.generation, step.step)


def facts_k04(trace: TraceReader) -> None:
    (failed,) = [event for event in events(trace, "kernel-failed") if event.data["layer"] == 0]
    assert (failed.step, failed.data["q_len"], failed.data["kv_len"]) == (1, 1, 33)
    assert failed.data["mask_kv"] == 32
    (lost,) = events(trace, "forward-failed")
    assert lost.text.startswith(
        "The forward of step 1 did not return (input rows: 1, cached keys: 32): "
    )
    (before,) = (one for one in inputs(trace) if one is not None)
    assert before.cached_after == (32, 32)


def facts_k07(trace: TraceReader) -> None:
    errors = [event.text for event in events(trace, "error")]
    assert len(errors) == 2
    assert all("multiple values for argument 'past_key_values'" in text for text in errors)
    assert inputs(trace) == [
        InputsRecord(1, ((0, 5),), (), (0, 5)),
        InputsRecord(1, ((0, 1),), (0, 5), (0, 6)),
    ]
    assert [call.kv_len for call in calls(trace, steps(trace)[1])] == [1, 6]


def facts_k09(trace: TraceReader) -> None:
    check_masks(trace, FLEX, [causal(n) for n in range(10, 15)], layers=4)
    assert [step.q_len for step in steps(trace)] == [10, 11, 12, 13, 14]
    for step, one in zip(steps(trace), inputs(trace), strict=True):
        assert one is not None
        assert one.cached_after == ()
        built = trace.builds(step.generation, step.step)
        assert [(b.layer, b.batch, b.heads, b.q_len) for b in built] == [
            (layer, 1, 4, step.q_len) for layer in range(4)
        ]
        assert len({call.mask for call in calls(trace, step)}) == 1


def facts_n02(trace: TraceReader) -> None:
    dtypes = [{call.dtype for call in calls(trace, step)} for step in steps(trace)]
    assert dtypes == [{"float32"}, {"bfloat16"}]
    for step in steps(trace):
        assert all(np.array_equal(executed(trace, call), causal(24)) for call in calls(trace, step))
    plain, rounded = (trace.layer_stats(step.generation, 0) for step in steps(trace))
    for one, other in zip(plain, rounded, strict=True):
        assert abs(one.norm - other.norm) / one.norm < 0.05
    assert all(step.margin is not None and step.margin > 0 for step in steps(trace))


def facts_l01_build(trace: TraceReader) -> None:
    (failed,) = events(trace, "kernel-failed")
    assert (failed.step, failed.data["layer"], failed.data["q_len"]) == (1, 0, 1)
    assert "InductorError" in failed.text
    assert trace.n_steps(0) == 1
    assert np.array_equal(trace.array(0, 0, "inputs.mask"), [[0] * 3 + [1] * 13, [1] * 16])


def facts_o01(trace: TraceReader) -> None:
    check_masks(trace, "eager", [causal(14)])
    mass = trace.array(0, 0, "attention.mass")
    assert mass is not None
    assert np.allclose(mass.sum(-1), 1, atol=1e-4)
    (event,) = events(trace, "not-attention-weights")
    assert (event.step, event.data) == (0, {"layer": 0, "shape": [1, 14, 32]})


def facts_o04(trace: TraceReader) -> None:
    check_masks(trace, "sdpa", [causal(15)] * 2)


def facts_origin(trace: TraceReader) -> None:
    """The wrapper's four steps are one generation; the plain model's, without it, the next."""
    owner = np.full(19, -1)
    owner[1:7], owner[8:13] = 0, 1
    row, column = owner[:, None], owner[None]
    meant = causal(19) & ((row < 0) | (column < 0) | (row == column))
    wrapped, plain = trace.steps(0), trace.steps(1)
    assert [step.q_len for step in wrapped] == [15, 16, 17, 18]
    assert ids(trace)[15:] == [206, 138, 86]
    for step in wrapped:
        n = step.q_len
        made = calls(trace, step)
        assert [(call.layer, call.path) for call in made] == [(k, FLEX) for k in range(3)]
        assert all(np.array_equal(executed(trace, call), meant[:n, :n]) for call in made)
        assert {call.mask_passed_to_layer for call in made} == {"none"}
        assert [build.layer for build in trace.builds(0, step.step)] == [0, 1, 2]
    assert [step.kv_after for step in plain] == [15, 16, 17, 18]
    assert {call.path for step in plain for call in calls(trace, step)} == {"sdpa"}
    assert ids(trace, 1)[15:] == [277, 133, 65, 106]


def facts_c1(trace: TraceReader) -> None:
    first = calls(trace, steps(trace)[0])
    assert {mask(trace, call).kind for call in first} == {"none, causal"}
    assert all(np.array_equal(executed(trace, call), causal(9)) for call in first)


def facts_c2(trace: TraceReader) -> None:
    input_ids = trace.array(0, 0, "inputs.ids")
    assert input_ids is not None
    assert input_ids.shape == (2, 8)
    assert input_ids[0].tolist() == ids(trace)[:8]
    assert np.array_equal(trace.array(0, 0, "inputs.mask"), input_ids != 0)
    positions = [trace.array(0, step, "inputs.positions") for step in (0, 1)]
    assert [np.asarray(one)[:, -1].tolist() for one in positions] == [[4, 7], [5, 8]]


def facts_c3(trace: TraceReader) -> None:
    mine = [step for step in steps(trace) if calls(trace, step)[0].path == FLEX]
    cells = [executed(trace, calls(trace, step)[0]) for step in mine]
    assert [one.shape for one in cells] == [(6, 6), (1, 7), (1, 8), (1, 9)]
    assert all(one.all() for one in cells[1:])


def facts_c5(trace: TraceReader) -> None:
    assert [one.positions for one in inputs(trace) if one] == [((0, 9),), ((100, 9),)]


FACTS: dict[str, Callable[[TraceReader], None]] = {
    "w01_bos_shift": facts_w01,
    "w02_orphan_tokens": facts_w02,
    "w04_missing_eos": facts_w04,
    "a01_placeholder_mask": facts_a01,
    "a02_silent_fallback": facts_a02,
    "a05_patch_needs_a_tensor": facts_a05,
    "a07_no_mask_function": facts_a07,
    "a09_bool_mask_is_added": facts_a09,
    "s01_leak_through_separators": facts_s01,
    "s03_order_of_paraphrases": facts_s03,
    "s04_left_padding": facts_s04,
    "k01_decode_without_offset": facts_k01,
    "k04_mask_one_short": facts_k04,
    "k07_lost_cache": facts_k07,
    "k09_no_cache": facts_k09,
    "n02_bfloat16": facts_n02,
    "l01_compiled_does_not_build": facts_l01_build,
    "o01_not_weights": facts_o01,
    "o04_drawn_mask_nobody_applied": facts_o04,
    "origin_wrapper": facts_origin,
    "c1_plain_causal_prompt": facts_c1,
    "c2_padded_batch": facts_c2,
    "c3_open_decode_row": facts_c3,
    "c5_shifted_positions": facts_c5,
}

"""What the trace must hold of the cases that call FlexAttention themselves, outside of a model."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from facts import FLEX, Cells, calls, causal, events, executed, inputs_of, mask, steps

from flexinspect.records.step import CallRecord
from flexinspect.trace.reader import TraceReader


def standalone(trace: TraceReader) -> list[CallRecord]:
    """Return the calls outside of a model, which are a generation of one step and one call each."""
    found = [calls(trace, step) for step in steps(trace) if inputs_of(trace, step) is None]
    assert all(len(made) == 1 for made in found)
    return [made[0] for made in found]


def graphs(trace: TraceReader) -> list[tuple[str, ...]]:
    """Return, for each step, the events of graphs that were built in it, in order."""
    kinds = [
        [row.event.kind for row in trace.events(generation=step.generation, step=step.step)]
        for step in steps(trace)
    ]
    assert {kind for of_step in kinds for kind in of_step} <= {"compiled", "recompiled", "source"}
    return [tuple(kind for kind in of_step if kind != "source") for of_step in kinds]


def rows_up_to(n_open: int, n_rows: int, n_keys: int) -> Cells:
    return np.tile(np.arange(n_keys) < n_open, (n_rows, 1))


def facts_k03(trace: TraceReader) -> None:
    for call, n_open in zip(standalone(trace), (32, 12), strict=True):
        assert (call.path, call.q_len, call.kv_len) == (FLEX, 1, 32)
        assert np.array_equal(executed(trace, call), rows_up_to(n_open, 1, 32))


def facts_b02(trace: TraceReader) -> None:
    """Uncompiled flex follows the mask_mod, compiled flex the tables: two blocks are missing."""
    owner = np.arange(512) // 256
    cells = causal(512) & (owner[:, None] == owner[None])
    plain, compiled = standalone(trace)
    assert (plain.path, compiled.path) == (FLEX, "flex compiled")
    assert np.array_equal(executed(trace, plain), cells)
    blocks = cells.reshape(4, 128, 4, 128).any((1, 3))
    for call in (plain, compiled):
        found = mask(trace, call)
        assert (found.block_q, found.block_kv, found.full) == (128, 128, None)
        assert found.partial is not None
        assert (blocks & ~found.partial[0]).nonzero()[0].tolist() == [1, 3]
        assert (blocks & ~found.partial[0]).nonzero()[1].tolist() == [0, 2]
    tables = np.eye(4, dtype=np.bool_).repeat(128, 0).repeat(128, 1)
    assert np.array_equal(executed(trace, compiled), cells & tables)


def facts_b06(trace: TraceReader) -> None:
    (call,) = standalone(trace)
    found = mask(trace, call)
    assert np.array_equal(executed(trace, call), causal(40))
    assert (found.block_q, found.block_kv) == (128, 128)
    assert found.partial is not None
    assert found.partial.shape == (1, 1, 1)


def facts_p02(trace: TraceReader) -> None:
    reported = graphs(trace)
    assert reported[:5] == [("compiled",), *[("recompiled",)] * 4]
    assert reported[5:10] == reported[10:] == [*[("recompiled",)] * 2, *[()] * 3]
    mask_mods = [str(mask(trace, call).mask_mod) for call in standalone(trace)]
    names = (
        "rule",
        *(f"__main__.over_a_{what}.<locals>.<lambda>" for what in ("number", "tensor")),
    )
    assert mask_mods == [name for name in names for _ in range(5)]
    sources = {mask(trace, call).mask_mod_source for call in standalone(trace)[:5]}
    assert sources == {"<string>:1"}


def facts_p03(trace: TraceReader) -> None:
    """Three masks are built and no call of FlexAttention follows, as if memory had run out."""
    (step,) = steps(trace)
    assert calls(trace, step) == []
    built = trace.builds(step.generation, step.step)
    grids = [(b.layer, b.batch, b.heads, b.q_len, b.kv_len) for b in built]
    assert grids == [
        (None, None, None, 256, 256),
        (None, None, None, 2048, 2048),
        (None, None, 8, 2048, 2048),
    ]
    assert [build.peak_growth > 100 << 20 for build in built] == [False, False, True]


def facts_n01(trace: TraceReader) -> None:
    grouped, by_head = standalone(trace)
    assert {(call.q_heads, call.kv_heads) for call in (grouped, by_head)} == {(4, 2)}
    cells = mask(trace, by_head).cells
    assert cells is not None
    assert cells.shape == (4, 8, 8)
    assert all(np.array_equal(cells[head], causal(8)) for head in range(3))
    assert np.array_equal(cells[3], rows_up_to(1, 8, 8))
    assert by_head.lse_error is not None
    assert by_head.lse_error < 1e-3


def facts_o03(trace: TraceReader) -> None:
    """The two calls that raised are events with their lengths; those around them are recorded."""
    inside, after = events(trace, "kernel-failed")
    assert inside.data["error"].startswith("NotImplementedError: ")
    assert after.data["error"].startswith("Unsupported: ")
    for event in (inside, after):
        assert event.data["kernel"] == "flex_attention"
        assert (event.data["layer"], event.data["q_len"], event.data["kv_len"]) == (None, 8, 8)
    first, last = standalone(trace)
    assert first == last
    assert np.array_equal(executed(trace, first), rows_up_to(8, 8, 8))
    ids_ = [row.id for row in trace.events() if row.event in (inside, after)]
    around = [row.id for row in trace.events() if row.event.kind in ("compiled", "recompiled")]
    assert around[0] < ids_[0] < ids_[1] < around[1]


def facts_l01_crash(trace: TraceReader) -> None:
    """The end of a process that compiled code took down: its reason and its last output."""
    assert re.match(r"The program was ended by SIG(ABRT|SEGV|BUS)", trace.run()["reason"])
    output = [(row.output.stream, row.output.text) for row in trace.output()]
    assert "".join(text for stream, text in output if stream == "stdout") == (
        "entering compiled flex\n"
    ), output


def facts_c4(trace: TraceReader) -> None:
    assert graphs(trace) == [("compiled",), ("recompiled",), *[()] * 6]
    assert {call.path for call in standalone(trace)} == {"flex compiled"}


def facts_c6(trace: TraceReader) -> None:
    (call,) = standalone(trace)
    found = mask(trace, call)
    assert (found.batch, found.heads, call.batch, call.q_heads) == (1, 1, 8, 32)
    assert np.array_equal(executed(trace, call), causal(16))
    (built,) = trace.builds(0, 0)
    assert (built.batch, built.heads) == (None, None)


def facts_c7(trace: TraceReader) -> None:
    """NaN in closed keys passes the LSE check; NaN in values leaves nothing to check."""
    in_keys, in_values = standalone(trace)
    assert np.array_equal(executed(trace, in_keys), rows_up_to(12, 4, 16))
    assert in_values.mask == in_keys.mask
    assert in_values.lse_error is not None
    assert np.isnan(in_values.lse_error)


STANDALONE_FACTS: dict[str, Callable[[TraceReader], None]] = {
    "k03_empty_cache_slots": facts_k03,
    "b02_stale_tables": facts_b02,
    "b06_blocks_for_tokens": facts_b06,
    "p02_graph_every_step": facts_p02,
    "p03_square_of_the_length": facts_p03,
    "n01_which_head": facts_n01,
    "l01_compiled_crash": facts_l01_crash,
    "o03_logger_breaks_flex": facts_o03,
    "c4_two_graphs": facts_c4,
    "c6_shared_mask": facts_c6,
    "c7_nan_in_masked_keys": facts_c7,
}

"""The recorded mask is the executed mask of every query head, on every path."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.dense_reference import attention_row, eager_attention
from support.executed_masks import executed_mask
from support.tiny import ids, make_model, make_pieces
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from flexinspect.core.errors import AttentionCallError, MaskError
from flexinspect.masks import key_blocks, mask_presets
from flexinspect.records.prompt import Prompt, compose_prompt
from flexinspect.records.step import (
    CallRecord,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    MaskRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.step_clock import StepClock
from flexinspect_hooks.generation import mask_source
from flexinspect_hooks.generation.decoding import Choice, generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import (
    ForwardWindow,
    MaskMod,
    MaskSource,
    SpecMaskSource,
    UserMaskSource,
    shift_mask_mod,
)
from flexinspect_hooks.observers.attention import mask_capture
from flexinspect_hooks.observers.attention.call_references import AttentionCall, CapturedMask
from flexinspect_hooks.observers.attention.mask_capture import MaskCapture
from flexinspect_hooks.observers.attention.segment_attention import newest_weights
from flexinspect_hooks.sessions.capture_session import CaptureSession

CPU = torch.device("cpu")
NEW, HEADS, LAYERS = 4, 4, 3
NEEDS_A_COMPILER = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
)


def third_forgets(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Causal, but head 3 does not attend to the first five keys."""
    return (kv_idx <= q_idx) & ((h != 3) | (kv_idx > 4) | (q_idx <= 4))


def unlike_blocks(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Causal in heads 0 and 2, a window in head 1, the first 130 keys in head 3."""
    near, early = (h != 1) | (q_idx - kv_idx < 40), (h != 3) | (kv_idx < 130)
    return (kv_idx <= q_idx) & near & early


def by_heads(mask_mod: MaskMod, n_q: int, n_kv: int, q_offset: int = 0) -> np.ndarray[Any, Any]:
    """Evaluate a mask_mod for all heads without vmap, bool (heads, n_q, n_kv)."""
    shape = (HEADS, n_q, n_kv)
    h, q, kv = (torch.from_numpy(i) for i in np.indices(shape))
    return mask_mod(torch.tensor(0), h, q + q_offset, kv).expand(shape).numpy()


class MemorySink:
    """Keeps records instead of writing them."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.events: list[EventRecord] = []
        self.masks: dict[str, MaskRecord] = {}

    def begin_generation(self, record: GenerationRecord) -> None:
        self.steps.clear()

    def write_steps(self, records: Sequence[StepRecord]) -> None:
        self.steps += records
        self.masks |= {mask.fingerprint: mask for step in records for mask in step.masks}

    def write_event(self, record: EventRecord) -> None:
        self.events.append(record)

    def write_findings(self, findings: Any) -> None: ...
    def update_run(self, **facts: Any) -> None: ...

    def end_generation(self, record: GenerationEnd) -> None:
        pass

    def mask_of(self, call: CallRecord) -> MaskRecord:
        return self.masks[call.mask or ""]

    def cells_of(self, call: CallRecord) -> np.ndarray[Any, Any]:
        cells = self.mask_of(call).cells
        assert cells is not None
        return cells


def capture(
    model: Any,
    prompt: Prompt,
    source: MaskSource,
    *,
    level: str = "extreme",
    compiled: bool = False,
) -> tuple[MemorySink, list[Tensor]]:
    """Generate under a mask; returns the records and the logits of each step."""
    sink, logits = MemorySink(), []
    session = CaptureSession(model, sink, level=level)

    def chose(choice: Choice) -> None:
        logits.append(choice.logits.clone())
        pos = len(prompt.ids) + choice.step
        token = TokenRecord(pos, choice.token_id, "", "", pos, 6, step=choice.step)
        session.on_token_chosen(token, choice.scores)

    with session:
        session.begin_generation(GenerationRecord(0, "s", "m", "contiguous", prompt.segments, ()))
        with FlexPatch(model, source, compiled=compiled):
            generate(model, prompt, max_new_tokens=NEW, on_choice=chose)
    assert sink.events == []
    return sink, logits


def own(mask_mod: MaskMod) -> UserMaskSource:
    return UserMaskSource(mask_mod, name="mine", device=CPU)


def worst_gate(sink: MemorySink) -> float:
    lse_errors = [call.lse_error for step in sink.steps for call in step.calls]
    assert len(lse_errors) == NEW * LAYERS
    assert None not in lse_errors
    return max(lse_error or 0.0 for lse_error in lse_errors)


def array_of(step: StepRecord, stream: str, layer: int | None = None) -> np.ndarray[Any, Any]:
    return next(a.array for a in step.arrays if (a.stream, a.layer) == (stream, layer))


@pytest.fixture
def long_prompt() -> Prompt:
    """A prompt of three blocks."""
    paraphrases = (ids(120, 1), ids(90, 2), ids(60, 3))
    return compose_prompt(make_pieces(paraphrases=paraphrases), max_new_tokens=8)


# -- mask_mods that depend on the head -------------------------------------------------------------


@pytest.mark.parametrize("mask_mod", [third_forgets, unlike_blocks])
def test_an_uncompiled_mask_mod_is_recorded_for_every_head_and_passes_the_check(
    llama: Any, long_prompt: Prompt, mask_mod: MaskMod
) -> None:
    sink, _ = capture(llama, long_prompt, own(mask_mod))
    for step in sink.steps:
        expected = by_heads(mask_mod, step.q_len, step.kv_after, step.kv_before)
        for call in step.calls:
            assert sink.cells_of(call).shape == (HEADS, step.q_len, step.kv_after)
            assert (sink.cells_of(call) == expected).all()
    assert worst_gate(sink) < 1e-4


def test_attention_by_segment_of_each_head_equals_the_dense_reference(
    llama: Any, prompt: Prompt
) -> None:
    sink, _ = capture(llama, prompt, own(third_forgets))
    for layer in range(LAYERS):
        keys = np.concatenate([array_of(s, "k", layer) for s in sink.steps], axis=1)
        for step in sink.steps:
            kv = step.kv_after
            weights = attention_row(
                torch.tensor(array_of(step, "q", layer)[:, -1:]),
                torch.tensor(keys[:, :kv]),
                scale=step.calls[layer].scale or 0.0,
                visible=torch.tensor(by_heads(third_forgets, 1, kv, kv - 1)),
            )[:, 0]
            assert (weights[3, :5] == 0).all()
            mass = array_of(step, "attention.mass")[layer]
            for index, segment in enumerate(prompt.segments):
                expected = weights[:, segment.start : min(segment.stop, kv)].sum(-1).numpy()
                np.testing.assert_allclose(mass[:, index], expected, atol=1e-5)


def test_a_mask_mod_by_head_equals_dense_attention_with_it(llama: Any, prompt: Prompt) -> None:
    _, logits = capture(llama, prompt, own(third_forgets))
    n = len(prompt.ids)
    closed = torch.from_numpy(~by_heads(third_forgets, n, n))
    dense = torch.zeros(1, HEADS, n, n).masked_fill(closed, torch.finfo(torch.float32).min)
    with torch.no_grad(), eager_attention(llama):
        expected = llama(torch.tensor([prompt.ids]), attention_mask=dense).logits[0, -1]
    torch.testing.assert_close(logits[0].view(-1), expected, atol=1e-4, rtol=1e-4)


def test_outputs_with_a_mask_mod_by_head_are_bit_equal_with_and_without_capture(
    llama: Any, prompt: Prompt
) -> None:
    plain: list[Tensor] = []
    with FlexPatch(llama, own(third_forgets)):
        generate(
            llama, prompt, max_new_tokens=NEW, on_choice=lambda c: plain.append(c.logits.clone())
        )
    _, captured = capture(llama, prompt, own(third_forgets))
    assert len(plain) == len(captured) == NEW
    assert all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, kv: kv <= q,
        lambda b, h, q, kv: (kv <= q) & (h >= 0),
        lambda b, h, q, kv: (kv <= q) & (torch.tensor([True] * HEADS)[h]),
    ],
    ids=["ignores the head", "compares it", "looks it up"],
)
def test_heads_that_are_all_equal_are_stored_once(
    llama: Any, prompt: Prompt, mask_mod: Any
) -> None:
    sink, _ = capture(llama, prompt, own(mask_mod))
    for step in sink.steps:
        cells = sink.cells_of(step.calls[0])
        assert cells.shape == (1, step.q_len, step.kv_after)
        assert (
            cells == by_heads(lambda b, h, q, kv: kv <= q, *cells.shape[1:], step.kv_before)
        ).all()
    assert worst_gate(sink) < 1e-4


def test_a_mask_mod_that_ignores_the_head_is_evaluated_for_one_head() -> None:
    indices = [torch.arange(n) for n in (32, 7, 9)]
    groups = list(mask_source.head_groups(lambda b, h, q, kv: kv <= q, torch.tensor(0), *indices))
    assert [len(group) for group in groups] == [1]


@pytest.mark.parametrize("at_once", [1, 63, 64 * 2, 1 << 20])
def test_a_mask_mod_by_head_is_the_same_for_any_chunk_size(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(mask_source, "MAX_EVALUATED_CELLS", at_once)
    for n_heads in (1, 3, 4):
        indices = [torch.arange(n) for n in (n_heads, 7, 9)]
        groups = list(mask_source.head_groups(third_forgets, torch.tensor(0), *indices))
        expected = by_heads(third_forgets, 7, 9)[:n_heads]
        assert (torch.cat(groups).numpy() == expected).all()


def test_presets_are_not_evaluated_by_head(
    llama: Any, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_capture, "head_groups", None)
    monkeypatch.setattr(mask_source, "head_groups", None)
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    sink, _ = capture(llama, prompt, SpecMaskSource(spec, length=128, device=CPU, compiled=False))
    assert worst_gate(sink) < 1e-4


def test_heads_with_too_many_cells_are_not_assumed_equal(
    llama: Any, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = len(prompt.ids)
    monkeypatch.setattr(mask_capture, "MAX_CELLS", n * n)
    sink, _ = capture(llama, prompt, own(third_forgets))
    first = sink.steps[0]
    assert sink.mask_of(first.calls[0]).cells is None
    assert first.calls[0].lse_error is None
    assert len(sink.cells_of(sink.steps[1].calls[0])) == HEADS
    same, _ = capture(llama, prompt, own(lambda b, h, q, kv: kv <= q))
    assert same.cells_of(same.steps[0].calls[0]).shape == (1, n, n)


def test_a_sliding_window_over_a_mask_mod_by_head_applies_both(prompt: Prompt) -> None:
    sink, _ = capture(make_model("mistral"), prompt, own(third_forgets))
    assert worst_gate(sink) < 1e-4
    cells = sink.cells_of(sink.steps[0].calls[0])
    n = len(prompt.ids)
    band = np.subtract.outer(np.arange(n), np.arange(n)) < 9
    assert (cells == by_heads(third_forgets, n, n) & band).all()


def test_layers_with_another_number_of_heads_do_not_share_a_mask_by_head() -> None:
    block_mask = own(unlike_blocks).block_mask(ForwardWindow(9, 9, 0), None)

    def call(layer: int, heads: int) -> AttentionCall:
        q = torch.zeros(1, heads, 9, 8)
        module = torch.nn.Identity()
        return AttentionCall(
            *(layer, "b", "flex uncompiled", module, q, q, q, (block_mask,), {}, q)
        )

    clock = StepClock()
    clock.set_next_step(0)
    step = clock.open((torch.zeros(1, 9, dtype=torch.int64),), {}, "advanced")
    refs = [call(0, 4), call(1, 2), call(2, 4), call(3, 2)]
    masks = MaskCapture().capture_masks(refs, step, StepBuffer(CPU))
    assert [ref.captured.number for ref in refs] == [0, 1, 0, 1]
    assert [mask.cells.shape for mask in masks if mask.cells is not None] == [
        (4, 9, 9),
        (2, 9, 9),
    ]


# -- block masks of mask_mods that depend on the head ----------------------------------------------


@pytest.mark.parametrize(("n_q", "offset"), [(300, 0), (256, 0), (1, 299), (5, 250)])
def test_a_mask_mod_by_head_gets_the_tables_of_create_block_mask(n_q: int, offset: int) -> None:
    n_kv = offset + n_q
    window = ForwardWindow(n_q, n_kv, offset, heads=HEADS)
    made = own(unlike_blocks).block_mask(window, None)
    theirs = create_block_mask(
        shift_mask_mod(unlike_blocks, window), 1, HEADS, n_q, n_kv, device="cpu"
    )
    assert made.shape == theirs.shape == (1, HEADS, n_q, n_kv)
    for name in ("kv", "full_kv"):
        counts = getattr(theirs, f"{name}_num_blocks")
        assert getattr(made, f"{name}_num_blocks").equal(counts)
        mine, other = (getattr(m, f"{name}_indices") for m in (made, theirs))
        for at in np.ndindex(*counts.shape):
            assert mine[at][: counts[at]].tolist() == other[at][: counts[at]].tolist()


def test_a_mask_mod_that_ignores_the_head_keeps_tables_of_one_head() -> None:
    causal = own(lambda b, h, q, kv: kv <= q)
    assert causal.block_mask(ForwardWindow(300, 300, 0, heads=HEADS), None).shape == (
        1,
        1,
        300,
        300,
    )


def test_the_mask_of_a_patched_model_is_for_its_query_heads(llama: Any, prompt: Prompt) -> None:
    sink, _ = capture(llama, prompt, own(third_forgets))
    mask = sink.mask_of(sink.steps[0].calls[0])
    assert mask.heads == HEADS
    assert mask.partial is not None
    assert mask.partial.shape == (HEADS, 1, 1)


def test_a_mask_mod_by_head_needs_a_model_with_a_known_number_of_heads() -> None:
    with pytest.raises(MaskError, match="depends on the head"):
        own(third_forgets).block_mask(ForwardWindow(9, 9, 0, heads=0), None)
    assert (
        own(lambda b, h, q, kv: kv <= q).block_mask(ForwardWindow(9, 9, 0, heads=0), None)
        is not None
    )


def test_a_compiled_call_with_tables_for_other_heads_raises_a_clear_error(
    llama: Any, prompt: Prompt
) -> None:
    class Wrong:
        name = "wrong"

        def block_mask(self, window: ForwardWindow, overlay: MaskMod | None) -> BlockMask:
            return create_block_mask(
                shift_mask_mod(third_forgets, window),
                1,
                2,
                window.q_len,
                window.kv_len,
                device="cpu",
            )

    with pytest.raises(AttentionCallError, match="for 2 heads, the layer has 4"):
        with FlexPatch(llama, Wrong(), compiled=True):
            generate(llama, prompt, max_new_tokens=1)


# -- compiled --------------------------------------------------------------------------------------


@pytest.fixture
def _own_graphs() -> Iterator[None]:
    """Reset dynamo: these graphs must not count against the recompile limit of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@NEEDS_A_COMPILER
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_own_graphs")
def test_a_compiled_mask_mod_by_head_is_executed_by_head(llama: Any, long_prompt: Prompt) -> None:
    sink, logits = capture(llama, long_prompt, own(unlike_blocks), compiled=True)
    for step in sink.steps:
        expected = by_heads(unlike_blocks, step.q_len, step.kv_after, step.kv_before)
        for call in step.calls:
            assert (call.path, call.check_kind) == ("flex compiled", "output")
            assert (sink.cells_of(call) == expected).all()
    assert worst_gate(sink) < 1e-4
    _, uncompiled = capture(llama, long_prompt, own(unlike_blocks))
    for mine, other in zip(logits, uncompiled, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-3, rtol=1e-3)


class SharedTables:
    """A mask_mod by head with block tables of head 0 only (H=None)."""

    name = "shared"

    def block_mask(self, window: ForwardWindow, overlay: MaskMod | None) -> BlockMask:
        shifted = shift_mask_mod(unlike_blocks, window)
        return create_block_mask(shifted, None, None, window.q_len, window.kv_len, device="cpu")


def as_tables_say(step: StepRecord) -> np.ndarray[Any, Any]:
    """The cells of `SharedTables` that a compiled call executes."""
    cells = by_heads(unlike_blocks, step.q_len, step.kv_after, step.kv_before)
    chunks = (cells[0, a:b] for a, b in key_blocks.row_chunks(step.q_len))
    tables, size = (
        key_blocks.stack_block_rows(chunks),
        (key_blocks.BLOCK_SIZE, key_blocks.BLOCK_SIZE),
    )
    return np.stack([executed_mask(head, tables, size, compiled=True) for head in cells])


@NEEDS_A_COMPILER
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_own_graphs")
def test_a_compiled_mask_mod_by_head_with_tables_of_one_head_is_recorded_as_executed(
    llama: Any, long_prompt: Prompt
) -> None:
    sink, _ = capture(llama, long_prompt, SharedTables(), compiled=True)
    for step in sink.steps:
        for call in step.calls:
            assert (sink.cells_of(call) == as_tables_say(step)).all()
            assert sink.mask_of(call).heads == 1
    first = sink.steps[0]
    mask_mod_cells = by_heads(unlike_blocks, first.q_len, first.kv_after)
    assert not (sink.cells_of(first.calls[0]) == mask_mod_cells).all()
    assert worst_gate(sink) < 1e-4


def test_the_formula_of_a_compiled_call_is_applied_to_every_head() -> None:
    window = ForwardWindow(300, 300, 0)
    cells = torch.from_numpy(by_heads(unlike_blocks, 300, 300))
    step: Any = SimpleNamespace(q_len=300, kv_after=300, kv_before=0)
    shared = mask_capture._compiled_cells(cells, SharedTables().block_mask(window, None), HEADS)
    assert shared is not None
    assert (shared.numpy() == as_tables_say(step)).all()
    per_head = create_block_mask(unlike_blocks, 1, HEADS, 300, 300, device="cpu")
    own_tables = mask_capture._compiled_cells(cells, per_head, HEADS)
    assert own_tables is not None
    assert own_tables.equal(create_mask(unlike_blocks, 1, HEADS, 300, 300, device="cpu")[0])
    two = create_block_mask(unlike_blocks, 1, 2, 300, 300, device="cpu")
    assert mask_capture._compiled_cells(cells, two, HEADS) is None


# -- dense masks -----------------------------------------------------------------------------------


def forward(model: Any, prompt: Prompt, mask: Tensor, backend: str) -> tuple[MemorySink, Tensor]:
    """Record one forward under a dense mask; returns its logits as well."""
    model.set_attn_implementation(backend)
    sink = MemorySink()
    session = CaptureSession(model, sink)
    with torch.no_grad(), session:
        session.begin_generation(GenerationRecord(0, "s", "m", "contiguous", prompt.segments, ()))
        logits = model(torch.tensor([prompt.ids]), attention_mask=mask).logits[0, -1]
        token = TokenRecord(len(prompt.ids), 5, "", "", len(prompt.ids), 6, step=0)
        session.on_token_chosen(token)
    assert sink.events == []
    return sink, logits


def dense(prompt: Prompt, heads: int = 1) -> Tensor:
    n = len(prompt.ids)
    return torch.from_numpy(by_heads(third_forgets, n, n)[None, -heads:])


@pytest.mark.parametrize("heads", [1, HEADS])
def test_a_bool_mask_closes_nothing_in_eager_attention_which_adds_it(
    llama: Any, prompt: Prompt, heads: int
) -> None:
    mask = dense(prompt, heads)
    sink, logits = forward(llama, prompt, mask, "eager")
    for call in sink.steps[0].calls:
        assert sink.mask_of(call).kind == "bool"
        assert sink.cells_of(call).all()
        assert sink.cells_of(call).shape == (1, call.q_len, call.kv_len)
        assert call.lse_error is not None
        assert call.lse_error < 1e-4
    added, as_floats = forward(llama, prompt, mask.float(), "eager")
    assert torch.equal(logits, as_floats)
    assert all(added.cells_of(call).all() for call in added.steps[0].calls)


@pytest.mark.parametrize("heads", [1, HEADS])
def test_a_bool_mask_closes_cells_in_sdpa(llama: Any, prompt: Prompt, heads: int) -> None:
    mask = dense(prompt, heads)
    sink, _ = forward(llama, prompt, mask, "sdpa")
    for call in sink.steps[0].calls:
        assert (sink.cells_of(call) == mask[0].numpy()).all()
        assert call.lse_error is not None
        assert call.lse_error < 1e-4


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_float_mask_with_a_bias_passes_the_check_with_it(
    llama: Any, prompt: Prompt, backend: str
) -> None:
    n = len(prompt.ids)
    slope = torch.arange(1, HEADS + 1).view(1, HEADS, 1, 1) / 10
    bias = -slope * (torch.arange(n)[:, None] - torch.arange(n)).float()
    mask = bias.masked_fill(~dense(prompt), -torch.inf)
    sink, _ = forward(llama, prompt, mask, backend)
    for call in sink.steps[0].calls:
        assert sink.mask_of(call).kind == "float"
        assert (sink.cells_of(call) == dense(prompt)[0].numpy()).all()
        assert call.lse_error is not None
        assert call.lse_error < 1e-4
    assert np.isfinite(array_of(sink.steps[0], "attention.entropy")).all()


def padded(prompt: Prompt, closed: slice) -> Tensor:
    """A 2D mask with some tokens as padding."""
    mask = torch.ones(1, len(prompt.ids), dtype=torch.long)
    mask[:, closed] = 0
    return mask


@pytest.mark.parametrize("closed", [slice(0, 3), slice(-3, None)], ids=["left", "right"])
def test_padding_rows_are_recorded_with_the_weights_of_eager_attention(
    llama: Any, prompt: Prompt, closed: slice
) -> None:
    mask = padded(prompt, closed)
    sink, _ = forward(llama, prompt, mask, "eager")
    with torch.no_grad():
        input_ids = torch.tensor([prompt.ids])
        weights = llama(input_ids, attention_mask=mask, output_attentions=True).attentions
    rows = mask[0].numpy() == 0
    first_row_sees = 0 if closed.start == 0 else 1
    for call, own in zip(sink.steps[0].calls, weights, strict=True):
        assert (sink.cells_of(call) == (own[0] > 0).numpy()).all()
        averaged_rows = sink.mask_of(call).uniform_rows
        assert (averaged_rows is not None) == (first_row_sees == 0)
        if averaged_rows is not None:
            assert (averaged_rows[0] == rows).all()
            assert np.allclose(own[0].numpy()[:, rows], 1 / len(prompt.ids))
        assert call.lse_error is not None
        assert call.lse_error < 1e-4


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_newest_row_at_the_lowest_float_has_equal_weights(
    llama: Any, prompt: Prompt, backend: str
) -> None:
    n = len(prompt.ids)
    mask = torch.zeros(1, 1, n, n).masked_fill(~dense(prompt), torch.finfo(torch.float32).min)
    mask[..., -1, :] = torch.finfo(torch.float32).min
    sink, _ = forward(llama, prompt, mask, backend)
    shares = [segment.stop - segment.start for segment in prompt.segments]
    shares[-1] = n - prompt.segments[-1].start
    for call in sink.steps[0].calls:
        assert sink.cells_of(call)[0, -1].all()
        averaged_rows = sink.mask_of(call).uniform_rows
        assert averaged_rows is not None
        assert averaged_rows[0].nonzero()[0].tolist() == [n - 1]
        assert call.lse_error is not None
        assert call.lse_error < 1e-4
    mass = array_of(sink.steps[0], "attention.mass")
    np.testing.assert_allclose(mass, np.broadcast_to(np.array(shares) / n, mass.shape), atol=1e-5)
    np.testing.assert_allclose(array_of(sink.steps[0], "attention.entropy"), np.log(n), atol=1e-4)


def test_a_row_of_minus_infinity_stays_closed(llama: Any, prompt: Prompt) -> None:
    n = len(prompt.ids)
    mask = torch.zeros(1, 1, n, n).masked_fill(~dense(prompt), -torch.inf)
    mask[..., 3, :] = -torch.inf
    sink, _ = forward(llama, prompt, mask, "sdpa")
    for call in sink.steps[0].calls:
        assert not sink.cells_of(call)[0, 3].any()
        assert sink.mask_of(call).uniform_rows is None


def test_an_open_row_and_an_averaged_one_are_two_masks(llama: Any, prompt: Prompt) -> None:
    n = len(prompt.ids)
    masks_ = (torch.zeros(1, 1, n, n), torch.full((1, 1, n, n), torch.finfo(torch.float32).min))
    sinks = [forward(llama, prompt, mask, "eager")[0] for mask in masks_]
    records = [sink.mask_of(sink.steps[0].calls[0]) for sink in sinks]
    assert all(record.cells is not None and record.cells.all() for record in records)
    assert records[0].fingerprint != records[1].fingerprint


def test_transformers_flex_adds_the_first_head_of_a_dense_mask(prompt: Prompt) -> None:
    n = len(prompt.ids)
    closed = ~dense(prompt, HEADS)
    for mask, expected in (
        (~closed, np.ones((1, n, n), np.bool_)),
        (torch.zeros(closed.shape).masked_fill(closed, -torch.inf), ~closed[0, :1].numpy()),
    ):
        kind = "bool" if mask.dtype is torch.bool else "float"
        seen = CapturedMask(0, n, n, 0, 0, True, kind)
        ref: Any = SimpleNamespace(mask=mask, path="flex compiled")
        cells = mask_capture._dense_cells(
            ref, seen, mask_capture._IndexTensors(torch.device("cpu"))
        )
        assert cells is not None
        assert (cells.numpy() == expected).all()
        assert seen.bias is not None
        assert seen.bias.shape == (1, n)


@pytest.mark.parametrize(
    ("values", "added"),
    [
        ((0.0, -2.0), {"lowest": -2.0, "highest": -2.0, "cells": 1, "first": [0, 4, 2]}),
        ((-1e-9, -2e-9), {"lowest": -2e-9, "highest": -1e-9, "cells": 2, "first": [0, 4, 2]}),
        ((0.0, 0.0), None),
        ((-1.0, -2.0), None),
        ((0.5, -2.0), None),
        ((-1e9, -torch.inf), None),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_one_value_that_a_float_mask_adds_is_recorded(
    llama: Any, prompt: Prompt, values: tuple[float, float], added: Any, backend: str
) -> None:
    n = len(prompt.ids)
    mask = torch.full((1, 1, n, n), -torch.inf).triu(1)
    mask[0, 0, 4, 1:3] = torch.tensor(values)
    sink, _ = forward(llama, prompt, mask, backend)
    assert sink.mask_of(sink.steps[0].calls[0]).added == added


def test_masks_that_add_other_values_are_two_masks(llama: Any, prompt: Prompt) -> None:
    n = len(prompt.ids)
    masks_ = [torch.full((1, 1, n, n), -torch.inf).triu(1) for _ in range(2)]
    masks_[1][..., -1, 0] = -2.0
    sinks = [forward(llama, prompt, mask, "eager")[0] for mask in masks_]
    records = [sink.mask_of(sink.steps[0].calls[0]) for sink in sinks]
    assert records[0].fingerprint != records[1].fingerprint


@pytest.mark.parametrize("rows", [1, 3])
def test_added_values_are_the_same_in_numpy(rows: int) -> None:
    values = torch.zeros(2, rows, 6)
    values[1, -1, 2:5] = torch.tensor([-1.0, -2.0, -2.0])
    values[..., 5] = torch.finfo(torch.float32).min
    by_torch = mask_capture.added_values("m.", torch, values)
    by_numpy = mask_capture.added_values("m.", np, values.numpy())
    assert {name: value.tolist() for name, value in by_torch.items()} == {
        "m.added": [-2.0, 0.0, -1.0],
        "m.added_at": [2 * rows * 6 - 3, 3],
    }
    assert {name: value.tolist() for name, value in by_numpy.items()} == {
        name: value.tolist() for name, value in by_torch.items()
    }


# -- the soft cap ----------------------------------------------------------------------------------


@pytest.mark.parametrize("patch", [True, False])
def test_a_call_records_its_soft_cap(prompt: Prompt, patch: bool) -> None:
    sink = MemorySink()
    model = make_model("gemma2", attn_logit_softcapping=7.0)
    session = CaptureSession(model, sink, level="basic")
    source = SpecMaskSource(mask_presets.causal(), length=128, device=CPU, compiled=False)
    with torch.no_grad(), session:
        session.begin_generation(GenerationRecord(0, "s", "m", "contiguous", prompt.segments, ()))
        with FlexPatch(model, source) if patch else nullcontext():
            model(torch.tensor([prompt.ids]))
        token = TokenRecord(len(prompt.ids), 5, "", "", len(prompt.ids), 6, step=0)
        session.on_token_chosen(token)
    assert [call.softcap for call in sink.steps[0].calls] == [7.0] * LAYERS


def test_layers_under_one_mask_keep_their_own_caps(prompt: Prompt) -> None:
    model = make_model("gemma2", attn_logit_softcapping=0.5)
    model.model.layers[2].self_attn.attn_logit_softcapping = 0.05
    sink, _ = capture(model, prompt, own(third_forgets), level="advanced")
    assert [call.softcap for call in sink.steps[-1].calls] == [0.5, 0.5, 0.05]
    assert worst_gate(sink) < 1e-4


def test_weights_of_one_call_are_made_under_its_cap() -> None:
    q, k = 8 * torch.randn(1, HEADS, 1, 8), torch.randn(1, 2, 9, 8)
    about = (0, "sdpa", "sdpa", torch.nn.Identity(), q, k, k, (None,), {}, q.mT, None)
    seen = CapturedMask(0, 1, 9, 8, 0, False, "none")
    seen.cells = torch.ones(1, 1, 9, dtype=torch.bool)
    for cap in (None, 0.5):
        weights = newest_weights(AttentionCall(*about, cap, captured=seen))
        visible = torch.ones(1, 1, 9, dtype=torch.bool)
        expected = attention_row(q[0], k[0], scale=8**-0.5, visible=visible, softcap=cap)
        torch.testing.assert_close(weights, expected[:, 0].float())


def test_a_call_without_a_soft_cap_records_none(
    family_model: Callable[[str], Any], prompt: Prompt
) -> None:
    sink, _ = capture(family_model("llama"), prompt, own(third_forgets), level="basic")
    assert {call.softcap for step in sink.steps for call in step.calls} == {None}

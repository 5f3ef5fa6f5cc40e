"""The digests of hidden states: what they are, what they tell, and when they are stored."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import ids, make_model

import flexinspect
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.observers.hidden_digests import (
    MAX_ROWS,
    MODIFIED_EVENT,
    N_SUMS,
    digest,
    digest_rows,
    sample_weights,
    signed_sums,
    signs,
)
from flexinspect_hooks.step_writer.layer_records import DIGEST_STREAM, WEIGHTS_STREAM
from flexinspect_hooks.step_writer.values import MODIFIED

MASK = (1 << 64) - 1


def documented_sign(index: int) -> int:
    """SplitMix64 with integers of Python, as docs/trace-format.md says."""
    z = (index + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return -1 if (z ^ z >> 31) >> 63 else 1


def documented_digest(row: Any) -> list[float]:
    return [
        sum(documented_sign(i) * float(row[i]) for i in range(j, len(row), N_SUMS))
        for j in range(N_SUMS)
    ]


def test_the_signs_are_those_of_the_published_generator() -> None:
    # The first outputs from seed 0: e220a8397b1dcdaf, 6e789e6aa1b965f4, 06c45d188009454f,
    # f88bb8a8724c81ec, 1b39896a51a8749b.
    assert signs(5).tolist() == [-1, 1, 1, -1, 1]
    assert signs(300).tolist() == [documented_sign(index) for index in range(300)]


@given(st.integers(1, 70), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(deadline=None, max_examples=25)
def test_torch_numpy_and_the_documented_formula_agree(n: int, dtype: torch.dtype) -> None:
    rows = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(n)).to(dtype)
    ours, same = digest(rows), signed_sums(rows.float().numpy(), signs(n))
    assert ours.shape == (2, 3, N_SUMS)
    torch.testing.assert_close(ours, torch.from_numpy(same))
    expected = [documented_digest(row) for row in rows.float().view(6, n).tolist()]
    torch.testing.assert_close(ours.view(6, N_SUMS), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_the_norm_of_a_difference_is_estimated_without_bias() -> None:
    rows = torch.randn(4000, 192, generator=torch.Generator().manual_seed(0))
    ratios = digest(rows).square().sum(-1) / rows.square().sum(-1)
    assert float(ratios.mean()) == pytest.approx(1, abs=0.03)
    assert float(ratios.min()) > 0.01  # no difference of 4000 disappears


@given(st.integers(1, 5000))
def test_rows_with_digests_are_few_and_have_the_first_and_the_last(n: int) -> None:
    rows = digest_rows(n)
    assert rows == sorted(set(rows))
    assert (rows[0], rows[-1]) == (0, n - 1)
    assert len(rows) == min(n, MAX_ROWS)


def recorded(path: Path, model: Any, *prompts: Any, **options: Any) -> TraceReader:
    with flexinspect.watch(model, out=path, **options):
        for prompt in prompts:
            model.generate(torch.tensor(prompt), max_new_tokens=3, do_sample=False)
    return open_trace(path)


def test_the_digests_of_a_trace_are_those_of_its_hidden_states(tmp_path: Path) -> None:
    model = make_model("llama")
    with recorded(tmp_path / "t.flextrace", model, [ids(20, 3)], level="extreme") as reader:
        for step in range(3):
            found = reader.array(0, step, DIGEST_STREAM)
            assert found is not None
            rows = digest_rows(20) if step == 0 else [0]
            assert found.shape == (1, len(rows), 3, N_SUMS)
            for number, layer in enumerate(row.layer for row in reader.layer_stats(0, step)):
                hidden = reader.array(0, step, "hidden", layer)
                assert hidden is not None
                expected = [documented_digest(hidden[row]) for row in rows]
                np.testing.assert_allclose(found[0, :, number], expected, rtol=1e-4, atol=1e-4)


def test_each_row_of_a_batch_has_digests(tmp_path: Path) -> None:
    model = make_model("llama")
    batch = [ids(9, 3), ids(9, 4)]
    with (
        recorded(tmp_path / "b.flextrace", model, batch) as reader,
        recorded(tmp_path / "s.flextrace", model, *([row] for row in batch)) as single,
    ):
        for step in range(3):
            together = reader.array(0, step, DIGEST_STREAM)
            assert together is not None
            for row in range(2):
                alone = single.array(row, step, DIGEST_STREAM)
                assert alone is not None
                np.testing.assert_allclose(together[row], alone[0], rtol=1e-3, atol=1e-3)


def test_at_level_basic_there_are_none(tmp_path: Path) -> None:
    with recorded(
        tmp_path / "t.flextrace", make_model("llama"), [ids(9, 3)], level="basic"
    ) as reader:
        assert reader.array(0, 0, DIGEST_STREAM) is None
        assert reader.array(0, 0, WEIGHTS_STREAM) is None


def test_weights_are_sampled_once_and_again_when_they_have_changed(tmp_path: Path) -> None:
    model, path = make_model("llama"), tmp_path / "t.flextrace"
    with flexinspect.watch(model, out=path):
        for generation in range(3):
            model.generate(torch.tensor([ids(9, 3)]), max_new_tokens=2, do_sample=False)
            if generation == 1:
                model.lm_head.weight.mul_(2)
    with open_trace(path) as reader:
        first, second, third = (reader.array(n, 0, WEIGHTS_STREAM) for n in range(3))
    assert second is None
    assert first is not None
    assert third is not None
    assert first.shape == (len(list(model.parameters())), 8)
    assert (first[:-1] == third[:-1]).all()
    assert (2 * first[-1] == third[-1]).all()


def test_samples_are_evenly_spaced_and_weights_elsewhere_have_none() -> None:
    found = sample_weights([torch.arange(32.0).view(4, 8), torch.tensor([5.0, 6.0])])
    assert found is not None
    assert found.tolist() == [[0, 4, 8, 12, 16, 20, 24, 28], [5, 6, 5, 6, 5, 6, 5, 6]]
    assert sample_weights([torch.empty(16, device="meta")]) is None
    assert sample_weights([torch.arange(16, dtype=torch.int8)]) is None
    assert sample_weights([]) is None


def test_a_layer_whose_output_is_modified_later_has_no_digests(tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.layers[1].register_forward_pre_hook(
        lambda module, args: (args[0].add_(1), *args[1:])
    )
    with recorded(tmp_path / "t.flextrace", model, [ids(9, 3)]) as reader:
        assert [reader.array(0, step, DIGEST_STREAM) for step in range(3)] == [None] * 3
        events = [row.event.text for row in reader.events() if row.event.kind == MODIFIED_EVENT]
        assert len(events) == 1
        assert "modified in place" in events[0]


@pytest.mark.parametrize("level", ["basic", "advanced"])
def test_outputs_that_a_loop_modifies_are_not_recorded_as_what_layers_returned(
    tmp_path: Path, level: str
) -> None:
    """They wait for the writer thread, which may read them after the loop has changed them."""
    norms = {}
    for changes in (False, True):
        path, inputs = tmp_path / f"{level}-{changes}.flextrace", torch.tensor([ids(9, 3)])
        model = make_model("llama")
        with torch.no_grad(), flexinspect.watch(model, out=path, level=level) as watched:
            cache = None
            for _ in range(12):
                output = model(inputs, past_key_values=cache, output_hidden_states=True)
                cache, inputs = output.past_key_values, output.logits[:, -1:].argmax(-1)
                for states in output.hidden_states[1:-1] if changes else ():
                    states.div_(100)
                time.sleep(0.02)
        with watched.reader() as reader:
            norms[changes] = {
                (step, row.layer): row.norm
                for step in range(12)
                for row in reader.layer_stats(0, step)
            }
            events = [row.event for row in reader.events() if row.event.kind == MODIFIED]
            assert bool(events) is changes
    if level == "advanced":
        assert len(norms[True]) > 3 * 6  # after the first lost steps the outputs are copied
    assert norms[True].items() <= norms[False].items()

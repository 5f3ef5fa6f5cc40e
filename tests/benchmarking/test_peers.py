"""The comparison with other recorders runs, and says what it left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import ids, make_model

from benchmarks import peers
from benchmarks.peers import Generation, Recorder

TOKENS = 3


@pytest.fixture(scope="module")
def generation() -> Generation:
    return Generation(make_model("llama"), ids(12, seed=1), TOKENS)


def _nothing(_: Generation) -> peers.Recorded:
    return lambda: 0


def _broken(_: Generation) -> peers.Recorded:
    raise RuntimeError("this model has no layers\nsecond line")


def test_hooks_and_a_trace_are_compared_with_the_bare_generation(generation: Generation) -> None:
    recorders = tuple(
        one for one in peers.RECORDERS if one.name in ("plain hooks", "flexinspect basic")
    )
    found = peers.measure_kernel(generation, recorders, "sdpa", 0)
    assert found["left_out"] == []
    assert found["ms_per_token"] > 0
    for one in found["recorders"].values():
        assert one["wall"]["rounds"] + one["wall"]["left_out"] >= 3
        assert one["cpu"]["median"] > 0
    text = peers.table({"kernels": {"sdpa": found}, "versions": {}})
    assert "| plain hooks | layer outputs, logits |" in text


def test_plain_hooks_keep_each_layer_of_each_step(generation: Generation) -> None:
    n_layers = len(generation.layers)
    assert peers.plain_hooks(generation)() == TOKENS * (n_layers + 1)
    assert not generation.model.lm_head._forward_hooks


def test_what_cannot_run_is_left_out_with_a_sentence(generation: Generation) -> None:
    recorders = (
        Recorder("absent", "", _nothing, "no_such_library", "no-such-library"),
        Recorder("own attention", "", _nothing, takes_block_masks=False),
        Recorder("idle", "", _nothing),
        Recorder("broken", "", _broken),
    )
    found = peers.measure_kernel(generation, recorders, "flex-uncompiled", 0)
    assert found["left_out"] == [
        "no-such-library is not installed: pip install 'flexinspect[bench]'.",
        "own attention computes attention itself: no FlexAttention.",
        "idle kept nothing of this generation.",
        "broken does not run here: RuntimeError: this model has no layers",
    ]
    assert "recorders" not in found
    assert "Left out: idle kept" in peers.table({"kernels": {"sdpa": found}, "versions": {}})


def test_a_kernel_is_chosen_for_a_while(generation: Generation) -> None:
    model = generation.model
    before = model.config._attn_implementation
    with peers.kernel(model, "flex-uncompiled"):
        assert model.config._attn_implementation == "flex_attention"
    assert model.config._attn_implementation == before


def test_each_recorder_of_a_library_names_the_extra_that_has_it() -> None:
    text = Path("pyproject.toml").read_text("utf-8")
    extra = next(line for line in text.splitlines() if line.startswith("bench = "))
    for recorder in peers.RECORDERS:
        assert recorder.package in extra

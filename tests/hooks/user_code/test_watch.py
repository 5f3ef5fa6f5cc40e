"""`flexinspect.watch` records loops of the user correctly and does not change them."""

from __future__ import annotations

import copy
import inspect
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from support.dense_reference import attention_row
from support.paths import DEMO
from support.tiny import FAMILIES, ids, make_model
from torch import Tensor, nn
from transformers import AutoTokenizer, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import flexinspect
from flexinspect import FlexInspectError
from flexinspect.core.errors import UsageError
from flexinspect.masks import mask_presets
from flexinspect.records.step import UNKNOWN
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.sessions import capture_session

NEW = 6


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "own.flextrace"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


def prompt_of(n: int = 9, seed: int = 3) -> Tensor:
    return torch.tensor([ids(n, seed)])


def greedy(model: Any, inputs: Tensor, **options: Any) -> Tensor:
    options = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": NEW, **options}
    found: Tensor = model.generate(inputs, **{"do_sample": False, **options})
    return found


def with_cache(model: Any, inputs: Tensor, n: int = NEW) -> list[int]:
    cache, chosen = DynamicCache(config=model.config), []
    for _ in range(n):
        inputs = model(inputs, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        chosen.append(int(inputs))
    return chosen


def without_cache(model: Any, inputs: Tensor, n: int = NEW) -> list[int]:
    chosen = []
    for _ in range(n):
        token = model(inputs, use_cache=False).logits[:, -1:].argmax(-1)
        inputs = torch.cat((inputs, token), 1)
        chosen.append(int(token))
    return chosen


def state_of(model: nn.Module) -> list[Any]:
    """Return everything that watching may change, by identity."""
    found: list[Any] = [dict(ALL_ATTENTION_FUNCTIONS.__dict__), sorted(vars(model))]
    for module in model.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs"):
            found.append(dict(getattr(module, name)))
        found.append(list(module._forward_pre_hooks_with_kwargs))
    return found


def token_ids(reader: TraceReader, generation: int = 0) -> list[int]:
    return [token.token_id for token in reader.tokens(generation)]


def events(reader: TraceReader, kind: str) -> list[str]:
    return [row.event.text for row in reader.events() if row.event.kind == kind]


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "top_k": 5}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_the_same_tokens_and_the_trace_holds_them(
    family: str, options: dict[str, Any], family_model: Callable[[str], Any], out: Path
) -> None:
    model, inputs = family_model(family), prompt_of(14)
    torch.manual_seed(7)
    plain = greedy(model, inputs, output_logits=True, return_dict_in_generate=True, **options)
    torch.manual_seed(7)
    with flexinspect.watch(model, out=out) as trace:
        mine = greedy(model, inputs, output_logits=True, return_dict_in_generate=True, **options)
    assert torch.equal(plain.sequences, mine.sequences)
    assert all(map(torch.equal, plain.logits, mine.logits))
    with trace.reader() as reader:
        assert reader.state == "finished"
        assert token_ids(reader) == mine.sequences[0].tolist()
        assert [t.step for t in reader.tokens(0)] == [None] * 14 + list(range(NEW))
        steps = reader.steps(0)
        assert [s.phase for s in steps] == ["prefill"] + ["decode"] * (NEW - 1)
        assert [s.kv_after for s in steps] == list(range(14, 14 + NEW))
        for step, row in zip(steps, mine.logits, strict=True):
            chosen = int(mine.sequences[0, 14 + step.step])
            assert step.chosen_id == chosen
            assert step.chosen_rank == int((row[0] > row[0, chosen]).sum())
            expected = float(torch.log_softmax(row[0].double(), -1)[chosen])
            assert step.chosen_logprob == pytest.approx(expected, abs=1e-5)
            assert len(reader.calls(0, step.step)) == 3
        assert events(reader, "not-recorded") == events(reader, "hook-disabled") == []
        assert reader.generation(0).state == "finished"


@pytest.mark.parametrize("loop", [with_cache, without_cache])
def test_a_hand_written_loop_is_one_generation(llama: Any, out: Path, loop: Any) -> None:
    expected = loop(llama, prompt_of())
    with flexinspect.watch(llama, out=out) as trace:
        assert loop(llama, prompt_of()) == expected
    with trace.reader() as reader:
        assert [row.generation for row in reader.generations()] == [0]
        assert token_ids(reader) == [*prompt_of()[0].tolist(), *expected[:-1]]
        steps = reader.steps(0)
        assert [s.step for s in steps] == list(range(NEW))
        assert [s.kv_after for s in steps] == list(range(9, 9 + NEW))
        assert [s.chosen_id for s in steps] == [*expected[:-1], UNKNOWN]
        assert "not known" in reader.generation(0).stop_reason
        segments = [(s.start, s.stop, s.label) for s in reader.segments(0)]
        assert segments == [(0, 9, "prompt"), (9, 8 + NEW, "generated")]


def test_ids_that_a_loop_overwrites_are_recorded_as_passed(llama: Any, out: Path) -> None:
    inputs = prompt_of()
    with flexinspect.watch(llama, out=out) as trace:
        llama(inputs)
        inputs.fill_(5)
    with trace.reader() as reader:
        assert token_ids(reader) == prompt_of()[0].tolist()


def test_forwards_that_score_are_generations_of_one_step(llama: Any, out: Path) -> None:
    with flexinspect.watch(llama, out=out) as trace:
        for seed in (1, 2, 2):
            llama(input_ids=prompt_of(5, seed))
        greedy(llama, prompt_of(4))
    with trace.reader() as reader:
        numbers = [row.generation for row in reader.generations()]
        assert [reader.n_steps(number) for number in numbers] == [1, 1, 1, NEW]
        assert token_ids(reader, 1) == list(ids(5, 2))
        logits = reader.logits(0, 0)
        assert logits is not None
        assert (logits.chosen_id, logits.chosen_rank) == (UNKNOWN, -1)
        assert np.isnan(logits.chosen_logprob)
        cost = reader.run()["cost"]
        assert 0 < cost["capture_s"] < cost["total_s"]
        assert 0 < cost["ratio"] < 1000


def padded() -> tuple[Tensor, Tensor]:
    short, long = ids(5, 1), ids(9, 2)
    inputs = torch.tensor([[0] * 4 + list(short), list(long)])
    return inputs, torch.tensor([[0] * 4 + [1] * 5, [1] * 9])


@pytest.mark.parametrize("family", FAMILIES)
def test_row_0_of_a_left_padded_batch_is_recorded_correctly(
    family: str, family_model: Callable[[str], Any], out: Path
) -> None:
    model, (inputs, mask) = family_model(family), padded()
    plain = greedy(model, inputs, attention_mask=mask)
    with flexinspect.watch(model, out=out, level="extreme") as trace:
        mine = greedy(model, inputs, attention_mask=mask)
    assert torch.equal(plain, mine)
    with trace.reader() as reader:
        assert token_ids(reader) == mine[0].tolist()
        assert len(events(reader, "batched-input")) == 1
        first = reader.segments(0)[:2]
        assert [(s.start, s.stop, s.label) for s in first] == [(0, 4, "padding"), (4, 9, "prompt")]
        real = reader.tokens(0, start=4)
        assert [token.position_id for token in real] == list(range(len(real)))
        assert all(call.lse_error is None or call.lse_error < 1e-3 for call in reader.calls(0, 2))
        assert reader.calls(0, 2)[0].lse_error is not None


def test_attention_of_a_batch_is_that_of_row_0(llama: Any, out: Path) -> None:
    inputs, mask = padded()
    with flexinspect.watch(llama, out=out, level="extreme") as trace:
        greedy(llama, inputs, attention_mask=mask)
    with trace.reader() as reader:
        step = reader.steps(0)[-1]
        keys = [reader.array(0, s.step, "k", 1) for s in reader.steps(0)]
        query = reader.array(0, step.step, "q", 1)
        mass = reader.array(0, step.step, "attention.mass")
        scale = reader.calls(0, step.step)[1].scale or 0.0
    visible = torch.arange(step.kv_after) >= 4
    weights = attention_row(
        torch.tensor(query),
        torch.tensor(np.concatenate(keys, axis=1)),  # type: ignore[arg-type]
        scale=scale,
        visible=visible[None],
    )[:, 0]
    assert mass is not None
    expected = torch.stack([weights[:, a:b].sum(-1) for a, b in ((0, 4), (4, 9), (9, None))], -1)
    np.testing.assert_allclose(mass[1], expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention", "named"])
def test_every_backend_that_transformers_dispatches_is_recorded(
    out: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.integrations.flex_attention as theirs
    from torch.nn.attention.flex_attention import flex_attention
    from transformers import AttentionInterface, masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if backend == "flex_attention":  # on CPU transformers' flex needs a compiler
        make = masking_utils.create_block_mask
        plain = lambda *args, training=False, **kwargs: flex_attention(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(theirs, "compile_friendly_flex_attention", plain)
        uncompiled = lambda *args, _compile=None, **kwargs: make(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(masking_utils, "create_block_mask", uncompiled)
    AttentionInterface.register("named", sdpa_attention_forward)
    try:
        model = make_model("llama")
        model.set_attn_implementation(backend)
        with flexinspect.watch(model, out=out) as trace:
            model(prompt_of())
    finally:
        AttentionInterface._global_mapping.pop("named")
    with trace.reader() as reader:
        assert [call.backend for call in reader.calls(0, 0)] == [backend] * 3


def test_an_attention_function_that_cannot_be_hashed_is_recorded(out: Path) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("unhashable", Unhashable())
    try:
        model = make_model("llama")
        model.set_attn_implementation("unhashable")
        with flexinspect.watch(model, out=out) as trace:
            model(prompt_of())
    finally:
        AttentionInterface._global_mapping.pop("unhashable")
    with trace.reader() as reader:
        assert [call.backend for call in reader.calls(0, 0)] == ["unhashable"] * 3


def test_a_failed_last_forward_is_recorded_if_its_exception_was_caught(out: Path) -> None:
    model = make_model("llama")
    cache = DynamicCache(config=model.config)
    with flexinspect.watch(model, out=out) as trace:
        model(prompt_of(), past_key_values=cache)
        model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(prompt_of(1), past_key_values=cache)
    with trace.reader() as reader:
        (event_text,) = events(reader, "forward-failed")
        lost, _, error = event_text.partition("): ")
        assert lost == "The forward of step 1 did not return (input rows: 1, cached keys: 9"
        assert error == "ZeroDivisionError: division by zero"
        assert (reader.n_steps(0), reader.generation(0).state) == (1, "failed")


def test_a_replaced_forward_counts_as_unseen(out: Path) -> None:
    model = make_model("llama")
    inner = model.model.layers[1].self_attn
    inner.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with flexinspect.watch(model, out=out) as trace:
        with_cache(model, prompt_of(), 3)
    with trace.reader() as reader:
        (event_text,) = events(reader, "not-recorded")
        assert "2 of 3 layers" in event_text
        assert [call.layer for call in reader.calls(0, 0)] == [0, 2]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_is_unchanged_and_reported_as_not_recorded(
    out: Path, fullgraph: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = prompt_of()

    def graphs() -> tuple[int, Tensor]:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(
            make_model("llama", num_hidden_layers=1), backend=counter, fullgraph=fullgraph
        )
        with flexinspect.watch(compiled._orig_mod, out=out) if watched else nullcontext():
            logits: Tensor = compiled(inputs, use_cache=False).logits
        return counter.frame_count, logits

    watched = False
    n_graphs, plain = graphs()
    watched = True
    n_mine, mine = graphs()
    assert n_mine == n_graphs
    assert torch.equal(plain, mine)
    assert "No forward of this model was seen" in capsys.readouterr().err
    with flexinspect.open_trace(out) as reader:
        assert reader.generations() == []
        assert len(events(reader, "not-recorded")) == 1


def test_a_compiled_forward_is_one_step_without_attention(out: Path) -> None:
    model = make_model("llama", num_hidden_layers=1)
    model.forward = torch.compile(model.forward, backend="eager")
    plain = model(prompt_of(), use_cache=False).logits
    with flexinspect.watch(model, out=out) as trace:
        assert torch.equal(model(prompt_of(), use_cache=False).logits, plain)
    with trace.reader() as reader:
        assert reader.n_steps(0) == 1
        assert reader.calls(0, 0) == []
        assert "0 of 1 layers" in events(reader, "not-recorded")[0]


def test_beam_search_is_reported_as_not_followed(llama: Any, out: Path) -> None:
    plain = greedy(llama, prompt_of(), num_beams=3)
    with flexinspect.watch(llama, out=out) as trace:
        assert torch.equal(greedy(llama, prompt_of(), num_beams=3), plain)
    with trace.reader() as reader:
        assert len(events(reader, "generate-not-followed")) == 1
        assert token_ids(reader) == prompt_of()[0].tolist()
        assert {step.chosen_id for step in reader.steps(0)} == {UNKNOWN}
        assert reader.n_steps(0) == NEW


def test_a_prompt_in_chunks_is_recorded_as_input(llama: Any, out: Path) -> None:
    cache = DynamicCache(config=llama.config)
    with flexinspect.watch(llama, out=out) as trace:
        for part in prompt_of(9).split(4, dim=1):
            llama(part, past_key_values=cache)
    with trace.reader() as reader:
        assert token_ids(reader) == prompt_of(9)[0].tolist()
        assert len(events(reader, "chunked-input")) == 1
        assert [t.step for t in reader.tokens(0)][:8] == [None] * 8


def test_a_static_cache_keeps_segments_in_place(llama: Any, out: Path) -> None:
    plain = greedy(llama, prompt_of())
    with flexinspect.watch(llama, out=out) as trace:
        mine = greedy(llama, prompt_of(), cache_implementation="static", disable_compile=True)
    assert torch.equal(plain, mine)
    with trace.reader() as reader:
        assert token_ids(reader) == mine[0].tolist()
        mass = reader.array(0, 2, "attention.mass")
        assert mass is not None
        np.testing.assert_allclose(mass.sum(-1), 1.0, atol=1e-4)
        assert (mass[..., 0] > 0.05).any()


# -- errors in code of the user -------------------------------------------------------------------


class Own(Exception):
    """An exception of the user's code."""


def fail_in(model: Any, layer: int, at_call: int) -> Callable[[], None]:
    calls = [0]

    def hook(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == at_call:
            raise Own("mine")

    return model.model.layers[layer].register_forward_pre_hook(hook).remove  # type: ignore[no-any-return]


@pytest.mark.parametrize("loop", [with_cache, without_cache, greedy])
def test_an_exception_is_unchanged_and_its_step_is_marked(out: Path, loop: Any) -> None:
    model = make_model("llama")
    remove = fail_in(model, 1, 4)
    before = state_of(model)
    with pytest.raises(Own, match="mine"), flexinspect.watch(model, out=out) as trace:
        loop(model, prompt_of())
    assert state_of(model) == before
    remove()
    with trace.reader() as reader:
        assert reader.state == "failed"
        assert [s.chosen_id != UNKNOWN for s in reader.steps(0)] == [True] * 3
        about = reader.generation(0)
        assert (about.state, about.stop_reason) == ("failed", "Own: mine")
        (row,) = [row for row in reader.events() if row.event.kind == "error"]
        assert (row.event.generation, row.event.step) == (0, 3)
        assert "in hook" in row.event.data["traceback"]


def test_a_forward_that_is_tried_again_continues_the_generation(out: Path) -> None:
    model = make_model("llama")
    expected = with_cache(model, prompt_of())
    fail_in(model, 0, 3)  # before anything is cached
    cache, inputs, chosen = DynamicCache(config=model.config), prompt_of(), []
    with flexinspect.watch(model, out=out) as trace:
        while len(chosen) < NEW:
            try:
                inputs = model(inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
                chosen.append(int(inputs))
            except Own:
                continue
    assert chosen == expected
    with trace.reader() as reader:
        assert reader.state == "finished"
        assert token_ids(reader) == [*prompt_of()[0].tolist(), *expected[:-1]]
        assert [s.step for s in reader.steps(0)] == list(range(NEW))
        assert len(events(reader, "forward-failed")) == 1


def test_an_interrupt_ends_the_trace_as_interrupted(llama: Any, out: Path) -> None:
    with pytest.raises(KeyboardInterrupt), flexinspect.watch(llama, out=out) as trace:
        llama(prompt_of())
        raise KeyboardInterrupt
    with trace.reader() as reader:
        assert reader.state == reader.generation(0).state == "interrupted"


def test_an_exception_between_forwards_fails_the_trace(llama: Any, out: Path) -> None:
    with pytest.raises(Own), flexinspect.watch(llama, out=out) as trace:
        greedy(llama, prompt_of())
        raise Own("after")
    with trace.reader() as reader:
        assert reader.state == "failed"
        assert reader.generation(0).state == "finished"
        assert events(reader, "error") == ["Own: after"]


def test_gradients_are_the_same_and_the_model_is_not_kept_from_training(out: Path) -> None:
    model = make_model("llama").requires_grad_(True)
    inputs = prompt_of()

    def gradient() -> Tensor:
        model.zero_grad()
        model(inputs, labels=inputs).loss.backward()
        found: Tensor = model.model.layers[0].mlp.down_proj.weight.grad.clone()
        return found

    plain = gradient()
    with flexinspect.watch(model, out=out) as trace:
        assert torch.equal(gradient(), plain)
    with trace.reader() as reader:
        assert reader.n_steps(0) == 1


# -- the handle -----------------------------------------------------------------------------------


def test_a_session_leaves_no_hooks_or_threads(llama: Any, out: Path) -> None:
    before = state_of(llama)
    with flexinspect.watch(llama, out=out):
        assert state_of(llama) != before
        greedy(llama, prompt_of())
    assert state_of(llama) == before
    assert "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)
    assert "generate" not in vars(llama)


def test_one_model_is_watched_once_at_a_time_and_again_later(llama: Any, tmp_path: Path) -> None:
    with flexinspect.watch(llama, out=tmp_path / "a"):
        with pytest.raises(UsageError, match="being watched already"):
            with flexinspect.watch(llama, out=tmp_path / "b"):
                pass
        llama(prompt_of())
    assert not (tmp_path / "b").exists()
    with flexinspect.watch(llama, out=tmp_path / "b") as again:
        llama(prompt_of())
    with again.reader() as reader:
        assert len(reader.generations()) == 1


def test_two_models_may_be_watched_together(llama: Any, tmp_path: Path) -> None:
    other = make_model("qwen2")
    with flexinspect.watch(llama, out=tmp_path / "a") as a:
        with flexinspect.watch(other, out=tmp_path / "b") as b:
            mine, theirs = greedy(llama, prompt_of()), greedy(other, prompt_of())
    for trace, expected in ((a, mine), (b, theirs)):
        with trace.reader() as reader:
            assert token_ids(reader) == expected[0].tolist()
            assert len(reader.calls(0, 1)) == 3


def test_a_copy_made_while_watching_is_another_model(llama: Any, out: Path) -> None:
    with flexinspect.watch(llama, out=out) as trace:
        copied = copy.deepcopy(llama)
        with torch.no_grad():
            copied.lm_head.weight.neg_()
        assert inspect.signature(llama.generate) == inspect.signature(type(llama).generate).replace(
            parameters=list(inspect.signature(type(llama).generate).parameters.values())[1:]
        )
        theirs, mine = greedy(copied, prompt_of()), greedy(llama, prompt_of())
    assert not torch.equal(theirs, mine)
    assert torch.equal(greedy(copied, prompt_of()), theirs)
    with trace.reader() as reader:
        assert len(reader.generations()) == 1
        assert token_ids(reader) == mine[0].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "all"}, "basic, advanced, extreme"),
        ({"mask": "segment-isolatoin"}, "unknown"),
        ({"mask": 3}, "name of a preset"),
        ({"segments": [(4, 2, "x")]}, "is not a segment"),
        ({"layers": [0, 9]}, "no attention layer 9"),
        ({"tokenizer": "gpt2"}, "cannot be used"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_runs(
    llama: Any, out: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(FlexInspectError, match=message):
        flexinspect.watch(llama, **{"out": out, **options})
    assert not out.exists()


def test_an_existing_file_is_not_overwritten(llama: Any, out: Path) -> None:
    out.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        flexinspect.watch(llama, out=out)
    assert out.read_text() == "mine"


def test_a_missing_folder_is_refused(llama: Any, out: Path) -> None:
    with pytest.raises(UsageError), flexinspect.watch(llama, out=out / "no" / "such"):
        pass
    with flexinspect.watch(llama, out=out):
        llama(prompt_of())


def test_the_default_name_has_the_time_in_it(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with flexinspect.watch(llama):
            llama(prompt_of())
    names = sorted(path.name for path in tmp_path.glob("*.flextrace"))
    assert len(names) == 2
    assert all(name.startswith("watch-2") for name in names)


def test_a_module_without_attention_layers_works_with_fewer_facts(out: Path) -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    with flexinspect.watch(model, out=out) as trace:
        model(torch.tensor([[1, 2, 3]]))
    with trace.reader() as reader:
        assert token_ids(reader) == [1, 2, 3]
        assert reader.calls(0, 0) == []


def test_the_handle_prints_a_summary_and_how_to_open_the_trace(out: Path) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = torch.inf
    with flexinspect.watch(model, out=out) as trace:
        greedy(model, prompt_of())
        assert trace.findings() != []
        assert "recording" in str(trace)
        trace.level = "basic"
        greedy(model, prompt_of())
        with pytest.raises(UsageError):
            trace.level = "most"
    assert trace.level == "basic"
    with trace.reader() as reader:
        assert trace.findings() == reader.findings()
        assert reader.layer_stats(0, 0) != []
        assert reader.array(0, 0, "attention.mass") is not None
        assert reader.array(1, 0, "attention.mass") is None
    assert f"2 generations, {2 * NEW} steps" in str(trace)
    assert str(trace).endswith(f"flexinspect open {out}")
    assert f"<code>flexinspect open {out}</code>" in trace._repr_html_()
    assert ">error</span>" in trace._repr_html_()


def test_a_handle_that_was_not_entered_has_no_summary(llama: Any, tmp_path: Path) -> None:
    trace = flexinspect.watch(llama, out=tmp_path / "a&b.flextrace")
    assert str(trace) == f"Nothing is recorded yet; the trace will be {tmp_path}/a&b.flextrace."
    assert trace._repr_html_().endswith("/a&amp;b.flextrace.")
    assert not (tmp_path / "a&b.flextrace").exists()


def test_ipython_shows_the_summary_and_repr_reads_no_file(
    llama: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from IPython.lib.pretty import pretty

    with flexinspect.watch(llama, out=out) as trace:
        llama(prompt_of())
    assert pretty(trace) == str(trace)
    monkeypatch.setattr(type(trace), "reader", lambda self: pytest.fail("the trace was opened"))
    assert "Watch object" in repr(trace)


# -- segments and declared masks ------------------------------------------------------------------


@pytest.fixture
def demo() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO).eval().requires_grad_(False)


def test_tokens_segments_and_the_declared_preset_are_shown(
    demo: Any, tokenizer: Any, out: Path
) -> None:
    questions = ["Who wrote Hamlet?", "Who is the author of Hamlet?"]
    inputs = tokenizer("\n".join([*questions, "Answer:"]), return_tensors="pt")
    with flexinspect.watch(
        demo, tokenizer, out=out, segments=questions, mask="segment-isolation"
    ) as trace:
        answer = demo.generate(**inputs, max_new_tokens=4, do_sample=False)
    with trace.reader() as reader:
        segments = reader.segments(0)
        texts = {
            s.label[:10]: "".join(t.text for t in reader.tokens(0, start=s.start, stop=s.stop))
            for s in segments
        }
        assert questions[0] in texts[questions[0][:10]]
        assert questions[1] in texts[questions[1][:10]]
        assert [s.kind for s in segments][-1] == "generated"
        whole = "".join(token.text for token in reader.tokens(0))
        assert whole == tokenizer.decode(answer[0])
        about = reader.generation(0)
        assert about.declared["preset"] == "segment-isolation"
    shown = show(out, "tokens")
    assert "Hamlet" in shown
    mask = show(out, "mask")
    assert "segment-isolation" in mask
    assert "declared" in mask


def show(path: Path, panel: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "flexinspect", "show", str(path), "--panel", panel],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_text_that_is_not_in_the_prompt_is_reported(
    llama: Any, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with flexinspect.watch(llama, out=out, segments=["7 7 7", (2, 4, "span")]) as trace:
        greedy(llama, prompt_of())
        greedy(llama, prompt_of(8, 5))
    assert capsys.readouterr().err.count("'7 7 7' is not in the prompt") == 1
    with trace.reader() as reader:
        assert len(events(reader, "segments-not-found")) == 2
        assert "span" in [s.label for s in reader.segments(1)]


def test_ids_are_shown_without_a_tokenizer(llama: Any, out: Path) -> None:
    inputs = prompt_of()
    wanted = " ".join(map(str, inputs[0, 3:6].tolist()))
    with flexinspect.watch(llama, out=out, segments=[(wanted, "middle")]) as trace:
        greedy(llama, inputs)
    with trace.reader() as reader:
        assert (3, 6, "middle") in [(s.start, s.stop, s.label) for s in reader.segments(0)]
        first = reader.tokens(0)[0]
        assert (first.token, first.text) == (f"{int(inputs[0, 0])}", f"{int(inputs[0, 0])} ")
        assert [row.answer for row in reader.generations()] == ["230 13 84 198 189 299"]


def test_an_id_is_not_found_in_the_digits_of_others(llama: Any, out: Path) -> None:
    digit = next(d for d in map(str, range(3, 10)) if int(d) not in prompt_of()[0].tolist())
    with flexinspect.watch(llama, out=out, segments=[digit]) as trace:
        llama(prompt_of())
    with trace.reader() as reader:
        assert len(events(reader, "segments-not-found")) == 1
        assert [s.label for s in reader.segments(0)] == ["prompt", "generated"]


def test_a_mask_spec_may_be_declared_instead_of_a_preset(llama: Any, out: Path) -> None:
    spec = mask_presets.MaskSpec("mine", (0, 4), (0, 0), (0, 4))
    with flexinspect.watch(llama, out=out, mask=spec) as trace:
        llama(prompt_of())
    with trace.reader() as reader:
        assert reader.generation(0).mask == "mine"
        assert reader.generation(0).declared["local_starts"] == [0, 4]
    assert "mine" in show(out, "mask")


def test_an_unknown_token_is_not_shown_as_chosen(llama: Any, out: Path) -> None:
    with flexinspect.watch(llama, out=out):
        llama(prompt_of())
    shown = show(out, "logits")
    assert "The token chosen at step 0 is unknown: the model never received it." in shown
    assert (
        "It is unknown whether logits processors changed these logits before the choice." in shown
    )
    assert "*" not in shown


def test_a_trace_that_is_moved_while_it_is_watched_is_reported_at_the_end(
    llama: Any, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with flexinspect.watch(llama, out=out):
        greedy(llama, prompt_of())
        out.rename(out.with_name("moved.flextrace"))
    assert f"{out} was moved, deleted or replaced while it was recorded" in capsys.readouterr().err


def test_the_writer_thread_imports_the_rules(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, threads = make_model("llama"), []
    original = capture_session.built_in_rules

    def noted() -> Any:
        threads.append(threading.current_thread().name)
        return original()

    monkeypatch.setattr(capture_session, "built_in_rules", noted)
    with flexinspect.watch(model, out=out) as watched:
        greedy(model, prompt_of())
    assert threads == ["flexinspect-writer"]
    with watched.reader() as reader:
        assert set(reader.run()["rules"]) > {"numbers"}
        assert reader.run()["git"] is None or reader.run()["git"]["commit"]


def test_a_trace_is_one_whole_file_when_its_block_ends(out: Path) -> None:
    model = make_model("llama")
    with flexinspect.watch(model, out=out):
        greedy(model, prompt_of())
    copy_of = shutil.copy(out, out.with_name("copy.flextrace"))
    assert not list(out.parent.glob(f"{out.name}-*"))
    with open_trace(copy_of) as reader:
        assert (reader.state, reader.n_steps(0)) == ("finished", NEW)

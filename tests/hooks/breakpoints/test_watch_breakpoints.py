"""Breakpoints in a user's own process: `flexinspect.watch(..., breakpoints=[...])`."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patches import Own, isolating
from support.tiny import ids, make_model
from torch import nn
from transformers import DynamicCache

import flexinspect
from flexinspect.breakpoints.grammar import ExpressionError
from flexinspect.breakpoints.store import BreakpointHit
from flexinspect.core.errors import UsageError
from flexinspect.trace.reader import open_trace

N_PROMPT, N_NEW = 12, 6


@pytest.fixture
def model() -> Any:
    return make_model("llama")


def generate(model: nn.Module, n: int = N_NEW) -> Any:
    prompt = torch.tensor([ids(N_PROMPT, 5)])
    return model.generate(  # type: ignore[operator]
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, do_sample=False
    )


def hits_of(
    tmp_path: Path, model: nn.Module, *breakpoints: str, **watch: Any
) -> list[BreakpointHit]:
    hits: list[BreakpointHit] = []
    tmp_path.mkdir(exist_ok=True)
    out = tmp_path / "run.flextrace"
    with flexinspect.watch(model, out=out, breakpoints=breakpoints, on_break=hits.append, **watch):
        generate(model)
    return hits


def steps(hits: list[BreakpointHit]) -> list[int | None]:
    return [hit.step for hit in hits]


@contextmanager
def corrupted(module: nn.Module, value: float, *, row: int = 2, forward: int = 0) -> Any:
    """Write a value into one row of a module's output, in one forward."""
    seen = 0

    def corrupt(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal seen
        tensor = output[0] if isinstance(output, tuple) else output
        if seen == forward:
            tensor[0, row % tensor.shape[1], 0] = value
        seen += 1

    handle = module.register_forward_hook(corrupt)
    yield
    handle.remove()


# -- after a step ------------------------------------------------------------------------------


def test_a_step_is_hit_by_its_number_before_the_next_begins(tmp_path: Path, model: Any) -> None:
    n_forwards = 0

    def count(*_: Any) -> None:
        nonlocal n_forwards
        n_forwards += 1

    seen: list[tuple[int | None, int]] = []
    model.register_forward_pre_hook(count)
    with flexinspect.watch(
        model,
        out=tmp_path / "run.flextrace",
        breakpoints=["prob > 0 and step in (1, 5)"],
        on_break=lambda hit: seen.append((hit.step, n_forwards)),
    ):
        generate(model)
    # The choice of step 1 is known when the third forward comes; that of step 5 after the sixth.
    assert seen == [(1, 3), (5, 6)]


def test_values_of_the_chosen_token_are_evaluated_and_reported(tmp_path: Path, model: Any) -> None:
    (hit,) = hits_of(tmp_path, model, "entropy > 0.01 and step > 2 [once]")
    assert hit.step == 3
    assert hit.values["entropy"] > 0.01  # type: ignore[operator]
    assert hit.reason.startswith("entropy > 0.01 and step > 2: step 3 (decode): entropy ")
    assert "; token " in hit.reason


def test_a_token_is_hit_by_its_text(tmp_path: Path, model: Any) -> None:
    chosen = generate(model)[0, N_PROMPT:].tolist()
    wanted = chosen[2]
    # Without a tokenizer an id and a space are the text.
    hits = hits_of(tmp_path, model, f'token == "{wanted} "')
    assert steps(hits) == [step for step, token in enumerate(chosen) if token == wanted]
    hits = hits_of(tmp_path / "again", model, f"token_id == {wanted}", layers=None)
    assert len(hits) == chosen.count(wanted)


def test_a_probability_is_hit(tmp_path: Path, model: Any) -> None:
    low = hits_of(tmp_path, model, "prob < 0.5")
    high = hits_of(tmp_path / "again", model, "prob >= 0.5")
    assert sorted(steps([*low, *high])) == list(range(N_NEW))  # type: ignore[type-var]


def test_the_hit_of_the_last_step_is_not_lost(tmp_path: Path, model: Any) -> None:
    assert steps(hits_of(tmp_path, model, f"prob > 0 and step == {N_NEW - 1}")) == [N_NEW - 1]


def test_hits_and_ignore_are_counted_over_the_run(tmp_path: Path, model: Any) -> None:
    assert steps(hits_of(tmp_path, model, "prob > 0 [ignore=2]")) == [2, 3, 4, 5]


def test_log_leaves_an_event_and_stops_nothing(tmp_path: Path, model: Any) -> None:
    assert hits_of(tmp_path, model, "step == 2 [log]") == []
    with open_trace(tmp_path / "run.flextrace") as reader:
        (event,) = [row.event for row in reader.events() if row.event.kind == "breakpoint"]
    assert event.text.startswith("Breakpoint 1, step == 2: step 2 (decode)")
    assert (event.step, event.data["condition"]) == (2, "step == 2")


def test_what_the_level_does_not_record_is_reported_once(tmp_path: Path, model: Any) -> None:
    assert hits_of(tmp_path, model, "norm > 0", level="basic") == []
    with open_trace(tmp_path / "run.flextrace") as reader:
        events = [
            row.event for row in reader.events() if row.event.kind == "breakpoint-not-evaluated"
        ]
    assert len(events) == 1
    assert "norm is not known there" in events[0].text


# -- inside a forward --------------------------------------------------------------------------


def test_a_nan_is_hit_in_the_module_that_made_it(tmp_path: Path, model: Any) -> None:
    with corrupted(model.model.layers[1].self_attn, float("nan"), row=3):
        (hit,) = hits_of(tmp_path, model, "nan @ layers.*.self_attn [once]")
    assert (hit.step, hit.layer, hit.is_in_forward) == (0, 1, True)
    assert hit.reason == (
        "nan @ layers.*.self_attn: step 0 (prefill): "
        "1 NaN value in row 3 of model.layers.1.self_attn"
    )


def test_a_nan_is_hit_while_its_forward_runs(tmp_path: Path, model: Any) -> None:
    later: list[str] = []
    model.model.layers[2].register_forward_hook(lambda *_: later.append("layer 2"))
    with corrupted(model.model.layers[1].mlp, float("nan"), forward=2):
        with flexinspect.watch(
            model,
            out=tmp_path / "run.flextrace",
            breakpoints=["nan @ mlp and step > 0 [once]"],
            on_break=lambda hit: later.append(f"hit in step {hit.step}"),
        ):
            generate(model)
    assert later[:4] == ["layer 2", "layer 2", "hit in step 2", "layer 2"]


def test_an_infinity_is_no_nan(tmp_path: Path, model: Any) -> None:
    with corrupted(model.model.layers[0].input_layernorm, float("inf")):
        hits = hits_of(
            tmp_path, model, "nan @ layers.0.input_layernorm", "inf @ layers.0.input_layernorm"
        )
    assert [(hit.id, hit.step) for hit in hits] == [(2, 0)]


def test_a_nan_of_the_attention_is_hit_in_the_users_own_frame(tmp_path: Path, model: Any) -> None:
    frames: list[str] = []

    def notice(hit: BreakpointHit) -> None:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            frames.append(frame.f_code.co_name)

    def mine(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return run_kernel(query, key * float("nan"), value)

    def run_kernel(query: Any, key: Any, value: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        out = flex_attention(query, key, value, enable_gqa=True)
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2), None

    from transformers import AttentionInterface

    AttentionInterface.register("mine_nan", mine)
    model.set_attn_implementation("mine_nan")
    with flexinspect.watch(
        model,
        out=tmp_path / "run.flextrace",
        breakpoints=["nan @ layers.1.self_attn [once]"],
        on_break=notice,
    ):
        generate(model)
    assert "run_kernel" in frames
    assert "mine" in frames


def test_a_missing_module_is_reported(tmp_path: Path, model: Any) -> None:
    assert hits_of(tmp_path, model, "nan @ layers.*.self_atn") == []
    with open_trace(tmp_path / "run.flextrace") as reader:
        (events,) = [
            row.event for row in reader.events() if row.event.kind == "breakpoint-not-evaluated"
        ]
    assert "no module of the model has a matching name" in events.text
    assert "model.layers.0.self_attn" in events.text


def empty_row(offset: int) -> Callable[..., Any]:
    """A causal mask_mod under which position 4 sees nothing."""
    return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx + offset) & (q_idx + offset != 4)


def test_an_empty_row_is_hit_at_the_call(tmp_path: Path, model: Any) -> None:
    Own(model, mask_mod=empty_row)
    (hit,) = hits_of(tmp_path, model, "empty-row [once]")
    assert (hit.step, hit.layer, hit.is_in_forward) == (0, 0, True)
    assert "row 4 attends to no key" in hit.reason


def test_an_empty_row_of_a_dense_mask_is_hit(tmp_path: Path, model: Any) -> None:
    hits: list[BreakpointHit] = []
    prompt = torch.tensor([[0, 0, *ids(6, 5)]])
    with flexinspect.watch(
        model, out=tmp_path / "a.flextrace", breakpoints=["empty-row"], on_break=hits.append
    ):
        model(prompt, attention_mask=(prompt != 0).long())
    assert ["rows 0, 1 attend to no key" in hit.reason for hit in hits] == [True]


def test_rows_that_see_keys_are_not_empty(tmp_path: Path, model: Any) -> None:
    Own(model)
    assert hits_of(tmp_path, model, "empty-row", "fallback", 'path == "sdpa"') == []


def test_a_fallback_is_hit_where_an_exception_was_swallowed(tmp_path: Path, model: Any) -> None:
    Own(model, lambda layer, rows, keys: "caught" if (layer, rows) == (1, 1) else "flex")
    (hit,) = hits_of(tmp_path, model, "fallback [once]")
    assert (hit.step, hit.layer) == (1, 1)
    assert "layer 1 ran sdpa, after RuntimeError: expected all tensors" in hit.reason


def test_a_fallback_is_hit_where_a_layer_just_left_flex(tmp_path: Path, model: Any) -> None:
    Own(model, lambda layer, rows, keys: "sdpa" if layer == 2 and rows == 1 else "flex")
    (hit,) = hits_of(tmp_path, model, "fallback @ layers.2.self_attn [once]")
    assert (hit.step, hit.layer) == (1, 2)
    assert "where it ran FlexAttention before" in hit.reason


def test_a_path_is_hit_in_its_layer(tmp_path: Path, model: Any) -> None:
    Own(model, lambda layer, rows, keys: "sdpa" if layer == 1 else "flex")
    hits = hits_of(tmp_path, model, 'path == "sdpa" and layer != 1', 'path == "sdpa"')
    assert [(hit.id, hit.layer) for hit in hits] == [(2, 1)] * N_NEW


def test_a_planted_leak_is_hit_as_a_finding(tmp_path: Path, model: Any) -> None:
    Own(model, mask_mod=isolating([(1, 6), (6, 9)]))  # position 5 is in the wrong one
    declared: dict[str, Any] = {"segments": [(1, 5, "paraphrase 1"), (5, 9, "paraphrase 2")]}
    hits = hits_of(tmp_path, model, "finding mask.* >= warning", **declared)
    assert hits[0].step == 0
    assert "mask.leak: " in hits[0].reason
    tidy = make_model("llama")
    Own(tidy, mask_mod=isolating([(1, 5), (5, 9)]))
    assert hits_of(tmp_path / "again", tidy, "finding mask.* >= warning", **declared) == []


# -- who is stopped ----------------------------------------------------------------------------


def test_a_breakpoint_may_be_set_and_removed_while_the_model_runs(
    tmp_path: Path, model: Any
) -> None:
    hits: list[BreakpointHit] = []
    with flexinspect.watch(model, out=tmp_path / "run.flextrace", on_break=hits.append) as watched:
        generate(model)
        info = watched.breakpoints.add("prob > 0 and step == 1")
        generate(model)
        watched.breakpoints.remove(info.id)
        generate(model)
    assert [(hit.generation, hit.step) for hit in hits] == [(1, 1)]


def test_without_breakpoints_nothing_is_installed_and_nothing_waits(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexinspect_hooks.capture.recorder import Recorder

    n_drains = 0
    drain = Recorder.drain

    def count(recorder: Recorder) -> None:
        nonlocal n_drains
        n_drains += 1
        drain(recorder)

    monkeypatch.setattr(Recorder, "drain", count)
    n_hooks: list[int] = []

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    with flexinspect.watch(model, out=tmp_path / "run.flextrace") as watched:
        generate(model)
        plain, n_plain = hooks(), n_drains
        assert watched._session is not None
        assert watched._session.context.on_call is watched._session.context.on_kernel is None
        info = watched.breakpoints.add("nan @ layers.*.self_attn or empty-row")
        generate(model)
        n_hooks.append(hooks())
        assert watched._session.context.on_call is not None
        watched.breakpoints.enable(info.id, False)
        generate(model)
        n_hooks.append(hooks())
        assert watched._session.context.on_call is None
    assert n_plain == 1  # the prompt, which is in the trace before the prefill
    assert n_hooks == [plain + 3, plain]
    assert hooks() == 0


def test_the_time_of_a_stop_belongs_to_no_step(tmp_path: Path, model: Any) -> None:
    import time

    with flexinspect.watch(
        model,
        out=tmp_path / "run.flextrace",
        breakpoints=["prob > 0 and step in (1, 2)"],
        on_break=lambda hit: time.sleep(0.5),
    ):
        generate(model)
    with open_trace(tmp_path / "run.flextrace") as reader:
        records = reader.steps(0)
    assert len(records) == N_NEW
    assert all(record.wall_ms < 400 for record in records[1:])
    assert all(0 <= record.capture_ms < 400 for record in records)


def test_what_the_function_raises_reaches_the_caller(tmp_path: Path, model: Any) -> None:
    def refuse(hit: BreakpointHit) -> None:
        raise RuntimeError("enough")

    for number, condition in enumerate(("step == 1", "prob > 0", "nan @ mlp or layer == 1")):
        with pytest.raises(RuntimeError, match="enough"):
            out = tmp_path / f"{number}.flextrace"
            with flexinspect.watch(model, out=out, breakpoints=[condition], on_break=refuse):
                generate(model)


def test_a_forward_that_a_breakpoint_refused_may_be_run_again(tmp_path: Path, model: Any) -> None:
    def refuse(hit: BreakpointHit) -> None:
        raise RuntimeError("enough")

    out, input_ids = tmp_path / "run.flextrace", torch.tensor([ids(N_PROMPT, 5)])
    cache = DynamicCache(config=model.config)
    with flexinspect.watch(model, out=out, breakpoints=["step == 1 [once]"], on_break=refuse):
        for number in range(4):
            if number == 2:
                with pytest.raises(RuntimeError, match="enough"):
                    model(input_ids, past_key_values=cache)
            input_ids = model(input_ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    with open_trace(out) as reader:
        assert len(reader.generations()) == 1
        assert [step.step for step in reader.steps(0)] == [0, 1, 2, 3]
        assert [token.step for token in reader.tokens(0)][N_PROMPT:] == [0, 1, 2]


def test_pdb_opens_in_the_users_frame(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("p 'rows', rows\nc\n"))

    def patched(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        rows = query.shape[2]
        out = flex_attention(query * float("nan"), key, value, enable_gqa=True)
        assert rows
        return out.transpose(1, 2), None  # type: ignore[union-attr]

    from transformers import AttentionInterface

    AttentionInterface.register("mine_pdb", patched)
    model.set_attn_implementation("mine_pdb")
    with flexinspect.watch(
        model,
        out=tmp_path / "run.flextrace",
        breakpoints=["nan @ layers.1.self_attn [once]"],
        on_break="pdb",
    ):
        generate(model, 1)
    printed = capsys.readouterr()
    assert "Breakpoint 1, nan @ layers.1.self_attn: step 0 (prefill)" in printed.err
    assert f"('rows', {N_PROMPT})" in printed.out


def test_by_default_a_hit_is_printed_where_there_is_no_terminal(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with flexinspect.watch(model, out=tmp_path / "a.flextrace", breakpoints=["step == 2"]):
        generate(model)
    assert "flexinspect: Breakpoint 1, step == 2: step 2 (decode)" in capsys.readouterr().err


def test_what_cannot_be_read_is_refused_before_anything_runs(tmp_path: Path, model: Any) -> None:
    out = tmp_path / "run.flextrace"
    with pytest.raises(ExpressionError, match="entropi is not a known name"):
        flexinspect.watch(model, out=out, breakpoints=["entropi > 3"])
    with pytest.raises(UsageError, match="on_break must be a function"):
        flexinspect.watch(model, out=out, on_break="debugger")
    assert not out.exists()


def test_a_once_breakpoint_in_the_last_step_is_not_missed_when_it_is_evaluated_at_once(
    tmp_path: Path, model: Any
) -> None:
    hits: list[BreakpointHit] = []
    condition = f"prob > 0 and step == {N_NEW - 1} [once]"
    out = tmp_path / "run.flextrace"
    with flexinspect.watch(model, out=out, breakpoints=[condition], on_break=hits.append) as run:
        session = run._session
        assert session is not None
        end, left = session._tracker.end, list[int]()

        def judged_first() -> None:
            session.recorder.drain()
            left.append(len(run.breakpoints.enabled()))
            end()

        session._tracker.end = judged_first  # type: ignore[method-assign]
        generate(model)
        assert left[-1] == 0  # it was hit and disabled before any of them was evaluated
        assert steps(hits) == [N_NEW - 1]

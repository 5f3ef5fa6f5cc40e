"""A wrong or incomplete record is reported; a complete and correct one is not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from support.cases import found_in_case, found_in_trace, ran_case
from support.planting import of, one, planted, serious
from support.tiny import FAMILIES, ids, make_model
from support.warm_python import run_warm
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.models.llama import modeling_llama

from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord, GenerationRecord
from flexinspect.rules.attention.capture_checks import ObserverRule
from flexinspect.rules.attention.kernel_failures import FailuresRule, failure_finding_id
from flexinspect.rules.context import RuleContext
from flexinspect.trace.file.side_files import LastCallWriter, last_call_path, take_last_call
from flexinspect.trace.reader import open_trace


def prompt(n: int = 15) -> torch.Tensor:
    return torch.tensor([ids(n, 1)])


def generate(model: Any, new: int = 4, **options: Any) -> Any:
    return lambda: model.generate(prompt(), max_new_tokens=new, do_sample=False, **options)


def eager(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, bias: Any = 0.0, warm: float = 1.0
) -> Any:
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = query @ key.mT * module.scaling / warm + bias
    if mask is not None:
        scores = scores + mask[..., : key.shape[2]]
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


# -- LSE checks ------------------------------------------------------------------------------------


class Known:
    """A function under a name whose meaning is known, that does something else in some layers."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...], **how: Any
    ) -> None:
        self._layers, self._how = layers, how
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", self)

    def __call__(self, module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        how = self._how if module.layer_idx in self._layers else {}
        return eager(module, query, key, value, mask, **how)


@pytest.mark.parametrize(
    ("layers", "how"),
    [
        pytest.param((1,), {"warm": 3.0}, id="a temperature in one layer"),
        pytest.param((0, 1, 2), {"warm": 0.3}, id="a temperature in all layers"),
        pytest.param((2,), {"bias": 4 * torch.randn(1, 4, 1, 15)}, id="a bias per head"),
    ],
)
def test_a_layer_that_does_more_than_its_name_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...], how: dict[str, Any]
) -> None:
    model = make_model("llama")
    model.set_attn_implementation("eager")
    Known(monkeypatch, layers, **how)
    found = one(planted(tmp_path, model, lambda: model(prompt())), "observer.check-failed")
    assert (found.layer, found.severity) == (layers[0], Severity.WARNING)
    assert found.layers == (layers if len(layers) > 1 else ())
    assert "step 0, the record is not what ran" in found.sentence
    assert found.evidence["check_error"] > found.evidence["tolerance"] == 0.01


def test_a_mask_that_is_dropped_under_a_known_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama").to(torch.bfloat16)
    model.set_attn_implementation("eager")
    input_ids = prompt()
    input_ids[0, :6] = 0

    def open_for_all(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        return eager(module, query, key, value, None)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", open_for_all)
    found = planted(
        tmp_path, model, lambda: model(input_ids, attention_mask=(input_ids != 0).long())
    )
    check = one(found, "observer.check-failed")
    assert 1 in check.layers
    assert check.evidence["tolerance"] == 0.12  # bfloat16, recomputed output


def test_a_user_function_under_the_name_sdpa(tmp_path: Path) -> None:
    model = make_model("llama")
    before = AttentionInterface._global_mapping["sdpa"]
    AttentionInterface.register(
        "sdpa", lambda m, q, k, v, mask, **_: eager(m, q, k, v, None, warm=5)
    )
    try:
        found = planted(tmp_path, model, lambda: model(prompt()))
    finally:
        AttentionInterface.register("sdpa", before)
    assert one(found, "observer.check-failed").layers == (0, 1, 2)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lse_checks_of_every_family_pass(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    model = make_model(family).to(dtype)
    model.set_attn_implementation("eager")
    assert serious(planted(tmp_path, model, generate(model))) == []


def test_a_row_of_padding_in_float16_is_not_recomputed(tmp_path: Path) -> None:
    """The lowest float16 plus a score is rounded to 32, or overflows to -inf."""
    model = make_model("phi3", sliding_window=6).half()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.qkv_proj.weight *= 12
    mask = (torch.arange(15) < 5).long()[None]
    found = planted(tmp_path, model, lambda: model(prompt(), attention_mask=mask))
    assert of(found, "observer.check-failed") == []


def test_dropout_while_training_is_no_other_mask(tmp_path: Path) -> None:
    model = make_model("llama", attention_dropout=0.5).train()
    model.set_attn_implementation("eager")
    assert of(planted(tmp_path, model, lambda: model(prompt())), "observer.check-failed") == []


def _without_head_0(
    self: Any, hidden_states: Any, position_embeddings: Any, past_key_values: Any = None, **_: Any
) -> Any:
    """Compute the attention of a Llama, and set head 0 to zero in what the kernel returned."""
    batch, n, _ = hidden_states.shape
    projections = (self.q_proj, self.k_proj, self.v_proj)
    q, k, v = (
        one(hidden_states).view(batch, n, -1, self.head_dim).transpose(1, 2) for one in projections
    )
    q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1, enable_gqa=True)
    out[:, 0] = 0
    return self.o_proj(out.transpose(1, 2).reshape(batch, n, -1)), None


def test_a_head_that_the_program_sets_to_zero_after_the_kernel_is_no_other_record(
    tmp_path: Path,
) -> None:
    model = make_model("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = MethodType(_without_head_0, attention)
    found = planted(tmp_path, model, generate(model))
    assert of(found, "observer.check-failed") == []


# -- what was not recorded -------------------------------------------------------------------------


def test_a_layer_that_does_its_own_arithmetic_from_the_decode_steps_on(tmp_path: Path) -> None:
    model = make_model("llama")
    inner = model.model.layers[1].self_attn
    original = inner.forward

    def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.shape[1] > 1:
            return original(hidden_states, *args, **kwargs)
        return torch.zeros_like(hidden_states), None

    inner.forward = forward
    found = one(planted(tmp_path, model, generate(model)), "observer.incomplete")
    assert (found.step, found.layer, found.severity) == (1, 1, Severity.WARNING)
    assert found.sentence == (
        "No attention call of layer 1 was captured in step 1, unlike in earlier steps and in "
        "layers 0, 2: it is not known what ran there."
    )
    assert found.evidence["missing"] == [1]


def test_a_layer_that_was_never_seen_is_a_note(tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.layers[2].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    found = one(planted(tmp_path, model, lambda: model(prompt())), "observer.incomplete")
    assert found.severity is Severity.NOTE
    assert found.sentence.startswith("Attention was seen in 2 of 3 layers")


@pytest.mark.parametrize("kind", ["hook-disabled", "step-not-recorded", "rule-disabled"])
def test_a_broken_recording_is_a_warning_inside_and_outside_steps(kind: str) -> None:
    rule, context = ObserverRule(), RuleContext()
    rule.context = context
    (found,) = rule.on_event(EventRecord(kind, "The hook 'x' failed", 0.0))
    assert (found.id, found.severity, found.generation) == (
        "observer.incomplete",
        Severity.WARNING,
        0,
    )
    context.start_generation(GenerationRecord(3, "s", "m", "c", (), ()))
    (again,) = rule.on_event(EventRecord(kind, "again", 0.0))
    assert again.generation == 3
    assert not [*rule.on_event(EventRecord("phase", "loading", 0.0))]


def test_beams_are_only_a_note(tmp_path: Path) -> None:
    model = make_model("llama")
    found = planted(tmp_path, model, generate(model, num_beams=3))
    assert one(found, "observer.incomplete").severity is Severity.NOTE
    assert serious(found) == []


# -- weights that are none -------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(0,), (1, 2)])
def test_an_output_that_is_returned_as_weights(tmp_path: Path, layers: tuple[int, ...]) -> None:
    model = make_model("llama")
    model.set_attn_implementation("eager")
    for layer in layers:
        inner = model.model.layers[layer].self_attn
        inner.forward = _twice(inner.forward)
    found = planted(tmp_path, model, lambda: model(prompt(), output_attentions=True))
    finding = one(found, "observer.not-weights")
    assert (finding.step, finding.layer) == (0, layers[0])
    assert (
        "a tensor (1, 15, 48), whose rows do not sum to 1; weights would be (1, 4, 15, 15)"
        in finding.sentence
    )
    assert ("more layers" in finding.sentence) == (len(layers) > 1)


def _twice(original: Any) -> Any:
    return lambda *args, **kwargs: (original(*args, **kwargs)[0],) * 2


def test_a_log_sum_exp_that_is_returned_as_weights(tmp_path: Path) -> None:
    model = make_model("llama")

    _bare(model, return_lse=True)
    found = planted(tmp_path, model, lambda: model(prompt(), output_attentions=True))
    assert "a tensor (1, 4, 15)" in one(found, "observer.not-weights").sentence


def _bare(model: Any, *, return_lse: bool) -> None:
    """Let a model run flex without a mask, and return its log-sum-exp where weights belong."""

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        found = flex_attention(query, key, value, enable_gqa=True, return_lse=return_lse)
        out, lse = found if return_lse else (found, None)
        return out.transpose(1, 2).contiguous(), lse

    AttentionInterface.register(f"bare_{return_lse}", attention)
    model.set_attn_implementation(f"bare_{return_lse}")


def test_correct_weights_give_no_finding(tmp_path: Path) -> None:
    model = make_model("gemma2")
    found = planted(tmp_path, model, lambda: model(prompt(), output_attentions=True))
    assert serious(found) == []


# -- calls that fail -------------------------------------------------------------------------------


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Log(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_fresh_dynamo", "flex_with_dynamo")
def test_a_logger_around_one_step_breaks_the_steps_after_it(tmp_path: Path) -> None:
    model = make_model("llama")
    _bare(model, return_lse=False)

    def run() -> None:
        model(prompt())
        with pytest.raises(NotImplementedError), Log():
            model(prompt())
        with pytest.raises(Exception, match="skipped"):
            model(prompt())
        torch._dynamo.reset()
        model(prompt())

    found = planted(tmp_path, model, run)
    under, after = of(found, "observer.logger-breaks-flex")
    assert (under.generation, under.layer, under.severity) == (1, 0, Severity.WARNING)
    assert "inside a dispatch mode (" in under.sentence
    assert (after.generation, after.layer, after.severity) == (2, 0, Severity.ERROR)
    assert "until torch._dynamo.reset()" in after.sentence
    assert of(found, "path.kernel-failed") == []


@pytest.mark.parametrize(
    ("error", "finding"),
    [
        ("InductorError: CppCompileError: C++ compile error", "kernel.does-not-build"),
        ("InductorError: LoweringException: NotImplementedError", "kernel.does-not-build"),
        ("BackendCompilerFailed: backend='inductor' raised", "kernel.does-not-build"),
        ("ValueError: block_mask was created for", "path.kernel-failed"),
        ("NotImplementedError: max_scores is not there on CPU", "path.kernel-failed"),
        ("FailOnRecompileLimitHit: Hard failure", ""),
    ],
)
def test_a_failure_is_classified_by_its_message(error: str, finding: str) -> None:
    assert failure_finding_id(error) == finding


def failed(error: str, *after: str, step: int = 2) -> list[Finding]:
    rule, context = FailuresRule(), RuleContext()
    context.start_generation(GenerationRecord(0, "s", "m", "c", (), ()))
    rule.on_generation_start(context)
    data = {"layer": 1, "kernel": "flex_attention", "error": error, "q_len": 1, "kv_len": 9}
    found = [*rule.on_event(EventRecord("kernel-failed", "", 0.0, 0, step, data))]
    for kind in after:
        found += rule.on_event(EventRecord(kind, "", 0.0, 0, step))
    return [*found, *rule.on_generation_end()]


def test_a_failed_build_is_reported_when_the_forward_ends() -> None:
    (found,) = failed("InductorError: CppCompileError: C++ compile error", "forward-failed")
    assert (found.id, found.step, found.layer) == ("kernel.does-not-build", 2, 1)
    assert found.sentence == (
        "Compiled flex_attention does not build in layer 1, step 2 (1 row, 9 keys): "
        "InductorError: CppCompileError: C++ compile error."
    )


def test_two_words_of_one_end_are_one_finding() -> None:
    assert len(failed("ValueError: x", "error", "forward-failed")) == 1


# -- a process that is taken down ------------------------------------------------------------------

DEADLY = """
import os, torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

def backend(graph, example):
    def run(*args):
        if os.environ["DIES"] == "inside":
            os.kill(os.getpid(), {signal})
        return graph(*args)
    return run

held = torch.zeros(1, 1, 8, 8)
query = torch.randn(1, 4, 8, 16)
if os.environ["DIES"] != "before":
    call = torch.compile(flex_attention, backend=backend)
    call(query, query, query, score_mod=lambda s, b, h, q, k: s + held[b][0][q][k])
if os.environ["DIES"] != "never":
    os.kill(os.getpid(), {signal})
"""


def died(tmp_path: Path, when: str, number: int, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    script, out = tmp_path / "deadly.py", tmp_path / "deadly.flextrace"
    script.write_text(DEADLY.replace("{signal}", str(number)))
    monkeypatch.setenv("DIES", when)
    run_warm(["-m", "flexinspect", "run", "--no-ui", "--out", str(out), str(script)])
    assert not last_call_path(out).exists()
    with open_trace(out) as trace:
        return of(trace.findings(), "observer.crash")


def test_a_process_that_dies_in_compiled_flex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = died(tmp_path, "inside", signal.SIGSEGV, monkeypatch)
    assert found.severity is Severity.ERROR
    assert found.sentence == (
        "The program was ended by SIGSEGV: it had entered flex (compiled, score_mod with captured "
        "tensor) outside of a model (8 rows, 8 keys), which did not return."
    )
    assert found.why
    assert found.query


def test_a_process_that_dies_later_or_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (after,) = died(tmp_path, "after", signal.SIGABRT, monkeypatch)
    assert "had returned: what compiled code breaks may show later" in after.sentence
    (tmp_path / "deadly.flextrace").unlink()
    (before,) = died(tmp_path, "before", signal.SIGBUS, monkeypatch)
    assert before.sentence == "The program was ended by SIGBUS; no step was complete yet."


def test_a_process_that_is_asked_to_end_or_ends_well_has_not_crashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert died(tmp_path, "after", signal.SIGTERM, monkeypatch) == []
    (tmp_path / "deadly.flextrace").unlink()
    assert died(tmp_path, "never", 0, monkeypatch) == []


def test_the_last_kernel_call_records_where_it_was_made(tmp_path: Path) -> None:
    trace = tmp_path / "a.flextrace"
    calls = LastCallWriter(trace)
    assert take_last_call(trace) is None
    calls.enter((2, 7, 3), 1, 40, "flex (compiled)")
    child = os.fork()
    if not child:
        calls._pid = 0
        os._exit(0)
    os.waitpid(child, 0)
    call = take_last_call(trace)
    assert call is not None
    assert (call.is_running, call.generation, call.step, call.layer) == (True, 2, 7, 3)
    assert (call.q_len, call.kv_len, call.description) == (1, 40, "flex (compiled)")
    assert not last_call_path(trace).exists()
    calls.leave()
    calls.remove()


def test_the_last_call_in_a_folder_that_is_gone_is_none(tmp_path: Path) -> None:
    calls = LastCallWriter(tmp_path / "gone" / "a.flextrace")
    calls.enter((-1, -1, -1), 1, 1, "flex")
    calls.leave()
    calls.remove()
    assert list(tmp_path.iterdir()) == []


# -- the cases -------------------------------------------------------------------------------------


def test_weights_that_are_none() -> None:
    finding = one(found_in_case("o01_not_weights"), "observer.not-weights")
    assert (finding.step, finding.layer) == (0, 0)
    assert (
        "(1, 14, 32), whose rows do not sum to 1; weights would be (1, 4, 14, 14)"
        in finding.sentence
    )


def test_a_logger_outside_of_a_model() -> None:
    found = found_in_case("o03_logger_breaks_flex")
    under, after = of(found, "observer.logger-breaks-flex")
    assert "NotImplementedError in a standalone call inside a dispatch mode" in under.sentence
    assert "__main__.Log" in under.sentence
    assert "until torch._dynamo.reset()" in after.sentence


@pytest.mark.slow
def test_a_compiled_call_that_kills_the_process() -> None:
    crash = one(found_in_trace(ran_case("l01_compiled_crash")[1]), "observer.crash")
    assert "flex (compiled, score_mod with captured tensor)" in crash.sentence


@pytest.mark.slow
def test_a_compiled_call_that_does_not_build() -> None:
    found = one(found_in_case("l01_compiled_does_not_build"), "kernel.does-not-build")
    assert (found.step, found.layer, found.severity) == (1, 0, Severity.ERROR)
    assert "InductorError" in found.sentence


@pytest.mark.parametrize("window", [None, 9])
def test_an_own_function_that_masks_by_itself_is_no_fault(
    tmp_path: Path, window: int | None
) -> None:
    def mine(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        n, m = q.shape[2], k.shape[2]
        rows, keys = torch.arange(m - n, m)[:, None], torch.arange(m)[None]
        allowed = keys <= rows
        if window is not None:
            allowed &= keys > rows - window
        closed = torch.zeros(n, m).masked_fill(~allowed, -torch.inf)[None, None]
        return eager(module, q, k, v, closed)

    model = make_model("llama" if window is None else "mistral")
    AttentionInterface.register("mine", mine)
    try:
        model.set_attn_implementation("mine")
        found = planted(tmp_path, model, lambda: model(prompt()))
    finally:
        del AttentionInterface._global_mapping["mine"]
    assert [one for one in found if one.severity is not Severity.NOTE] == []

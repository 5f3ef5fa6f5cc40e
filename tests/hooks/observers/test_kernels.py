"""Kernels that code of the user calls are observed however they were imported, and restored."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
import torch.nn.functional as functional
from support.tiny import ids, make_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface
from transformers.models.llama import modeling_llama

import flexinspect
from flexinspect.records.step import CallRecord
from flexinspect.trace.reader import TraceReader
from flexinspect_hooks.observers.attention import kernel_calls
from flexinspect_hooks.observers.attention.kernel_calls import KernelCall, observe_kernels

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


class Listener:
    """An observer that keeps its calls, outputs and errors."""

    def __init__(self, wants: Callable[[KernelCall], bool] = lambda call: True) -> None:
        self.calls: list[KernelCall] = []
        self.outputs: list[Any] = []
        self.errors: list[BaseException] = []
        self.unwanted: set[str] = set()
        self._wants = wants

    def accepts(self, name: str) -> bool:
        return name not in self.unwanted

    def before(self, call: KernelCall) -> KernelCall | None:
        if not self._wants(call):
            return None
        self.calls.append(call)
        return call

    def after(self, note: KernelCall, output: Any) -> None:
        self.outputs.append(output)

    def failed(self, note: KernelCall, error: BaseException) -> None:
        self.errors.append(error)


@pytest.fixture
def observer() -> Iterator[Listener]:
    listener = Listener()
    remove = observe_kernels(listener)
    yield listener
    remove()


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def block_mask(q_len: int, kv_len: int | None = None, mask_mod: Any = causal) -> Any:
    return create_block_mask(mask_mod, None, None, q_len, kv_len or q_len, device="cpu")


Q = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))


def test_a_kernel_that_no_observer_accepts_is_not_described(observer: Listener) -> None:
    observer.unwanted = {"flex_attention"}
    flex_attention(Q, Q, Q)
    functional.scaled_dot_product_attention(Q, Q, Q)
    assert [call.name for call in observer.calls] == ["scaled_dot_product_attention"]


def test_a_kernel_is_observed_under_every_name_that_refers_to_it(observer: Listener) -> None:
    held = {"in a closure": partial(flex_attention, Q, Q)}
    held["in a closure"](Q)
    flex_module.flex_attention(Q, Q, Q)
    functional.scaled_dot_product_attention(Q, Q, Q)
    sdpa(Q, Q, Q, is_causal=True)
    names = [call.name for call in observer.calls]
    assert names == ["flex_attention"] * 2 + ["scaled_dot_product_attention"] * 2
    assert observer.calls[3].arguments["is_causal"] is True
    assert len(observer.outputs) == 4


def test_arguments_are_passed_by_name_and_results_are_unchanged(observer: Listener) -> None:
    mask = block_mask(8)
    out, aux = flex_attention(Q, Q, Q, None, mask, 0.5, return_aux=AuxRequest(lse=True))
    built, call = observer.calls
    assert (built.name, built.arguments["Q_LEN"], built.arguments["KV_LEN"]) == (
        "create_block_mask",
        8,
        8,
    )
    assert call.arguments["block_mask"] is mask
    assert call.arguments["scale"] == 0.5
    assert observer.outputs[1][0] is out
    assert aux.lse.shape == (1, 2, 8)


def test_a_compiled_kernel_is_observed_at_each_call_and_not_recompiled() -> None:
    count = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention, backend=count, fullgraph=True)
    before = compiled(Q, Q, Q, block_mask=block_mask(8))
    listener = Listener()
    remove = observe_kernels(listener)
    during = [compiled(Q, Q, Q, block_mask=block_mask(8)) for _ in range(2)]
    remove()
    after = compiled(Q, Q, Q, block_mask=block_mask(8))
    assert [c.compiled for c in listener.calls if c.name == "flex_attention"] == [True, True]
    assert all(torch.equal(before, found) for found in (*during, after))
    assert count.frame_count == 1


def test_a_graph_around_the_kernel_contains_no_observer() -> None:
    mask = block_mask(8)

    def whole(q: Tensor) -> Tensor:
        return sdpa(flex_attention(q * 2, q, q, block_mask=mask), q, q)

    expected = whole(Q)
    listener = Listener()
    remove = observe_kernels(listener)
    during = torch.compile(whole, backend="eager", fullgraph=True)
    assert torch.equal(during(Q), expected)
    remove()
    assert listener.calls == []
    assert torch.equal(during(Q), expected)
    assert torch.equal(torch.compile(whole, backend="eager", fullgraph=True)(Q), expected)


def test_everything_is_restored_when_the_last_observer_is_removed() -> None:
    codes = [f.__code__ for f in (flex_attention, create_block_mask)]
    names = set(vars(flex_module))
    first, second = observe_kernels(Listener()), observe_kernels(Listener())
    assert flex_attention.__code__ is not codes[0]
    first()
    assert flex_attention.__code__ is not codes[0]
    second()
    assert [f.__code__ for f in (flex_attention, create_block_mask)] == codes
    assert set(vars(flex_module)) == names
    built_in = torch._C._nn.scaled_dot_product_attention
    assert functional.scaled_dot_product_attention is built_in
    assert globals()["sdpa"] is built_in


attend: Any = None


def test_a_variable_bound_while_kernels_are_observed_is_restored() -> None:
    global attend
    remove = observe_kernels(Listener())
    attend = functional.scaled_dot_product_attention
    assert attend is not torch._C._nn.scaled_dot_product_attention
    remove()
    assert attend is torch._C._nn.scaled_dot_product_attention
    assert functional.scaled_dot_product_attention is attend


def test_only_the_newest_observer_that_accepts_a_call_receives_it(observer: Listener) -> None:
    listener = Listener(wants=lambda call: call.name == "flex_attention")
    remove = observe_kernels(listener)
    flex_attention(Q, Q, Q)
    sdpa(Q, Q, Q)
    remove()
    assert [call.name for call in listener.calls] == ["flex_attention"]
    assert [call.name for call in observer.calls] == ["scaled_dot_product_attention"]


def test_an_observer_that_fails_does_not_affect_the_caller() -> None:
    class Broken(Listener):
        def after(self, note: KernelCall, output: Any) -> None:
            raise RuntimeError("broken")

    remove = observe_kernels(Broken())
    out = sdpa(Q, Q, Q)
    remove()
    assert torch.equal(out, sdpa(Q, Q, Q))


def test_an_exception_of_a_kernel_is_unchanged(observer: Listener) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        flex_attention(Q, Q, Q, block_mask=block_mask(8, 9))
    assert observer.errors == [caught.value]


# -- in a model ---------------------------------------------------------------------------------


def recorded(
    model: nn.Module, path: Path, run: Callable[[], object], level: str = "advanced"
) -> TraceReader:
    with flexinspect.watch(model, out=path, level=level) as trace:
        run()
    return trace.reader()


def llama(attention: str = "sdpa") -> Any:
    model = make_model("llama")
    model.set_attn_implementation(attention)
    return model


def model_input(n: int = 9) -> Tensor:
    return torch.tensor([ids(n, 3)])


@pytest.fixture
def interface() -> Iterator[Callable[[str, Callable[..., Any]], None]]:
    names: list[str] = []

    def register(name: str, function: Callable[..., Any]) -> None:
        names.append(name)
        AttentionInterface.register(name, function)

    yield register
    for name in names:
        AttentionInterface._global_mapping.pop(name, None)


def calls(reader: TraceReader, step: int = 0) -> list[CallRecord]:
    return reader.calls(0, step)


def own_segments(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & ((q_idx < 4) == (kv_idx < 4))


def own_flex(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kw: Any) -> Any:
    mask = block_mask(q.shape[2], k.shape[2], own_segments)
    scale = kw.get("scaling")
    out = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def test_a_mask_created_inside_a_registered_function_is_recorded(
    tmp_path: Path, interface: Any
) -> None:
    interface("own_flex", own_flex)
    model = llama("own_flex")
    expected = model(model_input()).logits
    got: list[Tensor] = []
    reader = recorded(model, tmp_path / "a", lambda: got.append(model(model_input()).logits))
    assert torch.equal(got[0], expected)
    found = calls(reader)
    assert [(c.layer, c.path, c.backend) for c in found] == [
        (layer, "flex uncompiled", "own_flex") for layer in range(len(found))
    ]
    assert {c.mask_passed_to_layer for c in found} == {"none"}
    mask = reader.mask(str(found[0].mask))
    assert mask is not None
    assert mask.cells is not None
    q_idx, kv_idx = torch.arange(9)[:, None], torch.arange(9)
    assert (mask.cells[0] == own_segments(Q, Q, q_idx, kv_idx).numpy()).all()
    assert all(c.lse_error is not None and c.lse_error < 1e-4 for c in found)
    builds = reader.builds(0, 0)
    assert [(b.layer, b.q_len, b.kv_len, b.heads) for b in builds] == [
        (layer, 9, 9, None) for layer in range(len(found))
    ]
    assert builds[0].mask_mod.endswith("own_segments")


def test_a_layer_that_falls_back_records_the_suppressed_exception(
    tmp_path: Path, interface: Any
) -> None:
    def falling(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        try:
            if module.layer_idx == 1:
                raise RuntimeError("device mismatch")
            return own_flex(module, q, k, v, mask, **kw)
        except RuntimeError:
            repeat = q.shape[1] // k.shape[1]
            k, v = (t.repeat_interleave(repeat, 1) for t in (k, v))
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2).contiguous(), None

    interface("falling", falling)
    model = llama("falling")
    reader = recorded(model, tmp_path / "a", lambda: model(model_input()))
    one = calls(reader)[1]
    assert (one.layer, one.path, one.suppressed_exception) == (
        1,
        "sdpa",
        "RuntimeError: device mismatch",
    )
    assert [c.suppressed_exception for c in calls(reader) if c.layer != 1] == [None] * (
        len(calls(reader)) - 1
    )
    mask = reader.mask(str(one.mask))
    assert mask is not None
    assert mask.kind == "none, causal"


def test_a_kernel_that_raises_is_an_event_with_lengths_even_if_the_step_is_lost(
    tmp_path: Path, interface: Any
) -> None:
    def wrong(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        made = block_mask(q.shape[2], k.shape[2] - 1)
        return flex_attention(q, k, v, block_mask=made, enable_gqa=True), None

    interface("wrong", wrong)
    model = llama("wrong")

    def run() -> None:
        with pytest.raises((ValueError, RuntimeError)):
            model(model_input())

    reader = recorded(model, tmp_path / "a", run)
    (event,) = [row.event for row in reader.events() if row.event.kind == "kernel-failed"]
    facts = ("layer", "kernel", "q_len", "kv_len", "mask_q", "mask_kv")
    assert [event.data[name] for name in facts] == [0, "flex_attention", 9, 9, 9, 8]
    assert event.text.startswith("Layer 0: flex_attention raised ")


def test_a_fallback_after_a_kernel_that_raised_is_recorded_outside_of_the_handler(
    tmp_path: Path, interface: Any
) -> None:
    def patient(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = None
        with suppress(Exception):
            out = flex_attention(q, k, v, block_mask=block_mask(q.shape[2], k.shape[2] + 1))
        if out is None:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    interface("patient", patient)
    model = llama("patient")
    reader = recorded(model, tmp_path / "a", lambda: model(model_input()))
    assert all(
        (c.suppressed_exception or "").startswith(("ValueError", "RuntimeError"))
        for c in calls(reader)
    )


def test_a_replaced_forward_that_calls_the_kernel_itself_is_recorded_in_its_layer(
    tmp_path: Path,
) -> None:
    model = llama()
    attention = model.model.layers[1].self_attn
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads

    def forward(hidden_states: Tensor, attention_mask: Any = None, **kw: Any) -> Any:
        batch, n, _ = hidden_states.shape
        q = attention.q_proj(hidden_states).view(batch, n, heads, -1).transpose(1, 2)
        k = attention.k_proj(hidden_states).view(batch, n, kv_heads, -1).transpose(1, 2)
        v = attention.v_proj(hidden_states).view(batch, n, kv_heads, -1).transpose(1, 2)
        out = flex_attention(q, k, v, block_mask=block_mask(n), enable_gqa=True)
        return attention.o_proj(out.transpose(1, 2).reshape(batch, n, -1)), None

    attention.forward = forward
    reader = recorded(model, tmp_path / "a", lambda: model(model_input(), use_cache=False))
    found = calls(reader)
    assert [c.layer for c in found] == list(range(model.config.num_hidden_layers))
    assert (found[1].path, found[1].backend) == ("flex uncompiled", "direct")
    assert found[0].backend == "sdpa"
    assert found[1].lse_error is not None
    assert found[1].lse_error < 1e-4


def test_calls_of_a_model_without_known_layers_are_numbered(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.lin(x).view(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + out.transpose(1, 2).reshape(x.shape)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(300, 16)
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            for block in self.blocks:
                x = block(x)
            return x @ self.embed.weight.T

    model = Model()
    with torch.no_grad():
        reader = recorded(model, tmp_path / "a", lambda: model(model_input()))
    found = calls(reader)
    assert [(c.layer, c.path, c.q_heads, c.kv_len) for c in found] == [
        (layer, "sdpa", 2, 9) for layer in range(3)
    ]
    assert all(c.lse_error is not None and c.lse_error < 1e-4 for c in found)


def test_a_call_with_a_score_mod_is_not_checked(tmp_path: Path, interface: Any) -> None:
    def biased(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + (i - j)

        out = flex_attention(q, k, v, score_mod, block_mask(q.shape[2]), enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    interface("biased", biased)
    model = llama("biased")
    reader = recorded(model, tmp_path / "a", lambda: model(model_input(), use_cache=False))
    assert {(c.lse_error, c.check_kind) for c in calls(reader)} == {(None, None)}


def test_transformers_flex_run_uncompiled_is_recorded_as_uncompiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.integrations.flex_attention as integration

    def plain(q: Tensor, k: Tensor, v: Tensor, training: bool = False, **kw: Any) -> Any:
        return flex_attention(q, k, v, **kw)

    monkeypatch.setattr(integration, "compile_friendly_flex_attention", plain)
    model = llama("flex_attention")
    import transformers.masking_utils as masking

    make = masking.create_block_mask

    def uncompiled(*args: Any, _compile: Any = None, **kw: Any) -> Any:
        return make(*args, **kw)

    monkeypatch.setattr(masking, "create_block_mask", uncompiled)
    with torch.no_grad():
        reader = recorded(model, tmp_path / "a", lambda: model(model_input()))
    assert {c.path for c in calls(reader)} == {"flex uncompiled"}
    assert [b.layer for b in reader.builds(0, 0)] == [None]


def test_sdpa_with_is_causal_for_one_row_attends_to_one_key(tmp_path: Path, interface: Any) -> None:
    def upper_left(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    interface("upper_left", upper_left)
    model = llama("upper_left")
    options = {"do_sample": False, "max_new_tokens": 3}
    reader = recorded(model, tmp_path / "a", lambda: model.generate(model_input(), **options))
    decode = calls(reader, 1)[0]
    mask = reader.mask(str(decode.mask))
    assert mask is not None
    assert mask.cells is not None
    assert mask.cells.sum() == 1
    assert mask.cells[0, 0, 0]
    assert decode.lse_error is not None
    assert decode.lse_error < 1e-4


def test_a_name_that_a_program_gives_to_sdpa_between_two_blocks_is_observed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("edited_cell")
    module.attend = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "edited_cell", module)
    original = functional.scaled_dot_product_attention
    kernel_calls._rebind(original)()
    module.attend = original  # type: ignore[attr-defined]
    restore = kernel_calls._rebind(original)
    assert module.attend is functional.scaled_dot_product_attention is not original
    restore()
    assert module.attend is functional.scaled_dot_product_attention is original


def test_a_name_that_an_installed_package_gets_between_two_blocks_is_observed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = functional.scaled_dot_product_attention
    kernel_calls._rebind(original)()
    monkeypatch.setattr(modeling_llama, "attend", original, raising=False)
    restore = kernel_calls._rebind(original)
    assert modeling_llama.attend is functional.scaled_dot_product_attention is not original
    restore()
    assert modeling_llama.attend is functional.scaled_dot_product_attention is original


def test_modules_of_python_and_of_installed_packages_are_searched_once() -> None:
    kernel_calls._rebind(functional.scaled_dot_product_attention)()
    are_libraries = {
        name: kernel_calls._is_library(name)
        for name in ("json", "torch", "transformers", "flexinspect_hooks", "__main__")
    }
    assert are_libraries == {
        "json": True,
        "torch": True,
        "transformers": True,
        "flexinspect_hooks": False,
        "__main__": False,
    }
    assert "transformers.models.llama.modeling_llama" in kernel_calls._without_reference
    assert "torch.nn.functional" not in kernel_calls._without_reference
    assert not any(name.startswith("flexinspect") for name in kernel_calls._without_reference)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_causal_bias_of_torch_computes_what_it_does_without_an_observer(
    observer: Listener, rows: int
) -> None:
    from torch.nn.attention.bias import causal_lower_right

    query, (key, value) = torch.randn(1, 2, rows, 16), torch.randn(2, 1, 2, 5, 16)
    mask = torch.ones(rows, 5, dtype=torch.bool).tril(5 - rows)
    expected = sdpa(query, key, value, mask)
    observer.calls.clear()
    for found in (
        functional.scaled_dot_product_attention(query, key, value, causal_lower_right(rows, 5)),
        functional.scaled_dot_product_attention(
            query, key, value, attn_mask=causal_lower_right(rows, 5)
        ),
    ):
        torch.testing.assert_close(found, expected)
    assert len(observer.calls) == 2
    for call in observer.calls:
        assert torch.equal(call.arguments["attn_mask"], mask)

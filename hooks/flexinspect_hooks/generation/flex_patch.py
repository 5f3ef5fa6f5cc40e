"""Run a Hugging Face model on FlexAttention with the masks of a `MaskSource`, and restore it.

The patch uses transformers' attention and mask interfaces: it registers a new name in both, sets it
in the model's configurations, and restores everything on exit. There is no fallback: an attention
call that fails raises, with its layer and step in the message.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex_module
from msgspec import Struct
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from flexinspect.core.errors import AttentionCallError, MaskError, ModelError, summarize_error
from flexinspect_hooks.capture import last_kernel_call
from flexinspect_hooks.generation.mask_source import ForwardWindow, MaskMod, MaskSource
from flexinspect_hooks.python_internals.patching import patch

BACKEND = "flexinspect"  # prefix of the name under which the patch registers itself
N_COMPILE_FORWARDS = 3  # that may compile; their calls are noted in case the process dies

Qkv = tuple[Tensor, Tensor, Tensor]

_numbers = itertools.count(1)


class LastCallInfo(Struct):
    """Facts about the newest call of the patched attention function, for the observers."""

    path: str = ""
    lse: Tensor | None = None
    softcap: float | None = None


LAST_CALL = LastCallInfo()


class FlexPatch:
    """While entered, `model` runs FlexAttention with the masks of `source`.

    `compiled` runs `torch.compile`d kernels; `on_compile` is called with "prefill" or "decode"
    before the first call of each kind, which compiles it. Otherwise flex runs uncompiled and
    without dynamo, so that every mask_mod is plain Python. Nested patches of one model restore in
    order. Entering raises `ModelError` for a model without transformers' attention interface.
    """

    def __init__(
        self,
        model: nn.Module,
        source: MaskSource,
        *,
        compiled: bool = False,
        on_compile: Callable[[str], None] | None = None,
    ) -> None:
        self._on_compile = on_compile
        self.model = model
        self.source = source
        self.compiled = compiled
        self._n_forwards = 0
        self._rows = (0, 0)  # first row and number of rows of the newest forward pass
        self._restores = ExitStack()
        self._heads: dict[int, int] = {}
        self._mask_heads = 1

    def __enter__(self) -> FlexPatch:
        from transformers import AttentionInterface, AttentionMaskInterface

        can_set = getattr(self.model, "_can_set_attn_implementation", None)
        if can_set is None or not can_set():
            text = f"{type(self.model).__name__} does not use transformers' attention interface, "
            text += "so it cannot run FlexAttention."
            hint = "Use a class that calls ALL_ATTENTION_FUNCTIONS (Llama, Qwen, Mistral, ...)."
            raise ModelError(text, hint=hint)
        name = f"{BACKEND}_{next(_numbers)}"
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, self._make_mask)
        for registry in (AttentionInterface, AttentionMaskInterface):
            self._restores.callback(registry._global_mapping.pop, name, None)
        for config in model_configs(self.model):
            self._heads[id(config)] = _query_heads(config)
            self._restores.callback(patch(config, "_attn_implementation_internal", name))
        # Without this flag uncompiled flex goes through dynamo, which costs more than the model.
        flag = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
        self._restores.callback(patch(flex_module, flag, not self.compiled))
        return self

    def __exit__(self, *_: object) -> None:
        self._restores.close()

    def _make_mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: MaskMod | None = None,
        attention_mask: Tensor | None = None,
        config: Any = None,
        **_: Any,
    ) -> BlockMask:
        """The mask function for transformers: one block mask per forward pass and layer type."""
        from transformers.masking_utils import causal_mask_function

        if attention_mask is not None and not bool(attention_mask.all()):
            text = "The batch is padded, but segment masks support one prompt without padding only."
            raise MaskError(text, hint="Run one prompt at a time and leave attention_mask out.")
        # What a layer type adds to the causal mask (a sliding window).
        overlay = None if mask_function is causal_mask_function else mask_function
        heads = self._heads.get(id(config)) or _query_heads(config)
        window = ForwardWindow(int(q_length), int(kv_length), int(q_offset), int(kv_offset), heads)
        rows = (window.q_offset, window.q_len)
        if rows != self._rows:
            self._rows, self._n_forwards = rows, self._n_forwards + 1
        block_mask = self.source.block_mask(window, overlay)
        self._mask_heads = max(self._mask_heads, block_mask.kv_num_blocks.shape[1])
        return block_mask

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: BlockMask | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The attention function for transformers: returns the output (B, L, H, D), no weights."""
        layer = getattr(module, "layer_idx", -1)
        try:
            if kwargs.get("dropout"):
                raise ValueError("FlexAttention has no dropout; call model.eval() first")
            if kwargs.get("s_aux") is not None:
                raise ValueError("attention sinks are not supported by the segment masks")
            if self.compiled and self._n_forwards <= N_COMPILE_FORWARDS:
                step_and_layer = (-1, self._n_forwards - 1, layer)
                last_kernel_call.begin_kernel_call(step_and_layer, query, key, None, attention_mask)
            out, lse = self._flex((query, key, value), attention_mask, scaling, softcap)
        except Exception as error:
            step, (row, n_rows) = self._n_forwards - 1, self._rows
            rows = f"rows {row} to {row + n_rows - 1}"
            text = f"FlexAttention failed in layer {layer}, step {step} ({rows}): "
            hint = "No fallback ran; fix the mask or the call and run again."
            raise AttentionCallError(text + summarize_error(error), hint=hint) from error
        finally:
            last_kernel_call.end_kernel_call()
        LAST_CALL.path = "flex compiled" if self.compiled else "flex uncompiled"
        LAST_CALL.lse, LAST_CALL.softcap = lse, softcap
        return out.transpose(1, 2).contiguous(), None

    def _flex(
        self, qkv: Qkv, block_mask: BlockMask | None, scaling: float | None, softcap: float | None
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = qkv
        if self._mask_heads > 1 and self.compiled and query.shape[1] != self._mask_heads:
            # The kernel does not check this, and may crash the process.
            raise ValueError(
                f"the block mask is for {self._mask_heads} heads, the layer has {query.shape[1]}"
            )
        gqa = query.shape[1] != key.shape[1]
        if gqa and self.compiled and query.shape[1] & (query.shape[1] - 1):
            # With grouped heads, the kernels need a power of two of query heads.
            repeats = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
            gqa = False
        # The compiled CPU kernel has no LSE.
        with_lse = not (self.compiled and query.device.type == "cpu")
        call = self._kernel(query.shape[2])
        options = {"block_mask": block_mask, "scale": scaling, "enable_gqa": gqa}
        score_mod = _soft_cap(softcap) if softcap else None
        aux = AuxRequest(lse=True) if with_lse else None
        result = call(query, key, value, score_mod=score_mod, return_aux=aux, **options)
        return (result[0], result[1].lse) if with_lse else (result, None)

    def _kernel(self, q_len: int) -> Callable[..., Any]:
        if not self.compiled:
            return flex_attention
        kind = "decode" if q_len == 1 else "prefill"
        if kind not in _compiled_calls:
            if self._on_compile is not None:
                self._on_compile(kind)
            call = _decode_call if kind == "decode" else _prefill_call
            _compiled_calls[kind] = torch.compile(call, dynamic=True, fullgraph=True)
        return _compiled_calls[kind]


def model_configs(model: nn.Module) -> Iterator[Any]:
    """Yield each configuration of a model and its sub-models once."""
    pending: list[Any] = [m.config for m in model.modules() if hasattr(m, "config")]
    seen: set[int] = set()
    while pending:
        config = pending.pop()
        if id(config) in seen or not hasattr(config, "_attn_implementation_internal"):
            continue
        seen.add(id(config))
        yield config
        pending += [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]


def _query_heads(config: Any) -> int:
    """The number of query heads, 0 if the layers do not share one number."""
    heads = getattr(config, "num_attention_heads", None)
    return heads if isinstance(heads, int) else 0


def _soft_cap(cap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


def _prefill_call(*args: Any, **kwargs: Any) -> Any:
    return flex_attention(*args, **kwargs)


def _decode_call(*args: Any, **kwargs: Any) -> Any:
    return flex_attention(*args, **kwargs)


_compiled_calls: dict[str, Callable[..., Any]] = {}
"""Compiled calls by kind, for the life of the process. Prefill and decode are two code objects,
because dynamo caches graphs per code object, and the prefill's graph would otherwise be tried, and
fail its guards, at every decode step."""

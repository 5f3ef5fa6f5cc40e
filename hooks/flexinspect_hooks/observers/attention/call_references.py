"""References to an attention call while its step is open, and its shape for the writer thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxOutput, BlockMask

from flexinspect.records.step import CallRecord
from flexinspect_hooks.observers.attention.kernel_calls import KernelReturn
from flexinspect_hooks.observers.attention.kernel_interception import FLEX, KernelCall, repeat_call

_sliding_windows: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Sliding windows by module, cached: reading a configuration takes longer than the other facts."""

SAME_MASK: Any = object()
"""Value of `mask_passed_to_layer` if it is the call's own mask."""


class LayerInputs(NamedTuple):
    """The arguments that a layer passed to an attention function of the user."""

    query: Tensor
    key: Tensor
    scale: float | None


class AttentionCall(NamedTuple):
    """References to one attention call: q, k, v (B, heads, rows, D), output (B, rows, heads, D).

    `path` is the path that ran: as reported by the backend, else derived from the backend's name. A
    tuple, because one is created per layer inside the forward. `causal` is the kernel's argument
    (None: the module's attribute decides). With `unknown_scores` a score_mod or dropout changes
    scores or weights, so that they cannot be recomputed. `mask_passed_to_layer` is the mask that
    the layer received. `function` or `kernel` is what was called, for `repeat`.
    """

    layer: int
    backend: str
    path: str
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor = None  # type: ignore[assignment]  # set when the call returns
    lse: Tensor | None = None
    softcap: float | None = None
    causal: bool | None = None
    unknown_scores: bool = False
    mask_passed_to_layer: Any = SAME_MASK
    suppressed_exception: str | None = None
    function: Callable[..., Any] | None = None
    kernel: KernelCall | None = None
    layer_inputs: LayerInputs | None = None

    def repeat(self, value: Tensor) -> Tensor:
        """Repeat the call with other values (B, kv heads, keys, D); returns (B, rows, heads, D).

        Exceptions of the call propagate.
        """
        if self.kernel is not None:
            output, _ = _split_output(repeat_call(self.kernel, value))
            return cast(Tensor, output).transpose(1, 2)
        assert self.function is not None
        output = self.function(self.module, self.query, self.key, value, *self.args, **self.kwargs)
        return cast(Tensor, output[0])

    @property
    def mask(self) -> Any:
        """The mask of the call."""
        return self.args[0] if self.args else self.kwargs.get("attention_mask")

    @property
    def scale(self) -> float | None:
        """The scale of the scores, None for the default."""
        scale: float | None = self.kwargs.get("scaling")
        return scale

    @property
    def is_causal(self) -> bool:
        """Whether the call is causal if it has no mask."""
        return bool(getattr(self.module, "is_causal", True)) if self.causal is None else self.causal

    @property
    def window(self) -> int | None:
        """The number of keys in the layer's sliding window, None without one.

        From the argument that transformers passes; a kernel call in code of the user has none, so
        there the module's attribute counts.
        """
        window = self.kwargs.get("sliding_window", SAME_MASK)
        if window is SAME_MASK:
            window = _cached_window(self.module)
        return window if type(window) is int and window > 0 else None

    @property
    def passed_mask_text(self) -> str | None:
        """Describes the mask that the layer received; None if it is the mask of the call.

        If transformers' flex reads only a part of a dense mask, that mask is not the kernel's.
        """
        passed = self.mask_passed_to_layer
        if passed is not SAME_MASK and passed is not self.mask:
            return describe_mask(passed)
        if not self.path.startswith("flex"):
            return None
        mask = self.mask
        if isinstance(mask, BlockMask) or not isinstance(mask, Tensor) or mask.dim() != 4:
            return None
        return describe_mask(mask) if mask.shape[2] not in (1, self.query.shape[2]) else None


class CallShape(NamedTuple):
    """A call without its tensors: `q` is (B, heads, rows, D), `k` (B, kv heads, keys, D)."""

    layer: int
    path: str
    backend: str
    q: torch.Size
    k: torch.Size
    dtype: torch.dtype
    scale: float | None
    softcap: float | None
    mask_passed_to_layer: str | None
    suppressed_exception: str | None
    causal: bool | None
    window: int | None

    def record(
        self, mask: str | None, lse_error: float | None, check_kind: str | None
    ) -> CallRecord:
        """Return the call's record, with its mask's fingerprint and the result of its check."""
        batch, q_heads, q_len, head_dim = self.q
        # By position: a record is created per layer and step.
        return CallRecord(
            self.layer,
            self.path,
            self.backend,
            mask,
            batch,
            q_heads,
            self.k[1],
            q_len,
            self.k[2],
            head_dim,
            _dtype_name(self.dtype),
            self.scale,
            lse_error,
            check_kind,
            self.softcap,
            self.mask_passed_to_layer,
            self.suppressed_exception,
            self.causal,
            self.window,
        )


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def call_shape(ref: AttentionCall) -> CallShape:
    """Return a call without its tensors."""
    causal = getattr(ref.module, "is_causal", None)
    return CallShape(
        layer=ref.layer,
        path=ref.path,
        backend=ref.backend,
        q=ref.query.shape,
        k=ref.key.shape,
        dtype=ref.query.dtype,
        scale=ref.scale,
        softcap=float(ref.softcap) if ref.softcap else None,
        mask_passed_to_layer=ref.passed_mask_text,
        suppressed_exception=ref.suppressed_exception,
        causal=causal if type(causal) is bool else None,
        window=ref.window,
    )


def _cached_window(module: nn.Module) -> Any:
    try:
        return _sliding_windows[module]
    except KeyError:
        window = _sliding_windows[module] = _window_of(module)
        return window
    except TypeError:  # a call in no known layer has a weak proxy of the model as its module
        return None


def _window_of(module: nn.Module) -> Any:
    """Return an attention module's sliding window, or its configuration's if for all layers."""
    own = module.__dict__
    if "sliding_window" in own:
        return own["sliding_window"]
    config = own.get("config")
    return None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)


def describe_mask(mask: Any) -> str:
    """Return the kind and size of a mask: "none", "block (1, 1, 8, 8)", "bool (8, 8)"."""
    if mask is None:
        return "none"
    if isinstance(mask, BlockMask):
        return f"block {tuple(mask.shape)}"
    if isinstance(mask, Tensor):
        return f"{_dtype_name(mask.dtype)} {tuple(mask.shape)}"
    return type(mask).__name__


def kernel_path(returned: KernelReturn) -> str:
    """Return the path of a kernel call: "flex compiled", "flex uncompiled" or "sdpa"."""
    if returned.call.name == FLEX:
        return "flex compiled" if returned.call.compiled else "flex uncompiled"
    return "sdpa"


def call_of_kernel(
    returned: KernelReturn, layer: int, backend: str, module: nn.Module
) -> AttentionCall | None:
    """Return a kernel call as the call of a layer; None if its tensors are not (B, H, L, D)."""
    arguments, is_flex = returned.call.arguments, returned.call.name == FLEX
    query, key, value = (arguments.get(name) for name in ("query", "key", "value"))
    out, lse = _split_output(returned.output)
    if not all(isinstance(t, Tensor) and t.dim() == 4 for t in (query, key, value, out)):
        return None
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    assert isinstance(value, Tensor)
    return AttentionCall(
        layer=layer,
        backend=backend,
        path=kernel_path(returned),
        module=module,
        query=query,
        key=key,
        value=value,
        args=(arguments.get("block_mask" if is_flex else "attn_mask"),),
        kwargs={"scaling": arguments.get("scale")},
        output=out.transpose(1, 2),
        lse=lse,
        causal=False if is_flex else bool(arguments.get("is_causal")),
        unknown_scores=bool(arguments.get("score_mod" if is_flex else "dropout_p")),
        mask_passed_to_layer=SAME_MASK if returned.layer is None else returned.mask_passed_to_layer,
        suppressed_exception=returned.suppressed_exception,
        kernel=returned.call,
    )


def _split_output(output: Any) -> tuple[Any, Tensor | None]:
    """Return a kernel's output and its row LSE, None if the caller did not request it."""
    if not isinstance(output, tuple):
        return output, None
    extra = output[1] if len(output) > 1 else None
    lse = extra.lse if isinstance(extra, AuxOutput) else extra
    return output[0], lse if isinstance(lse, Tensor) else None

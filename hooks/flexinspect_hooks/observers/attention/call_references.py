"""References to an attention call while its step is open, and what its record keeps of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxOutput, BlockMask

from flexinspect_hooks.observers.attention.kernel_calls import FLEX, SAME_MASK, KernelCall
from flexinspect_hooks.step_writer.mask_records import MaskFacts

_sliding_windows: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Sliding windows by module, cached: reading a configuration takes longer than the other facts."""


class CapturedMask(MaskFacts):
    """One distinct mask of a step, with the objects that its facts and values are read from.

    `cells` is the executed mask of each query head, bool (1 or q heads, q_len, kv_len), 1 if all
    heads share it; None at level basic and for masks that are too large. `averaged`, bool (1 or
    heads, q_len), marks rows of a float mask that are at its lowest float throughout. `bias` (1 or
    heads, kv_len) is what a dense mask adds to the scores of the newest row, 0 where closed.
    `added` (1 or heads, rows, kv_len) is what a float mask adds in every row. `mask_mod_blocks` is
    what the mask_mod of a compiled call opens, as in `MaskRecord`. The tensors are dropped before
    the writer thread gets the mask: their values go through the buffer.
    """

    mask_mod: Any = None
    cells: Tensor | None = None
    averaged: Tensor | None = None
    bias: Tensor | None = None
    added: Tensor | None = None
    mask_mod_blocks: Tensor | None = None
    is_open: bool = False
    """Whether every cell is known to be open."""


class AttentionCall(Struct, eq=False):
    """References to one attention call: q, k, v (B, heads, rows, D), output (B, rows, heads, D).

    `path` is the path that ran: as reported by the backend, else derived from the backend's name.
    `causal` is the kernel's argument (None: the module's attribute decides). With `unknown_scores`
    a score_mod or dropout changes scores or weights, so that they cannot be recomputed.
    `mask_passed_to_layer` is the mask that the layer received. `function` or `kernel` is what was
    called, for `repeat`; `layer_call` is the call of a user's function that called this kernel.
    `captured` is set while the step is reduced, and so is `check_kind` if the newest row can be
    recomputed: "lse" or "output".
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
    layer_call: AttentionCall | None = None
    captured: CapturedMask = None  # type: ignore[assignment]  # set when the step is reduced
    check_kind: str | None = None

    @classmethod
    def of_kernel(cls, call: KernelCall, backend: str) -> AttentionCall | None:
        """Return a kernel call in a layer as that layer's, None if not of tensors (B, H, L, D)."""
        arguments, is_flex = call.arguments, call.name == FLEX
        tensors: list[Any] = [arguments.get(name) for name in ("query", "key", "value")]
        out, lse = _split_output(call.output)
        if not all(isinstance(t, Tensor) and t.dim() == 4 for t in (*tensors, out)):
            return None
        if call.layer is None or call.module is None:
            return None
        query, key, value = tensors
        mask = arguments.get("block_mask" if is_flex else "attn_mask")
        return cls(
            *(call.layer, backend, call.path, call.module, query, key, value),
            args=(mask,),
            kwargs={"scaling": arguments.get("scale")},
            output=out.transpose(1, 2),
            lse=lse,
            causal=False if is_flex else bool(arguments.get("is_causal")),
            unknown_scores=bool(arguments.get("score_mod" if is_flex else "dropout_p")),
            mask_passed_to_layer=call.mask_passed_to_layer,
            suppressed_exception=call.suppressed_exception,
            kernel=call,
        )

    def run(self, value: Tensor) -> Any:
        """Call the attention function with `value`, (B, kv heads, keys, D); returns its result."""
        assert self.function is not None
        return self.function(self.module, self.query, self.key, value, *self.args, **self.kwargs)

    def repeat(self, value: Tensor) -> Tensor:
        """Repeat the call with other values (B, kv heads, keys, D); returns (B, rows, heads, D)."""
        if self.kernel is None:
            return cast(Tensor, self.run(value)[0])
        output, _ = _split_output(self.kernel.repeat(value))
        return cast(Tensor, output).transpose(1, 2)

    @property
    def mask(self) -> Any:
        """The mask of the call."""
        return self.args[0] if self.args else self.kwargs.get("attention_mask")

    @property
    def scale(self) -> float | None:
        """The scale of the scores; None for the default, and for one that is not a number."""
        scale = self.kwargs.get("scaling")
        return scale if isinstance(scale, Real) else None  # type: ignore[return-value]

    def note_unknown_scale(self) -> None:
        """Set `unknown_scores` if the scale is not a number, such as a tensor with one per head."""
        if self.kwargs.get("scaling") is not None and self.scale is None:
            self.unknown_scores = True

    @property
    def is_causal(self) -> bool:
        """Whether the call is causal if it has no mask."""
        return bool(getattr(self.module, "is_causal", True)) if self.causal is None else self.causal

    def record_fields(self) -> dict[str, Any]:
        """Return the fields of the call's `CallRecord` but for its check.

        `mask` is the number of its mask.
        """
        batch, q_heads, q_len, head_dim = self.query.shape
        _, kv_heads, kv_len, _ = self.key.shape
        causal = getattr(self.module, "is_causal", None)
        return {
            "layer": self.layer,
            "path": self.path,
            "backend": self.backend,
            "mask": self.captured.number,
            "batch": batch,
            "q_heads": q_heads,
            "kv_heads": kv_heads,
            "q_len": q_len,
            "kv_len": kv_len,
            "head_dim": head_dim,
            "dtype": _dtype_name(self.query.dtype),
            "scale": self.scale,
            "softcap": float(self.softcap) if self.softcap else None,
            "mask_passed_to_layer": _passed_mask_text(self),
            "suppressed_exception": self.suppressed_exception,
            "causal": causal if type(causal) is bool else None,
            "window": _sliding_window(self),
        }


Calls = Sequence[AttentionCall]


def _passed_mask_text(ref: AttentionCall) -> str | None:
    """Describe the mask that the layer received; None if it is the mask of the call.

    If transformers' flex reads only a part of a dense mask, that mask is not the kernel's.
    """
    passed, mask = ref.mask_passed_to_layer, ref.mask
    if passed is not SAME_MASK and passed is not mask:
        return describe_mask(passed)
    if not ref.path.startswith("flex") or not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    return describe_mask(mask) if mask.shape[2] not in (1, ref.query.shape[2]) else None


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sliding_window(ref: AttentionCall) -> int | None:
    """Return the keys in a layer's window, by the argument or else the module; None without."""
    window = ref.kwargs.get("sliding_window", SAME_MASK)
    if window is SAME_MASK:
        try:
            window = _sliding_windows[ref.module]
        except KeyError:
            window = _sliding_windows[ref.module] = _window_of(ref.module)
        except TypeError:  # a call in no known layer has a weak proxy of the model as its module
            return None
    return window if type(window) is int and window > 0 else None


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


def _split_output(output: Any) -> tuple[Any, Tensor | None]:
    """Return a kernel's output and its row LSE, None if the caller did not request it."""
    if not isinstance(output, tuple):
        return output, None
    extra = output[1] if len(output) > 1 else None
    lse = extra.lse if isinstance(extra, AuxOutput) else extra
    return output[0], lse if isinstance(lse, Tensor) else None

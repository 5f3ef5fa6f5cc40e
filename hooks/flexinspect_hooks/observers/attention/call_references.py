"""References to an attention call while its step is open, and what stays of it afterwards."""

from __future__ import annotations

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
"""What each module states, as asking a configuration takes longer than all else about a call."""

SAME_MASK: Any = object()
"""In place of the mask that a layer was handed: the call's own."""


class LayerInputs(NamedTuple):
    """What a layer gave an attention function of the user's: before the function did anything."""

    query: Tensor
    key: Tensor
    scale: float | None


class AttentionCall(NamedTuple):
    """References to one attention call: q, k, v (B, heads, rows, D), output (B, rows, heads, D).

    A tuple, because one is made per layer inside the forward. `causal` is what the kernel was told
    (None: what the module is). `unknown_scores` says that a score_mod or dropout changes scores or
    weights in a way that is not repeated here. `handed` is the mask that the layer was given.
    `function` or `kernel` is what was called, to call it again.
    """

    layer: int
    backend: str
    default_path: str
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    reported_path: str
    lse: Tensor | None
    softcap: float | None
    causal: bool | None = None
    unknown_scores: bool = False
    mask_passed_to_layer: Any = SAME_MASK
    suppressed_exception: str | None = None
    function: Callable[..., Any] | None = None
    kernel: KernelCall | None = None
    layer_inputs: LayerInputs | None = None

    def repeat(self, value: Tensor) -> Tensor:
        """Make the same call with other values (B, kv heads, keys, D); returns (B, rows, heads, D).

        Raises whatever the call raises.
        """
        if self.kernel is not None:
            output, _ = _split_output(repeat_call(self.kernel, value))
            return cast(Tensor, output).transpose(1, 2)
        assert self.function is not None
        given = (self.module, self.query, self.key, value, *self.args)
        return cast(Tensor, self.function(*given, **self.kwargs)[0])

    @property
    def path(self) -> str:
        """The path taken: what our backend told, else what the backend's name means."""
        return self.reported_path or self.default_path

    @property
    def mask(self) -> Any:
        """The mask that the layer received."""
        return self.args[0] if self.args else self.kwargs.get("attention_mask")

    @property
    def scale(self) -> float | None:
        """The scale of the scores, None for the default."""
        scale: float | None = self.kwargs.get("scaling")
        return scale

    @property
    def is_causal(self) -> bool:
        """Whether the call is causal when it gets no mask."""
        return bool(getattr(self.module, "is_causal", True)) if self.causal is None else self.causal

    @property
    def window(self) -> int | None:
        """How many keys the layer's sliding window holds, None without one.

        As transformers passes it on; a kernel that own code calls is not told, but the layer is.
        """
        found = self.kwargs.get("sliding_window", SAME_MASK)
        if found is SAME_MASK:
            found = _cached_window(self.module)
        return found if type(found) is int and found > 0 else None

    @property
    def passed_mask_text(self) -> str | None:
        """The mask that the layer was given, in words; None when it is the one of the call.

        A dense mask of which transformers' flex reads a corner is not what its kernel gets.
        """
        if (
            self.mask_passed_to_layer is not SAME_MASK
            and self.mask_passed_to_layer is not self.mask
        ):
            return describe_mask(self.mask_passed_to_layer)
        if not (self.reported_path or self.default_path).startswith("flex"):
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
        """Return the call's record."""
        batch, q_heads, q_len, head_dim = self.q
        dtype = _DTYPES[self.dtype]
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
            dtype,
            self.scale,
            lse_error,
            check_kind,
            self.softcap,
            self.mask_passed_to_layer,
            self.suppressed_exception,
            self.causal,
            self.window,
        )


class _DTypeNames(dict[torch.dtype, str]):
    """torch.float32 to "float32", each made once."""

    def __missing__(self, dtype: torch.dtype) -> str:
        self[dtype] = str(dtype).removeprefix("torch.")
        return self[dtype]


_DTYPES = _DTypeNames()


def call_shape(ref: AttentionCall) -> CallShape:
    """Return what stays of a call once its tensors are gone."""
    query = ref.query
    path = ref.reported_path or ref.default_path
    scale = ref.kwargs.get("scaling")
    cap = float(ref.softcap) if ref.softcap else None
    shapes = (query.shape, ref.key.shape)
    causal = getattr(ref.module, "is_causal", None)
    about = (ref.passed_mask_text, ref.suppressed_exception)
    said = (causal if type(causal) is bool else None, ref.window)
    return CallShape(ref.layer, path, ref.backend, *shapes, query.dtype, scale, cap, *about, *said)


def _cached_window(module: nn.Module) -> Any:
    try:
        return _sliding_windows[module]
    except KeyError:
        found = _sliding_windows[module] = _window_of(module)
        return found
    except TypeError:  # of calls in no known layer there is but a proxy of the model
        return None


def _window_of(module: nn.Module) -> Any:
    """Return the sliding window that an attention module states, or its model for all layers."""
    own = module.__dict__
    if "sliding_window" in own:
        return own["sliding_window"]
    config = own.get("config")
    return None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)


def describe_mask(mask: Any) -> str:
    """Return what kind of mask it is and its size: "none", "block (1, 1, 8, 8)", "bool (8, 8)"."""
    if mask is None:
        return "none"
    if isinstance(mask, BlockMask):
        return f"block {tuple(mask.shape)}"
    if isinstance(mask, Tensor):
        return f"{_DTYPES[mask.dtype]} {tuple(mask.shape)}"
    return type(mask).__name__


def kernel_path(returned: KernelReturn) -> str:
    """Return the path of a kernel's call."""
    if returned.call.name == FLEX:
        return "flex compiled" if returned.call.compiled else "flex uncompiled"
    return "sdpa"


def call_of_kernel(
    returned: KernelReturn, layer: int, backend: str, module: nn.Module
) -> AttentionCall | None:
    """Return a kernel's own call as that of a layer; None when its tensors are not (B, H, L, D)."""
    given, is_flex = returned.call.arguments, returned.call.name == FLEX
    query, key, value = (given.get(name) for name in ("query", "key", "value"))
    out, lse = _split_output(returned.output)
    if not all(isinstance(t, Tensor) and t.dim() == 4 for t in (query, key, value, out)):
        return None
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    assert isinstance(value, Tensor)
    mask = given.get("block_mask" if is_flex else "attn_mask")
    changed = given.get("score_mod") if is_flex else given.get("dropout_p")
    return AttentionCall(
        *(layer, backend, kernel_path(returned), module, query, key, value),
        args=(mask,),
        kwargs={"scaling": given.get("scale")},
        output=out.transpose(1, 2),
        reported_path="",
        lse=lse,
        softcap=None,
        causal=False if is_flex else bool(given.get("is_causal")),
        unknown_scores=bool(changed),
        mask_passed_to_layer=SAME_MASK if returned.layer is None else returned.mask_passed_to_layer,
        suppressed_exception=returned.suppressed_exception,
        kernel=returned.call,
    )


def _split_output(output: Any) -> tuple[Any, Tensor | None]:
    """Return a kernel's output and its row LSE, if the caller asked for that."""
    if not isinstance(output, tuple):
        return output, None
    extra = output[1] if len(output) > 1 else None
    lse = extra.lse if isinstance(extra, AuxOutput) else extra
    return output[0], lse if isinstance(lse, Tensor) else None

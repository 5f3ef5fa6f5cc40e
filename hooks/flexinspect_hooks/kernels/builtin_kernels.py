"""The built-in kernels, each called as a user's kernel is: with what its signature names."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from flexinspect.core.errors import UsageError
from flexinspect.core.text import did_you_mean
from flexinspect.inputs.kernel_configs import KernelEntry, KernelTable
from flexinspect_hooks.debugger.python_mods import flex_as_python
from flexinspect_hooks.kernels.calling import Kernel, user_kernel
from flexinspect_hooks.kernels.oracle import eager_attention
from flexinspect_hooks.kernels.problem import ScoreMod

EAGER = "eager"
"""The default reference: the formulas of the oracle, rounded to the dtype after every step."""

_MAX_GRAPHS = 256
_MAX_DECODE_ROWS = 127  # of FlexAttention's kernel for decode steps
_NOTES = {
    EAGER: "written out in torch, rounded to the dtype after every step",
    "sdpa": "scaled_dot_product_attention, with the backend that torch chooses",
    "sdpa-math": "SDPA, backend MATH",
    "sdpa-flash": "SDPA, backend FLASH_ATTENTION",
    "sdpa-efficient": "SDPA, backend EFFICIENT_ATTENTION",
    "sdpa-cudnn": "SDPA, backend CUDNN_ATTENTION",
    "flex": "flex_attention uncompiled: evaluates mask_mod on every cell, ignores block tables",
    "flex-compiled": "flex_attention compiled, with --kernel-option",
    "flex-decode": "flex_attention compiled, BACKEND=TRITON_DECODE (few rows)",
    "flash-attn": "flash_attn.flash_attn_func",
}
NAMES = tuple(_NOTES)


def find_kernels(
    names: Iterable[str], table: KernelTable, device: torch.device, options: Mapping[str, Any]
) -> list[Kernel]:
    """Return the kernels of these names, "module:function", or entries of the table.

    An entry of the table is followed by its previous versions; "all" stands for all built-in
    kernels and all of the table. Raises `UsageError` for an unknown name.
    """
    kernels: list[Kernel] = []
    entries = {entry.name: entry for entry in table.kernel}
    for name in names:
        if name == "all":
            kernels += [built_in(each, device, options) for each in NAMES if each != EAGER]
            kernels += [each for entry in table.kernel for each in _with_previous(entry)]
        elif name in entries:
            kernels += _with_previous(entries[name])
        else:
            kernels.append(named_kernel(name, device, options, also=tuple(entries)))
    return [*{kernel.name: kernel for kernel in kernels}.values()]


def named_kernel(
    name: str,
    device: torch.device,
    options: Mapping[str, Any] | None = None,
    also: Sequence[str] = (),
) -> Kernel:
    """Return a built-in kernel or "module:function". Raises `UsageError` with the known names.

    `also` are further names that the message lists.
    """
    if name in NAMES:
        return built_in(name, device, options)
    if ":" in name:
        return user_kernel(KernelEntry(name=name, function=name), name, name)
    known = [*NAMES, *also]
    hint = did_you_mean(name, known, f"Known: {', '.join(known)}, or module:function.")
    raise UsageError(f"There is no kernel '{name}'.", hint=hint)


def _with_previous(entry: KernelEntry) -> list[Kernel]:
    versions = [(entry.name, entry.function)]
    versions += [(f"{entry.name}@{spec}", spec) for spec in entry.previous]
    return [user_kernel(entry, spec, name) for name, spec in versions]


def built_in(name: str, device: torch.device, options: Mapping[str, Any] | None = None) -> Kernel:
    """Return a built-in kernel; `missing` says why it cannot run on this device."""
    note, missing = _NOTES[name], ""
    needs_cuda = name in ("sdpa-efficient", "sdpa-cudnn", "flex-decode", "flash-attn")
    if needs_cuda and device.type != "cuda":
        missing = f"It runs on CUDA only, and the device is {device.type}."
    if name == "flash-attn" and find_spec("flash_attn") is None:
        missing = "flash-attn is not installed."
    if name.startswith("sdpa"):
        return Kernel(name, _Sdpa(_BACKENDS[name]), note=note, missing=missing)
    if name == "flash-attn":
        halves = ("float16", "bfloat16")
        return Kernel(name, _flash_attn, "bshd", dtypes=halves, note=note, missing=missing)
    if name == EAGER:
        return Kernel(name, eager_attention, note=note)
    if name == "flex":
        return Kernel(name, _flex, note=note)
    backend = {"BACKEND": "TRITON_DECODE"} if name == "flex-decode" else {}
    kernel = _CompiledFlex({**backend, **(options or {})}, gives_lse=device.type != "cpu")
    rows = _MAX_DECODE_ROWS if name == "flex-decode" else None
    return Kernel(name, kernel, note=note, missing=missing, max_rows=rows)


def describe_kernels(device: torch.device, table: KernelTable) -> list[tuple[str, str, str]]:
    """Return (name, what it is, why it cannot run here or "") of every kernel."""
    rows = [(each.name, each.note, each.missing) for each in (built_in(n, device) for n in NAMES)]
    for entry in table.kernel:
        versions = f", previous: {', '.join(entry.previous)}" if entry.previous else ""
        rows.append((entry.name, f"{entry.function}{versions}", ""))
    return rows


_BACKENDS: Mapping[str, Sequence[SDPBackend]] = {
    "sdpa": (),
    "sdpa-math": (SDPBackend.MATH,),
    "sdpa-flash": (SDPBackend.FLASH_ATTENTION,),
    "sdpa-efficient": (SDPBackend.EFFICIENT_ATTENTION,),
    "sdpa-cudnn": (SDPBackend.CUDNN_ATTENTION,),
}


class _Sdpa:
    """`scaled_dot_product_attention` with one backend, or the one that torch chooses.

    A causal mask is passed as `is_causal`, as one calls it: on CUDA flash takes no mask tensor, and
    the others are slower with one.
    """

    def __init__(self, backends: Sequence[SDPBackend]) -> None:
        self._backends = list(backends)
        self._known: tuple[weakref.ref[Tensor], bool] | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        is_causal = attn_mask is not None and self._is_causal(attn_mask)
        arguments: dict[str, Any] = {"is_causal": is_causal}
        arguments["attn_mask"] = None if is_causal else attn_mask
        arguments |= {"scale": scale, "enable_gqa": enable_gqa}
        if not self._backends:
            return F.scaled_dot_product_attention(q, k, v, **arguments)
        with sdpa_kernel(self._backends):
            return F.scaled_dot_product_attention(q, k, v, **arguments)

    def _is_causal(self, mask: Tensor) -> bool:
        """Look at each mask once: that takes time and a synchronization, which would be timed."""
        if self._known is None or self._known[0]() is not mask:
            self._known = weakref.ref(mask), _is_causal(mask)
        return self._known[1]


def _is_causal(cells: Tensor) -> bool:
    rows, keys = cells.shape[-2:]
    lower = torch.ones(rows, keys, dtype=torch.bool, device=cells.device).tril()
    return rows == keys and bool((cells == lower).all())


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_mask: BlockMask | None = None,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    # Plain Python instead of dynamo: the source advises against that with a backward pass.
    is_plain = not q.requires_grad
    call: Any = flex_as_python(flex_attention) if is_plain else flex_attention
    arguments: dict[str, Any] = {"block_mask": block_mask, "score_mod": score_mod}
    arguments |= {"scale": scale, "enable_gqa": enable_gqa}
    with torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS):  # of the backward pass
        return call(q, k, v, **arguments, return_aux=AuxRequest(lse=True))


class _CompiledFlex:
    """Compiled `flex_attention`; each shape is compiled at its first call.

    Past dynamo's limit of graphs a compiled function runs uncompiled without a word: here the limit
    is raised, and with `fullgraph` reaching it is an error.
    """

    def __init__(self, kernel_options: Mapping[str, Any], *, gives_lse: bool) -> None:
        self._options, self._gives_lse = dict(kernel_options), gives_lse
        self._compiled: Any = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_mask: BlockMask | None = None,
        score_mod: ScoreMod | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if self._compiled is None:
            self._compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        arguments: dict[str, Any] = {"block_mask": block_mask, "score_mod": score_mod}
        arguments |= {"scale": scale, "enable_gqa": enable_gqa}
        if self._options:
            arguments["kernel_options"] = self._options
        if self._gives_lse:  # compiled on CPU it raises NotImplementedError
            arguments["return_aux"] = AuxRequest(lse=True)
        with torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS):
            return self._compiled(q, k, v, **arguments)


def _flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_attn_probs: bool = False,
) -> Any:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    arguments = {"causal": causal, "softmax_scale": softmax_scale, "softcap": softcap}
    return flash_attn_func(q, k, v, **arguments, return_attn_probs=return_attn_probs)

"""Calling a kernel: its options by its signature, and its contract before and after the call.

A kernel is any callable `(q, k, v, **options)` that returns the output, or (output, LSE). It gets
the options that its signature names; docs/kernels.md lists them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect.core.errors import UsageError, summarize_error
from flexinspect.core.text import join_labels
from flexinspect.inputs.kernel_configs import KernelEntry
from flexinspect_hooks.kernels.problem import Problem, with_softcap
from flexinspect_hooks.python_internals.user_imports import import_object

MASK_OPTIONS = ("attn_mask", "mask", "mask_mod", "block_mask")
CAUSAL_OPTIONS = ("causal", "is_causal")
SCALE_OPTIONS = ("scale", "softmax_scale", "sm_scale")
SOFTCAP_OPTIONS = ("softcap", "soft_cap", "logit_softcap")
_REFUSALS = ("No available kernel", "NoValidChoices", "must be divisible by BLOCK")
"""What torch raises where a backend of SDPA, or a tiling of FlexAttention, refuses the inputs."""
LSE_OPTIONS = ("return_lse", "return_softmax_lse", "return_attn_probs")


class Kernel(Struct, frozen=True):
    """A kernel under a name, with what it states about itself.

    `layout` is "bhsd" or "bshd" (rows before heads). `capability` is the lowest CUDA compute
    capability. Empty `dtypes` and `head_dims` mean any. `device` is "" or "cuda". `missing` is the
    reason why it cannot run on this machine at all.
    """

    name: str
    function: Callable[..., Any]
    layout: str = "bhsd"
    capability: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    max_rows: int | None = None
    device: str = ""
    missing: str = ""
    note: str = ""


class KernelResult(Struct, frozen=True):
    """What a kernel returned: (batch, heads, rows, head size), and the LSE if it gave one.

    `faults` are sentences about the form of the result, such as another dtype.
    """

    out: Tensor
    lse: Tensor | None
    faults: tuple[str, ...] = ()


class ContractError(UsageError):
    """A kernel cannot be called with this problem; the message is the reason.

    `is_fault` tells that the kernel accepted the problem and then failed, or returned something
    else than an output.
    """

    def __init__(self, message: str, *, is_fault: bool = False) -> None:
        super().__init__(message)
        self.is_fault = is_fault


def user_kernel(entry: KernelEntry, spec: str, name: str) -> Kernel:
    """Return the kernel "module:function". Attributes of the function complete the entry.

    Raises `UsageError` if it cannot be imported or is not callable.
    """
    function = import_object(spec, "--kernel")
    if not callable(function):
        raise UsageError(f"--kernel {spec} is not callable.")
    stated = {key: getattr(function, key, None) for key in ("layout", "capability", "dtypes")}
    capability: Any = entry.capability or stated["capability"] or ()
    if isinstance(capability, str):
        capability = tuple(int(part) for part in capability.split(".") if part.isdecimal())
    return Kernel(
        name,
        function,
        layout=stated["layout"] or entry.layout,
        capability=tuple(capability),
        dtypes=tuple(stated["dtypes"] or entry.dtypes),
        head_dims=tuple(getattr(function, "head_dims", ()) or entry.head_dims),
        device=getattr(function, "device", "") or entry.device,
    )


def check_contract(kernel: Kernel, problem: Problem) -> None:
    """Raise `ContractError` with one sentence per reason why the kernel cannot be called."""
    if kernel.missing:
        raise ContractError(kernel.missing)
    reasons = [*_contract_violations(kernel, problem)]
    try:
        options_of(kernel, problem)
    except ContractError as error:
        reasons.append(error.message)
    if reasons:
        raise ContractError(" ".join(reasons))


def _contract_violations(kernel: Kernel, problem: Problem) -> Iterator[str]:
    device, config = problem.device, problem.config
    if kernel.device and kernel.device != device.type:
        yield f"It runs on {kernel.device} only, and the inputs are on {device.type}."
    if kernel.capability and device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < kernel.capability:
            needed, has = (".".join(map(str, each)) for each in (kernel.capability, found))
            yield f"It needs compute capability {needed}, and this device has {has}."
    if kernel.dtypes and config.dtype not in kernel.dtypes:
        yield f"It takes {join_labels(kernel.dtypes)}, and the configuration has {config.dtype}."
    if kernel.head_dims and config.head_dim not in kernel.head_dims:
        sizes = join_labels([str(size) for size in kernel.head_dims])
        yield f"It takes head size {sizes}, and the configuration has {config.head_dim}."
    if kernel.layout not in ("bhsd", "bshd"):
        yield f"Its layout is '{kernel.layout}'; the layouts are bhsd and bshd."
    if kernel.max_rows is not None and config.q_len > kernel.max_rows:
        yield f"It takes up to {kernel.max_rows} rows, and the configuration has {config.q_len}."
    for name, tensor in (("q", problem.q), ("k", problem.k), ("v", problem.v)):
        if not tensor.is_contiguous():
            yield f"{name} is not contiguous."


def options_of(kernel: Kernel, problem: Problem) -> dict[str, Any]:
    """Return the options that the kernel gets for a problem, by its signature.

    Raises `ContractError` if the problem needs an option that the kernel does not have.
    """
    names, config = _parameter_names(kernel), problem.config
    options: dict[str, Any] = {}
    missing: list[str] = []
    _add_mask(names, problem, options, missing)
    scale = next((name for name in SCALE_OPTIONS if name in names), None)
    if scale is not None:
        options[scale] = config.used_scale
    elif config.scale is not None:
        missing.append(f"no scale, and the configuration has scale = {config.scale:g}")
    softcap = next((name for name in SOFTCAP_OPTIONS if name in names), None)
    score_mod = problem.score_mod
    if config.softcap is not None and softcap is not None:
        options[softcap] = config.softcap
    elif config.softcap is not None and "score_mod" in names:
        score_mod = with_softcap(score_mod, config.softcap)
    elif config.softcap is not None:
        missing.append(f"no softcap or score_mod, and there is softcap = {config.softcap:g}")
    if "score_mod" in names:
        options["score_mod"] = score_mod
    elif score_mod is not None:
        missing.append(f"no score_mod, and the configuration has {config.score_mod}")
    if "enable_gqa" in names:
        options["enable_gqa"] = config.q_heads != config.kv_heads
    options |= {name: True for name in LSE_OPTIONS if name in names}
    if missing:
        text = f"It takes {'; '.join(missing)}."
        if _takes_any_options(kernel):
            text += " Its **options get nothing: name the options in its signature."
        raise ContractError(text)
    return options


def _add_mask(
    names: frozenset[str], problem: Problem, options: dict[str, Any], missing: list[str]
) -> None:
    config = problem.config
    is_causal = config.mask == "causal" and config.q_len == config.kv_len
    causal = next((name for name in CAUSAL_OPTIONS if name in names), None)
    has_mask = any(name in names for name in MASK_OPTIONS)
    if not problem.is_masked:
        return
    for name in ("attn_mask", "mask"):
        if name in names:
            options[name] = problem.cells
    if "mask_mod" in names:
        options["mask_mod"] = problem.mask_mod
    if "block_mask" in names:
        options["block_mask"] = problem.block_mask
    if causal is not None and is_causal and not has_mask:
        options[causal] = True
    elif not has_mask:
        missing.append(f"no mask that could express {config.mask}")


def _parameter_names(kernel: Kernel) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(kernel.function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature takes q, k and v
        return frozenset()


def _takes_any_options(kernel: Kernel) -> bool:
    try:
        parameters = inspect.signature(kernel.function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def call_kernel(
    kernel: Kernel, problem: Problem, qkv: tuple[Tensor, Tensor, Tensor] | None = None
) -> KernelResult:
    """Call the kernel on a problem, or on other q, k, v of the same shapes.

    Raises `ContractError` if it raises, or returns something else than an output of the right
    shape on the right device. Another dtype is a fault of the result.
    """
    q, k, v = (problem.q, problem.k, problem.v) if qkv is None else qkv
    options = options_of(kernel, problem)
    is_swapped = kernel.layout == "bshd"
    if is_swapped:
        q, k, v = (each.transpose(1, 2).contiguous() for each in (q, k, v))
    try:
        returned = kernel.function(q, k, v, **options)
    except Exception as error:
        is_refusal = isinstance(error, NotImplementedError)
        is_refusal |= any(part in str(error) for part in _REFUSALS)
        text = f"It failed: {summarize_error(error)}"
        raise ContractError(text, is_fault=not is_refusal) from error
    out, rest = (returned[0], returned[1:]) if isinstance(returned, tuple) else (returned, ())
    if not isinstance(out, Tensor):
        raise ContractError(f"It returned a {type(out).__name__}, not a tensor.", is_fault=True)
    if tuple(out.shape) != tuple(q.shape):
        text = f"Its output is {tuple(out.shape)}; q is {tuple(q.shape)}."
        raise ContractError(text, is_fault=True)
    if out.device.type != problem.device.type:
        text = f"Its output is on {out.device}; q is on {problem.device}."
        raise ContractError(text, is_fault=True)
    faults = []
    if out.dtype is not problem.dtype:
        names = [str(each).removeprefix("torch.") for each in (out.dtype, problem.dtype)]
        faults.append(f"The output is {names[0]}, and q is {names[1]}.")
    out = out.transpose(1, 2) if is_swapped else out
    lse = _lse_of(rest, tuple(out.shape[:3]), faults)
    return KernelResult(out, lse, tuple(faults))


def _lse_of(rest: tuple[Any, ...], shape: tuple[int, ...], faults: list[str]) -> Tensor | None:
    second = rest[0] if rest else None
    lse = getattr(second, "lse", second)  # AuxOutput of FlexAttention
    if not isinstance(lse, Tensor):
        return None
    if tuple(lse.shape) != shape:
        faults.append(f"The LSE is {tuple(lse.shape)}; (batch, heads, rows) is {shape}.")
        return None
    return lse

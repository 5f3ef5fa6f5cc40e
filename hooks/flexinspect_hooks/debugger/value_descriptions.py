"""Short, bounded descriptions of tensors, block masks, caches and modules for a debugger.

A stop may happen inside vmap, a dispatch mode, or a graph that is being built. The descriptions
must not affect those, so tensors are unwrapped and all modes are disabled meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.utils._python_dispatch import _disable_current_modes

MAX_EXACT = 1 << 24
"""Elements up to which a CPU tensor is read completely, within the time budget."""

SAMPLE_SIZE = 4096
"""Elements that are read of a larger tensor, or of one on another device."""

BUDGET_S = 0.3
"""Seconds per second that may be spent on reading complete tensors."""

MAX_VALUES = 6
"""Most values that are listed."""

MAX_MEMBERS = 20
"""Most members of a container that are described."""

_spent = [0.0, 0.0]
"""Start of the current second, and the time spent in it."""


@contextmanager
def torch_modes_disabled() -> Iterator[None]:
    """Context manager in which torch computes without modes, vmap and gradients."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        yield


def unwrap_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor under vmap's and grad's wrappers."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def describe_tensor(tensor: Tensor) -> str:
    """Return a tensor in one line: shape, dtype, device, statistics, the first values.

    The statistics say "sample of" if not all elements were read. Errors are shown in their place.
    """
    with torch_modes_disabled():
        real = unwrap_tensor(tensor)
        head = f"{_shape_and_dtype(tensor)} {tensor.device}"
        if real is not tensor:
            head += f", one of {_format_shape(real)} under vmap"
        try:
            return f"{head}  {_describe_values(real)}"
        except Exception as error:
            return f"{head}  values not readable: {type(error).__name__}"


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{_format_shape(tensor)} {str(tensor.dtype).removeprefix('torch.')}"


def _format_shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "0-dim"


def _describe_values(tensor: Tensor) -> str:
    if tensor.numel() == 0:
        return "empty"
    if tensor.is_meta or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
        return f"no values ({type(tensor).__name__})"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"values not shown ({tensor.layout})"
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return "values not readable while a CUDA graph is recorded"
    if tensor.numel() == 1:
        return str(tensor.item())
    as_text: Callable[[Any], str] = "{:.4g}".format if tensor.is_floating_point() else str
    values = _take_elements(tensor, torch.arange(min(MAX_VALUES, tensor.numel()))).tolist()
    more = ", …" if tensor.numel() > MAX_VALUES else ""
    return f"{_sampled_statistics(tensor)}  [{', '.join(map(as_text, values))}{more}]"


def _sampled_statistics(tensor: Tensor) -> str:
    """Return the statistics of all elements if that is cheap, otherwise of a sample."""
    read, note = tensor, ""
    if tensor.numel() > SAMPLE_SIZE and not _can_read_all(tensor):
        at = torch.linspace(0, tensor.numel() - 1, SAMPLE_SIZE, dtype=torch.float64).long()
        read, note = _take_elements(tensor, at), f" (sample of {SAMPLE_SIZE} of {tensor.numel():,})"
    elif tensor.device.type != "cpu":
        read = tensor.cpu()
    started = time.perf_counter()
    text = _statistics(read)
    _spent[1] += time.perf_counter() - started
    return text + note


def _can_read_all(tensor: Tensor) -> bool:
    now = time.perf_counter()
    if now - _spent[0] > 1.0:
        _spent[:] = now, 0.0
    return tensor.device.type == "cpu" and tensor.numel() <= MAX_EXACT and _spent[1] < BUDGET_S


def _take_elements(tensor: Tensor, at: Tensor) -> Tensor:
    """Return elements by flat index, as a copy on the CPU, for any strides."""
    at = at.to(tensor.device)
    return tensor[torch.unravel_index(at, tensor.shape)].cpu()


def _statistics(values: Tensor) -> str:
    if values.dtype == torch.bool:
        n = int(values.sum())
        return f"{n:,} of {values.numel():,} true ({n / values.numel():.1%})"
    if values.is_complex():
        return "complex"
    if not values.is_floating_point():
        low, high = torch.aminmax(values)
        mean = float(values.sum(dtype=torch.float64)) / values.numel()
        return f"min {int(low)} mean {mean:.4g} max {int(high)}"
    total = values.sum(dtype=torch.float32 if values.element_size() < 4 else None).item()
    counts = "no NaN or Inf"
    if total - total != 0:  # NaN or infinite, as some elements may be
        values = values.float()
        counts = f"{int(values.isnan().sum()):,} NaN {int(values.isinf().sum()):,} Inf"
        values = values[values.isfinite()]
        if not values.numel():
            return f"no finite value {counts}"
        total = values.sum(dtype=torch.float64).item()
    low, high = torch.aminmax(values)
    mean = total / values.numel()
    return f"min {float(low):.4g} mean {mean:.4g} max {float(high):.4g} {counts}"


# -- other things ------------------------------------------------------------------------------


def describe_mask(mask: BlockMask) -> str:
    """Return a block mask in one line: its lengths, its blocks by kind, its mask_mod."""
    from flexinspect_hooks.python_internals.mask_mod_identity import mask_mod_name

    with torch_modes_disabled():
        batch, heads, q_len, kv_len = mask.shape
        partial = int(unwrap_tensor(mask.kv_num_blocks).sum())
        full = 0 if mask.full_kv_num_blocks is None else int(mask.full_kv_num_blocks.sum())
        rows, cols = mask.kv_num_blocks.shape[-1], mask.kv_indices.shape[-1]
        size = "×".join(map(str, mask.BLOCK_SIZE))
        return (
            f"{q_len} rows × {kv_len} keys, batch {batch}, heads {heads}; "
            f"{rows}×{cols} blocks of {size}: {full} full, {partial} partial; "
            f"mask_mod {mask_mod_name(mask.mask_mod)}"
        )


def describe_cache(cache: Any) -> str:
    """Return a cache in one line: layers, positions, shape of one layer's keys."""
    layers = list(getattr(cache, "layers", ()))
    keys = [getattr(layer, "keys", None) for layer in layers]
    filled = [key for key in keys if isinstance(key, Tensor) and key.numel()]
    if not filled:
        return f"{len(layers)} layers, empty"
    first = filled[0]
    n_bytes = 2 * sum(key.numel() * key.element_size() for key in filled)
    alike = "" if len({key.shape for key in filled}) == 1 else ", not alike"
    return (
        f"{len(filled)} of {len(layers)} layers filled, {first.shape[-2]} positions, "
        f"keys {_shape_and_dtype(first)} {first.device}{alike}, {n_bytes / 1e6:.1f} MB"
    )


def describe_module(module: nn.Module) -> str:
    """Return a module in one line: its class, layer, mode and children."""
    layer = getattr(module, "layer_idx", None)
    where = f" of layer {layer}" if isinstance(layer, int) else ""
    own = ", ".join(name for name, _ in list(module.named_children())[:MAX_MEMBERS])
    state = "training" if module.training else "eval"
    return f"{type(module).__name__}{where} ({state}): {own or 'no children'}"


def describe_container(value: Any) -> str | None:
    """Return a list, tuple or dict of tensors, masks or modules in one line; None for others."""
    is_mapping = isinstance(value, Mapping)
    members = list(value.values() if is_mapping else value)[:MAX_MEMBERS]
    if not any(_holds_torch_values(one) for one in members):
        return None
    names = [f"{key!r:.40}: " for key in value] if is_mapping else [""] * MAX_MEMBERS
    texts = [name + _describe_member(one) for name, one in zip(names, members, strict=False)]
    more = ", …" if len(value) > MAX_MEMBERS else ""
    return f"{type(value).__name__} of {len(value)}: {', '.join(texts)}{more}"


def _holds_torch_values(value: Any, depth: int = 2) -> bool:
    if isinstance(value, (list, tuple)) and depth:
        return any(_holds_torch_values(one, depth - 1) for one in value[:MAX_MEMBERS])
    return isinstance(value, (Tensor, BlockMask, nn.Module))


def _describe_member(value: Any, depth: int = 2) -> str:
    if isinstance(value, Tensor):
        return _shape_and_dtype(value)
    if isinstance(value, (BlockMask, nn.Module)):
        return type(value).__name__
    if isinstance(value, (list, tuple)) and depth:
        return f"({', '.join(_describe_member(one, depth - 1) for one in value[:MAX_MEMBERS])})"
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
    return text if len(text) <= 40 else text[:39] + "…"


MAX_ROWS, MAX_COLS = 24, 48
"""Largest size of a rendered mask, in cells."""

OPEN_CELL, PARTIAL_CELL, CLOSED_CELL = "█", "▒", "·"


def is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor looks like a mask: boolean, with two or more dimensions."""
    return tensor.dtype == torch.bool and tensor.dim() >= 2


def render_mask(mask: Tensor) -> list[str]:
    """Return the first batch and head of a boolean mask as rows of at most MAX_COLS cells.

    A mask of more than MAX_ROWS rows or MAX_COLS columns is sampled.
    """
    with torch_modes_disabled():
        plane = unwrap_tensor(mask)
        while plane.dim() > 2:
            plane = plane[0]
        rows = _sample_positions(plane.shape[0], MAX_ROWS)
        cols = _sample_positions(plane.shape[1], MAX_COLS)
        seen = plane[rows.to(plane.device)][:, cols.to(plane.device)].cpu().tolist()
        return ["".join(OPEN_CELL if one else CLOSED_CELL for one in row) for row in seen]


def render_blocks(mask: BlockMask) -> list[str]:
    """Return the block tables of batch 0 and head 0: full, partial and closed blocks."""
    with torch_modes_disabled():
        n_rows, n_cols = mask.kv_num_blocks.shape[-1], mask.kv_indices.shape[-1]
        cells = [[CLOSED_CELL] * n_cols for _ in range(min(n_rows, MAX_ROWS))]
        tables = [(mask.kv_num_blocks, mask.kv_indices, PARTIAL_CELL)]
        if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
            tables.append((mask.full_kv_num_blocks, mask.full_kv_indices, OPEN_CELL))
        for numbers, indices, sign in tables:
            found = indices[0, 0, :MAX_ROWS].tolist()
            for row, number in enumerate(numbers[0, 0, :MAX_ROWS].tolist()):
                for col in found[row][:number]:
                    cells[row][col] = sign
        return ["".join(row[:MAX_COLS]) for row in cells]


def render_mask_mod(mask: BlockMask) -> list[str]:
    """Evaluate the mask_mod for batch 0 and head 0, sampled as in `render_mask`."""
    with torch_modes_disabled():
        q_len, kv_len = mask.shape[-2:]
        device = mask.kv_num_blocks.device
        rows = _sample_positions(q_len, MAX_ROWS).to(device)
        cols = _sample_positions(kv_len, MAX_COLS).to(device)

        def sampled(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return mask.mask_mod(b, h, rows[q_idx], cols[kv_idx])

        return render_mask(create_mask(sampled, 1, 1, len(rows), len(cols), device=str(device)))


def _sample_positions(length: int, most: int) -> Tensor:
    """Return at most `most` evenly spaced positions of `length`."""
    n = min(length, most)
    return torch.linspace(0, max(length - 1, 0), n, dtype=torch.float64).round().long()

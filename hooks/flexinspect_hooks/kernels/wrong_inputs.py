"""The q, k and v that kernels read by mistake, each with its class."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.kernels.problem import Problem

_NAMES = ("q", "k", "v")
_OFFSETS = (1, 2, 4, 8, 16)  # elements; vector loads are powers of two

QKV = tuple[Tensor, Tensor, Tensor]


class InputFault(Struct, frozen=True):
    """Wrong inputs: q (batch, query heads, rows, head size), k and v of the problem's shapes.

    `beyond` are the elements of q, k or v, as `name` says, that are unknown: bool, of its shape,
    all in one row of it. None means that all are known.
    """

    kind: str
    sentence: str
    qkv: QKV
    name: str = ""
    beyond: Tensor | None = None


def input_faults(problem: Problem, layout: str = "bhsd") -> Iterator[InputFault]:
    """Yield the wrong inputs that differ from the problem's, of a kernel with this layout."""
    qkv = (problem.q, problem.k, problem.v)
    for fault in (
        *(*_exchanged(qkv), *_layouts(qkv), *_shifted(qkv)),
        *(*_offsets(problem, layout), *_rounded(qkv), *_parts(qkv)),
    ):
        if not all(torch.equal(*pair) for pair in zip(fault.qkv, qkv, strict=True)):
            yield fault


def _exchanged(qkv: QKV) -> Iterator[InputFault]:
    q, k, v = qkv
    yield InputFault("inputs-exchanged", "k and v are exchanged.", (q, v, k))
    if q.shape == k.shape:
        yield InputFault("inputs-exchanged", "q and k are exchanged.", (k, q, v))
        yield InputFault("inputs-exchanged", "q and v are exchanged.", (v, k, q))


def _layouts(qkv: QKV) -> Iterator[InputFault]:
    for index, name in enumerate(_NAMES):
        batch, heads, length, width = qkv[index].shape
        memory = qkv[index].reshape(batch, length, heads, width).transpose(1, 2)
        text = f"{name} is read as (batch, length, heads, size); it is (batch, heads, length, size)"
        yield InputFault("layout", f"{text}.", _replaced(qkv, index, memory))
        memory = qkv[index].transpose(1, 2).reshape(batch, heads, length, width)
        text = f"{name} is copied to (batch, length, heads, size), and read with the old strides."
        yield InputFault("layout", text, _replaced(qkv, index, memory))


def _shifted(qkv: QKV) -> Iterator[InputFault]:
    for index, name in ((1, "k"), (2, "v")):
        for shift, word in ((1, "before"), (-1, "after")):
            text = f"For each key, {name} of the key {word} it is read."
            moved = _replaced(qkv, index, qkv[index].roll(shift, 2))
            yield InputFault("key-shifted", text, moved)


def _offsets(problem: Problem, layout: str) -> Iterator[InputFault]:
    """Tensors that are read from a wrong address.

    What lies beyond their ends is unknown: at most one row of elements.
    """
    qkv = (problem.q, problem.k, problem.v)
    for index, name in enumerate(_NAMES):
        width = qkv[index].shape[-1]
        for n in (*_OFFSETS, width):
            for sign, word in ((1, "after"), (-1, "before")):
                count = "1 element" if n == 1 else f"{n} elements" + " (one row)" * (n == width)
                text = f"{name} is read from {count} {word} its address."
                moved, beyond = _moved(qkv[index], sign * n, layout)
                wrong = _replaced(qkv, index, moved)
                yield InputFault("pointer-offset", text, wrong, name, beyond)


def _rounded(qkv: QKV) -> Iterator[InputFault]:
    """Inputs in a lower precision than their own; TF32 has the 10 bits of float16's mantissa."""
    for name in ("tf32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        rounded = [_round(each, name) for each in qkv]
        title = name.upper() if name == "tf32" else name
        for count, names in ((3, "q, k and v"), (2, "q and k")):
            q, k, v = (*rounded[:count], *qkv[count:])
            yield InputFault("inputs-rounded", f"{names} are rounded to {title}.", (q, k, v))


def _parts(qkv: QKV) -> Iterator[InputFault]:
    """Parts of q, k and v that are not read."""
    q, k, v = qkv
    width = q.shape[-1]
    for n in dict.fromkeys((1, width % 16, width % 32, width % 64, width // 2)):
        if 0 < n < width:
            rest = q.clone()
            rest[..., width - n :] = 0
            text = f"The scores are without the last {n} of {width} columns of q and k."
            yield InputFault("columns-dropped", text, (rest, k, v))
    first = [each[:1].expand_as(each).contiguous() for each in (k, v)]
    for name, wrong in (
        ("k and v", (q, first[0], first[1])),
        ("k", (q, first[0], v)),
        ("v", (q, k, first[1])),
    ):
        text = f"The whole batch reads {name} of batch row 0."
        yield InputFault("inputs-of-batch-0", text, wrong)


def _round(tensor: Tensor, name: str) -> Tensor:
    if name != "tf32":
        return tensor.to(getattr(torch, name)).to(tensor.dtype)
    bits = tensor.float().contiguous().view(torch.int32)
    kept = (bits + 0x1000) & ~0x1FFF  # half of the last bit that stays is added, then 13 bits go
    return kept.view(torch.float32).to(tensor.dtype)


def _moved(tensor: Tensor, n: int, layout: str) -> tuple[Tensor, Tensor]:
    """Return a tensor read `n` elements away, and which elements lie beyond its ends."""
    memory = tensor.transpose(1, 2) if layout == "bshd" else tensor
    position = torch.arange(memory.numel(), device=tensor.device) + n
    beyond = ((position < 0) | (position >= memory.numel())).reshape(memory.shape)
    moved = memory.reshape(-1).roll(-n).reshape(memory.shape)
    return (moved.transpose(1, 2), beyond.transpose(1, 2)) if layout == "bshd" else (moved, beyond)


def _replaced(qkv: QKV, index: int, tensor: Tensor) -> QKV:
    q, k, v = (tensor if at == index else each for at, each in enumerate(qkv))
    return q, k, v

"""The q, k and v that kernels read by mistake, each with its class."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.kernels.problem import Problem

_NAMES = ("q", "k", "v")


class InputFault(Struct, frozen=True):
    """Wrong inputs: q (batch, query heads, rows, head size), k and v of the problem's shapes."""

    kind: str
    sentence: str
    qkv: tuple[Tensor, Tensor, Tensor]


def input_faults(problem: Problem) -> Iterator[InputFault]:
    """Yield the wrong inputs that differ from the problem's."""
    qkv = (problem.q, problem.k, problem.v)
    for fault in (*_exchanged(qkv), *_layouts(qkv), *_shifted(qkv)):
        if not all(torch.equal(*pair) for pair in zip(fault.qkv, qkv, strict=True)):
            yield fault


def _exchanged(qkv: tuple[Tensor, Tensor, Tensor]) -> Iterator[InputFault]:
    q, k, v = qkv
    yield InputFault("inputs-exchanged", "k and v are exchanged.", (q, v, k))
    if q.shape == k.shape:
        yield InputFault("inputs-exchanged", "q and k are exchanged.", (k, q, v))
        yield InputFault("inputs-exchanged", "q and v are exchanged.", (v, k, q))


def _layouts(qkv: tuple[Tensor, Tensor, Tensor]) -> Iterator[InputFault]:
    for index, name in enumerate(_NAMES):
        batch, heads, length, width = qkv[index].shape
        memory = qkv[index].reshape(batch, length, heads, width).transpose(1, 2)
        text = f"{name} is read as (batch, length, heads, size); it is (batch, heads, length, size)"
        yield InputFault("layout", f"{text}.", _replaced(qkv, index, memory))
        memory = qkv[index].transpose(1, 2).reshape(batch, heads, length, width)
        text = f"{name} is copied to (batch, length, heads, size), and read with the old strides."
        yield InputFault("layout", text, _replaced(qkv, index, memory))


def _shifted(qkv: tuple[Tensor, Tensor, Tensor]) -> Iterator[InputFault]:
    for index, name in ((1, "k"), (2, "v")):
        for shift, word in ((1, "before"), (-1, "after")):
            text = f"For each key, {name} of the key {word} it is read."
            moved = _replaced(qkv, index, qkv[index].roll(shift, 2))
            yield InputFault("key-shifted", text, moved)


def _replaced(
    qkv: tuple[Tensor, Tensor, Tensor], index: int, tensor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (tensor if at == index else each for at, each in enumerate(qkv))
    return q, k, v

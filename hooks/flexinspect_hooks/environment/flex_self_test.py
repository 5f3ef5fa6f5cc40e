"""A small mask through every form of FlexAttention of this machine, compared with an oracle."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

N_TOKENS, N_HEADS, HEAD_DIM, SEGMENT = 256, 2, 32, 48
"""Two blocks of rows, and segments whose borders lie inside a block."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest absolute difference of an output of unit inputs that rounding explains."""


def segment_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Segment isolation: a row attends to itself and to the earlier keys of its segment."""
    return (q_idx >= kv_idx) & (q_idx // SEGMENT == kv_idx // SEGMENT)


def kernels() -> list[str]:
    """Return the names of the kernels that can run here."""
    names = ["uncompiled", "compiled"]
    return names + (["cuda", "cuda compiled"] if torch.cuda.is_available() else [])


def run_kernel(name: str) -> dict[str, Any]:
    """Run a kernel twice; return its error, the tolerance, and the seconds of both calls."""
    device = "cuda" if name.startswith("cuda") else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    shape = (3, 1, N_HEADS, N_TOKENS, HEAD_DIM)
    inputs = torch.randn(shape, generator=generator).to(device, dtype)
    block_mask = create_block_mask(segment_mask, None, None, N_TOKENS, N_TOKENS, device=device)
    is_compiled = name.split()[-1] == "compiled"
    call: Any = torch.compile(flex_attention) if is_compiled else flex_attention
    times = []
    with torch.no_grad():
        for _ in range(2):
            started = time.perf_counter()
            out = call(*inputs, block_mask=block_mask)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(round(time.perf_counter() - started, 3))
    error = float((out.double().cpu() - _oracle(inputs.double().cpu())).abs().max())
    facts = {"kernel": name, "error_size": error, "tolerance": TOLERANCE[dtype]}
    return facts | {"first_s": times[0], "next_s": times[1]}


def _oracle(inputs: Tensor) -> Tensor:
    """Attention in float64 with the mask as a table: no kernel, no blocks."""
    q, k, v = inputs
    index = torch.arange(N_TOKENS)
    none = torch.zeros((), dtype=torch.long)
    open_cells = segment_mask(none, none, index[:, None], index[None])
    scores = (q @ k.transpose(-1, -2)) / HEAD_DIM**0.5
    out: Tensor = scores.masked_fill(~open_cells, -torch.inf).softmax(-1) @ v
    return out

"""A problem from a trace: the q, k, v that a layer had in a recorded step, under its mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexinspect.core.errors import UsageError
from flexinspect.core.text import format_numbers
from flexinspect.inputs.kernel_configs import KernelConfig, TracePoint
from flexinspect.records.step import CallRecord
from flexinspect.trace.queries import branch_of_step, lineage, step_bounds
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.kernels.problem import Problem


def captured_problem(point: TracePoint, device: torch.device) -> Problem:
    """Return the problem of a layer in a step of a trace; the batch is 1, batch row 0.

    Raises `UsageError` if q, k and v of the layer are not recorded (level extreme records them),
    and `TraceError` if the file is none.
    """
    with open_trace(Path(point.trace)) as reader, reader.snapshot():
        return _read_problem(reader, point, device)


def _read_problem(reader: TraceReader, point: TracePoint, device: torch.device) -> Problem:
    generation, step = point.generation, point.step
    first, last = step_bounds(reader, generation, point.branch) or (0, -1)
    if not first <= step <= last:
        steps = f"it has steps {first} to {last}" if last >= first else "it has none"
        raise UsageError(f"{point.trace} has no step {step} in generation {generation}; {steps}.")
    branch = branch_of_step(reader, generation, step, point.branch)
    calls = [c for c in reader.calls(generation, step, branch) if c.layer == point.layer]
    if not calls:
        layers = sorted({call.layer for call in reader.calls(generation, step, branch)})
        known = f"it has {format_numbers('layer', layers)}" if layers else "it has no calls"
        raise UsageError(f"Step {step} of {point.trace} has no layer {point.layer}; {known}.")
    call = calls[-1]
    query = _array(reader, point, "q", step)
    key, value = (_join(reader, point, name) for name in ("k", "v"))
    record = None if call.mask is None else reader.mask(call.mask)
    n_keys = key.shape[1]
    cells = torch.ones(1, 1, query.shape[1], n_keys, dtype=torch.bool)
    offset = n_keys - call.kv_len
    if record is not None and record.cells is not None:
        # A mask of one row or one head is that of all of them.
        shape = (record.cells.shape[0], query.shape[1], call.kv_len)
        cells = torch.from_numpy(np.broadcast_to(record.cells, shape).copy())[None]
    elif call.mask is not None:
        raise UsageError(f"The executed mask of layer {call.layer} in step {step} is not recorded.")
    key, value = key[:, offset:], value[:, offset:]
    config = _config(call, query, key, cells)
    dtype = getattr(torch, call.dtype)
    qkv = [each[None].to(device=device, dtype=dtype).contiguous() for each in (query, key, value)]
    where = f"captured: {Path(point.trace).name}, step {step}, layer {point.layer}"
    return Problem(
        config,
        (qkv[0], qkv[1], qkv[2]),
        cells=cells.to(device),
        tokens=_texts(reader, point, n_keys)[offset:],
        inputs_text=where,
    )


def _texts(reader: TraceReader, point: TracePoint, n_keys: int) -> tuple[str, ...]:
    """The texts of the keys; a branch holds its own tokens only, its parents the others."""
    texts: dict[int, str] = {}
    for branch, _, _ in lineage(reader, point.generation, point.branch):
        for token in reader.tokens(point.generation, branch, stop=n_keys):
            texts.setdefault(token.pos, token.text)
    return tuple(texts.get(position, "") for position in range(n_keys))


def _config(call: CallRecord, query: Tensor, key: Tensor, cells: Tensor) -> KernelConfig:
    rows, keys = cells.shape[-2:]
    causal = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    mask = "none" if bool(cells.all()) else "captured"
    return KernelConfig(
        name="captured",
        dtype=call.dtype,
        q_heads=query.shape[0],
        kv_heads=key.shape[0],
        q_len=query.shape[1],
        kv_len=key.shape[1],
        head_dim=query.shape[2],
        mask="causal" if torch.equal(cells[0, 0], causal) and len(cells[0]) == 1 else mask,
        scale=call.scale,
        softcap=call.softcap,
    )


def _array(reader: TraceReader, point: TracePoint, stream: str, step: int) -> Tensor:
    """The rows of a step, (heads, rows, head size)."""
    branch = branch_of_step(reader, point.generation, step, point.branch)
    array: Any = reader.array(point.generation, step, stream, point.layer, branch)
    if array is None:
        what = f"{stream} of layer {point.layer} in step {step} is not recorded in {point.trace}."
        raise UsageError(what, hint="Record it with: flexinspect run --level extreme --layers N")
    return torch.from_numpy(np.array(array))


def _join(reader: TraceReader, point: TracePoint, stream: str) -> Tensor:
    """The rows of a stream from the prefill to the step."""
    steps = range(point.step + 1)
    return torch.cat([_array(reader, point, stream, step) for step in steps], 1)

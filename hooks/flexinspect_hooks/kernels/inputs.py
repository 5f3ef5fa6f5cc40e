"""Inputs of kernels: random, a range, positions that can be read in the output, or captured.

Each input has a description that every report prints, because an input decides which faults can
show: `blind_share` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect.core.errors import UsageError
from flexinspect.core.text import plural
from flexinspect.inputs.kernel_configs import KernelConfig
from flexinspect_hooks.kernels.key_use import MIN_WEIGHT
from flexinspect_hooks.kernels.oracle import Variation, attend, scores_of, weights_of
from flexinspect_hooks.kernels.problem import Problem, make_mask_mod, mask_cells, seeded

QKV = tuple[Tensor, Tensor, Tensor]
KINDS = ("normal", "raw", "unit", "token")
DIGIT = 64
"""Base of the digits of a position: bfloat16 holds whole numbers up to 256 exactly."""

_READ_COLUMNS = 4
_READABLE_WEIGHT = 0.99
_PEAK_SCORE = 60.0  # exp(-60) is below the rounding of every dtype, and 60 is exact in all of them
_SATURATED_SHARE = 0.5
_BLIND_SHARE = 0.5
_SMALL_BLOCK = 16  # keys; kernels take blocks of 16 or more
_FEW_GROWING = 0.01
_MAX_BLIND_ROWS = 64  # rows per head for which every lost key is tried


def make_problem(config: KernelConfig, kind: str, seed: int, device: torch.device) -> Problem:
    """Return the problem of a configuration with inputs of a kind. Raises `UsageError`.

    normal: q, k, v ~ N(0, 1) of the seed. raw: `q` counts up over (batch, rows, heads, head size),
    `k = -q`, `v = q`. unit: the same, divided by the number of elements. token: see `_token`.
    """
    if kind == "normal":
        qkv = _normal(config, seed)
    elif kind == "token":
        qkv = _token(config, seed, device)
    else:
        qkv = _range(config, is_raw=kind == "raw")
    q, k, v = (each.to(device=device, dtype=getattr(torch, config.dtype)) for each in qkv)
    return Problem(
        config,
        (q.contiguous(), k.contiguous(), v.contiguous()),
        inputs_text=describe_inputs(kind, seed),
        holds_positions=kind == "token",
    )


def describe_inputs(kind: str, seed: int) -> str:
    """Return what the inputs are, in one line."""
    texts = {
        "normal": f"q, k, v ~ N(0, 1), seed {seed}",
        "raw": "--range raw: q = 0, 1, 2, ...; k = -q; v = q",
        "unit": "--range unit: q from 0 to 1; k = -q; v = q",
        "token": f"--range token: each row attends to one key, v holds positions, seed {seed}",
    }
    return texts.get(kind, kind)


def _shapes(config: KernelConfig) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    rows = (config.batch, config.q_heads, config.q_len, config.head_dim)
    return rows, (config.batch, config.kv_heads, config.kv_len, config.head_dim)


def _normal(config: KernelConfig, seed: int) -> QKV:
    rows, keys = _shapes(config)
    generator = seeded().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator) for shape in (rows, keys, keys))
    return q, k, v


def _range(config: KernelConfig, *, is_raw: bool) -> QKV:
    rows, keys = _shapes(config)
    dtype = getattr(torch, config.dtype) if is_raw else torch.float64

    def count(shape: tuple[int, int, int, int]) -> Tensor:
        batch, heads, length, width = shape
        n = math.prod(shape)
        if is_raw and n - 1 > torch.finfo(dtype).max:
            what = f"--range raw counts up to {n - 1} in {config.name}, too much for {config.dtype}"
            raise UsageError(f"{what}.", hint="Use --range unit, or a smaller configuration.")
        values = torch.arange(0, n, dtype=dtype).reshape(batch, length, heads, width)
        return (values if is_raw else values / n).transpose(1, 2)

    q, k = count(rows), -count(keys)
    return q, k, -k


def _token(config: KernelConfig, seed: int, device: torch.device) -> QKV:
    """Inputs with which each row reads one key, and its output tells which.

    Keys are random signs. The query of a row is the key that it aims at: by turns its last open
    key, its first one, another open one, and the first closed key after the open ones, which a
    right kernel does not read. Columns 0 to 3 of a value are the position (two digits of base 64),
    the key head and the batch, and the other columns are random signs.
    """
    if config.head_dim < 2 * _READ_COLUMNS:
        raise UsageError(f"--range token needs a head size of 8 or more; {config.name} has less.")
    rows, keys = _shapes(config)
    generator = seeded().manual_seed(seed)
    k, v = (torch.randint(0, 2, keys, generator=generator) * 2.0 - 1 for _ in range(2))
    position = torch.arange(config.kv_len)
    v[..., 0], v[..., 1] = position % DIGIT, position // DIGIT
    v[..., 2] = torch.arange(config.kv_heads)[:, None]
    v[..., 3] = torch.arange(config.batch)[:, None, None]
    cells = mask_cells(config, make_mask_mod(config), device).cpu()
    aims = _aims(cells.expand(*rows[:3], config.kv_len), generator)
    grouped = k.repeat_interleave(config.q_heads // config.kv_heads, 1)
    q = torch.gather(grouped, 2, aims[..., None].expand(*rows))
    return q * (_PEAK_SCORE / config.used_scale / config.head_dim), k, v


def _aims(cells: Tensor, generator: torch.Generator) -> Tensor:
    """The key at which each row aims, (batch, heads, rows)."""
    n_keys = cells.shape[-1]
    position = torch.arange(n_keys)
    last = torch.where(cells, position, -1).amax(-1).clamp_min(0)
    first = torch.where(cells, position, n_keys).amin(-1).clamp_max(n_keys - 1)
    other = (torch.rand(cells.shape, generator=generator) * cells).argmax(-1)
    trap = torch.where(last + 1 < n_keys, last + 1, (first - 1).clamp_min(0))
    batch, heads, rows = (torch.arange(size) for size in cells.shape[:3])
    turn = (batch[:, None, None] + heads[:, None] + rows) % 4
    return torch.stack([last, first, other, trap]).gather(0, turn[None])[0]


class Read(Struct, frozen=True):
    """A row that read another key than it must: all places are (key head, key position)."""

    batch: int
    head: int
    row: int
    expected: tuple[int, int]
    read: tuple[int, int]


def wrong_reads(problem: Problem, out: Tensor) -> tuple[list[Read], int]:
    """Return the rows of `--range token` inputs that read a wrong key, and how many were readable.

    A row is readable if the oracle puts nearly all weight on one key.
    """
    weights = weights_of(problem, Variation.of(problem))
    top, expected = weights.max(-1)
    codes = out.double().nan_to_num(-1.0, posinf=-1.0, neginf=-1.0)
    read = codes[..., 0].round() + DIGIT * codes[..., 1].round()
    heads = codes[..., 2].round()
    group = problem.config.q_heads // problem.config.kv_heads
    kv_head = torch.arange(problem.config.q_heads, device=out.device)[:, None] // group
    readable = top > _READABLE_WEIGHT
    wrong = readable & ((read != expected) | (heads != kv_head))
    found = []
    for batch, head, row in wrong.nonzero().tolist():
        place = (batch, head, row)
        got = (int(heads[place]), int(read[place]))
        found.append(Read(*place, (head // group, int(expected[place])), got))
    return found, int(readable.sum())


def input_warnings(problem: Problem, tolerance: float, *, is_probed: bool) -> Iterator[str]:
    """Yield a sentence for each reason why these inputs may not show a fault.

    `is_probed` tells that the identity-V probe ran, which sees a lost key by its weight.
    """
    for name, tensor in (("q", problem.q), ("k", problem.k), ("v", problem.v)):
        if not bool(tensor.isfinite().all()):
            yield f"{name} has NaN or Inf before any kernel ran."
            return
    weights = weights_of(problem, Variation.of(problem))
    if problem.holds_positions:
        yield _coverage(problem, weights)
        return
    several = problem.cells.sum(-1).expand(weights.shape[:3]) > 1
    if bool(several.any()):
        top = weights.amax(-1)[several]
        saturated = float((top > _READABLE_WEIGHT).double().mean())
        if saturated >= _SATURATED_SHARE:
            yield (
                f"The softmax is saturated: in {saturated:.0%} of the rows one key has more than "
                f"99 % of the weight (mean {float(top.mean()):.0%})."
            )
    if text := _early_maxima(problem):
        yield text
    min_weight = MIN_WEIGHT if is_probed else 1.0
    blind, n_tried = blind_share(problem, weights, tolerance, min_weight=min_weight)
    if blind >= _BLIND_SHARE:
        probe = f", and have a weight below {MIN_WEIGHT:g}" if is_probed else ""
        yield (
            f"These inputs hide most mask faults: {blind:.0%} of {plural(n_tried, 'open cell')} "
            f"could be lost without a difference above the tolerance{probe}. Compare with random "
            "inputs and --range token too."
        )


def _coverage(problem: Problem, weights: Tensor) -> str:
    """What the rows of `--range token` can show: a key that no row reads may be wrong unseen."""
    top, key = weights.max(-1)
    readable = top > _READABLE_WEIGHT
    group = problem.config.q_heads // problem.config.kv_heads
    batch, head, _ = readable.nonzero(as_tuple=True)
    places = torch.stack([batch, head // group, key[readable]])
    n_read = len(set(zip(*places.tolist(), strict=True)))
    n_keys = math.prod(problem.k.shape[:3])
    rows = plural(int((~readable).sum()), "row")
    return f"Each row shows one key: {n_read} of {n_keys} keys are read; {rows} cannot be read."


def _early_maxima(problem: Problem) -> str:
    """Say so if the maximum of an online softmax never grows: no missing rescale shows then."""
    variation = Variation.of(problem)
    if problem.config.kv_len <= _SMALL_BLOCK:
        return ""
    scores = scores_of(problem, variation).masked_fill(~variation.cells, -torch.inf)
    later = scores[..., _SMALL_BLOCK:].amax(-1) > scores[..., :_SMALL_BLOCK].amax(-1)
    reached = problem.cells[..., _SMALL_BLOCK:].any(-1) & problem.cells[..., :_SMALL_BLOCK].any(-1)
    reached = reached.expand(later.shape)
    if not bool(reached.any()) or float(later[reached].double().mean()) > _FEW_GROWING:
        return ""
    return (
        f"The largest score of a row is among its first {_SMALL_BLOCK} keys: an online softmax "
        "that does not rescale its sums gives the right output."
    )


def blind_share(
    problem: Problem, weights: Tensor, tolerance: float, *, min_weight: float = 1.0
) -> tuple[float, int]:
    """Return the share of open cells whose loss changes no output by more than `tolerance`.

    Cells whose weight is above `min_weight` count as visible in any case.

    Without key j the output o of a row becomes `(o - p_j v_j) / (1 - p_j)`, so it changes by
    `p_j / (1 - p_j) * (v_j - o)`. At most 64 rows per head are tried, evenly spread.
    """
    variation = Variation.of(problem)
    out = attend(problem, variation).out
    value = problem.v[:, list(variation.kv_head)].double()
    cells = problem.cells.expand(weights.shape)
    n_rows = weights.shape[2]
    lost = total = 0
    step = max(n_rows // _MAX_BLIND_ROWS, 1)
    for row in range(n_rows - 1, -1, -step):
        p, is_open = weights[:, :, row], cells[:, :, row]
        far = (value - out[:, :, row, None]).abs().amax(-1)
        effect = (p / (1 - p).clamp_min(1e-300) * far).masked_fill(p >= 1, torch.inf)
        single = is_open.sum(-1, keepdim=True) == 1  # the loss of the only key empties the row
        seen = (effect > tolerance) | (p > min_weight) | single
        lost, total = lost + int((is_open & ~seen).sum()), total + int(is_open.sum())
    return (lost / total if total else 0.0), total

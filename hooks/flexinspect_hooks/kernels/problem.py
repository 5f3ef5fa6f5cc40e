"""One problem for attention kernels: q, k and v, and the mask and the changes of scores as code.

A problem offers the same mask in every form that kernels take: a bool tensor, a `mask_mod`, and a
`BlockMask`. Shapes are those of FlexAttention: (batch, heads, rows or keys, head size).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flexinspect.core.errors import MaskError, UsageError, summarize_error
from flexinspect.inputs.kernel_configs import KernelConfig
from flexinspect_hooks.generation.mask_source import MaskMod, check_mask_mod, evaluate_mask_mod
from flexinspect_hooks.loading import placement
from flexinspect_hooks.python_internals.user_imports import import_object

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Problem:
    """A configuration with its inputs on one device.

    `tokens` are the words of the keys, empty unless they come from a trace. `cells` replaces the
    configuration's mask: bool (1 or batch, 1 or heads, rows, keys). `holds_positions` tells that
    the values encode positions, as those of `--range token`.
    """

    def __init__(
        self,
        config: KernelConfig,
        qkv: tuple[Tensor, Tensor, Tensor],
        *,
        cells: Tensor | None = None,
        tokens: tuple[str, ...] = (),
        inputs_text: str = "own q, k and v",
        holds_positions: bool = False,
    ) -> None:
        self.config, self.tokens = config, tokens
        self.inputs_text, self.holds_positions = inputs_text, holds_positions
        self.q, self.k, self.v = qkv
        self.device = self.q.device
        self.mask_mod = make_mask_mod(config) if cells is None else _lookup(cells)
        self.score_mod = make_score_mod(config)
        if cells is not None:
            self.cells = cells

    def with_inputs(self, qkv: tuple[Tensor, Tensor, Tensor]) -> Problem:
        """Return the same problem with other q, k and v of the same shapes."""
        return Problem(self.config, qkv, cells=self.cells, inputs_text=self.inputs_text)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return self.q.dtype

    @property
    def is_masked(self) -> bool:
        """Whether any cell is closed."""
        return not bool(self.cells.all())

    @cached_property
    def cells(self) -> Tensor:
        """The open cells, bool (1 or batch, 1 or heads, rows, keys)."""
        return mask_cells(self.config, self.mask_mod, self.device)

    @cached_property
    def block_mask(self) -> BlockMask:
        """The mask as FlexAttention takes it."""
        config, (batch, heads) = self.config, self.cells.shape[:2]
        return create_block_mask(
            self.mask_mod,
            batch if batch > 1 else None,
            heads if heads > 1 else None,
            config.q_len,
            config.kv_len,
            device=self.device,
            BLOCK_SIZE=config.block_size,
        )

    @property
    def empty_rows(self) -> Tensor:
        """Rows without an open key, bool (1 or batch, 1 or heads, rows)."""
        return ~self.cells.any(-1)


def mask_cells(config: KernelConfig, mask_mod: MaskMod, device: torch.device) -> Tensor:
    """Return the cells of a mask_mod; a dimension that it ignores has size 1.

    Raises `MaskError` for a mask_mod that FlexAttention would refuse.
    """
    check_mask_mod(mask_mod, config.mask, device)
    sizes = (max(config.batch, 2), max(config.q_heads, 2), config.q_len, config.kv_len)
    indices = [torch.arange(size, device=device) for size in sizes]
    try:
        cells = evaluate_mask_mod(mask_mod, *indices)
    except Exception as error:
        text = f"The mask_mod {config.mask} failed: {summarize_error(error)}"
        raise MaskError(text) from error
    batch = 1 if cells.stride(0) == 0 else config.batch
    heads = 1 if cells.stride(1) == 0 else config.q_heads
    return cells[:batch, :heads].contiguous()


def make_mask_mod(config: KernelConfig) -> MaskMod:
    """Return the mask_mod of a configuration. Raises `UsageError` if the user's cannot be loaded.

    Causal masks end at the last key: row i stands at the position `i + kv_len - q_len`.
    """
    kind, _, number = config.mask.partition(":")
    offset, size = config.kv_len - config.q_len, int(number) if number.isdecimal() else 0

    def none(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx >= 0

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx + offset

    def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx + offset) & (kv_idx > q_idx + offset - size)

    def prefix(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx + offset) | (kv_idx < size)

    def document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = q_idx + offset
        return (kv_idx <= row) & (kv_idx >= row - row % size)

    def padding(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx + offset) & (kv_idx >= size)

    built_in = {each.__name__: each for each in (none, causal, window, prefix, document, padding)}
    if kind in built_in:
        return built_in[kind]
    loaded: MaskMod = import_object(config.mask, "mask =", MaskError)
    return loaded


def make_score_mod(config: KernelConfig) -> ScoreMod | None:
    """Return the score_mod of a configuration without its softcap, None without one."""
    offset, heads = config.kv_len - config.q_len, config.q_heads

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        # The slopes of https://arxiv.org/abs/2108.12409 for a power of two of heads.
        return score + torch.exp2(-8.0 * (h + 1) / heads) * (kv_idx - q_idx - offset)

    def relative(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + 0.02 * (kv_idx - q_idx - offset)

    built_in: dict[str, ScoreMod | None] = {"": None, "alibi": alibi, "relative": relative}
    if config.score_mod in built_in:
        return built_in[config.score_mod]
    loaded: ScoreMod = import_object(config.score_mod, "score_mod =")
    return loaded


def with_softcap(score_mod: ScoreMod | None, softcap: float) -> ScoreMod:
    """Return a score_mod that applies the softcap first, then `score_mod`."""

    def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = softcap * torch.tanh(score / softcap)
        return score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)

    return capped


def apply_score_mod(score_mod: ScoreMod, scores: Tensor) -> Tensor:
    """Apply a score_mod to (batch, heads, rows, keys) under vmap, as FlexAttention does.

    Raises `UsageError` when it fails.
    """
    indices = [torch.arange(size, device=scores.device) for size in scores.shape]
    function: Callable[..., Tensor] = score_mod
    for position in (4, 3, 2, 1):
        in_dims = (0, *(0 if other == position else None for other in range(1, 5)))
        function = torch.vmap(function, in_dims=in_dims)
    try:
        return function(scores, *indices)
    except Exception as error:
        name = getattr(score_mod, "__name__", "score_mod")
        raise UsageError(f"The score_mod {name} failed: {summarize_error(error)}") from error


def choose_device(name: str) -> torch.device:
    """Return a device by its name; "auto" is CUDA or the CPU, which have float64.

    Raises `ModelError` if there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(placement.choose_device(name))


def _lookup(cells: Tensor) -> MaskMod:
    """The mask_mod of given cells."""
    batch, heads = (size > 1 for size in cells.shape[:2])

    def captured(b: Any, h: Any, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cells[b if batch else 0, h if heads else 0, q_idx, kv_idx]

    return captured


seeded = partial(torch.Generator, "cpu")
"""A generator of the CPU: the same seed gives the same numbers on every device."""

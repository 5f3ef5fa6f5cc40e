"""Prompts with segments, masks of cells, and faults to plant, for the tests of proofs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import flexinspect
from flexinspect.analysis.proof_results import Proof
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records.finding import Finding, Severity
from support.tiny import ids, make_model

ROWS = 20
SPANS = ((1, 7, "paraphrase 1"), (9, 17, "paraphrase 2"))
"""A BOS, six tokens, two of a separator, eight tokens, three of a cue."""


def prompt(seed: int = 1) -> Tensor:
    """Return ids (1, ROWS) that begin with a BOS."""
    return torch.tensor([[1, *ids(ROWS - 1, seed)]])


def isolated(spans: Sequence[tuple[int, int, str]] = SPANS, n: int = ROWS) -> BoolArray:
    """Return cells (n, n): all see the BOS, paraphrases and separators only themselves besides.

    Rows from the end of the last span on see all before them.
    """
    cells = np.zeros((n, n), np.bool_)
    inner = [(start, stop) for start, stop, _ in spans]
    gaps = [(a[1], b[0]) for a, b in pairwise(inner)]
    for start, stop in inner + gaps:
        cells[start:stop, start:stop] = True
    cells[inner[-1][1] :] = True
    cells[:, 0] = True
    return cells & np.tri(n, dtype=np.bool_)


def mask_for(model: nn.Module, cells: BoolArray) -> Tensor:
    """Return cells (n, n) or (heads, n, n) as the 4-D mask that the model's backend takes."""
    held = torch.from_numpy(cells if cells.ndim == 3 else cells[None])[None]
    if model.config._attn_implementation == "sdpa":
        return held
    dtype = next(model.parameters()).dtype
    lowest = torch.finfo(dtype).min
    return torch.zeros(held.shape, dtype=dtype).masked_fill(~held, lowest)


def proved(model: nn.Module, cells: BoolArray | None = None, **options: Any) -> Proof:
    """Prove isolation of the prompt under cells."""
    if cells is not None:
        options["attention_mask"] = mask_for(model, cells)
    options = {"segments": SPANS, **options}
    proof: Proof = flexinspect.prove("isolation", model, prompt(), **options)
    return proof


def only(proof: Proof, finding_id: str) -> Finding:
    """Return the only finding of an id."""
    (finding,) = [one for one in proof.findings if one.id == finding_id]
    return finding


def serious(proof: Proof) -> list[Finding]:
    """Return errors and warnings."""
    return [one for one in proof.findings if one.severity is not Severity.NOTE]


@contextmanager
def hooked(module: nn.Module, after: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While entered, a module's output is changed."""

    def change(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (after(output[0]), *output[1:])
        return after(output)

    handle = module.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def other_mask(layer: nn.Module, mask: Tensor | None) -> Iterator[None]:
    """While entered, one decoder layer is handed another mask, as a silent fallback would do."""

    def swap(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": mask}

    handle = layer.register_forward_pre_hook(swap, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@functools.cache
def _made(family: str, overrides: tuple[tuple[str, Any], ...]) -> Any:
    return make_model(family, **dict(overrides))


def model_of(family: str = "llama", backend: str = "sdpa", **overrides: Any) -> Any:
    """Return a tiny model of a family on a backend (Gemma 2 has eager alone)."""
    model = copy.deepcopy(_made(family, tuple(overrides.items())))
    model.set_attn_implementation("eager" if family == "gemma2" else backend)
    return model

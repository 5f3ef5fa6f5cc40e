"""Generations without an error that were once reported, or that look like an error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.generation_bugs import attention_bugs, loop_bugs, models
from benchmarks.generation_bugs.models import blocks, demo, ids, make, register, run_flex


def windows_by_layer() -> None:
    """Windows that are meant to differ by layer."""
    attention_bugs.late_binding(False)


def windows_of_the_architecture() -> None:
    """Gemma 3, whose layers have a window or none, with an attention function of its own."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    options = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}
    model = make("gemma3_text", "eager", layer_types=kinds, **options)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        n, m = query.shape[2], key.shape[2]
        row, column = torch.arange(m - n, m)[:, None], torch.arange(m)[None]
        window = module.sliding_window or m
        allowed = (column <= row) & (row - column < window)
        return models.dense(query, key, value, kwargs["scaling"], allowed), None

    register(model, attend)
    models.greedy(model, ids(16))


def paged_cache() -> None:
    """A paged cache: the kernel gets permuted slots, and more than the cache reports."""
    attention_bugs.physical_index(False)


def _segments(model: Any, n: int, *, isolates_separator: bool = False) -> None:
    """Give a model the segment mask of `models`, with FlexAttention."""
    cells = models.segment_cells(64)
    if isolates_separator:
        cells[models.CUE - 1] = False
        cells[:, models.CUE - 1] = False

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        n, m = query.shape[2], key.shape[2]
        mask = blocks(lambda b, h, q, kv: cells[q + (m - n), kv], n, m)
        return run_flex(query, key, value, block_mask=mask, scale=kwargs["scaling"]), None

    register(model, attend)
    model.generate(ids(n), max_new_tokens=4, do_sample=False)


def isolated_separators() -> None:
    """Separators that no row sees, and that see nothing, as declared."""
    _segments(make(), 17, isolates_separator=True)


def isolated_segments() -> None:
    """Two questions that do not see each other, as declared."""
    _segments(make(), 17)


def announced_eviction() -> None:
    """An eviction after the prefill, with positions that go on."""
    loop_bugs.thinned_cache(False)


def two_prompts() -> None:
    """Two prompts, of which the declaration describes the first one only."""
    model, tokenizer = demo()
    for questions in (loop_bugs.QUESTIONS, ("Name the largest ocean.", "Who wrote it?")):
        text = "\n".join((*questions, loop_bugs.CUE))
        batch = tokenizer(text, return_tensors="pt")
        model.generate(**batch, max_new_tokens=4, do_sample=False)


def two_masked_prompts() -> None:
    """Two prompts with a segment mask of their own each; the first one is declared."""
    model, tokenizer = demo()
    spans: list[tuple[int, int]] = []

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        n, m = query.shape[2], key.shape[2]
        number = torch.zeros(m, dtype=torch.long)
        for which, (start, stop) in enumerate(spans, 1):
            number[start:stop] = which

        def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            row = q + (m - n)
            together = (number[row] == number[kv]) | (kv == 0) | (row >= spans[-1][1])
            return (row >= kv) & together

        mask = blocks(allowed, n, m)
        return run_flex(query, key, value, block_mask=mask, scale=kwargs["scaling"]), None

    register(model, attend)
    for questions in (loop_bugs.QUESTIONS, ("Name the largest ocean.", "Who wrote it?")):
        row = [tokenizer.bos_token_id]
        spans.clear()
        for question in questions:
            piece = tokenizer.encode(question + "\n", add_special_tokens=False)
            spans.append((len(row), len(row) + len(piece)))
            row += piece
        row += tokenizer.encode(loop_bugs.CUE, add_special_tokens=False)
        prompt = torch.tensor([row])
        mask = torch.ones_like(prompt)
        model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False)


def dropout_in_a_training_step() -> None:
    """A model with dropout that is trained for a step, and then answers in eval mode."""
    model = make(attention_dropout=0.2)
    model.train()
    with torch.enable_grad():
        rows = ids(12)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    model.generate(ids(12), max_new_tokens=4, do_sample=False)


PROGRAMS = {
    "windows-by-layer": windows_by_layer,
    "windows-of-the-architecture": windows_of_the_architecture,
    "paged-cache": paged_cache,
    "isolated-separators": isolated_separators,
    "isolated-segments": isolated_segments,
    "announced-eviction": announced_eviction,
    "two-prompts": two_prompts,
    "two-masked-prompts": two_masked_prompts,
    "dropout-in-training": dropout_in_a_training_step,
}

"""A correct generation: `python program.py SEED [ATTEMPT]` draws it; it knows of no debugger."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    QuantizedCache,
    StaticCache,
)

sys.path.insert(0, str(Path(__file__).parents[2]))  # it runs as a script of a user would
from benchmarks.clean_runs.cases import BY_FLEX, ENCODERS, Case, draw
from benchmarks.clean_runs.models import VOCABULARY, make

N_NEW, STARTS = 4, (0, 1, 6, 12)
"""Tokens that are generated, and where the segments of a prompt with segments begin."""
SEGMENTED = 14
"""The length of a prompt with segments."""
GROUPS: dict[str, Any] = {"nbits": 4, "q_group_size": 16, "residual_length": 8}
QUANTISED: dict[str, dict[str, Any]] = {
    "quanto": GROUPS,
    "hqq": {**GROUPS, "axis_key": 1, "axis_value": 1},
    "fp8": {},
}
"""Options of the quantised caches."""
PAGED = {"page_size": 16, "num_blocks": 32, "max_batch_tokens": 64}
"""The size of a paged cache.

Without it transformers sizes the cache for the whole memory of the machine, and touches 7 of 24 GB:
four runs at a time exceed it.
"""


def prompts(case: Case, seed: int) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask, (batch, length) both; padding is token 0."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 17, (case.batch,), generator=random).tolist()
    if case.mask in BY_FLEX:
        lengths = [SEGMENTED] * case.batch
    elif case.padding == "none":
        lengths = lengths[:1] * case.batch
    width = max(lengths)
    ids, mask = torch.zeros(case.batch, width, dtype=torch.long), torch.zeros(case.batch, width)
    for row, n in enumerate(lengths):
        text = torch.randint(3, VOCABULARY, (n,), generator=random)
        text[0] = 1
        place = slice(width - n, width) if case.padding == "left" else slice(0, n)
        ids[row, place], mask[row, place] = text, 1
    return ids, mask.long()


def make_cache(case: Case, model: Any, length: int) -> Any:
    """Return the cache of a loop, None for none."""
    config = model.config
    if case.cache == "none":
        return None
    if case.cache == "static":
        return StaticCache(config, max_cache_len=length)
    if case.cache in QUANTISED:
        return QuantizedCache(case.cache, config, **QUANTISED[case.cache])
    if case.cache == "dynamic" and case.family != "bamba":
        return DynamicCache()
    return DynamicCache(config=config)


# -- generate -------------------------------------------------------------------------------------


def by_generate(case: Case, model: Any, seed: int) -> None:
    """Generate with `generate`, or with continuous batching for a paged cache."""
    ids, mask = prompts(case, seed)
    options = _options(case)
    if case.cache == "paged":
        settings = GenerationConfig(**options, max_new_tokens=N_NEW, eos_token_id=-1)
        outputs = model.generate_batch(
            inputs=ids.tolist(),
            generation_config=settings,
            continuous_batching_config=ContinuousBatchingConfig(**PAGED),
            progress_bar=False,
        )
        # transformers catches what a model without paged attention raises, such as Falcon.
        if failed := [one.error for one in outputs.values() if one.error is not None]:
            raise RuntimeError(failed[0])
        return
    if case.mask != "none":
        options["attention_mask"] = mask
    if case.choice == "assisted":
        options["assistant_model"] = make(case, seed + 1, n_layers=1)
    if case.cache == "static":
        options["cache_implementation"] = "static"
    elif case.cache in QUANTISED:
        options["past_key_values"] = make_cache(case, model, 0)
    options["use_cache"] = case.cache != "none"
    model.generate(ids, max_new_tokens=N_NEW, **options)


def _options(case: Case) -> dict[str, Any]:
    options: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
        "several": {"do_sample": True, "num_return_sequences": 2},
        "beams": {"do_sample": False, "num_beams": 3},
        "beam-sampling": {"do_sample": True, "num_beams": 2},
        "assisted": {"do_sample": False},
        "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    }
    return options[case.choice]


# -- own loops ------------------------------------------------------------------------------------


def by_loop(case: Case, model: Any, seed: int) -> None:
    """Generate with a loop of one's own."""
    ids, mask = prompts(case, seed)
    if case.cache == "none":
        _again_each_time(case, model, ids, mask)
        return
    cache = make_cache(case, model, ids.shape[1] + N_NEW)
    positions = _positions(mask)
    newest = mask.sum(1) - 1 if case.padding == "right" else torch.full((len(ids),), -1)
    rows, fed = torch.arange(len(ids)), ids
    for _ in range(N_NEW):
        options = _arguments(case, mask, positions, fed.shape[1])
        output = model(fed, past_key_values=cache, use_cache=True, **options)
        cache = output.past_key_values
        fed = _chosen(case, output.logits[rows, newest])
        newest = torch.full((len(ids),), -1)
        positions = positions.max(1, keepdim=True).values + 1
        mask = torch.cat((mask, torch.ones(len(ids), 1, dtype=torch.long)), 1)


def _again_each_time(case: Case, model: Any, ids: Tensor, mask: Tensor) -> None:
    """Feed the whole text in every step, without a cache."""
    rows = torch.arange(len(ids))
    for _ in range(N_NEW):
        options = _arguments(case, mask, _positions(mask), ids.shape[1])
        logits = model(ids, use_cache=False, **options).logits
        ends = mask.shape[1] - 1 - mask.flip(1).argmax(1)
        chosen = _chosen(case, logits[rows, ends])
        ids, mask = (torch.cat((one, torch.zeros_like(chosen)), 1) for one in (ids, mask))
        ids[rows, ends + 1], mask[rows, ends + 1] = chosen[:, 0], 1
        if not bool(mask[:, -1].any()):
            ids, mask = ids[:, :-1], mask[:, :-1]


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp_min(0)


def _arguments(case: Case, mask: Tensor, positions: Tensor, n_rows: int) -> dict[str, Any]:
    """Return attention mask and position ids of a forward, which many programs leave out."""
    if case.mask in BY_FLEX:
        return {"attention_mask": segment_mask(case.mask, n_rows, mask.shape[1])}
    options: dict[str, Any] = {}
    if case.mask != "none" and not (case.mask == "sliding" and case.padding == "none"):
        options["attention_mask"] = mask
    if case.padding != "none" or case.family == "bamba":
        options["position_ids"] = positions
    return options


def segment_mask(kind: str, n_rows: int, n_keys: int) -> Any:
    """Return the newest rows of a block mask in which segments are apart, as the files declare."""
    from torch.nn.attention.flex_attention import create_block_mask

    first, last, cue = STARTS[1:]
    offset = n_keys - n_rows

    def open_cells(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = q_idx + offset
        start = torch.where(row >= last, last, first)
        whole = 0 if kind == "fused" else last
        start = torch.where(row >= cue, whole, start)
        return (kv_idx <= row) & ((kv_idx >= start) | (kv_idx == 0))

    return create_block_mask(open_cells, None, None, n_rows, n_keys, device="cpu")


def _chosen(case: Case, logits: Tensor) -> Tensor:
    if case.choice == "greedy":
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits.float() / 0.8).softmax(-1), 1)


def main(seed: int, attempt: int) -> None:
    """Run the case of a seed."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    case = draw(seed, attempt)
    print(case)
    model = make(case, seed)
    with torch.no_grad():
        if case.loop == "own" and case.family not in ENCODERS:
            by_loop(case, model, seed)
        else:
            by_generate(case, model, seed)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)

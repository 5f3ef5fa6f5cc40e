"""What `flexinspect mask` needs of torch and tokenizers: a user's mask_mod, and real prompts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from msgspec import Struct

from flexinspect.core.errors import MaskError, summarize_error
from flexinspect.inputs import model_names
from flexinspect.inputs.job_samples import load_samples
from flexinspect.masks.mask_presets import BoolArray, IntArray
from flexinspect.records.job import Job
from flexinspect.records.prompt import Prompt, Segment, compose_prompt
from flexinspect_hooks.ensemble.ensemble_run import (
    encode_pieces,
    load_mask_mod,
    prompt_token_records,
)
from flexinspect_hooks.generation.mask_source import MaskMod, check_mask_mod, evaluate_mask_mod
from flexinspect_hooks.loading.model_loader import load_tokenizer
from flexinspect_hooks.loading.placement import choose_device
from flexinspect_hooks.loading.tokenizers import Vocabulary

_EVALUATION = threading.Lock()
"""Bands of rows are verified in threads, and a user's mask_mod need not be safe in several."""


class MaskModCells(Struct, frozen=True):
    """A `mask_mod` of torch as a `flexinspect.masks.cell_mask.CellMask`, evaluated on a device.

    It is called as FlexAttention calls it, under vmap with 0-dim indices, for batch 0.
    """

    name: str
    mask_mod: MaskMod
    device: torch.device
    n_heads: int = 1

    def cells(self, q_idx: IntArray, kv_idx: IntArray, head: int = 0) -> BoolArray:
        """Return which keys each row attends to, bool (rows, keys). Raises `MaskError`."""
        batch, h_idx = (torch.tensor(index, device=self.device) for index in (0, head))
        rows, keys = (
            torch.from_numpy(np.ascontiguousarray(index, np.int64)).to(self.device)
            for index in (q_idx, kv_idx)
        )
        try:
            with _EVALUATION:
                cells = evaluate_mask_mod(self.mask_mod, batch, h_idx, rows, keys)
                return np.asarray(cells.cpu())
        except Exception as error:
            where = f"rows {q_idx[0]} to {q_idx[-1]} and keys {kv_idx[0]} to {kv_idx[-1]}"
            text = f"The mask_mod {self.name} failed for {where}: {summarize_error(error)}"
            hint = "Indices are positions of the whole sequence, generated tokens included."
            raise MaskError(text, hint=hint) from error


def load_mask_mod_cells(
    spec: str, segments: Sequence[Segment], *, device: str = "cpu", heads: int = 1
) -> MaskModCells:
    """Load a user's mask_mod from "package.module:function" as a mask of cells.

    Raises `MaskError` for one that cannot be loaded, has another signature, or does not return a
    bool tensor, and `ModelError` for a device that does not exist.
    """
    place = torch.device(choose_device(device))
    mask_mod = load_mask_mod(spec, segments, flag="The mask_mod")
    check_mask_mod(mask_mod, spec, place)
    return MaskModCells(spec, mask_mod, place, heads)


def compose_prompts(job: Job) -> Iterator[tuple[str, Prompt, dict[int, str]]]:
    """Yield the id of each sample of a job, its prompt, and the texts of its tokens by position.

    Only the tokenizer of the job's model is loaded. Raises `ModelError` and `DatasetError`.
    """
    source = model_names.resolve(job.model)
    vocabulary = Vocabulary(load_tokenizer(source, trust_remote_code=job.trust_remote_code))
    for sample in load_samples(job):
        pieces = encode_pieces(sample, job.texts, vocabulary)
        prompt = compose_prompt(pieces, max_new_tokens=job.max_new_tokens, positions=job.positions)
        tokens = prompt_token_records(prompt, vocabulary)
        yield sample.id, prompt, {token.pos: token.text or token.token for token in tokens}

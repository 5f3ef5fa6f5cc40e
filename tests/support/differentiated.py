"""A generation with its kept logits, ready to be differentiated: what tests of gradients share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flexinspect.masks import mask_presets
from flexinspect.records.prompt import Prompt, compose_prompt
from flexinspect.records.step import GradientRecord, GradientStat
from flexinspect_hooks.generation.decoding import Choice, generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import MaskSource, SpecMaskSource
from flexinspect_hooks.gradients.after_generation import (
    FinishedBranch,
    GradientSpec,
    SampledLogits,
    TokenGradients,
    sample_logits,
)
from support.tiny import make_pieces

CPU = torch.device("cpu")


class TokenContext(NamedTuple):
    """The ids and position ids of all tokens before a step."""

    ids: Sequence[int]
    positions: Sequence[int]


@dataclass(frozen=True)
class Run:
    """What a model generated from a prompt under a mask, and what is kept of its logits."""

    model: Any
    prompt: Prompt
    source: MaskSource
    token_ids: tuple[int, ...]
    kept: dict[int, SampledLogits]

    def before(self, step: int) -> TokenContext:
        own = [self.prompt.next_position(number) for number in range(step)]
        ids = (*self.prompt.ids, *self.token_ids[:step])
        return TokenContext(ids, (*self.prompt.position_ids, *own))

    def gradients(
        self, step: int, spec: GradientSpec | None = None, **changes: Any
    ) -> GradientRecord:
        taker = TokenGradients(self.model, spec or GradientSpec(), compiled=False)
        source = changes.get("source", self.source)
        finished = FinishedBranch(0, self.prompt, self.token_ids, source)
        return taker.compute_step(finished, step, self.kept[step])


def preset_source(prompt: Prompt, mask: str) -> SpecMaskSource:
    """Return the mask of a preset for a prompt."""
    spec = mask_presets.preset(mask, prompt.segments)
    return SpecMaskSource(spec, length=prompt.segments[-1].stop, device=CPU, compiled=False)


def generated(
    model: Any,
    n_tokens: int = 3,
    *,
    source: MaskSource | None = None,
    positions: str = "contiguous",
) -> Run:
    """Generate greedily, with isolated segments by default, and keep what gradients need."""
    prompt = compose_prompt(make_pieces(), max_new_tokens=n_tokens, positions=positions)
    source = source or preset_source(prompt, "segment-isolation")
    kept: dict[int, SampledLogits] = {}

    def chose(choice: Choice) -> None:
        kept[choice.step] = sample_logits(choice.logits, choice.token_id)

    with FlexPatch(model, source):
        out = generate(model, prompt, max_new_tokens=n_tokens, on_choice=chose)
    return Run(model, prompt, source, out.token_ids, kept)


def by_name(record: GradientRecord) -> dict[str, GradientStat]:
    """Return the parameters' gradients by name."""
    return {stat.name: stat for stat in record.stats}

"""Greedy and sampled decoding with a KV cache, one forward per token, true row positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.job import SamplingOptions
from flexinspect.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token: its id on the host and on the device, and the scores it was drawn from."""

    step: int
    token_id: int
    chosen: Tensor
    logits: Tensor
    scores: Tensor | None


@dataclass(frozen=True, slots=True)
class Generated:
    """The ids that were generated and why generation ended: "eos", "stop", or "length"."""

    token_ids: tuple[int, ...]
    stop_reason: str


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Prompt,
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    stops: Callable[[Sequence[int]], bool] | None = None,
    sampling: SamplingOptions | None = None,
    seed: int = 0,
    on_choice: Callable[[Choice], None] | None = None,
) -> Generated:
    """Generate from a prompt of one sequence; the model's masks come from its patch.

    `on_choice` is called once per token, after it is known on the host. `stops` is asked after
    each token whether the ids generated so far end the answer.
    """
    device = next(model.parameters()).device
    sampling = sampling or SamplingOptions()
    choose = _chooser(sampling, seed, device)
    forward = _forward(model)
    cache = _cache(model)
    ids = torch.tensor([prompt.ids], device=device)
    positions = torch.tensor([prompt.position_ids], device=device)
    generated: list[int] = []
    for step in range(max_new_tokens):
        logits = forward(ids, positions, cache)
        chosen, scores = choose(logits)
        token_id = int(chosen)
        generated.append(token_id)
        if on_choice is not None:
            on_choice(Choice(step, token_id, chosen, logits, scores))
        if token_id in eos_ids:
            return Generated(tuple(generated), "eos")
        if stops is not None and stops(generated):
            return Generated(tuple(generated), "stop")
        ids = chosen.view(1, 1)
        positions = torch.tensor([[prompt.next_position(step)]], device=device)
    return Generated(tuple(generated), "length")


def _cache(model: nn.Module) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _forward(model: nn.Module) -> Callable[[Tensor, Tensor, Any], Tensor]:
    """Return a forward that gives the newest row's logits (V,)."""
    takes = inspect.signature(model.forward).parameters
    extra: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def forward(ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        output = model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, **extra
        )
        logits: Tensor = output.logits[0, -1]
        return logits

    return forward


def _chooser(
    sampling: SamplingOptions, seed: int, device: torch.device
) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
    """Return a function from logits (V,) to (0-dim token id, scores (V,) when sampling)."""
    if not sampling.do_sample:
        return lambda logits: (logits.argmax(), None)
    processors = _processors(sampling)
    generator = torch.Generator(device=device).manual_seed(seed)
    empty = torch.zeros((1, 0), dtype=torch.long, device=device)

    def choose(logits: Tensor) -> tuple[Tensor, Tensor | None]:
        scores = processors(empty, logits[None].float())[0]
        p = torch.softmax(scores, -1)
        return torch.multinomial(p, 1, generator=generator)[0], scores

    return choose


def _processors(sampling: SamplingOptions) -> Any:
    from transformers import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList()
    if sampling.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors

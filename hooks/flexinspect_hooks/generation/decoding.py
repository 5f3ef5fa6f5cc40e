"""Greedy and sampled decoding with a KV cache, one forward per token, true row positions.

A `Decoder` is one line of decoding. Its live state is its tokens, its cache and the random state of
its sampler; all else (positions, processors) follows from them, so it can be put back to an earlier
step, or go on with another token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.core.errors import UsageError
from flexinspect.records.job import SamplingOptions
from flexinspect.records.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token: its id on the host and on the device, and the scores it was drawn from."""

    step: int
    token_id: int
    chosen: Tensor
    logits: Tensor
    scores: Tensor | None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The ids that were generated and why generation ended: "eos", "stop", or "length"."""

    token_ids: tuple[int, ...]
    stop_reason: str


class Sampler:
    """From logits (V,) to a token: the best one, or a draw from what the processors left.

    The processors (temperature, top-k, top-p) keep nothing between steps, so the random state is
    all that a sampler has.
    """

    def __init__(self, sampling: SamplingOptions, seed: int, device: torch.device) -> None:
        self._processors = _processors(sampling) if sampling.do_sample else None
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._empty = torch.zeros((1, 0), dtype=torch.long, device=device)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (0-dim token id, scores (V,) when sampling)."""
        if self._processors is None:
            return logits.argmax(), None
        scores = self._processors(self._empty, logits[None].float())[0]
        p = torch.softmax(scores, -1)
        return torch.multinomial(p, 1, generator=self._generator)[0], scores

    def state(self) -> Tensor | None:
        """Return a copy of the random state (uint8; 5 kB on CPU, 16 bytes on CUDA)."""
        return None if self._processors is None else self._generator.get_state()

    def restore(self, state: Tensor | None) -> None:
        """Put a random state back; None for a sampler that draws nothing."""
        if state is not None:
            self._generator.set_state(state)


class Decoder:
    """One line of decoding of a prompt; the model's masks come from its patch.

    `token_ids` are those chosen so far, so their number is the step that comes next. `cache` holds
    the rows fed so far.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt: Prompt,
        *,
        sampling: SamplingOptions | None = None,
        seed: int = 0,
    ) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._forward = _last_logits_forward(model)
        self._last_token: Tensor | None = None
        self.sampler = Sampler(sampling or SamplingOptions(), seed, self._device)
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.cache = new_cache(model)

    @property
    def step(self) -> int:
        """The step that comes next."""
        return len(self.token_ids)

    @property
    def n_rows(self) -> int:
        """Rows that are in the cache once the next step is over."""
        return len(self.prompt.ids) + len(self.token_ids)

    def set_state(self, token_ids: Sequence[int], cache: Any) -> None:
        """Stand behind these tokens, with a cache of every row but the last one, or an empty one.

        The next forward feeds the rows that the cache lacks, in one go.
        """
        self.token_ids, self.cache, self._last_token = list(token_ids), cache, None

    @torch.no_grad()
    def next_logits(self) -> Tensor:
        """Feed the rows that the cache lacks; returns the newest row's logits (V,)."""
        start = int(self.cache.get_seq_length())
        return self._forward(*self._rows(start), self.cache)

    def _rows(self, start: int) -> tuple[Tensor, Tensor]:
        """Return ids and position ids, both (1, rows), of the rows from `start` on."""
        prompt, n_prompt = self.prompt, len(self.prompt.ids)
        places = [prompt.next_position(i) for i in range(max(start - n_prompt, 0), self.step)]
        ids: Tensor
        if start < n_prompt:
            ids = self._row([*prompt.ids, *self.token_ids][start:])
            places = [*prompt.position_ids[start:], *places]
        elif start == self.n_rows - 1 and self._last_token is not None:
            ids = self._last_token.view(1, 1)
        else:
            ids = self._row(self.token_ids[start - n_prompt :])
        return ids, self._row(places)

    def _row(self, values: Sequence[int]) -> Tensor:
        return torch.tensor([values], device=self._device)

    @torch.no_grad()
    def choose(self, logits: Tensor, forced: int | None = None) -> Choice:
        """Choose the token of this step, and stand behind it.

        With `forced` that token is taken in place of what was drawn; the draw is made all the same,
        so that later steps draw the random numbers that they would have drawn.
        """
        chosen, scores = self.sampler.choose(logits)
        if forced is not None:
            chosen = torch.full_like(chosen, forced)
        choice = Choice(self.step, int(chosen), chosen, logits, scores)
        self.token_ids.append(choice.token_id)
        self._last_token = chosen
        return choice


def generate(
    model: nn.Module,
    prompt: Prompt,
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    should_stop: Callable[[Sequence[int]], bool] | None = None,
    sampling: SamplingOptions | None = None,
    seed: int = 0,
    on_choice: Callable[[Choice], None] | None = None,
    forced: Mapping[int, int] | None = None,
) -> GenerationResult:
    """Generate from a prompt of one sequence; the model's masks come from its patch.

    `on_choice` is called once per token, after it is known on the host. `stops` is asked after
    each token whether the ids generated so far end the answer. `forced` has tokens by step that
    are taken in place of the chosen ones.
    """
    decoder = Decoder(model, prompt, sampling=sampling, seed=seed)
    for step in range(max_new_tokens):
        choice = decoder.choose(decoder.next_logits(), (forced or {}).get(step))
        if on_choice is not None:
            on_choice(choice)
        reason = find_stop_reason(decoder.token_ids, max_new_tokens, eos_ids, should_stop)
        if reason:
            return GenerationResult(tuple(decoder.token_ids), reason)
    return GenerationResult(tuple(decoder.token_ids), "length")


def find_stop_reason(
    token_ids: Sequence[int],
    max_new_tokens: int,
    eos_ids: Sequence[int],
    should_stop: Callable[[Sequence[int]], bool] | None,
) -> str:
    """Return why generation ends behind these tokens ("eos", "stop", "length"), empty if not."""
    if token_ids[-1] in eos_ids:
        return "eos"
    if should_stop is not None and should_stop(token_ids):
        return "stop"
    return "length" if len(token_ids) >= max_new_tokens else ""


def check_tokens(model: Any, token_ids: Sequence[int]) -> None:
    """Refuse tokens that a model cannot be fed. Raises `UsageError` naming those that it has."""
    n_tokens = model.get_input_embeddings().num_embeddings
    outside = [token_id for token_id in token_ids if not 0 <= token_id < n_tokens]
    if outside:
        raise UsageError(
            f"Token {outside[0]} does not exist; this model has tokens 0 to {n_tokens - 1}."
        )


def new_cache(model: nn.Module) -> Any:
    """Return an empty cache of the kind that the model's layers need."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _last_logits_forward(model: nn.Module) -> Callable[[Tensor, Tensor, Any], Tensor]:
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

"""Greedy and sampled decoding with a KV cache, one forward pass per token, true row positions.

The live state of a `Decoder` is its tokens, its cache and the random state of its sampler. All else
(positions, logits processors) follows from them, so it can return to an earlier step or continue
with another token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect.core.errors import UsageError
from flexinspect.records.job import SamplingOptions
from flexinspect.records.prompt import Prompt

Processed = tuple[tuple[str, Tensor], ...]


class Choice(Struct, frozen=True):
    """A chosen token, whose id is on the host.

    `logits` are (V,); `scores` (V,) are what the token was drawn from, None with greedy decoding.
    `processed` are the scores (V,) after each logits processor, with its name, in order.
    """

    step: int
    token_id: int
    logits: Tensor
    scores: Tensor | None
    processed: Processed = ()


class GenerationResult(Struct, frozen=True):
    """The generated ids, and why generation ended: "eos", "stop" or "length"."""

    token_ids: tuple[int, ...]
    stop_reason: str


class Sampler:
    """Chooses a token from logits (V,): the best one, or a random one after the processors.

    The processors (temperature, top-k, top-p) keep no state between steps, so the random state is
    the whole state of a sampler.
    """

    def __init__(self, sampling: SamplingOptions, seed: int, device: torch.device) -> None:
        import transformers

        self._processors = transformers.LogitsProcessorList() if sampling.do_sample else None
        if self._processors is not None:
            if sampling.temperature != 1.0:
                self._processors.append(transformers.TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                self._processors.append(transformers.TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                self._processors.append(transformers.TopPLogitsWarper(sampling.top_p))
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._empty = torch.zeros((1, 0), dtype=torch.long, device=device)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None, Processed]:
        """Return the 0-dim token id, the scores (V,) when sampling, and those of each processor."""
        if self._processors is None:
            return logits.argmax(), None, ()
        scores, processed = logits[None].float(), []
        for processor in self._processors:  # as the list itself calls them
            scores = processor(self._empty, scores)
            processed.append((type(processor).__name__, scores[0]))
        token = torch.multinomial(scores[0].softmax(-1), 1, generator=self._generator)[0]
        return token, scores[0], tuple(processed)

    def state(self) -> Tensor | None:
        """Return a copy of the random state (uint8; 5 kB on CPU, 16 bytes on CUDA)."""
        return None if self._processors is None else self._generator.get_state()

    def restore(self, state: Tensor | None) -> None:
        """Restore a random state; None, the state of a greedy sampler, changes nothing."""
        if state is not None:
            self._generator.set_state(state)


class Decoder:
    """Decodes one prompt; the model's masks come from its `FlexPatch`.

    `token_ids` are those chosen so far, so their number is the next step. `cache` holds the rows
    that the model has processed.
    """

    def __init__(
        self, model: Any, prompt: Prompt, *, sampling: SamplingOptions | None = None, seed: int = 0
    ) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        parameters = inspect.signature(model.forward).parameters
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._last_token: Tensor | None = None
        self.sampler = Sampler(sampling or SamplingOptions(), seed, self._device)
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.cache = new_cache(model)

    @property
    def step(self) -> int:
        """The next step."""
        return len(self.token_ids)

    def set_state(self, token_ids: Sequence[int], cache: Any) -> None:
        """Continue after these tokens; the next pass processes all rows that the cache lacks.

        The cache holds every row except the last one, or none.
        """
        self.token_ids, self.cache, self._last_token = list(token_ids), cache, None

    @torch.no_grad()
    def next_logits(self) -> Tensor:
        """Process the rows that the cache lacks, and return the newest row's logits (V,)."""
        return self.run(self._model)

    def run(self, forward: Callable[..., Any]) -> Tensor:
        """As `next_logits`, but with gradients, by the model or its method `forward`."""
        # With a cache also in the prefill: without one transformers looks for packed sequences in
        # the position ids.
        ids, positions = self._rows(int(self.cache.get_seq_length()))
        inputs = {"input_ids": ids, "position_ids": positions, "past_key_values": self.cache}
        return cast(Tensor, forward(**inputs, use_cache=True, **self._extra).logits[0, -1])

    def _rows(self, start: int) -> tuple[Tensor, Tensor]:
        """The ids and position ids, both (1, rows), of the rows from `start` on."""
        prompt, n_prompt = self.prompt, len(self.prompt.ids)
        following = (prompt.next_position(i) for i in range(max(start - n_prompt, 0), self.step))
        if self._last_token is not None and start == n_prompt + self.step - 1:
            ids: Tensor = self._last_token.view(1, 1)
        else:
            ids = torch.tensor([[*prompt.ids, *self.token_ids][start:]], device=self._device)
        return ids, torch.tensor([[*prompt.position_ids[start:], *following]], device=self._device)

    @torch.no_grad()
    def choose(self, logits: Tensor, forced: int | None = None) -> Choice:
        """Choose the token of this step and continue after it.

        A `forced` token replaces the one that was drawn. The draw is made in any case, so that
        later steps draw the same random numbers as without it.
        """
        chosen, scores, processed = self.sampler.choose(logits)
        if forced is not None:
            chosen = torch.full_like(chosen, forced)
        choice = Choice(self.step, int(chosen), logits, scores, processed)
        self.token_ids.append(choice.token_id)
        self._last_token = chosen
        return choice


class StopCriteria(Struct, frozen=True):
    """When a generation ends: after so many tokens, at an EOS id, or when `should_stop` is true."""

    max_new_tokens: int
    eos_ids: Sequence[int] = ()
    should_stop: Callable[[Sequence[int]], bool] | None = None

    def reason(self, token_ids: Sequence[int]) -> str:
        """Why it ends after these tokens ("eos", "stop", "length"); "" if it continues."""
        if token_ids[-1] in self.eos_ids:
            return "eos"
        if self.should_stop is not None and self.should_stop(token_ids):
            return "stop"
        return "length" if len(token_ids) >= self.max_new_tokens else ""


def generate(
    model: nn.Module,
    prompt: Prompt,
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    should_stop: Callable[[Sequence[int]], bool] | None = None,
    on_choice: Callable[[Choice], None] | None = None,
    forced: Mapping[int, int] | None = None,
    **options: Any,
) -> GenerationResult:
    """Generate from a prompt of one sequence; the model's masks come from its `FlexPatch`.

    Args:
        should_stop: whether to end after these tokens.
        on_choice: called once per token, after its id is known on the host.
        forced: tokens by step that replace the chosen ones.
        options: those of `Decoder`.
    """
    decoder = Decoder(model, prompt, **options)
    criteria, reason = StopCriteria(max_new_tokens, eos_ids, should_stop), ""
    while not reason and decoder.step < max_new_tokens:
        choice = decoder.choose(decoder.next_logits(), (forced or {}).get(decoder.step))
        if on_choice is not None:
            on_choice(choice)
        reason = criteria.reason(decoder.token_ids)
    return GenerationResult(tuple(decoder.token_ids), reason or "length")


def check_tokens(model: Any, token_ids: Sequence[int]) -> None:
    """Raise `UsageError` for a token id outside the model's embedding table."""
    n_tokens = model.get_input_embeddings().num_embeddings
    outside = [token_id for token_id in token_ids if not 0 <= token_id < n_tokens]
    if outside:
        raise UsageError(
            f"Token {outside[0]} does not exist; this model has tokens 0 to {n_tokens - 1}."
        )


def new_cache(model: nn.Module) -> Any:
    """An empty cache of the kind that the model's layers need."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)

"""Decoding that fuses the distributions of several prompts, for many ways to fuse at once.

Each paraphrase has a prompt of its own, and all of them are continued by the same tokens. A rule
chooses these tokens from the next-token logits of its paraphrases. Rules that have chosen the same
tokens so far share one forward pass; where they part, their rows of the cache are copied.

The fused scores of a token, from logits l of n paraphrases with softmax p and weights w, as in the
self-ensemble project (https://github.com/GuoYibo233/self-ensemble):

* avg: the mean of l, which is the normalized geometric mean of p;
* max: the largest p;
* weighted_avg: the sum of w l, where w adds up to 1;
* weighted_max: l of the paraphrase with the largest w.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexinspect.lab.lab_result import OwnChoice, TokenVote
from flexinspect.records.prompt import Prompt
from flexinspect_hooks.generation.decoding import StopCriteria, new_cache
from flexinspect_hooks.loading.tokenizers import TextStream, Vocabulary


class Distributions(NamedTuple):
    """The next-token distributions of some prompts: `logits` and their softmax, each (rows, V).

    `best` are the ids with the highest probability, (rows,), and `best_probability` these.
    """

    logits: Tensor
    probabilities: Tensor
    best: list[int]
    best_probability: list[float]

    @classmethod
    def of(cls, logits: Tensor) -> Distributions:
        """Make them from logits (rows, V) of any dtype."""
        logits = logits.float()
        probabilities = logits.softmax(-1)
        highest, best = probabilities.max(-1)
        return cls(logits, probabilities, best.tolist(), highest.tolist())


class FusionRule:
    """Chooses the tokens of one answer from the distributions of some paraphrases.

    `rows` are these paraphrases, from 0. Without a subclass the first of them chooses alone.
    """

    def __init__(self, method: str, rows: Sequence[int]) -> None:
        self.method, self.rows = method, tuple(rows)
        self.token_ids: list[int] = []
        self.ended = ""
        self.log_probability = 0.0

    def advance(self, all_: Distributions, rows: list[int], criteria: StopCriteria) -> int:
        """Choose the next token from the distributions at `rows`; return its id."""
        token_id = self._choose(all_, rows)
        self.token_ids.append(token_id)
        self.ended = criteria.reason(self.token_ids)
        return token_id

    def _choose(self, all_: Distributions, rows: list[int]) -> int:
        row = rows[0]
        self.log_probability += float(all_.logits[row].log_softmax(-1)[all_.best[row]])
        return all_.best[row]


class FusingRule(FusionRule):
    """Chooses the token with the highest fused score, and keeps what each paraphrase says."""

    def __init__(self, method: str, rows: Sequence[int], weights: Tensor | None = None) -> None:
        super().__init__(method, rows)
        self._weights = weights
        self._votes: list[tuple[float, list[float], list[int], list[float]]] = []

    def _choose(self, all_: Distributions, rows: list[int]) -> int:
        fused = fuse(self.method, all_.logits[rows], self._weights)
        token_id = int(fused.argmax())
        self._vote(token_id, float(fused[token_id]), all_, rows)
        return token_id

    def _vote(self, token_id: int, fused: float, all_: Distributions, rows: list[int]) -> None:
        own = all_.probabilities[rows, token_id].tolist()
        best = [(all_.best[row], all_.best_probability[row]) for row in rows]
        ids, probabilities = [one for one, _ in best], [one for _, one in best]
        self._votes.append((fused, own, ids, probabilities))

    def votes(self, vocabulary: Vocabulary) -> tuple[TokenVote, ...]:
        """Return the tokens with their texts."""
        add = TextStream(vocabulary).add
        votes = []
        for token_id, (fused, own, best, highest) in zip(self.token_ids, self._votes, strict=True):
            texts, rounded = map(vocabulary.text_of, best), map(_rounded, own)
            parts = zip(rounded, texts, map(_rounded, highest), strict=True)
            choices = tuple(OwnChoice(*one) for one in parts)
            votes.append(TokenVote(token_id, add(token_id), _rounded(fused), choices))
        return tuple(votes)


def _rounded(probability: float) -> float:
    """Six digits: results are read by people, and a dataset has many of them."""
    return float(f"{probability:.6g}")


class ForcedRule(FusingRule):
    """Repeats an answer that was made elsewhere, with its probabilities, token by token."""

    def __init__(
        self, method: str, rows: Sequence[int], answer: Sequence[tuple[int, float]]
    ) -> None:
        super().__init__(method, rows)
        self._answer = answer

    def _choose(self, all_: Distributions, rows: list[int]) -> int:
        token_id, probability = self._answer[len(self.token_ids)]
        self._vote(token_id, probability, all_, rows)
        return token_id


def fuse(method: str, logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the fused distribution (V,) of logits (rows, V), with weights (rows,) if it has any.

    That of `max` is normalized, which does not change its order.
    """
    if method == "avg":
        return logits.mean(0).softmax(-1)
    if method == "max":
        highest = logits.softmax(-1).amax(0)
        return highest / highest.sum()
    assert weights is not None
    weights = weights.to(logits.device)
    if method == "weighted_avg":
        return (logits * (weights / weights.sum())[:, None]).sum(0).softmax(-1)
    return logits[int(weights.argmax())].softmax(-1)


class FusedDecoder:
    """Decodes rules over the same prompts, after one prefill for all of them.

    The prompts run under the model's own causal attention, as a batch that is padded on the left.
    """

    def __init__(self, model: Any, prompts: Sequence[Prompt], criteria: StopCriteria) -> None:
        self._model, self._criteria = model, criteria
        self._device = next(model.parameters()).device
        takes = inspect.signature(model.forward).parameters
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._lengths = [len(prompt.ids) for prompt in prompts]
        longest = max(self._lengths)
        self._padding = [longest - length for length in self._lengths]
        ids = [[0] * n + [*prompt.ids] for n, prompt in zip(self._padding, prompts, strict=True)]
        places = [[0] * n + [*range(longest - n)] for n in self._padding]
        self._longest, self._cache = longest, new_cache(model)
        self._first = self._forward(ids, places, list(range(len(prompts))), self._cache)

    @torch.no_grad()
    def decode(self, rules: Sequence[FusionRule], *, is_last: bool = True) -> None:
        """Decode every rule to its end. Unless `is_last`, the prefill is kept for another call."""
        # Selecting rows and adding keys replace tensors of a cache.
        cache = self._cache if is_last else copy.deepcopy(self._cache)
        groups = [(list(range(len(self._lengths))), list(rules))]
        logits, step = self._first, 0
        while groups:
            step += 1
            parted, selected, tokens = self._advance(groups, Distributions.of(logits))
            groups = parted
            if groups:
                if selected != list(range(len(logits))):
                    cache.batch_select_indices(torch.tensor(selected, device=self._device))
                rows = [row for group, _ in groups for row in group]
                places = [[self._lengths[row] + step - 1] for row in rows]
                logits = self._forward([[one] for one in tokens], places, rows, cache)

    def _advance(
        self, groups: list[tuple[list[int], list[FusionRule]]], all_: Distributions
    ) -> tuple[list[tuple[list[int], list[FusionRule]]], list[int], list[int]]:
        """Let each rule choose; return the groups that go on, their rows here, and the tokens."""
        parted: list[tuple[list[int], list[FusionRule]]] = []
        selected: list[int] = []
        tokens: list[int] = []
        start = 0
        for rows, rules in groups:
            at = {row: start + place for place, row in enumerate(rows)}
            start += len(rows)
            by_token: dict[int, list[FusionRule]] = {}
            for rule in rules:
                token_id = rule.advance(all_, [at[row] for row in rule.rows], self._criteria)
                if not rule.ended:
                    by_token.setdefault(token_id, []).append(rule)
            for token_id, same in by_token.items():
                kept = sorted({row for rule in same for row in rule.rows})
                parted.append((kept, same))
                selected += [at[row] for row in kept]
                tokens += [token_id] * len(kept)
        return parted, selected, tokens

    @torch.no_grad()
    def _forward(
        self, ids: list[list[int]], places: list[list[int]], rows: list[int], cache: Any
    ) -> Tensor:
        """Return the logits (rows, V) of the newest token of each row."""
        n_keys = int(cache.get_seq_length()) + len(ids[0])
        mask = torch.ones((len(rows), n_keys), dtype=torch.long, device=self._device)
        for place, row in enumerate(rows):
            mask[place, : self._padding[row]] = 0
        out = self._model(
            input_ids=torch.tensor(ids, device=self._device),
            position_ids=torch.tensor(places, device=self._device),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **self._extra,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

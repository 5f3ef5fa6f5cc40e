"""Training examples: questions in altered seen wordings, in every layout the product can compose.

Prompts and masks come from `flexinspect.records.prompt` and `flexinspect.masks.mask_presets`, so
the model is trained on exactly what the product feeds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from flexinspect.masks.mask_presets import BoolArray, preset
from flexinspect.records.prompt import Prompt, PromptTokenIds, Segment, compose_prompt
from tools.demo_model.facts import Fact
from tools.demo_model.templates import (
    ENDINGS,
    HELD_OUT_SKELETONS,
    OPENINGS,
    RELATIONS,
    SEEN,
    SYNONYMS,
    fill,
    skeleton,
)
from tools.demo_model.tokenizer import CUE, SENTENCE_CUE, SEPARATOR, SHARED_TEXTS, encode

MAX_NEW_TOKENS = 16
MAX_SENTENCE_TOKENS = 40
IGNORED = -100
POOL = 8
"""Batches that are drawn together and then cut by length, so that little is padding."""
SENTENCE_SHARE = 0.15
"""The share of examples whose answer is a sentence."""
PRESET_WEIGHTS = {
    "segment-isolation": 12,
    "causal": 3,
    "shared-prefix": 2,
    "anchor-first": 2,
    "document": 1,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How the pieces are joined and masked: a preset, a positions mode, a shared text.

    `in_sentence`: with the cue for an answer in a sentence.
    """

    preset: str = "segment-isolation"
    positions: str = "contiguous"
    shared: str = ""
    in_sentence: bool = False

    @property
    def max_new_tokens(self) -> int:
        """Return how many tokens are generated at most."""
        return MAX_SENTENCE_TOKENS if self.in_sentence else MAX_NEW_TOKENS


PLAIN = Layout()
"""Segment isolation at contiguous positions, without a shared text."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its answer: `ids` and `position_ids` (n), the mask (n, n), labels (n)."""

    ids: tuple[int, ...]
    position_ids: tuple[int, ...]
    labels: tuple[int, ...]
    mask: BoolArray


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded examples: ids, positions and labels (b, n), the mask (b, 1, n, n)."""

    ids: Tensor
    position_ids: Tensor
    labels: Tensor
    mask: Tensor


class Composer:
    """Joins texts into prompts with the product's functions, encoding each piece once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.bos = (int(tokenizer.bos_token_id),)
        self.eos = int(tokenizer.eos_token_id)
        self.pad = int(tokenizer.pad_token_id)
        self._encode = lru_cache(maxsize=100_000)(lambda text: encode(tokenizer, text))

    def prompt(self, paraphrases: Sequence[str], layout: Layout) -> Prompt:
        """Return the prompt of these paraphrases in this layout."""
        pieces = PromptTokenIds(
            self.bos,
            self._encode(layout.shared),
            tuple(self._encode(text) for text in paraphrases),
            self._encode(SEPARATOR),
            self._encode(SENTENCE_CUE if layout.in_sentence else CUE),
        )
        return compose_prompt(
            pieces, max_new_tokens=layout.max_new_tokens, positions=layout.positions
        )

    def example(self, paraphrases: Sequence[str], answer: str, layout: Layout) -> Example:
        """Return the prompt followed by ` answer` and EOS, which alone carry labels."""
        prompt = self.prompt(paraphrases, layout)
        target = (*self._encode(" " + answer), self.eos)
        ids = (*prompt.ids, *target)
        after = tuple(prompt.next_position(k) for k in range(len(target)))
        labels = (IGNORED,) * len(prompt.ids) + target
        positions = (*prompt.position_ids, *after)
        return Example(ids, positions, labels, dense_mask(prompt, layout.preset, len(ids)))


def dense_mask(prompt: Prompt, name: str, n_tokens: int) -> BoolArray:
    """Return the preset's mask over the prompt and what follows, bool (n_tokens, n_tokens)."""
    return _dense(name, prompt.segments, n_tokens)


@lru_cache(maxsize=20_000)
def _dense(name: str, segments: tuple[Segment, ...], n_tokens: int) -> BoolArray:
    return preset(name, segments).dense(n_tokens)


def collate(examples: Sequence[Example], pad: int) -> Batch:
    """Pad the examples on the right; a padding row sees itself, so that no row is empty."""
    n_tokens = max(len(example.ids) for example in examples)
    shape = (len(examples), n_tokens)
    ids, labels = torch.full(shape, pad), torch.full(shape, IGNORED)
    positions = torch.zeros(shape, dtype=torch.long)
    mask = torch.eye(n_tokens, dtype=torch.bool).repeat(len(examples), 1, 1, 1)
    for row, example in enumerate(examples):
        n = len(example.ids)
        ids[row, :n] = torch.tensor(example.ids)
        labels[row, :n] = torch.tensor(example.labels)
        positions[row, :n] = torch.tensor(example.position_ids)
        mask[row, 0, :n, :n] = torch.from_numpy(example.mask)
    return Batch(ids, positions, labels, mask)


class Sampler:
    """An endless, seeded stream of training batches of about the same number of tokens."""

    def __init__(self, facts: Sequence[Fact], composer: Composer, seed: int) -> None:
        self.composer = composer
        self.random = Random(seed)
        self.facts = {relation: [f for f in facts if f.relation == relation] for relation in SEEN}
        self.by_key = {(f.country, f.relation): f for f in facts}
        self.words = sorted({word for group in SEEN.values() for t in group for word in t.split()})
        self.waiting: dict[int, list[list[Example]]] = {}

    def batch(self, n_paraphrases: int, n_examples: int) -> Batch:
        """Return `n_examples` examples of `n_paraphrases` paraphrases each, of similar length."""
        waiting = self.waiting.setdefault(n_paraphrases, [])
        if not waiting:
            pool = [self.example(n_paraphrases) for _ in range(POOL * n_examples)]
            pool.sort(key=lambda example: len(example.ids))
            waiting += [pool[i : i + n_examples] for i in range(0, len(pool), n_examples)]
            self.random.shuffle(waiting)
        return collate(waiting.pop(), self.composer.pad)

    def example(self, n_paraphrases: int) -> Example:
        """Return one example; among several paraphrases a minority may be corrupted."""
        fact = self.random.choice(self.facts[self.random.choice(RELATIONS)])
        layout = self.layout()
        templates = self.random.sample(SEEN[fact.relation], n_paraphrases)
        texts = [self.alter(template, corrupt=0.0) for template in templates]
        for index in self._corrupted(n_paraphrases, layout):
            texts[index] = self._corrupt(fact, texts[index])
        paraphrases = [self.recase(fill(text, fact.country)) for text in texts]
        answer = fact.answers[0]
        target = fact.sentence.format(a=answer) if layout.in_sentence else answer
        return self.composer.example(paraphrases, target, layout)

    def layout(self) -> Layout:
        """Draw a layout; segment isolation at contiguous positions is the most frequent."""
        names = list(PRESET_WEIGHTS)
        name = self.random.choices(names, list(PRESET_WEIGHTS.values()))[0]
        positions = "reset" if self.random.random() < 0.2 else "contiguous"
        with_shared = self.random.random() < (0.7 if name == "shared-prefix" else 0.2)
        shared = self.random.choice(SHARED_TEXTS) if with_shared else ""
        return Layout(name, positions, shared, self.random.random() < SENTENCE_SHARE)

    def _corrupted(self, n_paraphrases: int, layout: Layout) -> list[int]:
        """Draw the places to corrupt: fewer than half of them, never the one `document` reads."""
        most = (n_paraphrases - 1) // 2
        if not most or self.random.random() < 0.3:
            return []
        places = range(n_paraphrases - 1 if layout.preset == "document" else n_paraphrases)
        return self.random.sample(places, self.random.randint(1, most))

    def _corrupt(self, fact: Fact, template: str) -> str:
        """Make a paraphrase useless or misleading, so that the model learns to weigh them all."""
        if self.random.random() < 0.5:
            other = self.random.choice([name for name in RELATIONS if name != fact.relation])
            return self.alter(self.random.choice(SEEN[other]), corrupt=0.0)
        return self.alter(template, corrupt=0.5)

    def alter(self, template: str, *, corrupt: float) -> str:
        """Return a variation of a seen template that still holds `{c}` and is no held-out one."""
        draw = self.random.random
        text = self._swap(template) if draw() < 0.5 else template
        noise = corrupt or (self.random.choice((0.05, 0.1, 0.2)) if draw() < 0.4 else 0.0)
        text = " ".join(self._noisy(text.split(), noise)) if noise else text
        text = text.rstrip("?.") if draw() < 0.15 else text
        text = self.random.choice(OPENINGS) + text if draw() < 0.1 else text
        text = text + self.random.choice(ENDINGS) if draw() < 0.1 else text
        return template if skeleton(text) in HELD_OUT_SKELETONS else text

    def _swap(self, text: str) -> str:
        for first, *others in self.random.sample(SYNONYMS, len(SYNONYMS)):
            if first in text and self.random.random() < 0.5:
                word = rf"\b{re.escape(first)}(?!\w)"
                text = re.sub(word, self.random.choice(others), text, count=1)
        return text

    def _noisy(self, words: Sequence[str], rate: float) -> list[str]:
        """Drop words and put others in their place, never the country's."""
        kept: list[str] = []
        for word in words:
            if "{c}" in word or self.random.random() >= rate:
                kept.append(word)
            elif self.random.random() < 0.5:
                kept.append(self._stranger())
        return kept

    def _stranger(self) -> str:
        """Return a word from another question, or one that means nothing."""
        if self.random.random() < 0.4:
            word = self.random.choice(self.words)
            return "the" if "{c}" in word else word
        letters = "aaabcdeeeefghiiklmnoooprsttuvwy"
        return "".join(self.random.choices(letters, k=self.random.randint(2, 9)))

    def recase(self, text: str) -> str:
        """Return the text, sometimes changed as in hurried typing."""
        draw = self.random.random()
        if draw < 0.06:
            return text.lower()
        if draw < 0.10:
            return text[:1].lower() + text[1:]
        return text

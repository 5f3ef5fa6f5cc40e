"""Exact match of greedy answers, on seen and on held-out wordings, alone and fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from flexinspect.masks.mask_presets import PRESETS
from flexinspect.records.prompt import POSITION_MODES
from tools.demo_model.corpus import (
    PLAIN,
    Composer,
    Example,
    Layout,
    collate,
    dense_mask,
)
from tools.demo_model.facts import Fact
from tools.demo_model.templates import HELD_OUT, RELATIONS, SEEN, fill
from tools.demo_model.tokenizer import SHARED_TEXTS

FUSED = 5
TOKENS_PER_BATCH = 16_384
HELD_OUT_TEMPLATES = 8
SENTENCE_ROW = "five held-out wordings, fused, in a sentence"


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt to answer: a fact, its paraphrases, and how they are laid out."""

    fact: Fact
    paraphrases: tuple[str, ...]
    layout: Layout = PLAIN


@dataclass(frozen=True, slots=True)
class Score:
    """Exact matches among questions asked."""

    right: int
    n_questions: int

    @property
    def percent(self) -> float:
        """Return the exact match in percent."""
        return 100 * self.right / max(1, self.n_questions)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a name, the score over all facts, the score by relation."""

    name: str
    score: Score
    by_relation: Mapping[str, Score]


def alone(facts: Sequence[Fact], templates: Mapping[str, Sequence[str]]) -> Iterator[Question]:
    """Yield every fact in each wording of its relation, one paraphrase at a time."""
    for fact in facts:
        for template in templates[fact.relation]:
            yield Question(fact, (fill(template, fact.country),))


def fused(
    facts: Sequence[Fact],
    templates: Mapping[str, Sequence[str]],
    layout: Layout = PLAIN,
    *,
    rounds: int = HELD_OUT_TEMPLATES,
) -> Iterator[Question]:
    """Yield every fact `rounds` times in five wordings, each wording used equally often."""
    for number, fact in enumerate(facts):
        country = number // len(RELATIONS)
        group = templates[fact.relation]
        for turn in range(rounds):
            first = turn if rounds == len(group) else country + turn
            chosen = [group[(first + k) % len(group)] for k in range(FUSED)]
            yield Question(fact, tuple(fill(text, fact.country) for text in chosen), layout)


def accepted(answer: str, question: Question) -> bool:
    """Return whether the generated text is, once stripped, an accepted answer, or its sentence."""
    fact = question.fact
    form = fact.sentence if question.layout.in_sentence else "{a}"
    return answer.strip() in {form.format(a=text) for text in fact.answers}


class ModelUnderTest:
    """The model with its tokenizer, answering questions greedily."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.composer = Composer(tokenizer)

    def answers(self, questions: Sequence[Question]) -> list[str]:
        """Return the greedy answer to each question, cut at EOS."""
        prompts = [self.composer.prompt(q.paraphrases, q.layout) for q in questions]
        order = sorted(range(len(questions)), key=lambda i: len(prompts[i].ids))
        answers = [""] * len(questions)
        n_new = max((q.layout.max_new_tokens for q in questions), default=0)
        for chunk in self._chunks(order, [len(prompt.ids) + n_new for prompt in prompts]):
            examples = [self._open_example(questions[i], n_new) for i in chunk]
            for index, tokens in zip(chunk, self._greedy(examples, n_new), strict=True):
                answers[index] = str(self.tokenizer.decode(tokens))
        return answers

    def _chunks(self, order: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
        chunk: list[int] = []
        for index in order:
            if chunk and (len(chunk) + 1) * lengths[index] > TOKENS_PER_BATCH:
                yield chunk
                chunk = []
            chunk.append(index)
        if chunk:
            yield chunk

    def _open_example(self, question: Question, n_new: int) -> Example:
        """Return the prompt with room after it for the `n_new` tokens that may be generated."""
        prompt = self.composer.prompt(question.paraphrases, question.layout)
        n_tokens = len(prompt.ids) + n_new
        after = tuple(prompt.next_position(k) for k in range(n_new))
        ids = prompt.ids + (self.composer.pad,) * n_new
        mask = dense_mask(prompt, question.layout.preset, n_tokens)
        return Example(ids, prompt.position_ids + after, (0,) * n_tokens, mask)

    @torch.inference_mode()
    def _greedy(self, examples: Sequence[Example], n_new: int) -> list[list[int]]:
        """Return the generated ids of each example, without EOS.

        Nothing is cached: the whole prompt is computed anew for each token, for the rows that have
        not ended. Causal masks make the room after the last token harmless.
        """
        batch = collate(examples, self.composer.pad)
        starts = torch.tensor([len(e.ids) - n_new for e in examples])
        out: list[list[int]] = [[] for _ in examples]
        alive = torch.arange(len(examples))
        for step in range(n_new):
            stop = int(starts[alive].max()) + step
            last = starts[alive] + step - 1
            new = self._next(batch.ids, batch.position_ids, batch.mask, alive, last, stop)
            going = new != self.composer.eos
            alive, new = alive[going], new[going]
            if not len(alive):
                break
            batch.ids[alive, starts[alive] + step] = new
            for row, token in zip(alive.tolist(), new.tolist(), strict=True):
                out[row].append(token)
        return out

    def _next(
        self, ids: Tensor, positions: Tensor, mask: Tensor, alive: Tensor, last: Tensor, stop: int
    ) -> Tensor:
        hidden = self.model.model(
            input_ids=ids[alive, :stop],
            position_ids=positions[alive, :stop],
            attention_mask=mask[alive, :, :stop, :stop],
            use_cache=False,
        ).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden[torch.arange(len(alive)), last])
        return logits.argmax(dim=-1)

    def row(self, name: str, questions: Sequence[Question]) -> Row:
        """Ask all the questions and return the line of the table."""
        pairs = zip(questions, self.answers(questions), strict=True)
        marks = [(q.fact.relation, accepted(a, q)) for q, a in pairs]
        by_relation = {
            relation: Score(
                sum(right for name, right in marks if name == relation),
                sum(name == relation for name, _ in marks),
            )
            for relation in RELATIONS
        }
        row = Row(name, Score(sum(right for _, right in marks), len(marks)), by_relation)
        print(f"{row.name:48s} {row.score.percent:6.2f} %  of {row.score.n_questions}", flush=True)
        return row


def main_rows(model: ModelUnderTest, facts: Sequence[Fact]) -> list[Row]:
    """Return the table of the wordings: seen and held out, alone and five fused."""
    plan: dict[str, Callable[[], Iterator[Question]]] = {
        "seen wording, alone": lambda: alone(facts, SEEN),
        "five seen wordings, fused": lambda: fused(facts, SEEN, rounds=2),
        "held-out wording, alone": lambda: alone(facts, HELD_OUT),
        "five held-out wordings, fused": lambda: fused(facts, HELD_OUT),
        SENTENCE_ROW: lambda: fused(facts, HELD_OUT, Layout(in_sentence=True), rounds=2),
    }
    return [model.row(name, list(questions())) for name, questions in plan.items()]


def preset_rows(model: ModelUnderTest, facts: Sequence[Fact]) -> list[Row]:
    """Return one line per mask preset and positions mode, five held-out wordings each.

    `shared-prefix` has a shared text to look at; the other presets have none.
    """
    layouts = [
        Layout(preset, positions, SHARED_TEXTS[0] if preset == "shared-prefix" else "")
        for preset in PRESETS
        for positions in POSITION_MODES
    ]
    return [
        model.row(
            f"{layout.preset}, {layout.positions}",
            list(fused(facts, HELD_OUT, layout, rounds=1)),
        )
        for layout in layouts
    ]

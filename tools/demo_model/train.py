"""Training of the demo model: AdamW, cosine schedule, dense masks under SDPA."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_model.corpus import IGNORED, Batch, Sampler
from tools.demo_model.tokenizer import MAX_LENGTH

PARAPHRASES = (1, 2, 3, 4, 5)
PARAPHRASE_WEIGHTS = (10, 2, 2, 2, 4)
PRINT_EVERY = 50


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how fast to train; `prompts` is the number of lone questions in a batch."""

    steps: int = 1800
    prompts: int = 192
    peak_rate: float = 2.5e-3
    warmup: int = 100
    weight_decay: float = 0.05

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: linear warm-up, then a cosine down to nothing."""
        if step < self.warmup:
            return self.peak_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama of about two million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, sampler: Sampler, plan: TrainingPlan) -> None:
    """Train in place, printing the mean loss and the time as it goes."""
    optimiser = torch.optim.AdamW(_groups(model, plan), lr=plan.peak_rate, betas=(0.9, 0.98))
    model.train()
    started, losses = time.perf_counter(), list[float]()
    for step in range(plan.steps):
        losses.append(_step(model, sampler, plan, optimiser, step))
        if step % PRINT_EVERY == PRINT_EVERY - 1:
            recent = sum(losses[-PRINT_EVERY:]) / PRINT_EVERY
            seconds = time.perf_counter() - started
            progress = f"step {step + 1:5d}/{plan.steps}  loss {recent:.4f}"
            print(f"{progress}  {seconds:5.0f} s", flush=True)


def _groups(model: LlamaForCausalLM, plan: TrainingPlan) -> list[dict[str, object]]:
    """Decay matrices only: not norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": plan.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def _step(
    model: LlamaForCausalLM,
    sampler: Sampler,
    plan: TrainingPlan,
    optimiser: torch.optim.Optimizer,
    step: int,
) -> float:
    for group in optimiser.param_groups:
        group["lr"] = plan.rate(step)
    n_paraphrases = sampler.random.choices(PARAPHRASES, PARAPHRASE_WEIGHTS)[0]
    loss = answer_loss(model, sampler.batch(n_paraphrases, plan.prompts // n_paraphrases))
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return float(loss.detach())


def answer_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the labelled tokens; only their logits are computed."""
    hidden = model.model(
        input_ids=batch.ids,
        position_ids=batch.position_ids,
        attention_mask=batch.mask,
        use_cache=False,
    ).last_hidden_state
    targets = batch.labels[:, 1:]
    wanted = targets != IGNORED
    return cross_entropy(model.lm_head(hidden[:, :-1][wanted]), targets[wanted])

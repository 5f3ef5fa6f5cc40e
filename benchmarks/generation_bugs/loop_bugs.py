"""Errors in decoding loops, caches and prompts, and in arguments of `generate` and the loader."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.generation_bugs import models
from benchmarks.generation_bugs.models import demo, greedy, ids, make, saved

QUESTIONS = ("Which city is the capital of France?", "What is the money of Japan called?")
CUE = "Answer:"


def cut_cue(is_bug: bool) -> None:
    """X01: the prompt builder cuts the prompt at its end, and with it the cue."""
    model, tokenizer = demo()
    text = "\n".join((*QUESTIONS, CUE))
    encoded = tokenizer(text, return_tensors="pt").input_ids
    prompt = encoded[:, : encoded.shape[1] - 2] if is_bug else encoded
    mask = torch.ones_like(prompt)
    model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False)


def mask_of_four_dimensions(is_bug: bool) -> None:
    """X09: `generate` gets a mask of cells, from which it cannot make positions."""
    model, prompt = make(), ids(17)
    cells = models.segment_cells(64)
    if is_bug:
        mask = cells[None, None, :17, :17]
        model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False)
        return
    cache, rows = None, prompt
    for n in range(17, 21):
        mask = cells[None, None, n - rows.shape[1] : n, :n]
        output = model(rows, attention_mask=mask, past_key_values=cache, use_cache=True)
        cache, rows = output.past_key_values, output.logits[:, -1:].argmax(-1)


def compiled_before_hook(is_bug: bool) -> None:
    """X23: a hook that steers a layer is registered after the model was compiled and called."""
    model, prompt = make(), ids(12)

    def steer(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + 0.5

    layer = model.model.layers[1].mlp
    compiled: Any = torch.compile(model, backend="eager")
    if not is_bug:
        layer.register_forward_hook(steer)
    compiled(prompt)
    if is_bug:
        layer.register_forward_hook(steer)
    compiled(prompt)


def rejected_drafts(is_bug: bool) -> None:
    """N01: a speculative loop keeps the keys of rejected drafts."""
    model = make()
    output = model(ids(12), use_cache=True)
    cache, best = output.past_key_values, output.logits[:, -1:].argmax(-1)
    for _ in range(3):
        drafts = torch.tensor([[7, 8]])
        output = model(torch.cat((best, drafts), 1), past_key_values=cache)
        choices = output.logits.argmax(-1)
        n_good = int((choices[0, :-1] == drafts[0]).long().cumprod(0).sum())
        if not is_bug:
            cache.crop(n_good - 2)
        best = choices[:, n_good : n_good + 1]


def beams_without_reorder(is_bug: bool) -> None:
    """N02: a beam search by hand that does not reorder the cache."""
    model, width = make(), 3
    output = model(ids(12).repeat(width, 1), use_cache=True)
    cache = output.past_key_values
    scores, first = output.logits[0, -1].log_softmax(-1).topk(width)
    rows = first[:, None]
    for _ in range(4):
        output = model(rows, past_key_values=cache)
        totals = scores[:, None] + output.logits[:, -1].log_softmax(-1)
        scores, chosen = totals.flatten().topk(width)
        parents, tokens = chosen // models.VOCAB, chosen % models.VOCAB
        if not is_bug:
            cache.reorder_cache(parents)
        rows = tokens[:, None]


def thinned_cache(is_bug: bool) -> None:
    """N03: the cache is thinned after the prefill, and positions follow its length."""
    model = make()
    output = model(ids(40), use_cache=True)
    cache, rows = output.past_key_values, output.logits[:, -1:].argmax(-1)
    for layer in cache.layers:
        for name in ("keys", "values"):
            states = getattr(layer, name)
            setattr(layer, name, torch.cat((states[:, :, :4], states[:, :, -11:]), 2))
    for n in range(40, 44):
        options: Any = {} if is_bug else {"position_ids": torch.tensor([[n]])}
        output = model(rows, past_key_values=cache, **options)
        rows = output.logits[:, -1:].argmax(-1)


def sampling_of_the_checkpoint(is_bug: bool) -> None:
    """N05: the checkpoint's generation config samples, and the user thinks it is greedy."""
    model = make()
    model.generation_config.update(do_sample=True, temperature=1.3, top_p=0.9)
    model = AutoModelForCausalLM.from_pretrained(saved(model))
    torch.manual_seed(0)
    options: Any = {} if is_bug else {"do_sample": False, "temperature": None, "top_p": None}
    model.generate(ids(12), max_new_tokens=6, **options)


def padding_without_mask(is_bug: bool) -> None:
    """N06: a batch is padded with the EOS, and its attention mask is not passed."""
    model, tokenizer = demo()
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    texts = [f"{QUESTIONS[0]}\n{QUESTIONS[0]}\n{CUE}", f"{QUESTIONS[1]}\n{CUE}"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    options: Any = {} if is_bug else {"attention_mask": batch.attention_mask}
    model.generate(batch.input_ids, max_new_tokens=6, do_sample=False, **options)


def shared_prefix_cache(is_bug: bool) -> None:
    """N09: one cache of a prefix serves two questions and is not copied."""
    model, prefix = make(), ids(10)
    cache = model(prefix, use_cache=True).past_key_values
    for seed in (5, 6):
        own = cache if is_bug else copy.deepcopy(cache)
        greedy(model, ids(7, seed)[:, 1:], 4, own)


def training_mode(is_bug: bool) -> None:
    """N10: the model is left in training mode, with dropout in its attention."""
    model = make(attention_dropout=0.2)
    model.train(is_bug)
    model.generate(ids(12), max_new_tokens=5, do_sample=False)


def untied_head(is_bug: bool) -> None:
    """N11: the output head is not tied, and the checkpoint does not have it."""
    folder = saved(make(tie_word_embeddings=True))
    model = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=not is_bug)
    model.generate(ids(12), max_new_tokens=5, do_sample=False)


def wrong_eos(is_bug: bool) -> None:
    """N12: generation ends at another EOS, so that the text runs on behind the right one."""
    model, tokenizer = demo()
    if is_bug:
        model.generation_config.eos_token_id = tokenizer.bos_token_id
    batch = tokenizer(f"{QUESTIONS[0]}\n{CUE}", return_tensors="pt")
    model.generate(**batch, max_new_tokens=16, do_sample=False)


PROGRAMS = {
    "X01": cut_cue,
    "X09": mask_of_four_dimensions,
    "X23": compiled_before_hook,
    "N01": rejected_drafts,
    "N02": beams_without_reorder,
    "N03": thinned_cache,
    "N05": sampling_of_the_checkpoint,
    "N06": padding_without_mask,
    "N09": shared_prefix_cache,
    "N10": training_mode,
    "N11": untied_head,
    "N12": wrong_eos,
}

"""More silent training errors from public threads, each with the same program without the error.

`python further.py NAME bug|fixed SEED` is a training that knows nothing of flexinspect. The names
are those of the threads: repository and number of an issue or pull request. The programs are our
own and imitate what the thread describes, in small networks with synthetic data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))  # it runs as a script of a user would
from benchmarks.training_bugs import nets

IGNORED, PAD = -100, 0


def ragged(n: int, seed: int, *, length: int = 16) -> tuple[Tensor, Tensor]:
    """Return token ids (n, length), and which of them are not padding, at the end of each row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, length - 3, (n, 1), generator=generator)
    lengths[0] = length
    mask = torch.arange(length) < lengths
    ids = torch.randint(1, 32, (n, length), generator=generator)
    return torch.where(mask, ids, PAD), mask.long()


def small_llama(**facts: Any) -> Any:
    """Return a language model of transformers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=PAD, **facts,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def small_bert() -> Any:
    """Return a classifier of texts of transformers with random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, num_labels=2, pad_token_id=PAD,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def optimize(model: nn.Module, losses: Iterator[Tensor], *, lr: float = 1e-3) -> None:
    """Take one step for each loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for loss in losses:
        optimizer.zero_grad()
        nets.backward(loss)
        optimizer.step()


def mean_of_means(is_bug: bool, seed: int) -> None:
    """transformers-34191: accumulated losses are means of micro-batches, not of all labels."""
    model = nets.LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(6):
        batches = [ragged(2, seed + 100 * step + n) for n in range(3)]
        batches.append(ragged(8, seed + 100 * step + 50))
        labels = [ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED) for ids, mask in batches]
        total = sum(int((one != IGNORED).sum()) for one in labels)
        optimizer.zero_grad()
        for (ids, _), one in zip(batches, labels, strict=True):
            scores = model(ids[:, :-1]).flatten(0, 1)
            if is_bug:
                loss = functional.cross_entropy(scores, one.flatten()) / len(batches)
            else:
                loss = functional.cross_entropy(scores, one.flatten(), reduction="sum") / total
            nets.backward(loss)
        optimizer.step()


def shifted_twice(is_bug: bool, seed: int) -> None:
    """transformers-37830: the model shifts, and then its loss function shifts again."""
    model = nets.LanguageModel()

    def loss_function(scores: Tensor, labels: Tensor) -> Tensor:
        scores, labels = scores[:, :-1], labels[:, 1:]
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())

    def losses() -> Iterator[Tensor]:
        for _ in range(8):
            ids = torch.randint(32, (8, 12))
            scores, labels = model(ids), ids
            if is_bug:
                scores, labels = scores[:, :-1], labels[:, 1:]
            yield loss_function(scores, labels)

    optimize(model, losses())


def padding_in_loss(is_bug: bool, seed: int) -> None:
    """trl-1625: token ids are copied to labels without masking the padding."""
    model = small_llama()

    def losses() -> Iterator[Tensor]:
        for step in range(6):
            ids, mask = ragged(8, seed + step)
            labels = ids.clone() if is_bug else ids.masked_fill(mask == 0, IGNORED)
            yield model(input_ids=ids, attention_mask=mask, labels=labels).loss

    optimize(model, losses())


def padding_attended(is_bug: bool, seed: int) -> None:
    """transformers-16243: an encoder gets padded texts without their attention mask."""
    model = small_bert()

    def losses() -> Iterator[Tensor]:
        for step in range(6):
            ids, mask = ragged(8, seed + step)
            given = {} if is_bug else {"attention_mask": mask}
            yield model(input_ids=ids, labels=ids[:, 0] % 2, **given).loss

    optimize(model, losses())


def no_labels(is_bug: bool, seed: int) -> None:
    """trl-6025: texts are cut behind the prompt, so that no label of an answer is left."""
    model = nets.LanguageModel()
    length = 12 if is_bug else 24  # the prompt has 14 tokens

    def losses() -> Iterator[Tensor]:
        for step in range(6):
            ids = nets.sequences(8, length=24, seed=seed + step)
            labels = ids.clone()
            labels[:, :14] = IGNORED
            ids, labels = ids[:, :length], labels[:, :length]
            scores, labels = model(ids[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()
            total = functional.cross_entropy(scores, labels, reduction="sum")
            yield total / max(int((labels != IGNORED).sum()), 1)

    optimize(model, losses())


def sigmoid_twice(is_bug: bool, seed: int) -> None:
    """Lightning-7096: the model ends with a sigmoid, which the loss function applies again."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 1)]
    model = nn.Sequential(*layers, *([nn.Sigmoid()] if is_bug else []))

    def losses() -> Iterator[Tensor]:
        for x, y in nets.epochs(nets.loader(seed), 1):
            target = (y % 2).float()
            yield functional.binary_cross_entropy_with_logits(model(x).squeeze(1), target)

    optimize(model, losses())


class Stack(nn.Module):
    """Layers in a list, which are part of the module only if it is a `ModuleList`."""

    def __init__(self, *, registers: bool) -> None:
        super().__init__()
        layers = [nn.Linear(256, 256) for _ in range(2)]
        self.layers: Any = nn.ModuleList(layers) if registers else layers
        self.head = nn.Linear(256, nets.N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (n, 10)."""
        x = x.flatten(1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        scores: Tensor = self.head(x)
        return scores


def unregistered(is_bug: bool, seed: int) -> None:
    """pytorch-72580: layers in a Python list are not parameters of the model."""
    model = Stack(registers=not is_bug)
    data = nets.epochs(nets.loader(seed), 1)
    optimize(model, (functional.cross_entropy(model(x), y) for x, y in data))


def same_order(is_bug: bool, seed: int) -> None:
    """pytorch-31771: `set_epoch` is not called, so each epoch has the same order."""
    dataset = TensorDataset(*nets.digits(128, seed))
    sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=True, seed=seed)
    data = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = nets.ConvNet()

    def losses() -> Iterator[Tensor]:
        for epoch in range(3):
            if not is_bug:
                sampler.set_epoch(epoch)
            for x, y in data:
                yield functional.cross_entropy(model(x), y)

    optimize(model, losses())


def fast_schedule(is_bug: bool, seed: int) -> None:
    """Lightning-1476: the scheduler is called for each micro-batch, not for each step."""
    model = nets.ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=16)
    for n, (x, y) in enumerate(nets.epochs(nets.loader(seed), 4)):
        nets.backward(functional.cross_entropy(model(x), y) / 4)
        is_last = n % 4 == 3
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        if is_bug or is_last:
            scheduler.step()


def clips_scaled(is_bug: bool, seed: int) -> None:
    """Lightning-9330: gradients are clipped while they still contain the loss scale."""
    model, scaler = nets.ConvNet(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x, y in nets.epochs(nets.loader(seed), 1):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        nets.backward(scaler.scale(loss))
        if not is_bug:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


class Block(nn.Module):
    """A frozen linear layer with a trainable addition of low rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., width)."""
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapted(nn.Module):
    """A model with a frozen embedding, whose blocks are checkpointed."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 32).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.head = nn.Linear(32, 32)
        self.is_reentrant = is_reentrant

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores (batch, length, 32)."""
        x: Any = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        scores: Tensor = self.head(x)
        return scores


def cut_checkpoints(is_bug: bool, seed: int) -> None:
    """transformers-26221: reentrant checkpointing behind a frozen embedding has no gradients."""
    model = Adapted(is_reentrant=is_bug)
    each = (nets.sequences(8, seed=seed + step) for step in range(6))
    optimize(model, (nets.language_loss(model, ids) for ids in each))


def lost_in_rounding(is_bug: bool, seed: int) -> None:
    """torchao-1124: updates of weights in bfloat16 are smaller than their precision."""
    model = nets.ConvNet(p=0.0)
    if is_bug:
        model.bfloat16()

    def losses() -> Iterator[Tensor]:
        for x, y in nets.epochs(nets.loader(seed), 1):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not is_bug):
                scores = model(x.bfloat16() if is_bug else x)
            yield functional.cross_entropy(scores.float(), y)

    optimize(model, losses(), lr=1e-5)


def untied(is_bug: bool, seed: int) -> None:
    """transformers-43207: the config ties the embeddings, and the model does not."""
    model = small_llama(tie_word_embeddings=True)
    if is_bug:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    each = (nets.sequences(8, seed=seed + step) for step in range(6))
    optimize(model, (model(input_ids=ids, labels=ids).loss for ids in each))


def stays_in_evaluation(is_bug: bool, seed: int) -> None:
    """Lightning-20177: the model is not set back to training mode after a validation."""
    model = nets.ConvNet()

    def losses() -> Iterator[Tensor]:
        for step, (x, y) in enumerate(nets.epochs(nets.loader(seed), 1)):
            if step == 2:
                model.eval()
                with torch.no_grad():
                    functional.cross_entropy(model(x), y)
                if not is_bug:
                    model.train()
            yield functional.cross_entropy(model(x), y)

    optimize(model, losses())


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Digits one after the other, or every other one of them."""

    def __init__(self, seed: int, shard: slice) -> None:
        self.images, self.labels = (one[shard] for one in nets.digits(256, seed))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.images, self.labels, strict=True))


def same_data(is_bug: bool, seed: int) -> None:
    """transformers-11254: every rank reads the whole stream, so all train on the same batches."""
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = slice(None) if is_bug else slice(rank, None, size)
    data = DataLoader(Stream(seed, shard), batch_size=16)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10))
    wrapper = DistributedDataParallel(model)
    optimize(model, (functional.cross_entropy(wrapper(x), y) for x, y in data))
    dist.barrier()  # the rank that ends first takes the store with it
    dist.destroy_process_group()


BUGS = {
    "transformers-34191": (mean_of_means, "training.micro-batch-means", "unequal-micro-batches"),
    "transformers-37830": (shifted_twice, "training.label-shift", "labels-shifted-twice"),
    "trl-1625": (padding_in_loss, "training.padding", "padding-in-loss"),
    "transformers-16243": (padding_attended, "training.padding", "padding-attended"),
    "trl-6025": (no_labels, "training.loss-inputs", "labels-ignored"),
    "lightning-7096": (sigmoid_twice, "training.loss-inputs", "loss-of-probabilities"),
    "pytorch-72580": (unregistered, "training.optimizer-parameters", "unregistered"),
    "pytorch-31771": (same_order, "training.repeated-batch", "same-order"),
    "lightning-1476": (fast_schedule, "training.call-order", "schedule-of-micro-batches"),
    "lightning-9330": (clips_scaled, "training.call-order", "clip-before-unscale"),
    "transformers-26221": (cut_checkpoints, "training.cut-gradients", "checkpoint-cuts"),
    "torchao-1124": (lost_in_rounding, "training.no-update", "update-rounded"),
    "transformers-43207": (untied, "training.untied-weights", "untied-weights"),
    "lightning-20177": (stays_in_evaluation, "training.wrong-mode", "trained-in-evaluation-mode"),
    "transformers-11254": (same_data, "training.repeated-batch", "same-data"),
}
"""Each error by its thread: its program, and the finding and the check that name it."""
BEGINS: dict[str, Callable[[int], int]] = {
    "pytorch-31771": lambda seed: 4,
    "lightning-20177": lambda seed: 2,
}
"""The step in which an error first acts, by the seed, where it is not the first one."""
RANKED = ("transformers-11254",)
"""Errors that need two ranks."""

if __name__ == "__main__":
    _, name, variant, seed_text = sys.argv
    torch.manual_seed(int(seed_text))
    BUGS[name][0](variant == "bug", int(seed_text))

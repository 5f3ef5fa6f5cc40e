"""Silent training errors that others reported, each with the same program without the error.

`python bugs.py NAME bug|fixed SEED` is a training that knows nothing of flexinspect. The programs
are our own: they imitate the errors of the public artifact of TrainCheck (Jiang et al., OSDI 2025)
in small networks with synthetic data.
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
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))  # it runs as a script of a user would
from benchmarks.training_bugs import nets


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, *, clears: bool = True
) -> None:
    """Train on digits for two epochs."""
    for x, y in nets.epochs(nets.loader(seed), 2):
        if clears:
            optimizer.zero_grad()
        nets.backward(functional.cross_entropy(model(x), y))
        optimizer.step()


def frozen_head(is_bug: bool, seed: int) -> None:
    """pytorch-forum-84911: the optimizer holds the head, which is frozen with the rest."""
    model = nets.ConvNet()
    for name, one in model.named_parameters():
        if not name.startswith("bn"):
            one.requires_grad = False
    if not is_bug:
        model.fc.requires_grad_(True)
    held = model.fc.parameters() if is_bug else (p for p in model.parameters() if p.requires_grad)
    train(model, torch.optim.Adam(held, lr=1e-3), seed)


def no_zero_grad(is_bug: bool, seed: int) -> None:
    """stackoverflow-60335387: gradients are never cleared."""
    model = nets.ConvNet()
    train(model, torch.optim.Adam(model.parameters(), lr=1e-4), seed, clears=not is_bug)


def spectral_norm(is_bug: bool, seed: int) -> None:
    """pytorch-51800: spectral norm is evaluated before its first training forward."""
    width = 256
    model = nn.Sequential(
        nn.Flatten(),
        *(
            layer
            for n in (256, width, width, width)
            for layer in (nn.utils.spectral_norm(nn.Linear(n, width)), nn.ReLU())
        ),
        nn.Linear(width, nets.N_CLASSES),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = nets.loader(seed)
    if is_bug:
        print("before", nets.evaluate(model, data))
    train(model, optimizer, seed)
    print("after", nets.evaluate(model, data))


class EarlyReturn(torch.optim.SGD):
    """Does nothing any more after a step without gradients."""

    is_broken = False

    def step(self, closure: Any = None) -> Any:
        """Step, unless it is broken."""
        gradients = [one.grad for group in self.param_groups for one in group["params"]]
        self.is_broken |= all(one is None for one in gradients)
        return None if self.is_broken else super().step(closure)


def dead_optimizer(is_bug: bool, seed: int) -> None:
    """pytorch-115607: after a step without gradients, the optimizer does nothing."""
    model = nets.ConvNet()
    kind = EarlyReturn if is_bug else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-2)
    optimizer.step()
    train(model, optimizer, seed)


def dropout_in_evaluation(is_bug: bool, seed: int) -> None:
    """transformers-33844: attention drops in evaluation mode too."""
    model = nets.LanguageModel(always_drops=is_bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(12):
        if step % 4 == 1:
            model.eval()
            with torch.no_grad():
                nets.language_loss(model, nets.sequences(8, seed=99))
            model.train()
        optimizer.zero_grad()
        nets.backward(nets.language_loss(model, nets.sequences(8, seed=seed + step)))
        optimizer.step()


class VisionLanguage(nn.Module):
    """The mean of a batch of images, added to the words of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.words = nn.Linear(256, 16), nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        """Return logits (batch, length, 32)."""
        images = self.images(pixel_values.flatten(1))
        if len(images) != len(input_ids):
            images = images.mean(0, keepdim=True)
        logits: Tensor = self.head(self.words(input_ids) + images[:, None])
        return logits


def rows_differ(is_bug: bool, seed: int) -> None:
    """transformers-34204: the processor makes one text of a batch of texts and images."""
    model = VisionLanguage()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(8):
        ids = nets.sequences(1 if is_bug else 16, seed=seed + step)
        images, _ = nets.digits(16, seed + step)
        optimizer.zero_grad()
        logits = model(input_ids=ids, pixel_values=images)
        nets.backward(functional.cross_entropy(logits.flatten(0, 1), ids.flatten()))
        optimizer.step()


def more_tokens(is_bug: bool, seed: int) -> None:
    """transformers-23723: generate returns more tokens than it was asked for."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Adding(LlamaForCausalLM):  # type: ignore[misc]
        def generate(self, *args: Any, max_new_tokens: int = 20, **kwargs: Any) -> Any:
            """Generate, by the length of a prompt that was not trimmed."""
            return super().generate(*args, max_new_tokens=max_new_tokens + 4 * is_bug, **kwargs)

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, eos_token_id=None,
    )  # fmt: skip
    model = Adding(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        ids = nets.sequences(4, seed=seed + step)
        optimizer.zero_grad()
        nets.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
    model.eval()
    model.generate(nets.sequences(1, seed=seed), max_new_tokens=10, do_sample=False)


class FrozenStages(nn.Module):
    """A backbone that freezes its first stages in `train`, as those of mmpretrain do."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen_stages = 1
        self.stages = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def train(self, mode: bool = True) -> FrozenStages:
        """Set the mode, and freeze."""
        super().train(mode)
        for stage in self.stages[: self.frozen_stages]:
            stage.requires_grad_(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return features (n, 256)."""
        x = x.flatten(1)
        for stage in self.stages:
            x = torch.relu(stage(x))
        return x


def frozen_stages(is_bug: bool, seed: int) -> None:
    """mmpretrain-702: `train` would freeze the first stages, and is never called."""
    model = nn.Sequential(FrozenStages(), nn.Linear(256, nets.N_CLASSES))
    if not is_bug:
        model.train()
    held = [one for one in model.parameters() if one.requires_grad]
    train(model, torch.optim.SGD(held, lr=1e-2), seed)


class OwnLinear(nn.Linear):
    """A linear layer whose own kernel does not know autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out_features)."""
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.weight.T + self.bias


def autocast_passed_over(is_bug: bool, seed: int) -> None:
    """lightning-thunder-725: a linear layer that autocast passes over."""
    kind = OwnLinear if is_bug else nn.Linear
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), kind(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x, y in nets.epochs(nets.loader(seed), 1):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x).float(), y)
        nets.backward(loss)
        optimizer.step()


class RandomDigits(Dataset[tuple[Tensor, Tensor]]):
    """Images that are drawn when they are asked for."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(1, 16, 16), torch.randint(nets.N_CLASSES, ())


def _same_seed(worker: int) -> None:
    torch.manual_seed(1)


def same_numbers(is_bug: bool, seed: int) -> None:
    """stackoverflow-67180955: all workers draw the same random numbers."""
    begin = _same_seed if is_bug else None
    data = DataLoader(RandomDigits(), batch_size=16, num_workers=2, worker_init_fn=begin)
    model = nets.ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x, y in nets.epochs(data, 2):
        optimizer.zero_grad()
        nets.backward(functional.cross_entropy(model(x), y))
        optimizer.step()


FIRST_TRANSFER = 3  # the first step in which a transfer may be lost


def _transfer_losses(seed: int) -> Iterator[bool]:
    """Yield whether each transfer is lost, one for each gradient of a step."""
    random = torch.Generator().manual_seed(seed)
    while True:
        yield torch.rand((), generator=random).item() < 0.02


def _first_loss(seed: int) -> int:
    n_before = next(n for n, is_lost in enumerate(_transfer_losses(seed)) if is_lost)
    return FIRST_TRANSFER + n_before // len([*nets.ConvNet().parameters()])


def lost_transfers(is_bug: bool, seed: int) -> None:
    """pytorch-84803, 96600: a transfer now and then brings zeros."""
    model = nets.ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = _transfer_losses(seed)
    n_steps = 0

    def transfer(grad: Tensor) -> Tensor:
        is_lost = is_bug and n_steps >= FIRST_TRANSFER and next(losses)
        return torch.zeros_like(grad) if is_lost else grad

    for one in model.parameters():
        one.register_hook(transfer)  # type: ignore[no-untyped-call]
    for x, y in nets.epochs(nets.loader(seed), 6):
        optimizer.zero_grad()
        nets.backward(functional.cross_entropy(model(x), y))
        optimizer.step()
        n_steps += 1


class Nested(nn.Module):
    """A model inside of a model, which initializes all of it when it is made."""

    def __init__(self, depth: int, *, is_bug: bool) -> None:
        super().__init__()
        self.own = nn.Linear(64, 64)
        self.inner = Nested(depth - 1, is_bug=is_bug) if depth else nn.Linear(64, nets.N_CLASSES)
        if is_bug:
            self.apply(self.initialize)

    @staticmethod
    def initialize(module: nn.Module) -> None:
        """Draw the weights of a linear layer."""
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 10)."""
        logits: Tensor = self.inner(torch.relu(self.own(x)))
        return logits


def initialized_again(is_bug: bool, seed: int) -> None:
    """transformers-17877: each model initializes the models inside of it once more."""
    nested = Nested(4, is_bug=is_bug)
    if not is_bug:
        nested.apply(nested.initialize)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nested)
    train(model, torch.optim.SGD(model.parameters(), lr=1e-2), seed)


# -- two ranks -------------------------------------------------------------------------------------


def _begin_ranks(seed: int) -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    return dist.get_rank()


def _end_ranks() -> None:
    dist.barrier()  # the rank that ends first takes the store with it
    dist.destroy_process_group()


def _small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10))


def _train_ranks(rank: int, seed: int, calls: Any, optimizer: Any, *, clips: bool = False) -> None:
    for step in range(12):
        x, y = nets.digits(16, seed * 100 + step * 2 + rank)
        optimizer.zero_grad()
        nets.backward(functional.cross_entropy(calls(step)(x), y))
        if clips:
            nn.utils.clip_grad_norm_(calls(step).parameters(), 0.05)
        optimizer.step()


def out_of_sync(is_bug: bool, seed: int) -> None:
    """x-jxmnop-ddp-out-of-sync: every other step calls the model inside of the wrapper."""
    rank, model = _begin_ranks(seed), _small()
    wrapper = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    _train_ranks(rank, seed, lambda n: model if is_bug and n % 2 else wrapper, optimizer)
    _end_ranks()


def lost_hooks(is_bug: bool, seed: int) -> None:
    """pytorch-104336: the model is moved after it was wrapped, so the wrapper loses its hooks."""
    rank, model = _begin_ranks(seed), _small()
    wrapper = DistributedDataParallel(model)
    if is_bug:
        wrapper.double().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    _train_ranks(rank, seed, lambda _: wrapper, optimizer)
    _end_ranks()


def clips_alone(is_bug: bool, seed: int) -> None:
    """deepspeed-1801: only the first rank clips."""
    rank, model = _begin_ranks(seed), _small()
    wrapper = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    clips = not is_bug or rank == 0
    _train_ranks(rank, seed, lambda _: wrapper, optimizer, clips=clips)
    _end_ranks()


BUGS = {
    "pytorch-forum-84911": (frozen_head, "training.optimizer-parameters"),
    "stackoverflow-60335387": (no_zero_grad, "training.gradients-not-cleared"),
    "pytorch-51800": (spectral_norm, "training.evaluation-loss"),
    "pytorch-115607": (dead_optimizer, "training.no-update"),
    "transformers-33844": (dropout_in_evaluation, "training.dropout-in-evaluation"),
    "transformers-34204": (rows_differ, "training.rows-differ"),
    "transformers-23723": (more_tokens, "text.more-than-asked"),
    "mmpretrain-702": (frozen_stages, "training.frozen-trains"),
    "lightning-thunder-725": (autocast_passed_over, "training.autocast-passed-over"),
    "stackoverflow-67180955": (same_numbers, "training.repeated-batch"),
    "pytorch-84803": (lost_transfers, "training.lost-gradient"),
    "transformers-17877": (initialized_again, "training.repeated-initialization"),
    "x-jxmnop-ddp-out-of-sync": (out_of_sync, "training.ranks-differ"),
    "pytorch-104336": (lost_hooks, "training.ranks-differ"),
    "deepspeed-1801": (clips_alone, "training.ranks-differ"),
}
"""Each error by its name in the artifact: its program, and the finding that names it."""
BEGINS: dict[str, Callable[[int], int]] = {
    "stackoverflow-60335387": lambda seed: 1,
    "pytorch-115607": lambda seed: 1,
    "transformers-33844": lambda seed: 1,
    "stackoverflow-67180955": lambda seed: 1,
    "pytorch-84803": _first_loss,
    "x-jxmnop-ddp-out-of-sync": lambda seed: 1,
}
"""The step in which an error first acts, by the seed, where it is not the first one."""
RANKED = ("x-jxmnop-ddp-out-of-sync", "pytorch-104336", "deepspeed-1801")
"""Errors that need two ranks."""

if __name__ == "__main__":
    _, name, variant, seed_text = sys.argv
    torch.manual_seed(int(seed_text))
    BUGS[name][0](variant == "bug", int(seed_text))

"""Trainings without an error, of many kinds: none may get a warning.

`python clean.py NAME SEED` is a training that knows nothing of flexinspect. Most are the kinds of
pytorch/examples that the artifact of TrainCheck measures false positives on, with synthetic data.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2]))  # it runs as a script of a user would
from benchmarks.training_bugs import nets


def regression(seed: int) -> None:
    """A polynomial of degree 4 from batches with heavy tails."""
    target, model = torch.randn(4, 1) * 5, nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(300):
        x = torch.randn(32, 1)
        powers = torch.cat([x**n for n in range(1, 5)], 1)
        optimizer.zero_grad()
        nets.backward(functional.smooth_l1_loss(model(powers), powers @ target + 0.3))
        optimizer.step()


def manual_update(seed: int) -> None:
    """Weights that the program itself updates, as the word language model does."""
    model = nets.LanguageModel()
    for step in range(20):
        model.zero_grad()
        nets.backward(nets.language_loss(model, nets.sequences(8, seed=seed + step)))
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for one in model.parameters():
            if one.grad is not None:
                one.data.add_(one.grad, alpha=-1.0)


def digits(seed: int) -> None:
    """Convolutions with a scheduler, evaluated after each epoch."""
    model, data = nets.ConvNet(), nets.loader(seed)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(4):
        for x, y in data:
            optimizer.zero_grad()
            nets.backward(functional.nll_loss(functional.log_softmax(model(x), 1), y))
            optimizer.step()
        nets.evaluate(model, data)
        scheduler.step()


def recurrent(seed: int) -> None:
    """An LSTM over the rows of an image."""
    lstm, head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, nets.N_CLASSES)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-2)
    for x, y in nets.epochs(nets.loader(seed), 4):
        optimizer.zero_grad()
        states, _ = lstm(x[:, 0])
        nets.backward(functional.cross_entropy(head(states[:, -1]), y))
        optimizer.step()


def autoencoder(seed: int) -> None:
    """A variational autoencoder whose loss is a sum."""
    encoder, decoder = nn.Linear(256, 32), nn.Linear(16, 256)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    for x, _ in nets.epochs(nets.loader(seed, n=1024, batch_size=128), 10):
        target = torch.sigmoid(x.flatten(1))
        optimizer.zero_grad()
        mean, log_variance = encoder(target).chunk(2, 1)
        sample = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        made = torch.sigmoid(decoder(sample))
        error = functional.binary_cross_entropy(made, target, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        nets.backward(error + divergence)
        optimizer.step()


def mixed_precision(seed: int) -> None:
    """Autocast to bfloat16 with a gradient scaler, clipping and accumulation."""
    model, scaler = nets.ConvNet(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(nets.epochs(nets.loader(seed), 4)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y) / 2
        nets.backward(scaler.scale(loss))
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


class Policy(nn.Module):
    """Probabilities of two actions, and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.action, self.value = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return log probabilities (2,) and a value (1,)."""
        hidden = torch.relu(self.body(state))
        return functional.log_softmax(self.action(hidden), -1), self.value(hidden)


def _episode(policy: nn.Module) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Balance a state that drifts; return log probabilities, values and rewards."""
    state, logs, values, rewards = torch.randn(4) * 0.05, [], [], []
    for _ in range(100):
        log_probability, value = policy(state)
        action = int(torch.multinomial(log_probability.exp(), 1))
        logs.append(log_probability[action])
        values.append(value[0])
        state = state * 1.05 + torch.randn(4) * 0.02 + (0.1 if action else -0.1)
        rewards.append(1.0)
        if state.abs().max() > 1:
            break
    return logs, values, rewards


def _returns(rewards: list[float], *, normalized: bool) -> Tensor:
    total, returns = 0.0, list[float]()
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    found = torch.tensor(returns)
    return (found - found.mean()) / (found.std(correction=0) + 1e-6) if normalized else found


def reinforce(seed: int) -> None:
    """Policy gradients: the loss is a sum over an episode of any length."""
    policy = Policy()
    optimizer = torch.optim.Adam([*policy.body.parameters(), *policy.action.parameters()], lr=1e-2)
    for _ in range(60):
        logs, _, rewards = _episode(policy)
        returns = _returns(rewards, normalized=True)
        optimizer.zero_grad()
        nets.backward(-(torch.stack(logs) * returns).sum())
        optimizer.step()


def actor_critic(seed: int) -> None:
    """Two optimizers on two parts of one model, each with a loss of its own."""
    policy = Policy()
    actor = torch.optim.Adam([*policy.body.parameters(), *policy.action.parameters()], lr=1e-2)
    critic = torch.optim.Adam(policy.value.parameters(), lr=1e-2)
    for _ in range(60):
        logs, values, rewards = _episode(policy)
        returns, predicted = _returns(rewards, normalized=False), torch.stack(values)
        actor.zero_grad()
        critic.zero_grad()
        loss = functional.smooth_l1_loss(predicted, returns, reduction="sum")
        nets.backward(loss - (torch.stack(logs) * (returns - predicted.detach())).sum())
        actor.step()
        critic.step()


class Forward(nn.Linear):
    """A layer that trains itself by the goodness of its activations."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)

    def forward(self, x: Tensor) -> Tensor:
        """Return activations of normalized inputs."""
        return torch.relu(super().forward(x / (x.norm(2, 1, keepdim=True) + 1e-4)))

    def improve(self, good: Tensor, bad: Tensor) -> None:
        """Take one step."""
        goodness = torch.cat([2 - self(good).pow(2).mean(1), self(bad).pow(2).mean(1) - 2])
        self.optimizer.zero_grad()
        nets.backward(functional.softplus(goodness).mean())
        self.optimizer.step()


def forward_forward(seed: int) -> None:
    """Each layer has its own optimizer, and no backward pass crosses a layer."""
    layers = [Forward(256, 64), Forward(64, 64)]
    images, _ = nets.digits(128, seed)
    good, bad = images.flatten(1), torch.randn(128, 256)
    for _ in range(40):
        x, y = good, bad
        for layer in layers:
            layer.improve(x, y)
            x, y = layer(x).detach(), layer(y).detach()


def adversarial(seed: int) -> None:
    """A generator and a discriminator, in turn."""
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 256), nn.Tanh())
    discriminator = nn.Sequential(
        nn.Linear(256, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1), nn.Sigmoid()
    )
    first = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    second = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for x, _ in nets.epochs(nets.loader(seed), 6):
        ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        discriminator.zero_grad()
        nets.backward(functional.binary_cross_entropy(discriminator(x.flatten(1)), ones))
        made = generator(torch.randn(len(x), 8))
        nets.backward(functional.binary_cross_entropy(discriminator(made.detach()), zeros))
        first.step()
        generator.zero_grad()
        nets.backward(functional.binary_cross_entropy(discriminator(made), ones))
        second.step()


def closures(seed: int) -> None:
    """LBFGS, which calls a closure several times in one step."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    x = torch.randn(64, 4, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        nets.backward(loss)
        return loss

    for _ in range(8):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            functional.mse_loss(model(x), y)


def siamese(seed: int) -> None:
    """One network for two images of raw values up to 255."""
    body, head = nets.ConvNet(), nn.Linear(2 * nets.N_CLASSES, 1)
    optimizer = torch.optim.Adadelta([*body.parameters(), *head.parameters()], lr=1.0)
    for x, y in nets.epochs(nets.loader(seed), 4):
        pixels = (x - x.min()) / (x.max() - x.min()) * 255
        pair = torch.cat([body(pixels), body(pixels.flip(0))], 1)
        same = (y == y.flip(0)).float()[:, None]
        optimizer.zero_grad()
        nets.backward(functional.binary_cross_entropy_with_logits(head(pair), same))
        optimizer.step()


class GraphLayer(nn.Module):
    """A linear layer, mixed over the neighbours of each node."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        """Return (nodes, n_out)."""
        mixed: Tensor = neighbours @ self.linear(x)
        return mixed


class GraphNet(nn.Module):
    """Two layers over a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GraphLayer(16, 32), GraphLayer(32, 4)

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        """Return logits (nodes, 4)."""
        hidden = functional.dropout(torch.relu(self.first(x, neighbours)), 0.5, self.training)
        logits: Tensor = self.second(hidden, neighbours)
        return logits


def graph(seed: int) -> None:
    """The same whole graph in every step."""
    n, model = 200, GraphNet()
    x, y = torch.randn(n, 16), torch.randint(4, (n,))
    neighbours = (torch.rand(n, n) < 0.03).float() + torch.eye(n)
    neighbours = neighbours / neighbours.sum(1, keepdim=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    for _ in range(60):
        model.train()
        optimizer.zero_grad()
        nets.backward(functional.cross_entropy(model(x, neighbours), y))
        optimizer.step()
        model.eval()
        functional.cross_entropy(model(x, neighbours), y)


def language(seed: int) -> None:
    """A transformer with dropout, warm-up, decay and clipping."""
    model = nets.LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=60)
    for step in range(60):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        nets.backward(nets.language_loss(model, nets.sequences(16, seed=seed * 100 + step)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


def head_only(seed: int) -> None:
    """The optimizer holds the head alone, and the rest is left as it is, in evaluation mode."""
    model = nets.ConvNet().eval()
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=1e-2, momentum=0.9)
    for x, y in nets.epochs(nets.loader(seed), 3):
        optimizer.zero_grad()
        nets.backward(functional.cross_entropy(model(x), y))
        optimizer.step()


def target_network(seed: int) -> None:
    """Q-learning with a slow copy of the network, which is updated by hand."""
    network, slow = nn.Linear(4, 2), nn.Linear(4, 2)
    slow.load_state_dict(network.state_dict())
    optimizer = torch.optim.RMSprop(network.parameters(), lr=1e-3)
    for _ in range(60):
        state, following = torch.randn(32, 4), torch.randn(32, 4)
        with torch.no_grad():
            target = state.sum(1) + 0.9 * slow(following).max(1).values
        value = network(state)[torch.arange(32), torch.randint(2, (32,))]
        optimizer.zero_grad()
        nets.backward(functional.smooth_l1_loss(value, target))
        optimizer.step()
        with torch.no_grad():
            for one, other in zip(slow.parameters(), network.parameters(), strict=True):
                one.lerp_(other, 0.05)


class Experts(nn.Module):
    """Four experts, of which each row is sent to one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(256, 4), nn.Linear(32, nets.N_CLASSES)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 32, bias=False), nn.ReLU()) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 10)."""
        weights = self.gate(x.flatten(1)).softmax(1)
        chosen = weights.argmax(1)
        mixed = torch.zeros(len(x), 32)
        for at, expert in enumerate(self.experts):
            rows = (chosen == at).nonzero()[:, 0]
            mixed[rows] = expert(x.flatten(1)[rows]) * weights[rows, at, None]
        logits: Tensor = self.head(mixed)
        return logits


def experts(seed: int) -> None:
    """Experts that some batches do not reach."""
    model = Experts()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in nets.epochs(nets.loader(seed, batch_size=4), 1):
        optimizer.zero_grad()
        nets.backward(functional.cross_entropy(model(x), y))
        optimizer.step()


def trainer(seed: int) -> None:
    """`transformers.Trainer` with accumulation and evaluation."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    rows = [{"input_ids": one, "labels": one} for one in nets.sequences(64, seed=seed)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=12, per_device_train_batch_size=4, use_cpu=True,
            gradient_accumulation_steps=2, report_to=[], eval_strategy="steps", eval_steps=4,
            learning_rate=1e-3, disable_tqdm=True, save_strategy="no", seed=seed,
        )  # fmt: skip
        data: Any = rows
        Trainer(LlamaForCausalLM(config), args, train_dataset=data, eval_dataset=data[:8]).train()


def accelerated(seed: int) -> None:
    """A loop of Accelerate with accumulation."""
    from accelerate import Accelerator  # type: ignore[import-untyped]

    accelerator: Any = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model: Any = nets.ConvNet()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, nets.loader(seed))
    for x, y in nets.epochs(data, 3):
        with accelerator.accumulate(model):
            accelerator.backward(functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def monte_carlo(seed: int) -> None:
    """Dropout that stays on in evaluations, for several passes of each batch."""
    model, data = nets.ConvNet(p=0.3), nets.loader(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        model.train()
        for x, y in data:
            optimizer.zero_grad()
            nets.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
        model.eval()
        model.dropout.train()
        with torch.no_grad():
            for x, _ in data:
                torch.stack([model(x).softmax(1) for _ in range(4)]).std(0)


def layer_rates(seed: int) -> None:
    """Rates that fall by a third from layer to layer, and a head with a hundred times the rate."""
    layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
    head = nn.Linear(256, nets.N_CLASSES)
    groups = [{"params": one.parameters(), "lr": 1e-5 * 0.65**n} for n, one in enumerate(layers)]
    optimizer = torch.optim.AdamW([*groups, {"params": head.parameters(), "lr": 1e-3}])
    model = nn.Sequential(nn.Flatten(), *(part for one in layers for part in (one, nn.ReLU())))
    for x, y in nets.epochs(nets.loader(seed), 3):
        optimizer.zero_grad()
        nets.backward(functional.cross_entropy(head(model(x)), y))
        optimizer.step()


def small_dtype(seed: int) -> None:
    """Weights in bfloat16 with a warm-up, whose updates are large enough."""
    model = nets.ConvNet(p=0.0).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-2, total_iters=4)
    for x, y in nets.epochs(nets.loader(seed), 2):
        optimizer.zero_grad()
        nets.backward(functional.cross_entropy(model(x.bfloat16()).float(), y))
        optimizer.step()
        scheduler.step()


PROGRAMS = {
    one.__name__.replace("_", "-"): one
    for one in (
        *(regression, manual_update, digits, recurrent, autoencoder, mixed_precision, reinforce),
        *(actor_critic, forward_forward, adversarial, closures, siamese, graph, language),
        *(head_only, target_network, experts, trainer, accelerated),
        *(monte_carlo, layer_rates, small_dtype),
    )
}

if __name__ == "__main__":
    _, name, seed_text = sys.argv
    torch.manual_seed(int(seed_text))
    PROGRAMS[name](int(seed_text))

"""Checks of labels, padding, micro-batches, schedules, checkpoints, rounding and proportions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from flexinspect.records.finding import Finding
from flexinspect_hooks.python_internals.initializer_calls import count_initializations
from flexinspect_hooks.training.model_checks import check_constant_inputs, check_initializations
from flexinspect_hooks.training.token_checks import check_padding
from flexinspect_hooks.training.update_checks import check_outliers, update_outliers
from flexinspect_hooks.training.watch_training import watch_training

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).float()
Losses = Iterator[Tensor]


class TokenModel(nn.Module):
    """Scores of 16 tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(ids))
        return scores


def checks_of(path: Path, model: nn.Module, losses: Losses, **options: Any) -> list[Any]:
    """The failed checks of a training with one step for each loss."""
    return [one.evidence.get("check") for one in findings_of(path, model, losses, **options)]


def findings_of(
    path: Path, model: nn.Module, losses: Losses, *, lr: float = 1e-3, level: str = "basic"
) -> list[Finding]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    out = path / "a.flextrace"
    with watch_training(model, optimizer, out=out, level=level, quiet=True) as trace:
        for loss in losses:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [one for one in trace.findings() if one.evidence.get("check")]


def token_ids(seed: int, rows: int = 4, length: int = 10) -> Tensor:
    return torch.randint(16, (rows, length), generator=torch.Generator().manual_seed(seed))


# -- labels and padding ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "expected"), [(1, []), (2, ["labels-shifted-twice"]), (0, []), (3, [])]
)
def test_labels_that_are_the_next_token_but_one(
    tmp_path: Path, by: int, expected: list[str]
) -> None:
    model = TokenModel()

    def losses() -> Losses:
        for seed in range(3):
            ids = token_ids(seed)
            scores = model(ids)[:, : ids.shape[1] - by].flatten(0, 1)
            yield functional.cross_entropy(scores, ids[:, by:].flatten())

    assert checks_of(tmp_path, model, losses()) == expected


def test_a_second_head_may_predict_the_token_after_the_next(tmp_path: Path) -> None:
    model = TokenModel()

    def losses() -> Losses:
        for seed in range(3):
            ids = token_ids(seed)
            scores = model(ids)
            later = functional.cross_entropy(scores[:, :-2].flatten(0, 1), ids[:, 2:].flatten())
            first = functional.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            yield first + later

    assert checks_of(tmp_path, model, losses()) == []


def test_texts_that_repeat_themselves_agree_with_both_shifts(tmp_path: Path) -> None:
    model, ids = TokenModel(), torch.full((4, 10), 3)

    def losses() -> Losses:
        for _ in range(3):
            yield functional.cross_entropy(model(ids)[:, :-2].flatten(0, 1), ids[:, 2:].flatten())

    assert checks_of(tmp_path, model, losses()) == []


@pytest.mark.parametrize(("n_ignored", "expected"), [(3, ["labels-ignored"]), (1, [])])
def test_labels_that_are_all_ignored(tmp_path: Path, n_ignored: int, expected: list[str]) -> None:
    model = TokenModel()

    def losses() -> Losses:
        for seed in range(3):
            ids = token_ids(seed)
            labels = torch.full_like(ids, -100) if seed < n_ignored else ids
            scores = model(ids).flatten(0, 1)
            yield functional.cross_entropy(scores, labels.flatten(), reduction="sum") / 40

    assert checks_of(tmp_path, model, losses()) == expected


def transformers_model(*, is_causal: bool, **config: Any) -> nn.Module:
    model: Any = nn.Module()
    model.attention = nn.Module()
    model.attention.is_causal = is_causal
    model.config = SimpleNamespace(pad_token_id=0, **config)
    return model  # type: ignore[no-any-return]


IDS = torch.tensor([[5, 6, 7, 8, 9, 4], [5, 6, 0, 0, 0, 0]])
MASK = (IDS != 0).long()
END = torch.tensor([[5, 6, 7, 8, 9, 4], [5, 6, 0, -100, -100, -100]])  # the padding ends a text


@pytest.mark.parametrize(
    ("is_causal", "inputs", "expected"),
    [
        (True, {"attention_mask": MASK, "labels": IDS}, ["padding-in-loss"]),
        (True, {"attention_mask": MASK, "labels": IDS.masked_fill(IDS == 0, -100)}, []),
        (True, {"attention_mask": MASK, "labels": END}, []),
        (True, {"labels": IDS}, []),
        (True, {}, []),
        (False, {}, ["padding-attended"]),
        (False, {"attention_mask": torch.ones_like(MASK)}, ["padding-attended"]),
        (False, {"attention_mask": MASK}, []),
        (False, {"attention_mask": MASK[:, None, None, :]}, []),
        (True, {"input_ids": IDS.flip(1)}, ["padding-attended"]),
        (True, {"input_ids": IDS.flip(1), "attention_mask": MASK.flip(1)}, []),
        (False, {"input_ids": IDS[:1]}, []),
    ],
)
def test_padding(is_causal: bool, inputs: dict[str, Tensor], expected: list[str]) -> None:
    model = transformers_model(is_causal=is_causal)
    found = check_padding(model, {"input_ids": IDS, **inputs})
    assert [one[0] for one in found] == expected


def test_encoders_with_decoders_and_other_models_are_not_judged() -> None:
    model = transformers_model(is_causal=False, is_encoder_decoder=True)
    assert check_padding(model, {"input_ids": IDS}) == []
    assert check_padding(nn.Linear(1, 1), {"input_ids": IDS}) == []


# -- losses, micro-batches, schedules --------------------------------------------------------------


@pytest.mark.parametrize("way", ["sigmoid", "squeezed", "scores"])
def test_a_sigmoid_before_a_loss_that_applies_one(tmp_path: Path, way: str) -> None:
    model = nn.Linear(8, 1)

    def losses() -> Losses:
        for _ in range(3):
            scores = model(X) if way == "scores" else model(X).sigmoid()
            target = Y if way == "squeezed" else Y[:, None]
            scores = scores.squeeze(1) if way == "squeezed" else scores
            yield functional.binary_cross_entropy_with_logits(scores, target)

    found = checks_of(tmp_path, model, losses())
    assert found == ([] if way == "scores" else ["loss-of-probabilities"])


def accumulated(path: Path, loss_of: Callable[[Tensor, Tensor], Tensor], cut: int) -> list[Any]:
    """Train with micro-batches whose second has labels for `cut` tokens."""
    model = TokenModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch_training(model, optimizer, out=path / "a.flextrace", quiet=True) as trace:
        for step in range(3):
            optimizer.zero_grad()
            for n, length in enumerate((10, cut)):
                ids = token_ids(10 * step + n)
                labels = ids[:, 1:].clone()
                labels[:, length - 1 :] = -100
                labels[0, 0] = -100
                loss_of(model(ids)[:, :-1].flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
    return [one.evidence.get("check") for one in trace.findings() if one.evidence.get("check")]


def mean(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores, labels) / 2


def of_all(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores, labels, reduction="sum") / 50


def by_labels(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores, labels) * int((labels != -100).sum()) / 50


@pytest.mark.parametrize(
    ("loss_of", "cut", "expected"),
    [
        (mean, 4, ["unequal-micro-batches"]),
        (mean, 9, []),
        (of_all, 4, []),
        (by_labels, 4, []),
    ],
)
def test_means_of_micro_batches_with_different_numbers_of_labels(
    tmp_path: Path, loss_of: Callable[[Tensor, Tensor], Tensor], cut: int, expected: list[str]
) -> None:
    assert accumulated(tmp_path, loss_of, cut) == expected


@pytest.mark.parametrize(
    ("n_backward", "n_calls", "expected"),
    [(3, 3, ["schedule-of-micro-batches"]), (3, 1, []), (1, 2, []), (3, 2, [])],
)
def test_a_scheduler_that_is_called_for_each_micro_batch(
    tmp_path: Path, n_backward: int, n_calls: int, expected: list[str]
) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    with watch_training(model, optimizer, out=tmp_path / "a.flextrace", quiet=True) as trace:
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(n_backward):
                functional.mse_loss(model(X)[:, 0], Y).backward()
            optimizer.step()
            for _ in range(n_calls):
                scheduler.step()
    assert [one.evidence.get("check") for one in trace.findings()] == expected


# -- data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sets_epoch", [False, True])
def test_passes_in_the_same_order(tmp_path: Path, sets_epoch: bool) -> None:
    data = TensorDataset(X, Y)
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=0)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    held_out = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    model = nn.Linear(8, 1)

    def losses() -> Losses:
        for epoch in range(2):
            sampler.set_epoch(epoch * sets_epoch)
            for x, y in loader:
                yield functional.mse_loss(model(x)[:, 0], y)
            with torch.no_grad():  # an evaluation may have the same order each time
                for x, _ in held_out:
                    model(x)

    found = findings_of(tmp_path, model, losses())
    assert [(one.evidence["check"], one.step) for one in found] == (
        [] if sets_epoch else [("same-order", 2)]
    )


# -- models ----------------------------------------------------------------------------------------


class Lists(nn.Module):
    """Layers in a list, a dictionary and a tuple of lists."""

    def __init__(self, *, is_registered: bool = False, trains: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.hidden = [nn.Linear(8, 8).requires_grad_(trains)]
        self.named = {"a": ([nn.Linear(8, 8).requires_grad_(trains)],)}
        if is_registered:
            self.all = nn.ModuleList([self.hidden[0], self.named["a"][0][0]])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.named["a"][0][0](self.hidden[0](x)))
        return out


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, ["unregistered"]), ({"is_registered": True}, []), ({"trains": False}, [])],
)
def test_layers_that_are_not_registered(
    tmp_path: Path, options: dict[str, bool], expected: list[str]
) -> None:
    model = Lists(**options)
    losses = (functional.mse_loss(model(X)[:, 0], Y) for _ in range(3))
    assert checks_of(tmp_path, model, losses) == expected


class Checkpointed(nn.Module):
    """A checkpointed layer between a frozen one and a head."""

    def __init__(self, *, is_reentrant: bool, trains_first: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8).requires_grad_(trains_first)
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.unused = nn.Linear(1, 1)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = checkpoint(self.middle, self.first(x), use_reentrant=self.is_reentrant)
        out: Tensor = self.head(hidden)
        return out


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"is_reentrant": True}, ["middle.weight", "middle.bias"]),
        ({"is_reentrant": True, "trains_first": True}, []),
        ({"is_reentrant": False}, []),
    ],
)
def test_checkpoints_that_cut_the_backward_pass(
    tmp_path: Path, options: dict[str, bool], expected: list[str]
) -> None:
    model = Checkpointed(**options)
    losses = (functional.mse_loss(model(X)[:, 0], Y) for _ in range(3))
    found = findings_of(tmp_path, model, losses)
    assert [name for one in found for name in one.evidence["names"]] == expected
    assert all((one.id, one.step) == ("training.cut-gradients", 0) for one in found)


def test_initializers_that_run_again_are_counted_until_the_first_step() -> None:
    end = count_initializations()
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for _ in range(2):
            nn.init.normal_(model[0].weight)  # type: ignore[arg-type]
        nn.init.normal_(model[1].weight)  # type: ignore[arg-type]
        ((check, text, facts),) = check_initializations(model)
        assert (check, facts["names"], facts["most"]) == (
            "repeated-initialization",
            ["0.weight"],
            2,
        )
        assert text.startswith("The initializer of 1 parameter ran again before")
        assert check_initializations(model) == []
    finally:
        end()
    nn.init.normal_(model[0].weight)  # type: ignore[arg-type]
    assert check_initializations(model) == []


def test_what_a_layer_of_torch_draws_in_its_constructor_may_be_drawn_once_more() -> None:
    end = count_initializations()
    try:
        model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
        nn.init.normal_(model[0].weight)  # type: ignore[arg-type]
        nn.init.kaiming_uniform_(model[1].weight)  # type: ignore[arg-type]
        assert check_initializations(model) == []
    finally:
        end()


# -- updates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "lr", "expected"),
    [
        (torch.bfloat16, 1e-6, ["update-rounded"]),
        (torch.bfloat16, 1e-2, []),
        (torch.float32, 1e-6, []),
    ],
)
def test_updates_that_are_lost_in_rounding(
    tmp_path: Path, dtype: torch.dtype, lr: float, expected: list[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 1)).to(dtype)
    losses = (functional.mse_loss(model(X.to(dtype))[:, 0].float(), Y) for _ in range(4))
    assert checks_of(tmp_path, model, losses, lr=lr) == expected


class Deep(nn.Module):
    """Six layers of the same form."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("factor", [1e3, 1.0, 1e-5])
def test_a_rate_of_one_layer_that_is_out_of_proportion(tmp_path: Path, factor: float) -> None:
    model = Deep()
    groups = [{"params": [*one.parameters()], "lr": 1e-3} for one in model.layers]
    groups[2]["lr"] = 1e-3 * factor
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    path = tmp_path / "a.flextrace"
    with watch_training(model, optimizer, out=path, level="extreme", quiet=True) as trace:
        for _ in range(3):
            optimizer.zero_grad()
            functional.mse_loss(model(X)[:, 0], Y).backward()
            optimizer.step()
    found = [one for one in trace.findings() if one.id == "training.update-outlier"]
    assert [one.evidence["names"] for one in found] == (
        [] if factor == 1.0 else [["layers.2.weight", "layers.2.bias"]]
    )
    assert all(one.step == 0 for one in found)


NAMES = [f"layers.{n}.weight" for n in range(6)]
norms = st.lists(st.floats(1e-6, 1e6), min_size=6, max_size=6)


@given(weights=norms, gradients=norms, rate=st.floats(1e-8, 1.0))
def test_weights_and_gradients_of_any_size_make_no_outlier(
    weights: list[float], gradients: list[float], rate: float
) -> None:
    """Updates in proportion to the gradient, as of SGD, or to the weights, as of LAMB."""
    by_name = [dict(zip(NAMES, one, strict=True)) for one in (weights, gradients)]
    for norms in (gradients, weights):
        changes = {name: rate * norm for name, norm in zip(NAMES, norms, strict=True)}
        assert update_outliers(changes, *by_name) == []


def test_rates_that_fall_from_layer_to_layer_are_no_outlier() -> None:
    changes = {name: 0.3**n for n, name in enumerate(NAMES)}
    ones = dict.fromkeys(NAMES, 1.0)
    assert update_outliers(changes, ones, ones) == []


def test_a_parameter_that_a_step_leaves_out_is_said_so() -> None:
    ones = dict.fromkeys(NAMES, 1.0)
    ((check, text, facts),) = check_outliers({**ones, NAMES[3]: 0.0}, ones, ones, 7)
    assert check == "update-outlier"
    assert text.startswith("Step 7 does not change layers.3.weight, which has a gradient, but")
    assert facts == {"names": [NAMES[3]], "ratio": None}


# -- Monte Carlo dropout ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([X, X, X], []),
        ([X, X.clone(), X.clone()], []),
        ([X, X + 1, X + 2], ["dropout-in-evaluation"]),
        ([X], ["dropout-in-evaluation"]),
    ],
)
@pytest.mark.parametrize("has_gradients", [False, True])
def test_dropout_in_several_passes_of_the_same_inputs_is_meant(
    tmp_path: Path, inputs: list[Tensor], expected: list[str], has_gradients: bool
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def losses() -> Losses:
        for step in range(2):
            yield functional.mse_loss(model(X)[:, 0], Y)
            if step == 0:
                model.eval()
                model[1].train()
                with torch.set_grad_enabled(has_gradients):
                    for one in inputs:
                        model(one)
                model.train()

    assert checks_of(tmp_path, model, losses()) == expected


@pytest.mark.parametrize(
    ("inputs", "value"),
    [
        ([], None),
        ([torch.ones(1)], None),
        (["text", torch.arange(6)], None),
        ([torch.zeros(4, 3)], 0.0),
        ([torch.full((4, 3), 2.5), torch.ones(4, dtype=torch.int64)], 2.5),
        ([torch.zeros(4, 3), torch.arange(4)], None),
        ([X], None),
        ([torch.zeros(1, 3)], None),
    ],
)
def test_constant_inputs_are_found_where_no_input_varies(
    inputs: list[Any], value: float | None
) -> None:
    found = check_constant_inputs(inputs)
    assert [facts["value"] for _, _, facts in found] == ([] if value is None else [value])

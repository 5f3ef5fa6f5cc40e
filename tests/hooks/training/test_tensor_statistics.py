"""Statistics of gradients and tensors, and the counts of a training summary."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.modules import module as nn_module

from flexinspect.records.training_step import (
    EXPLODING_NORM,
    VANISHING_NORM,
    AnomalyOrigin,
    ParameterGradient,
    TrainingStepRecord,
    TrainingSummary,
    TrainingSummaryCounter,
    group_of,
)
from flexinspect_hooks.training.gradient_statistics import (
    CHECK_INTERVAL,
    ParameterList,
    TensorFacts,
    gradient_facts,
    tensor_facts,
    tensor_norms,
    trainable,
)


def model_gradients(model: nn.Module) -> list[ParameterGradient]:
    return gradient_facts(trainable(model)).rows


def facts_of(tensor: torch.Tensor) -> TensorFacts:
    return tensor_facts([tensor])[0]


def with_gradients(*grads: torch.Tensor | None) -> nn.ParameterDict:
    model = nn.ParameterDict(
        {
            f"p{n}": nn.Parameter(
                torch.zeros(g.shape, dtype=g.dtype) if g is not None else torch.zeros(2)
            )
            for n, g in enumerate(grads)
        }
    )
    for parameter, grad in zip(model.values(), grads, strict=True):
        parameter.grad = grad
    return model


def test_norm_and_largest_are_those_of_each_gradient() -> None:
    a, b = torch.tensor([[3.0, -4.0]]), torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    found = model_gradients(with_gradients(a, b))
    assert [(f.norm, f.max, f.n_nan, f.n_inf) for f in found] == [(5, 4, 0, 0), (3, 2, 0, 0)]
    assert [f.is_matrix for f in found] == [True, False]


def test_a_parameter_without_gradient_is_left_out() -> None:
    found = model_gradients(with_gradients(None, torch.ones(4)))
    assert [f.name for f in found] == ["p1"]


def test_nan_and_inf_are_counted_apart() -> None:
    bad = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    found = model_gradients(with_gradients(bad, torch.ones(1)))
    assert (found[0].n_nan, found[0].n_inf, found[0].has_nonfinite) == (1, 2, True)
    assert math.isnan(found[0].norm)
    assert (found[1].n_nan, found[1].n_inf, found[1].has_nonfinite) == (0, 0, False)


def test_a_norm_that_overflows_float32_stays_finite() -> None:
    found = model_gradients(with_gradients(torch.full((4,), 1e30)))
    assert found[0].n_inf == 0
    assert found[0].norm == pytest.approx(2e30)


def test_a_float16_gradient_has_a_norm_beyond_float16() -> None:
    found = model_gradients(with_gradients(torch.full((100,), 60000.0, dtype=torch.float16)))
    assert found[0].norm == pytest.approx(600_000, rel=1e-3)
    assert not found[0].has_nonfinite


def test_sparse_gradients_are_measured_by_their_stored_values() -> None:
    embedding = nn.Embedding(10, 2, sparse=True)
    embedding(torch.tensor([3, 3])).sum().backward()
    assert model_gradients(embedding)[0].norm == pytest.approx(math.sqrt(8))


def test_outliers_are_nonfinite_zero_and_beyond_a_threshold() -> None:
    values = [1.0, 0.0, 20.0, 1e-9, math.nan, math.inf]
    found = gradient_facts(
        trainable(with_gradients(*(torch.full((1,), value) for value in values)))
    )
    limits = (EXPLODING_NORM, VANISHING_NORM)
    assert [one.name for one in found.outliers(limits)] == ["p1", "p2", "p3", "p4", "p5"]
    assert [one.name for one in found.outliers((math.inf, 0.0))] == ["p1", "p4", "p5"]
    assert found.outliers((30.0, 1e-10)) == [found.rows[at] for at in (1, 4, 5)]
    assert found.counts


def test_a_parameter_list_follows_added_replaced_frozen_and_removed_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    known = ParameterList()

    def names() -> list[str]:
        return [one.name for one in known.trainable_of(model)]

    assert names() == names() == ["0.weight", "0.bias", "1.weight"]
    model[0].weight = nn.Parameter(torch.ones(3, 2))
    assert known.trainable_of(model)[0].parameter is model[0].weight
    model[1] = nn.PReLU()
    model.append(nn.Linear(2, 1))
    assert names() == ["0.weight", "0.bias", "1.weight", "2.weight", "2.bias"]
    model[0].requires_grad_(False)
    del model[2]
    assert names() == ["1.weight"]
    assert [one.name for one in known.trainable_of(nn.Linear(1, 1))] == ["weight", "bias"]


def test_a_parameter_list_finds_within_eight_looks_what_a_program_put_into_a_modules_table() -> (
    None
):
    model, known = nn.Sequential(nn.Linear(2, 2)), ParameterList()
    before = known.trainable_of(model)
    assert known.trainable_of(model) is before
    model[0]._parameters["weight"] = nn.Parameter(torch.ones(2, 2))
    looks = [known.trainable_of(model)[0].parameter for _ in range(CHECK_INTERVAL)]
    assert looks[-1] is model[0].weight


@pytest.mark.parametrize("closes", [True, False])
def test_a_parameter_list_leaves_no_hook_behind(closes: bool) -> None:
    gc.collect()  # lists of other tests
    before = len(nn_module._global_parameter_registration_hooks)
    known = ParameterList()
    assert len(nn_module._global_parameter_registration_hooks) == before + 1
    if closes:
        known.close()
    else:
        del known
        gc.collect()
    assert len(nn_module._global_parameter_registration_hooks) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_are_those_in_float64_for_any_layout_and_mixture(dtype: torch.dtype) -> None:
    each = [
        torch.randn(3, 5, dtype=dtype),
        torch.randn(7, dtype=dtype),
        torch.zeros(0, dtype=dtype),
    ]
    mixtures = [each, [*each, torch.randn(5, 3, dtype=dtype).T], [*each, torch.randn(4).half()]]
    for tensors in mixtures:
        exact = [float(one.double().norm()) for one in tensors]
        assert tensor_norms(tensors) == pytest.approx(exact, rel=1e-5)


def test_norms_of_millions_of_values_are_summed_in_pieces() -> None:
    """torch's own norm of 3 million values in float32 is off by 5e-5."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(3_000_001, generator=generator)
    infinite = torch.zeros(1 << 20)
    infinite[0], infinite[-1] = torch.inf, torch.nan
    norms = tensor_norms([large, torch.ones(4), infinite])
    assert norms[:2] == pytest.approx([float(large.double().norm()), 2.0], rel=1e-5)
    assert not math.isfinite(norms[2])


def test_a_parameter_list_does_not_keep_the_model_alive() -> None:
    model, known = nn.Linear(2, 2), ParameterList()
    weight = weakref.ref(known.trainable_of(model)[0].parameter)
    del model
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.3.mlp.up.weight", "model.layers.3"),
        ("lm_head.weight", "lm_head"),
        ("0.weight", "0"),
        ("scale", "(model)"),
        ("blocks.1.experts.7.w", "blocks.1"),
    ],
)
def test_a_parameter_belongs_to_its_layer_or_module(name: str, group: str) -> None:
    assert group_of(name) == group


def test_facts_of_a_tensor_are_of_its_finite_values() -> None:
    facts = facts_of(torch.tensor([1.0, 3.0, math.nan, math.inf]))
    assert facts == TensorFacts(n_nan=1, n_inf=1, min=1, max=3, mean=2, std=1)


@pytest.mark.parametrize("size", [1e25, 1.0, 1e-25])
def test_the_deviation_is_right_at_any_size(size: float) -> None:
    facts = facts_of(torch.tensor([1.0, 3.0]).repeat(600_000).view(2, -1) * size)
    assert facts.mean == pytest.approx(2 * size, rel=1e-5)
    assert facts.std == pytest.approx(size, rel=1e-5)
    assert facts.n_nan + facts.n_inf == 0


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.full((2,), math.nan)])
def test_a_tensor_without_finite_values_has_no_mean(tensor: torch.Tensor) -> None:
    assert math.isnan(facts_of(tensor).mean)


def test_many_tensors_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(number + 1, 3) for number in range(20)]
    alone = [facts_of(one) for one in tensors]
    taken: list[torch.Size] = []
    as_list = torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda one: (taken.append(one.shape), as_list(one))[1]
    )
    assert tensor_facts(tensors) == alone
    assert taken == [(20, 4)]
    half, nonfinite = torch.ones(2).half(), torch.tensor([1.0, math.nan])
    found = tensor_facts([*tensors, half, nonfinite, torch.zeros(0), torch.tensor([1, 3])])
    assert found[:20] == alone
    assert [found[at].mean for at in (20, 21, 23)] == [1, 1, 2]


def test_whole_numbers_and_bools_have_facts_too() -> None:
    assert facts_of(torch.tensor([1, 3])).mean == 2
    assert facts_of(torch.tensor([True, False])).max == 1


def a_step(**fields: object) -> TrainingStepRecord:
    return TrainingStepRecord(
        **{"loss": 1.0, "loss_source": "reported", "learning_rates": (), **fields}
    )  # type: ignore[arg-type]


def test_the_published_figures_are_reproduced_exactly() -> None:
    bad = [
        a_step(loss=math.nan, n_exploding=1),
        a_step(loss=math.nan, n_exploding=3),
        a_step(loss=math.inf),
        a_step(n_vanishing=1),
        a_step(n_nonfinite=2),
    ]
    counter = TrainingSummaryCounter()
    for step in (*bad, *(a_step() for _ in range(995))):
        counter.add(step)
    assert counter.summary.as_dict() == {
        "total_steps": 1000,
        "anomaly_steps": 5,
        "gradient_explosions": 2,
        "gradient_vanishing": 1,
        "loss_anomalies": 3,
        "anomaly_rate": 0.005,
        "loss_anomaly_rate": 0.003,
        "gradient_explosion_rate": 0.002,
        "gradient_vanishing_rate": 0.001,
    }


def anomaly_steps(*origins: tuple[str, str]) -> int:
    counter = TrainingSummaryCounter()
    for kind, name in origins:
        fields = {"n_vanishing": 1} if kind == "vanishing" else {"n_exploding": 1}
        if kind not in ("vanishing", "explosion"):
            fields = {"loss": math.nan}
        counter.add(a_step(anomaly_origin=AnomalyOrigin(kind, name), **fields))
    return counter.summary.anomaly_steps


def test_a_trouble_counts_once_however_long_it_lasts() -> None:
    explosion, weights = ("explosion", "2.bias"), ("weights", "0.weight")
    assert anomaly_steps(explosion, explosion, ("explosion", "0.weight")) == 1
    assert anomaly_steps(explosion, ("module", "2"), weights, weights) == 2
    assert anomaly_steps(explosion, weights, weights) == 2
    assert anomaly_steps(("vanishing", "0.weight"), ("vanishing", "2.weight")) == 1
    assert anomaly_steps(explosion, ("loss", ""), ("explosion", "0.weight")) == 3
    assert anomaly_steps(weights, ("weights", "1.weight")) == 1


def test_large_gradients_of_the_first_step_count_only_if_the_loss_rises() -> None:
    origin = AnomalyOrigin("explosion", "0.weight")
    for loss, n in ((0.5, 0), (1.5, 0), (3.0, 1), (math.inf, 2)):
        counter = TrainingSummaryCounter()
        counter.add(a_step(anomaly_origin=origin, n_exploding=1))
        source = AnomalyOrigin("loss", "") if math.isinf(loss) else None
        counter.add(a_step(loss=loss, anomaly_origin=source))
        assert counter.summary.anomaly_steps == n
        assert counter.summary.gradient_explosions == min(n, 1)


def test_an_empty_summary_has_zero_rates() -> None:
    assert TrainingSummary().as_dict()["anomaly_rate"] == 0.0


def test_an_unknown_loss_is_not_an_anomaly() -> None:
    assert not a_step(loss=math.nan, loss_source="").is_anomaly


def test_a_step_that_the_scaler_skipped_is_not_an_anomaly() -> None:
    step = TrainingStepRecord(1.0, "reported", (), n_nonfinite=3, n_exploding=1, n_vanishing=1)
    assert step.is_anomaly
    left_out = replace(step, is_skipped=True)
    assert not any((left_out.is_anomaly, left_out.is_explosion, left_out.is_vanishing))
    assert replace(left_out, loss=math.nan).is_anomaly


def test_a_complex_parameter_has_the_facts_of_its_parts() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2, dtype=torch.cfloat))
    model.weight.grad = torch.tensor([3 + 4j, complex(0, math.nan)])
    (found,) = model_gradients(model)
    assert (found.n_nan, found.n_inf) == (1, 0)
    model.weight.grad = torch.tensor([3 + 4j, 0])
    (found,) = model_gradients(model)
    assert (found.norm, found.max) == (5.0, 4.0)

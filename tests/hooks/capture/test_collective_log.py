"""The times of collective calls, in a process group of one process."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flexinspect.records.collectives import (
    CALLS_STREAM,
    KINDS,
    TIMES_STREAM,
    group_number,
)
from flexinspect_hooks.capture.collective_log import (
    METHODS,
    CollectiveLog,
    collective_arrays,
    observe_collectives,
)
from flexinspect_hooks.capture.rank_facts import split_facts


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_calls_are_noted_in_order_with_their_bytes_group_and_times() -> None:
    log, tensor = CollectiveLog(), torch.ones(6)
    before = time.time()
    with observe_collectives(log):
        dist.all_reduce(tensor)
        dist.all_gather([torch.zeros(6)], tensor)
        dist.all_gather_single(torch.zeros(6), tensor)
        dist.reduce_scatter_single(torch.zeros(6), tensor)
        dist.all_to_all_single(torch.zeros(6), tensor)
        dist.broadcast(tensor, 0)
        dist.barrier()
    calls = log.take()
    assert [one.kind for one in calls] == [
        *("all_reduce", "all_gather", "all_gather", "reduce_scatter", "all_to_all"),
        *("broadcast", "barrier"),
    ]
    assert [one.n_bytes for one in calls] == [24] * 6 + [0]
    assert {one.group for one in calls} == {group_number([0])}
    assert all(before <= one.entered <= one.left <= time.time() for one in calls)
    assert all(one.left <= two.entered for one, two in pairwise(calls))
    assert log.take() == ()


def test_an_asynchronous_call_ends_when_it_was_waited_for() -> None:
    log = CollectiveLog()
    with observe_collectives(log):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert log.take() == ()  # it belongs to the step in which it ends
        time.sleep(0.02)
        work.wait()
        (one,) = log.take()
        assert one.left - one.entered >= 0.02
        dist.all_reduce(torch.ones(3), async_op=True)
        assert log.take() == ()
        (lost,) = log.take()  # nobody waited for it
        assert math.isnan(lost.left)


def test_collectives_of_dtensor_are_noted_once_each_and_end_when_their_tensor_is_used() -> None:
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    mesh, log, before = init_device_mesh("cpu", (1,)), CollectiveLog(), functional.all_reduce
    with observe_collectives(log):
        tensor = functional.all_reduce(torch.ones(6), "sum", (mesh, 0))
        assert log.take() == ()
        torch.testing.assert_close(tensor + 0, torch.ones(6))
        functional.all_gather_tensor(torch.ones(6), 0, mesh).sum()
    calls = log.take()
    assert [(one.kind, one.n_bytes) for one in calls] == [("all_reduce", 24), ("all_gather", 24)]
    assert all(one.left >= one.entered and one.group == group_number([0]) for one in calls)
    assert functional.all_reduce is before


def test_a_compiled_graph_contains_nothing_of_the_observation() -> None:
    import torch.distributed._functional_collectives as functional

    def double(tensor: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(tensor * 2, "sum", [0]) + 1

    log = CollectiveLog()
    with observe_collectives(log):
        compiled = torch.compile(double, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 3.0))
    assert log.take() == ()


def test_afterwards_torch_has_its_own_methods_and_results_are_unchanged() -> None:
    names = [name for name in METHODS if hasattr(dist.ProcessGroup, name)]
    before = [getattr(dist.ProcessGroup, name) for name in names]
    log, other = CollectiveLog(), CollectiveLog()
    with observe_collectives(log), observe_collectives(other):
        tensor = torch.arange(4.0)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        torch.testing.assert_close(tensor, torch.arange(4.0))
    assert [getattr(dist.ProcessGroup, name) for name in names] == before
    assert len(log.take()) == len(other.take()) == 1
    dist.all_reduce(tensor)
    assert log.take() == ()


def test_an_exception_of_a_call_is_passed_on_and_ends_it() -> None:
    log = CollectiveLog()
    with observe_collectives(log):
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_gather([torch.zeros(5)], torch.zeros(6))
        dist.barrier()
    assert [one.kind for one in log.take()] == ["all_gather", "barrier"]


def test_the_reduction_of_gradients_is_noted_once_per_backward_pass() -> None:
    model = DistributedDataParallel(nn.Linear(4, 2))
    log = CollectiveLog()
    log.watch_reducer(model)
    ends = []
    for _ in range(3):
        before = time.time()
        model(torch.ones(1, 4)).sum().backward()
        (one,) = log.take()
        assert one.kind == "ddp_gradients"
        assert before - 1e-3 <= one.entered <= one.left <= time.time() + 1e-3
        assert log.take() == ()
        ends.append(one.left)
    assert ends == sorted(ends)
    log.watch_reducer(nn.Linear(2, 2))  # not parallel
    assert log.take() == ()


def test_the_arrays_of_a_step_have_a_row_per_call() -> None:
    log = CollectiveLog()
    assert collective_arrays(log.take()) == ()
    with observe_collectives(log):
        dist.all_reduce(torch.ones(2, dtype=torch.float64))
        dist.barrier(dist.new_group([0], timeout=timedelta(seconds=9)))
    calls, times = collective_arrays(one for one in log.take() if one.kind in KINDS)
    assert (calls.stream, times.stream) == (CALLS_STREAM, TIMES_STREAM)
    assert calls.array[0].tolist() == [KINDS.index("all_reduce"), 16, group_number([0])]
    assert times.array.shape == (len(calls.array), 2)


def test_the_ranks_that_share_a_layer_are_read_from_a_split_model() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(4, 4))
    assert split_facts(model) == {}
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    assert split_facts(model) == {}  # a mesh of one rank splits nothing
    model.tp_size = 2  # type: ignore[assignment]  # as transformers' models have it
    assert split_facts(model) == {"tp_size": 2}

"""The checklist of `flexinspect doctor`: Python, packages, machine, hub, inputs, torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from msgspec import Struct

from flexinspect.doctor import hub, machine, packages, torch_report
from flexinspect.doctor.check import Check


class CheckRequest(Struct, frozen=True):
    """What to check besides the machine: the folder of traces `out`, a model, a dataset, kernels.

    `dtype` is the one that the model is to run in.
    """

    out: Path
    model: str | None = None
    dataset: str | None = None
    dtype: str = "bfloat16"
    test_flex_attention: bool = False


def checklist(request: CheckRequest, progress: Callable[[str], None]) -> Iterator[Check]:
    """Yield the checks, the quick ones first; torch and the hub are asked meanwhile."""
    report = torch_report.TorchReport(test_flex_attention=request.test_flex_attention)
    with closing(report), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(hub.check_hub)
        yield packages.check_python()
        yield from packages.check_packages()
        yield packages.check_spacy_model()
        yield from machine.check_machine(request.out)
        progress("asking the hub")
        yield answer.result()
        yield from _check_inputs(request, progress, hub_is_up=answer.result().status == "ok")
        yield from report.checks(progress)


def _check_inputs(
    request: CheckRequest, progress: Callable[[str], None], *, hub_is_up: bool
) -> Iterator[Check]:
    if request.model:
        progress(f"looking for {request.model}")
        yield from hub.check_model(request.model, request.dtype, hub_is_up=hub_is_up)
    if request.dataset:
        progress(f"reading {request.dataset}")
        yield from hub.check_dataset(request.dataset, hub_is_up=hub_is_up)

"""What `flexinspect kernels` asks of the capture side: comparisons, the lists, and timings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from flexinspect.analysis.kernel_report import KernelEvaluation
from flexinspect.analysis.kernel_speed import SpeedReport
from flexinspect.core.errors import UsageError
from flexinspect.core.parsing import parse_json
from flexinspect.inputs.kernel_configs import (
    KernelConfig,
    KernelRequest,
    choose_configs,
    read_table,
)
from flexinspect_hooks.kernels.builtin_kernels import describe_kernels, find_kernels
from flexinspect_hooks.kernels.calling import Kernel
from flexinspect_hooks.kernels.captured import captured_problem
from flexinspect_hooks.kernels.inputs import describe_inputs, make_problem
from flexinspect_hooks.kernels.kernel_evaluation import evaluate
from flexinspect_hooks.kernels.problem import choose_device
from flexinspect_hooks.kernels.reference import Reference
from flexinspect_hooks.kernels.speed_sampling import measure_speed

Report = Callable[[str], None]


class KernelComparison:
    """A request with its device, its kernels and its configurations; raises `UsageError`."""

    def __init__(self, request: KernelRequest) -> None:
        self.request = request
        self.device = choose_device(request.device)
        if request.threads:
            torch.set_num_threads(request.threads)
        self.table = read_table(Path(request.table) if request.table else None)
        options = _kernel_options(request.kernel_options)
        self.kernels = find_kernels(request.kernels, self.table, self.device, options)
        (self.reference,) = find_kernels([request.reference], self.table, self.device, options)[:1]
        self.configs: tuple[KernelConfig | None, ...] = (None,)
        if request.point is None:
            self.configs = choose_configs(self.table, request.configs)

    def evaluations(self, report: Report) -> Iterator[KernelEvaluation]:
        """Yield the evaluation of each kernel on each configuration, as it is done.

        A configuration that cannot be built is reported as not compared, unless it is the only one.
        """
        for config in self.configs:
            name = "captured" if config is None else config.name
            report(f"{name}: the oracle and the reference")
            try:
                bar = self._bar(config)
            except UsageError as error:
                if len(self.configs) == 1 or config is None:
                    raise
                yield from (self._not_compared(config, one, error) for one in self.kernels)
                continue
            for kernel in self.kernels:
                report(f"{name}: {kernel.name}")
                runs, gradients = self.request.n_runs, self.request.gradients
                yield evaluate(kernel, bar, n_runs=runs, gradients=gradients)

    def speed(self, report: Report) -> SpeedReport:
        """Return the times of the kernels on the first configuration at several lengths."""
        config = self.configs[0]
        if config is None:
            raise UsageError("--bench makes its own inputs; it does not go with --inputs captured.")
        kinds = dict.fromkeys(["normal", self.request.inputs])
        return measure_speed(
            self.kernels,
            config,
            self.request.lengths or (config.kv_len,),
            kinds=tuple(kinds),
            repeats=self.request.repeats,
            device=self.device,
            report=report,
        )

    def _bar(self, config: KernelConfig | None) -> Reference:
        request = self.request
        if config is None:
            assert request.point is not None
            problem = captured_problem(request.point, self.device)
        else:
            problem = make_problem(config, request.inputs, request.seed, self.device)
        return Reference(problem, self.reference)

    def _not_compared(
        self, config: KernelConfig, kernel: Kernel, error: UsageError
    ) -> KernelEvaluation:
        return KernelEvaluation(
            kernel=kernel.name,
            config=config.name,
            shape=config.describe(),
            inputs=describe_inputs(self.request.inputs, self.request.seed),
            device=self.device.type,
            status="not compared",
            reason=error.message,
        )


def list_kernels(table: str, device: str) -> list[tuple[str, str, str]]:
    """Return (name, what it is, why it cannot run here or "") of every kernel."""
    return describe_kernels(choose_device(device), read_table(Path(table) if table else None))


def _kernel_options(texts: tuple[str, ...]) -> dict[str, Any]:
    """Parse KEY=VALUE; a value is JSON, or a word."""
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--kernel-option {text} is not KEY=VALUE.")
        try:
            options[key] = parse_json(value)
        except ValueError:
            options[key] = {"True": True, "False": False}.get(value, value)
    return options

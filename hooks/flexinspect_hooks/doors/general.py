"""`PyTorchDebugger`: tensors, parameters, gradients and memory, looked at when asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.debugging import DebugLevel
from flexinspect.trainingfacts import EXPLOSION, VANISHING, GradientFacts
from flexinspect_hooks import given
from flexinspect_hooks.doors.base import HISTORY, Debugger, OnAnomaly, log, sick
from flexinspect_hooks.doors.components import (
    component_infos,
    memory_of,
    output_problems,
    problems_of,
    tensors_in,
)
from flexinspect_hooks.doors.results import Anomaly, GradientAnalysis, ModelReport, TensorInfo
from flexinspect_hooks.doors.tensors import (
    gradient_analysis,
    gradients_of,
    tensor_info,
    tensor_infos,
)
from flexinspect_hooks.training import gradstats


class PyTorchDebugger(Debugger):
    """Looks at tensors and models when asked, counts what is wrong, and keeps a bounded history.

    `explosion` and `vanishing` are the norms of one parameter's gradient beyond which it is an
    anomaly: choose them per model.
    """

    def __init__(
        self,
        level: DebugLevel | str = DebugLevel.BASIC,
        *,
        history: int = HISTORY,
        explosion: float = EXPLOSION,
        vanishing: float = VANISHING,
        alert_above: float = 0.1,
        on_anomaly: OnAnomaly | None = None,
    ) -> None:
        self._explosion = given.limit(explosion, "explosion")
        self._vanishing = given.limit(vanishing, "vanishing")
        super().__init__(level, history=history, alert_above=alert_above, on_anomaly=on_anomaly)

    # -- tensors ---------------------------------------------------------------------------------

    def analyze_tensor(
        self,
        tensor: Tensor,
        name: str = "tensor",
        *,
        shape: Sequence[int | None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> TensorInfo:
        """Return what this level measures of a tensor, and count NaN, Inf and what differs.

        `shape` (None stands for any size) and `dtype` are what the tensor is meant to have.
        """
        info = tensor_info(given.tensor(tensor, "analyze_tensor"), name, self.level)
        anomalies = [*self._sick(info), *self._unlike(info, tensor, shape, dtype)]
        self._keep([info], anomalies)
        return info

    def analyze_model_parameters(self, model: nn.Module) -> dict[str, TensorInfo]:
        """Return what this level measures of each parameter, by name."""
        given.module(model, "analyze_model_parameters")
        infos = tensor_infos(dict(model.named_parameters()), self.level)
        self._keep(self._kept(infos), [bad for info in infos.values() for bad in self._sick(info)])
        return infos

    def analyze_gradients(self, model: nn.Module) -> GradientAnalysis:
        """Return each parameter's gradient by name; those that have none are left out."""
        level, limits = self.level, (self._explosion, self._vanishing)
        given.module(model, "analyze_gradients")
        facts = gradients_of(model, level)
        found = gradient_analysis(model, facts, level, *limits)
        anomalies = [
            self._anomaly(kind, one.name, said, tensor=found[one.name].tensor)
            for one in facts
            for kind, said in gradient_troubles(one, *limits)
        ]
        self._keep(self._kept(found), anomalies)
        return found

    def check_gradient_explosion(self, model: nn.Module, threshold: float = EXPLOSION) -> list[str]:
        """Return the parameters whose gradient norm is above the threshold.

        A gradient with Inf or NaN is not among them: `analyze_gradients` names those.
        """
        given.module(model, "check_gradient_explosion")
        given.limit(threshold, "threshold")
        facts = gradstats.model_gradients(model, with_max=False)
        return self._checked("explosion", gradstats.exploding(facts, threshold), threshold)

    def check_gradient_vanishing(self, model: nn.Module, threshold: float = VANISHING) -> list[str]:
        """Return the parameters whose gradient norm is below the threshold, 0 too."""
        given.module(model, "check_gradient_vanishing")
        given.limit(threshold, "threshold")
        facts = gradstats.model_gradients(model, with_max=False)
        return self._checked("vanishing", gradstats.vanishing(facts, threshold), threshold)

    # -- models ----------------------------------------------------------------------------------

    def profile_memory_usage(self, model: nn.Module) -> dict[str, int]:
        """Return bytes: `parameters`, `gradients`, `buffers`, their `total`, and around the model.

        `process` is resident, `system_used` that of all processes, `cuda_allocated` and
        `cuda_reserved` are 0 without CUDA.
        """
        return memory_of(given.module(model, "profile_memory_usage"))

    def validate_model(self, model: nn.Module, *inputs: Any, **named_inputs: Any) -> ModelReport:
        """Look at a model's weights and parts and, with inputs, run it once and look at its output.

        The run is without gradients and in the mode that the model is in.
        """
        parts = component_infos(given.module(model, "validate_model"))
        output: tuple[TensorInfo, ...] = ()
        if inputs or named_inputs:
            with torch.no_grad():
                tensors = tensors_in(model(*inputs, **named_inputs))
                named = {f"output {number}": one for number, one in enumerate(tensors)}
            output = tuple(tensor_infos(named, self.level).values())
        problems = (*problems_of(parts.values()), *output_problems(output))
        self._keep([], [self._anomaly("model", "model", problem) for problem in problems])
        return ModelReport(not problems, problems, parts, memory_of(model), output)

    # -- what is wrong ---------------------------------------------------------------------------

    def _sick(self, info: TensorInfo) -> list[Anomaly]:
        return [
            self._anomaly(kind, info.name, sentence, tensor=info) for kind, sentence in sick(info)
        ]

    def _unlike(
        self,
        info: TensorInfo,
        tensor: Tensor,
        shape: Sequence[int | None] | None,
        dtype: torch.dtype | None,
    ) -> Iterator[Anomaly]:
        if shape is not None and not _fits(info.shape, shape):
            said = f"{info.name} has shape {info.shape}, and {tuple(shape)} is meant."
            yield self._anomaly("shape", info.name, said, tensor=info)
        if dtype is not None and tensor.dtype != dtype:
            meant = str(dtype).removeprefix("torch.")
            said = f"{info.name} is {info.dtype}, and {meant} is meant."
            yield self._anomaly("dtype", info.name, said, tensor=info)

    def _checked(self, kind: str, names: list[str], threshold: float) -> list[str]:
        beyond = "above" if kind == "explosion" else "below"
        said = f"Gradient {kind} in {{}}: its norm is {beyond} {threshold:g}."
        self._keep([], [self._anomaly(kind, name, said.format(name)) for name in names])
        return names

    def _kept(self, infos: Any) -> list[Any]:
        """Return what of an analysis of many tensors the history keeps: at EXTREME each."""
        return list(infos.values()) if self.level is DebugLevel.EXTREME else []


def gradient_troubles(
    facts: GradientFacts, explosion: float, vanishing: float
) -> Iterator[tuple[str, str]]:
    """Return (kind, sentence) for what is wrong with a gradient; only a matrix vanishes."""
    name, norm = facts.name, facts.norm
    if facts.is_sick:
        value = "nan" if facts.n_nan else "inf"
        yield value, f"NaN/Inf gradient detected in {name}: {value}"
    if facts.explodes(explosion):
        yield "explosion", f"Gradient explosion in {name}: norm {norm:.4g} above {explosion:g}."
    if facts.is_matrix and facts.vanishes(vanishing):
        yield "vanishing", f"Gradient vanishing in {name}: norm {norm:.4g} below {vanishing:g}."


def _fits(shape: Sequence[int], meant: Sequence[int | None]) -> bool:
    return len(shape) == len(meant) and all(
        want is None or have == want for have, want in zip(shape, meant, strict=True)
    )


@contextmanager
def debug_context(
    level: DebugLevel | str = DebugLevel.BASIC, **options: Any
) -> Iterator[PyTorchDebugger]:
    """Give a `PyTorchDebugger` for a block, with its options, and log its summary at the end.

    From ADVANCED on, what is raised inside is recorded with its full stack; at EXTREME the block
    runs under autograd's anomaly mode too. The exception is raised on.
    """
    debugger = PyTorchDebugger(level, **options)
    try:
        if debugger.level is DebugLevel.EXTREME:
            with debugger.autograd_anomaly_detection():
                yield debugger
        else:
            yield debugger
    except Exception as error:
        if debugger.level is DebugLevel.ADVANCED:
            debugger.report_error(error)
        raise
    finally:
        log.info("Debugging is over: %s", debugger.get_debug_summary())

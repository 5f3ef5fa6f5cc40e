"""`DiffusionModelDebugger`: for any pipeline whose denoiser, text encoder and VAE are modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

import flexinspect_hooks.training_debuggers.base_debugger as base_debugger
import flexinspect_hooks.training_debuggers.measurements as measurements
from flexinspect.core.errors import UsageError
from flexinspect.records.debug_switches import DebugLevel, DictDataclass
from flexinspect_hooks.capture import argument_checks
from flexinspect_hooks.training.gradient_statistics import tensor_norms
from flexinspect_hooks.training_debuggers.base_debugger import Anomaly
from flexinspect_hooks.training_debuggers.debug_log import log
from flexinspect_hooks.training_debuggers.measurements import ComponentInfo, TensorInfo

MAX_SPREAD_GROWTH = 5.0  # a larger factor between two steps is an anomaly from ADVANCED on

COMPONENT_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "denoiser": ("unet", "transformer", "denoiser", "prior"),
    "text encoder": ("text_encoder",),
    "vae": ("vae", "vqvae", "movq", "decoder"),
}
"""Prefixes of component names by role, as in the pipelines of diffusers."""


class PipelineAnalysis(DictDataclass):
    """The components of a diffusion pipeline; `roles` has names of denoiser, text encoder, VAE."""

    total_parameters: int
    trainable_parameters: int
    memory: int
    components: dict[str, ComponentInfo]
    roles: dict[str, tuple[str, ...]]
    problems: tuple[str, ...] = ()


class DiffusionStepInfo(DictDataclass):
    """One denoising step. `change` is the norm of the change relative to the latents before.

    `change` and `memory` are measured from ADVANCED on; `made_by` is the component whose output was
    the first with NaN or Inf since the last step, under `watching`.
    """

    step: int
    latents: TensorInfo
    change: float | None = None
    anomalies: tuple[Anomaly, ...] = ()
    memory: dict[str, int] | None = None
    made_by: str | None = None


class DiffusionModelDebugger(base_debugger.BaseDebugger):
    """Checks a pipeline's components, and the latents of each denoising step.

    `jump` is the largest factor by which the spread of the latents may grow in one step (from
    ADVANCED on).
    """

    kind = "diffusion"

    def __init__(
        self,
        level: DebugLevel | str = DebugLevel.BASIC,
        *,
        jump: float = MAX_SPREAD_GROWTH,
        **options: Unpack[base_debugger.BaseDebuggerOptions],
    ) -> None:
        self._max_growth = argument_checks.check_limit(jump, "jump")
        super().__init__(level, **options)

    def _reset(self) -> None:
        self._previous_latents: Tensor | None = None
        self._previous_step: tuple[int, float | None] | None = None
        self._nonfinite_source: str | None = None
        super()._reset()

    def analyze_diffusion_pipeline(self, pipeline: Any) -> PipelineAnalysis:
        """The components of a pipeline: sizes, dtypes, devices, and non-finite weights.

        Raises `UsageError` for an object without any module.
        """
        modules = components_of(pipeline)
        infos = {n: measurements.component_info(module, n) for n, module in modules.items()}
        problems = tuple(measurements.weight_problems(infos.values()))
        self._record_problems("pipeline", problems)
        return PipelineAnalysis(
            total_parameters=sum(info.parameters for info in infos.values()),
            trainable_parameters=sum(info.trainable for info in infos.values()),
            memory=sum(info.memory for info in infos.values()),
            components=infos,
            roles={
                role: tuple(name for name in modules if name.startswith(prefixes))
                for role, prefixes in COMPONENT_PREFIXES.items()
            },
            problems=problems,
        )

    def monitor_diffusion_step(
        self, pipeline: Any, step: int, latents: Tensor
    ) -> DiffusionStepInfo:
        """Check the latents after a denoising step; step 0 starts a new image.

        Raises `UsageError` if `latents` is not a tensor, or `step` is not a count.
        """
        argument_checks.check_tensor(latents, "monitor_diffusion_step")
        step = argument_checks.check_count(step, "step", 0)
        # Read at once: another thread may clear it.
        before, spread = self._previous_step or (-1, None)
        if step <= before or step == 0:
            self._previous_latents = spread = None
        name = f"latents of step {step}"
        info = measurements.tensor_infos({name: latents}, self.level)[name]
        is_advanced = self.level.includes(DebugLevel.ADVANCED)
        made_by, self._nonfinite_source = self._nonfinite_source, None
        cause = f" First made by {made_by}." if made_by else ""
        anomalies = self._nonfinite_anomalies(info, "latents", cause, step=step)
        if info.std is not None and spread and info.std > self._max_growth * spread:
            sentence = (
                f"The latents of step {step} spread {info.std / spread:.1f} times as far as those "
                f"of the step before ({spread:.4g}, now {info.std:.4g})."
            )
            anomalies.append(self._make_anomaly("jump", "latents", sentence, step=step))
        modules = components_of(pipeline).values() if is_advanced else ()
        step_info = DiffusionStepInfo(
            step=step,
            latents=info,
            change=self._relative_change(latents) if is_advanced else None,
            anomalies=tuple(anomalies),
            memory=measurements.memory_of(*modules) if is_advanced else None,
            made_by=made_by,
        )
        self._previous_step = (step, info.std)
        self._record_analysis([step_info], anomalies)
        if self.level is DebugLevel.EXTREME:
            log.info("Denoising step %d: %s", step, info)
        return step_info

    @contextmanager
    def watching(self, pipeline: Any) -> Iterator[None]:
        """Find which component makes the first NaN or Inf of a step, while the block runs.

        Costs one reduction of each output of the pipeline's components. Only calls such as
        `unet(...)` are observed, not other methods (such as `vae.decode`).
        """
        with ExitStack() as stack:
            for name, module in components_of(pipeline).items():
                on_output = partial(self._on_component_output, name)
                stack.enter_context(module.register_forward_hook(on_output, with_kwargs=True))
            yield

    def _on_component_output(
        self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._nonfinite_source is None and measurements.has_nonfinite(output):
            is_from_inputs = measurements.has_nonfinite([args, kwargs])
            self._nonfinite_source = f"{name} (from non-finite inputs)" if is_from_inputs else name

    @torch.no_grad()
    def _relative_change(self, latents: Tensor) -> float | None:
        before, self._previous_latents = self._previous_latents, latents.detach().clone()
        if before is None or before.shape != latents.shape or before.device != latents.device:
            return None
        moved, size = tensor_norms([latents.detach() - before, before])
        return moved / size if size else None


def components_of(pipeline: Any) -> dict[str, nn.Module]:
    """The modules of a pipeline by name, from its `components` or else from its attributes."""
    if isinstance(pipeline, nn.Module):
        return measurements.parts_of(pipeline)
    parts = getattr(pipeline, "components", None)
    named = parts if isinstance(parts, Mapping) else getattr(pipeline, "__dict__", {})
    modules = {str(name): part for name, part in named.items() if isinstance(part, nn.Module)}
    if not modules:
        kind = type(pipeline).__name__
        text = f"The {kind} has no module among its components; a pipeline with a unet or "
        text += "transformer, a text encoder or a VAE is needed."
        raise UsageError(text)
    return modules

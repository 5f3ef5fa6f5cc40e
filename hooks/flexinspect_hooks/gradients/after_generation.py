"""Gradients after a generation: which steps are differentiated, and what is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flexinspect.core.errors import summarize_error
from flexinspect.records.job import Job, parse_steps
from flexinspect.records.prompt import Prompt
from flexinspect.records.step import EventRecord
from flexinspect.records.token_gradients import GradientRecord
from flexinspect_hooks.capture.model_layers import attention_layers, decoder_blocks
from flexinspect_hooks.capture.recorder import Recorder
from flexinspect_hooks.generation.mask_source import MaskSource
from flexinspect_hooks.gradients.backward import (
    DENSE_REFERENCE,
    Differentiator,
    GradientSpec,
    SampledLogits,
    TokenContext,
    sample_logits,
)

GRADIENTS_PHASE = "gradients"
"""The phase of a run while gradients are computed."""

COST_EVENT = "gradients-cost"
"""The kind of the event that reports what gradients cost."""


@dataclass(frozen=True, slots=True)
class FinishedBranch:
    """A branch that has ended; `token_ids` include its parents' before its `fork_step`."""

    generation: int
    prompt: Prompt
    token_ids: Sequence[int]
    source: MaskSource
    branch: int = 0
    fork_step: int = 0

    def event(self, kind: str, text: str) -> EventRecord:
        """An event of this branch's generation."""
        return EventRecord(kind, text, time.time(), self.generation)


class TokenGradients:
    """Keeps what the gradients of a generation need, and computes them after it, in its thread.

    A failure becomes an event, and the run goes on.
    """

    def __init__(self, model: Any, job: Job, *, compiled: bool) -> None:
        self._spec = GradientSpec(job.grads or "logprob", job.detect_anomaly)
        self._steps = parse_steps(job.grads_steps)
        self._steps_argument = job.grads_steps
        blocks = decoder_blocks(model, attention_layers(model))
        self._differentiator = Differentiator(model, blocks, compiled=compiled)
        self._sampled_logits: dict[tuple[int, int], SampledLogits] = {}
        """By branch and step."""
        self._has_run = False

    def begin_generation(self, recorder: Recorder) -> None:
        """Drop the state of the previous generation, and end the phase of its gradients."""
        self._sampled_logits.clear()
        if self._has_run:
            recorder.put(EventRecord("phase", "generating", time.time()))

    def on_token_chosen(self, branch: int, step: int, token_id: int, logits: Tensor) -> None:
        """Sample a step's logits (V,), to check later that the same forward pass is repeated."""
        if self._steps is None or step in self._steps:
            self._sampled_logits[branch, step] = sample_logits(logits, token_id)

    def compute(
        self, finished: FinishedBranch, recorder: Recorder, check_stop: Callable[[], object]
    ) -> None:
        """Compute and record the gradients of the requested steps of a branch.

        `check_stop` is called before each step and raises `KeyboardInterrupt` to end the run.
        """
        started = time.perf_counter()
        steps = sorted(step for branch, step in self._sampled_logits if branch == finished.branch)
        done: list[GradientRecord] = []
        self._has_run = bool(steps)
        for step in steps:
            check_stop()
            fraction = {"fraction": len(done) / len(steps)}
            recorder.put(EventRecord("phase", GRADIENTS_PHASE, time.time(), data=fraction))
            try:
                record = self._compute_with_fallback(finished, step, recorder)
            except Exception as error:
                text = f"Gradients were not computed from step {step} on: {summarize_error(error)}"
                recorder.put(finished.event("gradients-failed", text))
                break
            recorder.put(record)
            done.append(record)
            del self._sampled_logits[finished.branch, step]
        n_steps = len(finished.token_ids) - finished.fork_step
        text = f"--grads-steps {self._steps_argument} names none of the {n_steps} steps."
        if steps:
            text = _cost_text(done, n_steps, time.perf_counter() - started)
        recorder.put(finished.event(COST_EVENT, text))

    def _compute_with_fallback(
        self, finished: FinishedBranch, step: int, recorder: Recorder
    ) -> GradientRecord:
        """The gradients of a step; after a failure of FlexAttention, by the dense reference."""
        try:
            return self._compute_step(finished, step)
        except Exception as error:
            if not self._differentiator.uses_flex(self._spec):
                raise
            text = (
                f"FlexAttention's own backward failed, so the {DENSE_REFERENCE} is used instead: "
                f"{summarize_error(error)}"
            )
            recorder.put(finished.event("gradients-dense-fallback", text))
            self._spec = replace(self._spec, use_flex=False)
            return self._compute_step(finished, step)

    def _compute_step(self, finished: FinishedBranch, step: int) -> GradientRecord:
        prompt = finished.prompt
        ids = (*prompt.ids, *finished.token_ids[:step])
        positions = (*prompt.position_ids, *map(prompt.next_position, range(step)))
        context = TokenContext(finished.generation, finished.branch, step, ids, positions)
        sampled = self._sampled_logits[finished.branch, step]
        return self._differentiator.compute(context, sampled, finished.source, self._spec)


def _cost_text(done: Sequence[GradientRecord], n_steps: int, wall_s: float) -> str:
    if not done:
        return "No gradients were computed."
    agree = sum(record.matches_recorded for record in done)
    return (
        f"Gradients of {len(done)} of {n_steps} tokens took {wall_s:.1f} s, "
        f"{wall_s / len(done):.2f} s each, by the {done[0].path}; {agree} of {len(done)} "
        "forward passes gave the recorded logits."
    )

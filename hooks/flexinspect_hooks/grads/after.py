"""Gradients after a generation: which steps, in which order, what is recorded of it all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flexinspect.gradientrecords import GradientRecord
from flexinspect.job import Job, parse_steps
from flexinspect.prompts import Prompt
from flexinspect.records import EventRecord
from flexinspect_hooks.grads.backward import Before, Differentiator, Wish
from flexinspect_hooks.grads.gate import KeptLogits, keep
from flexinspect_hooks.grads.patch import DENSE
from flexinspect_hooks.layers import attention_layers, decoder_blocks
from flexinspect_hooks.masksource import MaskSource
from flexinspect_hooks.recorder import Recorder

PHASE = "gradients"
"""The phase of a run while they are taken."""

COST = "cost"
"""The kind of the event that sums up what they took."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A branch that has come to its end: what it was fed, what it generated, under which mask.

    `token_ids` are those of its parents before its `fork_step`, too.
    """

    generation: int
    prompt: Prompt
    token_ids: Sequence[int]
    source: MaskSource
    branch: int = 0
    fork_step: int = 0


class TokenGradients:
    """Keeps what a generation's gradients will need, and takes them when it is over.

    In the model's thread, and never in a forward that is recorded. What fails is an event, and the
    run goes on.
    """

    def __init__(self, model: Any, job: Job, *, compiled: bool) -> None:
        self._wish = Wish(job.grads or "logprob", job.detect_anomaly)
        self._steps = parse_steps(job.grads_steps)
        self._asked = job.grads_steps
        blocks = decoder_blocks(model, attention_layers(model))
        self._differentiator = Differentiator(model, blocks, compiled=compiled)
        self._kept: dict[tuple[int, int], KeptLogits] = {}
        """By branch and step."""
        self._took = False

    def begin(self, recorder: Recorder) -> None:
        """Forget the generation before, and say that the phase of its gradients is over."""
        self._kept.clear()
        if self._took:
            recorder.put(EventRecord("phase", "generating", time.time()))

    def chose(self, branch: int, step: int, token_id: int, logits: Tensor) -> None:
        """Keep of a step's logits (V,) what shows later that the same forward is differentiated."""
        if self._steps is None or step in self._steps:
            self._kept[branch, step] = keep(logits, token_id)

    def take(self, ended: Ended, recorder: Recorder, stop: Callable[[], object]) -> None:
        """Take and record the gradients of the branch's own steps that were asked for.

        `stop` is called before each, and raises `KeyboardInterrupt` when the run is to end.
        """
        started = time.perf_counter()
        steps = sorted(step for branch, step in self._kept if branch == ended.branch)
        done: list[GradientRecord] = []
        self._took = bool(steps)
        for step in steps:
            stop()
            recorder.put(_phase(len(done) / len(steps)))
            try:
                record = self._by_any(ended, step, recorder)
            except Exception as error:
                recorder.put(_failed(ended, step, error))
                break
            recorder.put(record)
            done.append(record)
            del self._kept[ended.branch, step]
        wall_s = time.perf_counter() - started
        n_steps = len(ended.token_ids) - ended.fork_step
        words = self._words(done, n_steps, wall_s) if steps else self._none(n_steps)
        recorder.put(_event(ended, COST, words))

    def _by_any(self, ended: Ended, step: int, recorder: Recorder) -> GradientRecord:
        """Return the gradients of a step, by the dense reference once FlexAttention has failed."""
        try:
            return self._one(ended, step)
        except Exception as error:
            if not self._differentiator.is_by_flex(self._wish):
                raise
            text = f"FlexAttention's own backward failed, so the {DENSE} takes its place: "
            text += _first(error)
            recorder.put(_event(ended, "gradients-by-reference", text))
            self._wish = replace(self._wish, by_flex=False)
            return self._one(ended, step)

    def _one(self, ended: Ended, step: int) -> GradientRecord:
        prompt = ended.prompt
        own = [prompt.next_position(number) for number in range(step)]
        before = Before(
            ended.generation,
            ended.branch,
            step,
            (*prompt.ids, *ended.token_ids[:step]),
            (*prompt.position_ids, *own),
        )
        kept = self._kept[ended.branch, step]
        return self._differentiator.gradients(before, kept, ended.source, self._wish)

    def _none(self, n_steps: int) -> str:
        return f"--grads-steps {self._asked} names none of the {n_steps} steps."

    def _words(self, done: Sequence[GradientRecord], n_steps: int, wall_s: float) -> str:
        if not done:
            return "Gradients of no token were taken."
        agree = sum(record.agrees for record in done)
        return (
            f"Gradients of {len(done)} of {n_steps} tokens took {wall_s:.1f} s, "
            f"{wall_s / len(done):.2f} s each, by the {done[0].path}; {agree} of {len(done)} "
            "forwards gave the recorded logits."
        )


def _phase(fraction: float) -> EventRecord:
    return EventRecord("phase", PHASE, time.time(), data={"fraction": fraction})


def _failed(ended: Ended, step: int, error: Exception) -> EventRecord:
    text = f"The gradients of step {step} and the steps after it were not taken: {_first(error)}"
    return _event(ended, "gradients-failed", text)


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _event(ended: Ended, kind: str, text: str) -> EventRecord:
    return EventRecord(kind, text, time.time(), ended.generation)

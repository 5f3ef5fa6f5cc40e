"""Journeys through tiny models, and a scribe that keeps what it is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flexinspect import masks
from flexinspect.job import SamplingOptions
from flexinspect.prompts import Prompt
from flexinspect_hooks.generate import Choice, Decoder, generate
from flexinspect_hooks.masksource import MaskSource, OwnMask, RuleMask
from flexinspect_hooks.patching import FlexPatch
from flexinspect_hooks.travel.journey import Journey
from flexinspect_hooks.travel.lines import Line
from flexinspect_hooks.travel.parts import Limits

CPU = torch.device("cpu")
WARM = SamplingOptions(do_sample=True, temperature=1.3, top_k=20)
SEED = 5


class Notes:
    """A scribe that keeps the logits of each recorded step, and what else it is told."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, int], Tensor] = {}
        self.ends: list[tuple[int, str, str]] = []
        self.begun: list[Mapping[str, Any]] = []
        self.told: list[tuple[str, str]] = []
        self.n_dropped = 0

    def stand(self, branch: int, step: int) -> None: ...

    def muted(self) -> Any:
        return nullcontext()

    def drop(self, line: Line) -> None:
        self.n_dropped += 1

    def chose(self, line: Line, choice: Choice) -> None:
        assert (line.branch, choice.step) not in self.logits, "a step was recorded twice"
        self.logits[line.branch, choice.step] = choice.logits.clone()

    def begin(self, line: Line) -> None:
        self.begun.append(line.change)

    def end(self, line: Line, state: str, reason: str) -> None:
        self.ends.append((line.branch, state, reason))

    def tell(self, kind: str, text: str, line: Line, step: int, facts: Mapping[str, Any]) -> None:
        self.told.append((kind, text))


class Trip:
    """A journey with the eyes on every logit: `seen` holds them by step of the last run."""

    def __init__(self, journey: Journey, notes: Notes, decoder: Decoder) -> None:
        self.journey, self.notes, self.decoder = journey, notes, decoder
        self.seen: dict[int, Tensor] = {}
        inner = decoder.choose

        def choose(logits: Tensor, forced: int | None = None) -> Choice:
            self.seen[decoder.step] = logits.clone()
            return inner(logits, forced)

        decoder.choose = choose  # type: ignore[method-assign]

    def go(self, n_steps: int = 1000) -> list[int]:
        """Go on for some steps, or to the end; returns all tokens."""
        for _ in range(n_steps):
            if self.journey.is_over:
                break
            self.journey.advance()
        return list(self.decoder.token_ids)


def rule_source(prompt: Prompt, name: str = "segment-isolation") -> RuleMask:
    rule = masks.preset(name, prompt.segments)
    return RuleMask(rule, length=prompt.segments[-1].stop, device=CPU, compiled=False)


def own_source() -> OwnMask:
    return OwnMask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, name="own", device=CPU)


@contextmanager
def travelling(
    model: Any,
    prompt: Prompt,
    source: MaskSource | None = None,
    *,
    sampling: SamplingOptions = WARM,
) -> Iterator[Trip]:
    """Yield a trip that stands before the first step, the model patched meanwhile."""
    patch = FlexPatch(model, source or rule_source(prompt))
    decoder, notes = Decoder(model, prompt, sampling=sampling, seed=SEED), Notes()
    n_new = len(prompt.segments[-1])
    with patch:
        yield Trip(Journey(model, decoder, patch, notes, Limits(n_new)), notes, decoder)


def fresh_run(
    model: Any, prompt: Prompt, source: MaskSource, forced: Mapping[int, int], **options: Any
) -> tuple[list[int], list[Tensor]]:
    """Return tokens and logits of a run of its own, with some tokens forced."""
    logits: list[Tensor] = []
    with FlexPatch(model, source):
        out = generate(
            *(model, prompt),
            max_new_tokens=len(prompt.segments[-1]),
            sampling=options.get("sampling", WARM),
            seed=SEED,
            forced=forced,
            on_choice=lambda choice: logits.append(choice.logits.clone()),
        )
    return list(out.token_ids), logits

"""Journeys through tiny models, and a scribe that keeps what it is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flexinspect.masks import algebra
from flexinspect.records.job import SamplingOptions
from flexinspect.records.prompt import Prompt, compose_prompt
from flexinspect_hooks.generation.decoding import Choice, Decoder, generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import MaskSource, SpecMaskSource, UserMaskSource
from flexinspect_hooks.rewind.branch_state import BranchState
from flexinspect_hooks.rewind.branching_decoder import BranchingDecoder, StopCriteria
from support.tiny import make_pieces

CPU = torch.device("cpu")
WARM = SamplingOptions(do_sample=True, temperature=1.3, top_k=20)
SEED = 5
N_PROMPT = 30


class Notes:
    """A scribe that keeps the logits of each recorded step, and what else it is told."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, int], Tensor] = {}
        self.ends: list[tuple[int, str, str]] = []
        self.begun: list[Mapping[str, Any]] = []
        self.told: list[tuple[str, str]] = []
        self.n_dropped = 0

    def set_next_step(self, branch: int, step: int) -> None: ...

    def no_capture(self) -> Any:
        return nullcontext()

    def drop_step(self, line: BranchState) -> None:
        self.n_dropped += 1

    def on_token_chosen(self, line: BranchState, choice: Choice) -> None:
        assert (line.number, choice.step) not in self.logits, "a step was recorded twice"
        self.logits[line.number, choice.step] = choice.logits.clone()

    def begin_branch(self, line: BranchState) -> None:
        self.begun.append(line.change)

    def end_branch(self, line: BranchState, state: str, reason: str) -> None:
        self.ends.append((line.number, state, reason))

    def record_event(
        self, kind: str, text: str, line: BranchState, step: int, facts: Mapping[str, Any]
    ) -> None:
        self.told.append((kind, text))


class Trip:
    """A journey with the eyes on every logit: `seen` holds them by step of the last run."""

    def __init__(self, journey: BranchingDecoder, notes: Notes, decoder: Decoder) -> None:
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


def rule_source(prompt: Prompt, name: str = "segment-isolation") -> SpecMaskSource:
    rule = algebra.preset(name, prompt.segments)
    return SpecMaskSource(rule, length=prompt.segments[-1].stop, device=CPU, compiled=False)


def own_source() -> UserMaskSource:
    return UserMaskSource(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, name="own", device=CPU)


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
        yield Trip(
            BranchingDecoder(model, decoder, patch, notes, StopCriteria(n_new)), notes, decoder
        )


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


def prompt_of(n_new: int) -> Prompt:
    """Return a prompt of `N_PROMPT` tokens, to be gone on with `n_new`."""
    made = compose_prompt(make_pieces(), max_new_tokens=n_new)
    assert len(made.ids) == N_PROMPT
    return made


def other_token(trip: Trip, step: int) -> int:
    """Return a token that a step of the base did not choose."""
    return (trip.journey.branches[0].checkpoint(step).token_id + 7) % 290 + 3


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread: thousands of tiny steps would wait at barriers for busy neighbours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

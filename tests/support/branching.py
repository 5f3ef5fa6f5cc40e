"""Branching decoders on tiny models, with a recorder that keeps what it receives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flexinspect.masks import mask_presets
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


class RecordedCalls:
    """A branch recorder that keeps the logits of each recorded step, and the other calls."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, int], Tensor] = {}
        self.ends: list[tuple[int, str, str]] = []
        self.changes: list[Mapping[str, Any]] = []
        self.events: list[tuple[str, str]] = []
        self.n_dropped = 0

    def set_next_step(self, branch: int, step: int) -> None: ...

    def no_capture(self) -> Any:
        return nullcontext()

    def drop_step(self, branch: int) -> None:
        self.n_dropped += 1

    def on_token_chosen(self, branch: BranchState, choice: Choice) -> None:
        assert (branch.number, choice.step) not in self.logits, "a step was recorded twice"
        self.logits[branch.number, choice.step] = choice.logits.clone()

    def begin_branch(self, branch: BranchState) -> None:
        self.changes.append(branch.change)

    def end_branch(self, branch: BranchState, state: str, reason: str) -> None:
        self.ends.append((branch.number, state, reason))

    def record_event(
        self, kind: str, text: str, branch: BranchState, step: int, facts: Mapping[str, Any]
    ) -> None:
        self.events.append((kind, text))


class BranchingRun:
    """A branching decoder; `seen` has the logits of each step that it ran, by step."""

    def __init__(
        self, branching: BranchingDecoder, recorder: RecordedCalls, decoder: Decoder
    ) -> None:
        self.branching, self.recorder, self.decoder = branching, recorder, decoder
        self.seen: dict[int, Tensor] = {}
        inner = decoder.choose

        def choose(logits: Tensor, forced: int | None = None) -> Choice:
            self.seen[decoder.step] = logits.clone()
            return inner(logits, forced)

        decoder.choose = choose  # type: ignore[method-assign]

    def advance(self, n_steps: int = 1000) -> list[int]:
        """Run some steps, or all to the end; returns all tokens."""
        for _ in range(n_steps):
            if self.branching.is_over:
                break
            self.branching.advance()
        return list(self.decoder.token_ids)


def preset_source(prompt: Prompt, name: str = "segment-isolation") -> SpecMaskSource:
    spec = mask_presets.preset(name, prompt.segments)
    return SpecMaskSource(spec, length=prompt.segments[-1].stop, device=CPU, compiled=False)


def user_source() -> UserMaskSource:
    return UserMaskSource(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, name="own", device=CPU)


@contextmanager
def branching_run(
    model: Any,
    prompt: Prompt,
    source: MaskSource | None = None,
    *,
    sampling: SamplingOptions = WARM,
) -> Iterator[BranchingRun]:
    """Yield a run before its first step, with the model patched."""
    patch = FlexPatch(model, source or preset_source(prompt))
    decoder, recorder = Decoder(model, prompt, sampling=sampling, seed=SEED), RecordedCalls()
    n_new = len(prompt.segments[-1])
    with patch:
        yield BranchingRun(
            BranchingDecoder(model, decoder, patch, recorder, StopCriteria(n_new)),
            recorder,
            decoder,
        )


def fresh_run(
    model: Any, prompt: Prompt, source: MaskSource, forced: Mapping[int, int], **options: Any
) -> tuple[list[int], list[Tensor]]:
    """Tokens and logits of a separate run, with some tokens forced."""
    logits: list[Tensor] = []
    with FlexPatch(model, source):
        out = generate(
            model,
            prompt,
            max_new_tokens=len(prompt.segments[-1]),
            sampling=options.get("sampling", WARM),
            seed=SEED,
            forced=forced,
            on_choice=lambda choice: logits.append(choice.logits.clone()),
        )
    return list(out.token_ids), logits


def prompt_of(n_new: int) -> Prompt:
    """A prompt of `N_PROMPT` tokens, to continue with `n_new`."""
    prompt = compose_prompt(make_pieces(), max_new_tokens=n_new)
    assert len(prompt.ids) == N_PROMPT
    return prompt


def other_token(run: BranchingRun, step: int) -> int:
    """A token that a step of the base did not choose."""
    return (run.branching.branches[0].checkpoint(step).token_id + 7) % 290 + 3


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread: thousands of tiny steps would wait at barriers for busy neighbours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

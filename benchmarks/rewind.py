"""What going back costs: restoring a state of 300 tokens of the demo model, forking, editing."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.common import flex_source
from flexinspect.inputs import datasets, model_names, samples
from flexinspect.inputs.config import load_config
from flexinspect.masks import edits as maskedits
from flexinspect.records.job import Job, SamplingOptions
from flexinspect.records.prompt import Prompt
from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner
from flexinspect_hooks.generation.decoding import Choice, Decoder, StopCriteria, generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.loading.model_loader import LoadedModel, load
from flexinspect_hooks.rewind.branch_state import BranchState, n_rows_of
from flexinspect_hooks.rewind.branching_decoder import BranchingDecoder

TOKENS = 300
ROUNDS = 11
WARM = SamplingOptions(do_sample=True, temperature=1.2, top_k=50)


class NullRecorder:
    """A branch recorder that records nothing."""

    def set_next_step(self, branch: int, step: int) -> None: ...
    def no_capture(self) -> Any:
        return nullcontext()

    def drop_step(self, branch: int) -> None: ...
    def on_token_chosen(self, branch: BranchState, choice: Choice) -> None: ...
    def begin_branch(self, branch: BranchState) -> None: ...
    def end_branch(self, branch: BranchState, state: str, reason: str) -> None: ...
    def record_event(self, *event: Any) -> None: ...


def measure() -> dict[str, Any]:
    """Measure on the demo model, with one thread, as a live run uses on two cores."""
    torch.set_num_threads(1)
    loaded = load(
        model_names.resolve("demo", load_config()),
        device="cpu",
        dtype="auto",
        weights="pretrained",
        seed=0,
        trust_remote_code=False,
        report=lambda phase, data: None,
    )
    prompt = _prompt(loaded)
    with FlexPatch(loaded.model, flex_source(prompt, "cpu", compiled=False)) as patch:
        decoder = _decoder(loaded, prompt, patch)
        steps = [_timed(decoder.advance) for _ in range(len(prompt.segments[-1]))]
        facts = _operation_times(decoder, len(steps) - 2)
        plain = _plain_step(loaded, prompt)
    return {
        "threads": 1,
        "prompt": len(prompt.ids),
        "steps": len(steps),
        "step_ms": _median(steps[1:]),
        "plain_step_ms": plain,
        **facts,
        "wanted_ms": 200,
    }


def _prompt(loaded: LoadedModel) -> Prompt:
    """Return a prompt of the demo set with room for as many tokens as make `TOKENS` and two."""
    (sample,) = datasets.load("demo", max_samples=1)
    chosen = samples.choose_paraphrases(sample, 5, None)

    def made(n_new: int) -> Prompt:
        job = Job(out="", max_new_tokens=n_new, sampling=WARM, stop="length")
        return EnsembleRunner(loaded, job, compiled=False).plan(chosen).prompt

    return made(TOKENS + 2 - len(made(1).ids))


def _decoder(loaded: LoadedModel, prompt: Prompt, patch: FlexPatch) -> BranchingDecoder:
    decoder = Decoder(loaded.model, prompt, sampling=WARM)
    limits = StopCriteria(len(prompt.segments[-1]))
    recorder: Any = NullRecorder()
    return BranchingDecoder(loaded.model, decoder, patch, recorder, limits)


def _operation_times(decoder: BranchingDecoder, step: int) -> Mapping[str, Any]:
    """Restore, fork and edit at the step before the last, from its cache and from nothing."""
    base = decoder.branches[0]
    rows = len(decoder._decoder.prompt.ids) + step
    cropped = [_timed(lambda: decoder.restore(0, step)) for _ in range(ROUNDS)]
    assert n_rows_of(decoder._decoder.cache) == rows
    onward = []
    for _ in range(ROUNDS):
        decoder.restore(0, step)
        onward.append(_timed(decoder.advance))
    again = []
    for _ in range(3):
        decoder._decoder.set_state([], type(decoder._decoder.cache)())
        decoder._cache_store.clear()
        again.append(_timed(lambda: decoder.restore(0, step)))
    forks, edits = [], []
    for number in range(ROUNDS):
        token = (base.checkpoint(step).token_id + 1 + number) % 300
        forks.append(_timed(functools.partial(decoder.fork, 0, step, [token])))
    for _ in range(3):
        edit = [maskedits.parse_edit("drop paraphrase 2")]

        def edit_and_advance(edit: list[maskedits.Edit] = edit) -> None:
            decoder.edit_mask(0, step, edit)
            decoder.advance()

        edits.append(_timed(edit_and_advance))
    return {
        "state_rows": rows,
        "restore_cropped_ms": _median(cropped),
        "next_step_ms": _median(onward),
        "restore_replayed_ms": _median(again),
        "fork_ms": _median(forks),
        "edit_with_recompute_ms": _median(edits),
    }


def _plain_step(loaded: LoadedModel, prompt: Prompt) -> float:
    """Return the step of the same generation without anything kept for going back."""
    stamps: list[float] = []

    def stamp(choice: Choice) -> None:
        stamps.append(time.perf_counter())

    n_new = len(prompt.segments[-1])
    generate(loaded.model, prompt, max_new_tokens=n_new, sampling=WARM, on_choice=stamp)
    return _median([b - a for a, b in itertools.pairwise(stamps)])


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _median(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)

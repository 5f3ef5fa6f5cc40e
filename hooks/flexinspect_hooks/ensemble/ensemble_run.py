"""The ensemble generation: sample, pieces, prompt, mask, patch and decoding, all recorded."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from msgspec import Struct

from flexinspect.control.messages import QueuedRewind, StepRef
from flexinspect.core import errors
from flexinspect.core.errors import DatasetError, MaskError, summarize_error
from flexinspect.core.signals import acknowledge_end, defer_interrupts
from flexinspect.inputs.samples import Sample
from flexinspect.masks import mask_presets
from flexinspect.records import prompt as prompts
from flexinspect.records.job import Job, PromptTexts
from flexinspect.records.prompt import Prompt, Segment
from flexinspect.records.step import EventRecord, GenerationRecord, TokenRecord
from flexinspect_hooks.control.step_barrier import StepBarrier
from flexinspect_hooks.ensemble.recompute_check import CheckCost, RecomputeCheck
from flexinspect_hooks.generation.decoding import Decoder, StopCriteria
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import MaskSource, SpecMaskSource, UserMaskSource
from flexinspect_hooks.gradients.after_generation import GradientSpec, TokenGradients
from flexinspect_hooks.loading.model_loader import LoadedModel
from flexinspect_hooks.loading.tokenizers import TextStream, Vocabulary, token_record
from flexinspect_hooks.python_internals.user_imports import import_object
from flexinspect_hooks.rewind.branch_recorder import TraceBranchRecorder
from flexinspect_hooks.rewind.branching_decoder import BranchingDecoder, RewindHandler
from flexinspect_hooks.sessions.capture_session import CaptureSession
from flexinspect_hooks.user_code.generation_builder import keep_written_special


class GenerationPlan(Struct, frozen=True):
    """One sample, ready to run. `declared` are entries of `GenerationRecord.declared`."""

    sample: Sample
    prompt: Prompt
    declared: dict[str, Any]
    source: MaskSource


class GenerationOutcome(Struct, frozen=True):
    """What a generation has produced: its answer, and how many tokens it chose."""

    answer: str
    n_tokens: int


class EnsembleRunner:
    """Runs samples through one loaded model; each is a generation of the trace."""

    def __init__(self, loaded: LoadedModel, job: Job, *, compiled: bool) -> None:
        self.vocabulary = Vocabulary(loaded.tokenizer_or_ids())
        self._model = loaded.model
        self._job = job
        self.compiled = compiled
        self._device = torch.device(loaded.device)
        self.eos_ids = _eos_ids(loaded, self.vocabulary)
        self._gradients: TokenGradients | None = None
        if job.grads:
            spec = GradientSpec(job.grads, job.detect_anomaly, steps=job.grads_steps)
            self._gradients = TokenGradients(loaded.model, spec, compiled=compiled)
        self.rewind_handler = RewindHandler(self.vocabulary)
        self.check_cost = CheckCost()
        """What the recomputes of `--check-every` took, of all generations."""

    def plan(self, sample: Sample) -> GenerationPlan:
        """Compose the prompt and the mask of a sample. Raises `DatasetError`, `MaskError`."""
        n_new = self._job.max_new_tokens
        pieces = encode_pieces(sample, self._job.texts, self.vocabulary)
        prompt = prompts.compose_prompt(pieces, max_new_tokens=n_new, positions=self._job.positions)
        self.check_length(prompt)
        return GenerationPlan(sample, prompt, *self._mask(prompt.segments))

    def check_length(self, prompt: Prompt) -> None:
        """Raise `DatasetError` if prompt and answer need more positions than the model has."""
        limit = getattr(self._model.config, "max_position_embeddings", None)
        needed = prompt.next_position(self._job.max_new_tokens - 1) + 1
        if limit and needed > limit:
            text = f"The prompt needs positions up to {needed}, and the model has {limit}."
            hint = "Use fewer or shorter paraphrases, or a smaller --max-new-tokens."
            raise DatasetError(text, hint=hint)

    def _mask(self, segments: Sequence[Segment]) -> tuple[dict[str, Any], MaskSource]:
        """The mask's entries of `GenerationRecord.declared`, and what runs it."""
        job, device, length = self._job, self._device, segments[-1].stop
        if ":" in job.mask:
            mask_mod = load_mask_mod(job.mask, segments)
            return {"mask_mod": job.mask}, UserMaskSource(mask_mod, name=job.mask, device=device)
        spec = mask_presets.preset(job.mask, segments, separators=job.separators)
        source = SpecMaskSource(spec, length=length, device=device, compiled=self.compiled)
        return {**mask_presets.spec_entries(spec), "separators": job.separators}, source

    def run(
        self, number: int, plan: GenerationPlan, session: CaptureSession, *, holds: bool = False
    ) -> GenerationOutcome:
        """Run one generation and record it; returns the outcome of its current branch.

        Between two steps the session's step barrier may pause it or return a rewind command. With
        `holds` it is kept alive at its end until the barrier releases it. An exception or an
        interrupt ends the generation in the trace, and is raised again.
        """
        record = self.record_of(number, plan)
        session.begin_generation(record)
        decoder = self._make_decoder(plan, session, record)
        state, reason = "failed", ""
        try:
            check = self._recompute_check(number, plan, session)
            with decoder.patch, nullcontext() if check is None else check.watching():
                self.rewind_handler.generation, self.rewind_handler.decoder = number, decoder
                self._decode_loop(decoder, session, number, check, holds=holds)
            state = "finished"
        except KeyboardInterrupt:
            state, reason = "interrupted", "stopped"
            acknowledge_end()
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            with defer_interrupts():
                self.rewind_handler.decoder = None
                decoder.close(state, reason)
        branch = decoder.current_branch
        token_ids = branch.token_ids(branch.n_steps)
        one_line = self._job.stop == "newline"
        answer = self.vocabulary.decode_generated(token_ids, one_line=one_line)
        return GenerationOutcome(answer, len(token_ids))

    def _recompute_check(
        self, number: int, plan: GenerationPlan, session: CaptureSession
    ) -> RecomputeCheck | None:
        if self._job.check_every is None:
            return None
        place, options = (number, self._job.check_every), {"compiled": self.compiled}
        return RecomputeCheck(
            self._model, plan.prompt, session, place, **options, cost=self.check_cost
        )

    def _decode_loop(
        self,
        decoder: BranchingDecoder,
        session: CaptureSession,
        number: int,
        check: RecomputeCheck | None,
        *,
        holds: bool,
    ) -> None:
        """Decode to the end, and execute the rewind commands that arrive between steps."""
        barrier = session.barrier
        while True:
            step_ref = StepRef(number, decoder.current_branch.number, decoder.step)
            # A held model waits at its end anyway.
            ends_branch = decoder.is_over and not holds
            rewind = barrier.between_steps(step_ref, ends_branch=ends_branch)
            if rewind is None and decoder.is_over:
                rewind = _hold_at_end(session, step_ref) if holds else None
                if rewind is None:
                    return
            with defer_interrupts():
                if rewind is None:
                    decoder.advance()
                    if check is not None:
                        check.on_step(decoder)
                else:
                    self._execute(rewind, barrier)

    def _execute(self, rewind: QueuedRewind, barrier: StepBarrier) -> None:
        try:
            step_ref, message = self.rewind_handler.execute(rewind.command)
        except errors.FlexInspectError as error:
            barrier.report_result(rewind, error)
        except (RuntimeError, MemoryError) as error:  # mostly out of memory
            message = f"The {rewind.command.kind} failed: {summarize_error(error)}"
            barrier.report_result(rewind, errors.ControlError(message))
        else:
            barrier.report_result(rewind, step_ref, message)

    def _make_decoder(
        self, plan: GenerationPlan, session: CaptureSession, generation: GenerationRecord
    ) -> BranchingDecoder:
        job, prompt = self._job, plan.prompt
        one_line = job.stop == "newline"
        decoder = Decoder(self._model, prompt, sampling=job.sampling, seed=job.seed)

        def on_compile(kind: str) -> None:
            text = f"compiling FlexAttention ({kind})"
            session.recorder.put(EventRecord("phase", text, time.time()))

        patch = FlexPatch(self._model, plan.source, compiled=self.compiled, on_compile=on_compile)
        recorder = TraceBranchRecorder(
            session, prompt, generation, self.vocabulary, self._gradients, one_line=one_line
        )
        should_stop = recorder.has_line_break if one_line else None
        criteria = StopCriteria(job.max_new_tokens, self.eos_ids, should_stop)
        return BranchingDecoder(self._model, decoder, patch, recorder, criteria)

    def record_of(self, number: int, plan: GenerationPlan) -> GenerationRecord:
        """The record of a generation that is about to begin."""
        prompt = plan.prompt
        tokens = prompt_token_records(prompt, self.vocabulary)
        texts = [token.text for token in tokens]
        special = keep_written_special(self.vocabulary.facts, prompt.ids, texts)
        return GenerationRecord(
            generation=number,
            sample_id=plan.sample.id,
            mask=plan.source.name,
            positions=self._job.positions,
            segments=prompt.segments,
            tokens=tuple(tokens),
            expected=plan.sample.answers,
            declared={**plan.declared, **prompts.declaration_entries((), special)},
            started_at=time.time(),
        )


def encode_pieces(
    sample: Sample, texts: PromptTexts, vocabulary: Vocabulary
) -> prompts.PromptTokenIds:
    """Encode the pieces of a sample's prompt. Raises `DatasetError` for one without tokens."""
    paraphrases = tuple(vocabulary.encode(text) for text in sample.paraphrases)
    for number, ids in enumerate(paraphrases, start=1):
        if not ids:
            raise DatasetError(f"Paraphrase {number} of sample '{sample.id}' has no tokens.")
    around = (texts.instruction, texts.separator, texts.cue)
    shared, separator, cue = map(vocabulary.encode, around)
    return prompts.PromptTokenIds(vocabulary.default_bos(), shared, paraphrases, separator, cue)


def prompt_token_records(prompt: Prompt, vocabulary: Vocabulary) -> list[TokenRecord]:
    """Return the records of a prompt's tokens, each with the text that it adds to its piece."""
    tokens: list[TokenRecord] = []
    for index, segment in enumerate(prompt.segments[:-1]):
        stream = TextStream(vocabulary)  # each piece was encoded by itself
        for pos in range(segment.start, segment.stop):
            id_, position = prompt.ids[pos], prompt.position_ids[pos]
            text = stream.add(id_)
            tokens.append(token_record(vocabulary, pos, id_, text, position, index))
    return tokens


def _hold_at_end(session: CaptureSession, step_ref: StepRef) -> QueuedRewind | None:
    """Keep the model alive until a rewind command arrives, or the barrier or Ctrl-C ends it."""
    text = "holding the model (flexinspect ctl continue ends the run)"
    session.recorder.put(EventRecord("phase", text, time.time()))
    try:
        return session.barrier.hold(step_ref)
    except KeyboardInterrupt:
        acknowledge_end()
        return None


def _eos_ids(loaded: LoadedModel, vocabulary: Vocabulary) -> tuple[int, ...]:
    """All ids that end a text, from the generation config or else from the tokenizer."""
    eos = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    if eos is None:
        eos = vocabulary.tokenizer.eos_token_id
    ids = eos if isinstance(eos, Iterable) else (eos,)
    return tuple(int(id_) for id_ in ids if id_ is not None)


def load_mask_mod(
    spec: str, segments: Sequence[Segment], *, flag: str = "--mask"
) -> Callable[..., torch.Tensor]:
    """Load the user's `mask_mod` from "package.module:function". Raises `MaskError`.

    Messages name it by `flag` and `spec`.

    A function of four arguments is the `mask_mod` itself. A function of one argument is called
    with the prompt's segments and returns it. Indices are positions of the whole sequence.
    """
    function = import_object(spec, flag, MaskError)
    if _accepts_arguments(function, 1) and not _accepts_arguments(function, 4):
        try:
            function = function(tuple(segments))
        except Exception as error:
            text = f"{flag} {spec} failed when called with the prompt's segments: "
            raise MaskError(text + summarize_error(error)) from error
    if not _accepts_arguments(function, 4):
        raise MaskError(
            f"{flag} {spec} must take (b, h, q_idx, kv_idx), or take (segments) and return a "
            "function that does."
        )
    return cast(Callable[..., torch.Tensor], function)


def _accepts_arguments(function: Any, n: int) -> bool:
    """Whether something can be called with `n` positional arguments."""
    try:
        inspect.signature(function).bind(*range(n))
    except (TypeError, ValueError):
        return False
    return True

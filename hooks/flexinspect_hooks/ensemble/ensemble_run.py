"""The generation that is inspected: sample → pieces → prompt → mask → patch → decode, recorded."""

from __future__ import annotations

import importlib
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexinspect.control.messages import QueuedRewind, StepRef
from flexinspect.core.errors import (
    ControlError,
    DatasetError,
    FlexInspectError,
    MaskError,
    summarize_error,
)
from flexinspect.core.signals import acknowledge_end, defer_interrupts
from flexinspect.inputs.datasets import Sample
from flexinspect.masks import algebra
from flexinspect.records.job import Job
from flexinspect.records.prompt import (
    Prompt,
    PromptTokenIds,
    Segment,
    compose_prompt,
    declaration_entries,
)
from flexinspect.records.step import EventRecord, GenerationRecord, TokenRecord
from flexinspect_hooks.control.step_barrier import StepBarrier
from flexinspect_hooks.generation.decoding import Decoder
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import MaskSource, SpecMaskSource, UserMaskSource
from flexinspect_hooks.gradients.after_generation import TokenGradients
from flexinspect_hooks.loading.model_loader import LoadedModel
from flexinspect_hooks.loading.tokenizers import TextStream, Vocabulary
from flexinspect_hooks.rewind.branch_recorder import GeneratedText, TraceBranchRecorder
from flexinspect_hooks.rewind.branching_decoder import BranchingDecoder, StopCriteria
from flexinspect_hooks.rewind.command_handler import RewindHandler
from flexinspect_hooks.sessions.capture_session import CaptureSession
from flexinspect_hooks.user_code.generation_builder import keep_written_special, tokenizer_facts


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """One sample, ready to run."""

    sample: Sample
    prompt: Prompt
    declared: dict[str, Any]
    source: MaskSource


class EnsembleRunner:
    """Runs samples through one loaded model, each as a generation of the trace."""

    def __init__(self, loaded: LoadedModel, job: Job, *, compiled: bool) -> None:
        self.vocabulary = Vocabulary(loaded.tokenizer_or_ids())
        self._model = loaded.model
        self._job = job
        self._compiled = compiled
        self._device = torch.device(loaded.device)
        self._eos = _eos_ids(loaded, self.vocabulary)
        self._tokenizer_facts = tokenizer_facts(self.vocabulary)
        self._gradients = (
            TokenGradients(loaded.model, job, compiled=compiled) if job.grads else None
        )
        self.rewind_handler = RewindHandler(self.vocabulary.encode, self.vocabulary.text_of)

    def plan(self, sample: Sample) -> GenerationPlan:
        """Compose the prompt and build the mask of a sample. Raises `UsageError` and kin."""
        pieces = self._pieces(sample)
        job = self._job
        prompt = compose_prompt(pieces, max_new_tokens=job.max_new_tokens, positions=job.positions)
        self._check_length(prompt)
        source, declared = self._mask(prompt.segments)
        return GenerationPlan(sample, prompt, declared, source)

    def _pieces(self, sample: Sample) -> PromptTokenIds:
        encode, texts = self.vocabulary.encode, self._job.texts
        paraphrases = tuple(encode(text) for text in sample.paraphrases)
        for number, ids in enumerate(paraphrases, start=1):
            if not ids:
                raise DatasetError(f"Paraphrase {number} of sample '{sample.id}' has no tokens.")
        return PromptTokenIds(
            bos=self.vocabulary.default_bos(),
            shared=encode(texts.instruction),
            paraphrases=paraphrases,
            separator=encode(texts.separator),
            cue=encode(texts.cue),
        )

    def _check_length(self, prompt: Prompt) -> None:
        limit = getattr(self._model.config, "max_position_embeddings", None)
        needed = prompt.next_position(self._job.max_new_tokens - 1) + 1
        if limit and needed > limit:
            raise DatasetError(
                f"The prompt needs positions up to {needed}, and the model has {limit}.",
                hint="Use fewer or shorter paraphrases, or a smaller --max-new-tokens.",
            )

    def _mask(self, segments: Sequence[Segment]) -> tuple[MaskSource, dict[str, Any]]:
        job = self._job
        if ":" in job.mask:
            own = load_mask_mod(job.mask, segments)
            return UserMaskSource(own, name=job.mask, device=self._device), {"rule": job.mask}
        rule = algebra.preset(job.mask, segments, separators=job.separators)
        declared = {
            "preset": job.mask,
            "separators": job.separators,
            "starts": rule.starts,
            "head": rule.prefix_stops,
            "low": rule.local_starts,
        }
        length = segments[-1].stop
        compiled = self._compiled
        return SpecMaskSource(rule, length=length, device=self._device, compiled=compiled), declared

    def run(
        self, number: int, plan: GenerationPlan, session: CaptureSession, *, holds: bool = False
    ) -> str:
        """Run one generation and record it; returns the answer of its first branch.

        Between two steps the session's gate, if it has one, may pause it or order it elsewhere;
        with `holds` it is kept alive at its end until the gate lets it go. An exception or an
        interrupt ends the generation in the trace before it goes on upwards.
        """
        begun = self.record_of(number, plan)
        session.begin_generation(begun)
        journey = self._make_decoder(plan, session, begun)
        state, reason = "failed", ""
        try:
            with journey.patch:
                self.rewind_handler.begin_generation(number, journey)
                self._decode_loop(journey, session, number, holds=holds)
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
                self.rewind_handler.begin_generation(number, None)
                journey.close(state, reason)
        return self._answer_text(journey.branches[0].token_ids(journey.branches[0].n_steps))

    def _decode_loop(
        self, decoder: BranchingDecoder, session: CaptureSession, number: int, *, holds: bool
    ) -> None:
        """Go on to the end, and wherever the gate orders the generation to go."""
        gate = session.barrier
        while True:
            place = StepRef(number, decoder.current_branch.number, decoder.step)
            order = gate.between_steps(place) if gate is not None else None
            if order is None and decoder.is_over:
                order = _hold_at_end(session, place) if holds else None
                if order is None:
                    return
            if order is None:
                with defer_interrupts():
                    decoder.advance()
            elif gate is not None:
                with defer_interrupts():
                    self._execute(order, gate)

    def _execute(self, order: QueuedRewind, barrier: StepBarrier) -> None:
        try:
            place, said = self.rewind_handler.execute(order)
        except FlexInspectError as error:
            barrier.report_result(order, error)
        except (RuntimeError, MemoryError) as error:  # too little memory, mostly
            first = (str(error).strip().splitlines() or [""])[0]
            why = f"The {order.kind} failed: {type(error).__name__}: {first}"
            barrier.report_result(order, ControlError(why))
        else:
            barrier.report_result(order, place, said)

    def _make_decoder(
        self, plan: GenerationPlan, session: CaptureSession, generation: GenerationRecord
    ) -> BranchingDecoder:
        job, prompt, words = self._job, plan.prompt, GeneratedText(self.vocabulary)
        decoder = Decoder(self._model, prompt, sampling=job.sampling, seed=job.seed)
        patch = FlexPatch(
            self._model, plan.source, compiled=self._compiled, on_compile=_compile_reporter(session)
        )
        scribe = TraceBranchRecorder(
            *(session, prompt, generation, words, self._token_record, self._answer_text),
            gradients=self._gradients,
        )
        # At a line break, but not at one before the first word.
        stops = words.has_line_break if job.stop == "newline" else None
        limits = StopCriteria(job.max_new_tokens, self._eos, stops)
        return BranchingDecoder(self._model, decoder, patch, scribe, limits)

    def _answer_text(self, token_ids: Sequence[int]) -> str:
        return self.vocabulary.decode_generated(token_ids, one_line=self._job.stop == "newline")

    def record_of(self, number: int, plan: GenerationPlan) -> GenerationRecord:
        """Return the record of a generation that is about to begin."""
        prompt = plan.prompt
        tokens: list[TokenRecord] = []
        for index, segment in enumerate(prompt.segments[:-1]):
            stream = TextStream(self.vocabulary)  # pieces are texts of their own
            for pos in range(segment.start, segment.stop):
                token_id = prompt.ids[pos]
                text, position = stream.add(token_id), prompt.position_ids[pos]
                tokens.append(self._token_record(pos, token_id, text, position, index, None))
        return GenerationRecord(
            generation=number,
            sample_id=plan.sample.id,
            mask=plan.source.name,
            positions=self._job.positions,
            segments=prompt.segments,
            tokens=tuple(tokens),
            expected=plan.sample.answers,
            declared={**plan.declared, **self._special_token_facts(tokens)},
            started_at=time.time(),
        )

    def _special_token_facts(self, tokens: Sequence[TokenRecord]) -> dict[str, Any]:
        """Return what matters of special tokens for this prompt; its pieces are its segments."""
        ids, texts = [token.token_id for token in tokens], [token.text for token in tokens]
        return declaration_entries((), keep_written_special(self._tokenizer_facts, ids, texts))

    def _token_record(
        self,
        pos: int,
        token_id: int,
        text: str,
        position_id: int,
        segment: int,
        step: int | None,
    ) -> TokenRecord:
        words = self.vocabulary
        return TokenRecord(
            pos,
            token_id,
            words.token_of(token_id),
            text,
            position_id,
            segment,
            token_id in words.special,
            step,
        )


def _hold_at_end(session: CaptureSession, place: StepRef) -> QueuedRewind | None:
    """Keep the model alive until the gate has an order or ends it; Ctrl-C ends it too."""
    if session.barrier is None:
        return None
    text = "holding the model (flexinspect ctl continue ends the run)"
    session.recorder.put(EventRecord("phase", text, time.time()))
    try:
        return session.barrier.hold(place)
    except KeyboardInterrupt:
        acknowledge_end()
        return None


def _compile_reporter(session: CaptureSession) -> Callable[[str], None]:
    """Say in the trace that a kernel is being compiled, before the wait begins."""

    def tell(kind: str) -> None:
        text = f"compiling FlexAttention ({kind})"
        session.recorder.put(EventRecord("phase", text, time.time()))

    return tell


def _eos_ids(loaded: LoadedModel, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return every id that ends a text, from the generation settings or the tokenizer."""
    settings = getattr(loaded.model, "generation_config", None)
    found = getattr(settings, "eos_token_id", None)
    if found is None:
        found = vocabulary.tokenizer.eos_token_id
    if found is None:
        return ()
    ids: Iterable[int] = found if isinstance(found, Iterable) else (found,)
    return tuple(int(i) for i in ids)


def load_mask_mod(spec: str, segments: Sequence[Segment]) -> Callable[..., torch.Tensor]:
    """Return the user's rule from "package.module:function".

    The function is a `mask_mod` if it takes four arguments; if it takes one, it is called with the
    prompt's segments and returns the `mask_mod`. Indices are positions of the whole sequence.

    Raises `MaskError` when it cannot be imported, fails, or has another form.
    """
    made = _import_mask_mod(spec)
    if _accepts_arguments(made, 1) and not _accepts_arguments(made, 4):
        try:
            made = made(tuple(segments))
        except Exception as error:
            raise MaskError(
                f"--mask {spec} failed when called with the prompt's segments: {summarize_error(error)}"
            ) from error
    if not _accepts_arguments(made, 4):
        raise MaskError(
            f"--mask {spec} must take (b, h, q_idx, kv_idx), or (segments) and return such a rule."
        )
    rule: Callable[..., torch.Tensor] = made
    return rule


def _import_mask_mod(spec: str) -> Any:
    module_name, _, name = spec.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: a file here must not replace an installed module
    try:
        return getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a module may be a script that ends itself
        raise MaskError(
            f"--mask {spec} cannot be loaded: {summarize_error(error)}",
            hint="Write --mask package.module:function, importable from the current folder.",
        ) from error


def _accepts_arguments(function: Any, n: int) -> bool:
    """Say whether something can be called with `n` arguments."""
    try:
        inspect.signature(function).bind(*range(n))
    except (TypeError, ValueError):
        return False
    return True

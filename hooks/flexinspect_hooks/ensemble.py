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

from flexinspect import masks
from flexinspect.control.messages import Order, Place
from flexinspect.datasets import Sample
from flexinspect.ending import let_end, met
from flexinspect.errors import (
    ControlError,
    DatasetError,
    FlexInspectError,
    MaskError,
    in_a_line,
)
from flexinspect.job import Job
from flexinspect.pieces import to_declared
from flexinspect.prompts import Prompt, PromptPieces, Segment, compose
from flexinspect.records import EventRecord, GenerationRecord, TokenRecord
from flexinspect_hooks.control.gate import Gate
from flexinspect_hooks.generate import Decoder
from flexinspect_hooks.grads.after import TokenGradients
from flexinspect_hooks.masksource import MaskSource, OwnMask, RuleMask
from flexinspect_hooks.models import LoadedModel
from flexinspect_hooks.patching import FlexPatch
from flexinspect_hooks.saidwords import facts_of_tokenizer, written_special
from flexinspect_hooks.session import CaptureSession
from flexinspect_hooks.travel.journey import Journey
from flexinspect_hooks.travel.orders import Orders
from flexinspect_hooks.travel.parts import Limits
from flexinspect_hooks.travel.recording import TraceScribe, Words
from flexinspect_hooks.vocabulary import TextStream, Vocabulary


@dataclass(frozen=True, slots=True)
class Plan:
    """One sample, ready to run."""

    sample: Sample
    prompt: Prompt
    declared: dict[str, Any]
    source: MaskSource


class Ensemble:
    """Runs samples through one loaded model, each as a generation of the trace."""

    def __init__(self, loaded: LoadedModel, job: Job, *, compiled: bool) -> None:
        self.vocabulary = Vocabulary(loaded.tokenizer_or_ids())
        self._model = loaded.model
        self._job = job
        self._compiled = compiled
        self._device = torch.device(loaded.device)
        self._eos = _eos_ids(loaded, self.vocabulary)
        self._facts = facts_of_tokenizer(self.vocabulary)
        self._gradients = (
            TokenGradients(loaded.model, job, compiled=compiled) if job.grads else None
        )
        self.orders = Orders(self.vocabulary.encode, self.vocabulary.text_of)

    def plan(self, sample: Sample) -> Plan:
        """Compose the prompt and build the mask of a sample. Raises `UsageError` and kin."""
        pieces = self._pieces(sample)
        job = self._job
        prompt = compose(pieces, max_new_tokens=job.max_new_tokens, positions=job.positions)
        self._check_length(prompt)
        source, declared = self._mask(prompt.segments)
        return Plan(sample, prompt, declared, source)

    def _pieces(self, sample: Sample) -> PromptPieces:
        encode, texts = self.vocabulary.encode, self._job.texts
        paraphrases = tuple(encode(text) for text in sample.paraphrases)
        for number, ids in enumerate(paraphrases, start=1):
            if not ids:
                raise DatasetError(f"Paraphrase {number} of sample '{sample.id}' has no tokens.")
        return PromptPieces(
            bos=self.vocabulary.bos(),
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
            return OwnMask(own, name=job.mask, device=self._device), {"rule": job.mask}
        rule = masks.preset(job.mask, segments, separators=job.separators)
        declared = {
            "preset": job.mask,
            "separators": job.separators,
            "starts": rule.starts,
            "head": rule.head,
            "low": rule.low,
        }
        length = segments[-1].stop
        compiled = self._compiled
        return RuleMask(rule, length=length, device=self._device, compiled=compiled), declared

    def run(self, number: int, plan: Plan, session: CaptureSession, *, holds: bool = False) -> str:
        """Run one generation and record it; returns the answer of its first branch.

        Between two steps the session's gate, if it has one, may pause it or order it elsewhere;
        with `holds` it is kept alive at its end until the gate lets it go. An exception or an
        interrupt ends the generation in the trace before it goes on upwards.
        """
        begun = self.record_of(number, plan)
        session.begin_generation(begun)
        journey = self._journey(plan, session, begun)
        state, reason = "failed", ""
        try:
            with journey.patch:
                self.orders.begin(number, journey)
                self._drive(journey, session, number, holds=holds)
            state = "finished"
        except KeyboardInterrupt:
            state, reason = "interrupted", "stopped"
            met()
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            with let_end():
                self.orders.begin(number, None)
                journey.close(state, reason)
        return self._answer(journey.lines[0].token_ids(journey.lines[0].n_steps))

    def _drive(
        self, journey: Journey, session: CaptureSession, number: int, *, holds: bool
    ) -> None:
        """Go on to the end, and wherever the gate orders the generation to go."""
        gate = session.gate
        while True:
            place = Place(number, journey.line.branch, journey.step)
            order = gate.between_steps(place) if gate is not None else None
            if order is None and journey.is_over:
                order = _held(session, place) if holds else None
                if order is None:
                    return
            if order is None:
                with let_end():
                    journey.advance()
            elif gate is not None:
                with let_end():
                    self._obey(order, gate)

    def _obey(self, order: Order, gate: Gate) -> None:
        try:
            place, said = self.orders.obey(order)
        except FlexInspectError as error:
            gate.done(order, error)
        except (RuntimeError, MemoryError) as error:  # too little memory, mostly
            first = (str(error).strip().splitlines() or [""])[0]
            why = f"The {order.kind} failed: {type(error).__name__}: {first}"
            gate.done(order, ControlError(why))
        else:
            gate.done(order, place, said)

    def _journey(self, plan: Plan, session: CaptureSession, begun: GenerationRecord) -> Journey:
        job, prompt, words = self._job, plan.prompt, Words(self.vocabulary)
        decoder = Decoder(self._model, prompt, sampling=job.sampling, seed=job.seed)
        patch = FlexPatch(
            self._model, plan.source, compiled=self._compiled, on_compile=_teller(session)
        )
        scribe = TraceScribe(
            *(session, prompt, begun, words, self._token, self._answer),
            gradients=self._gradients,
        )
        # At a line break, but not at one before the first word.
        stops = words.ends_line if job.stop == "newline" else None
        limits = Limits(job.max_new_tokens, self._eos, stops)
        return Journey(self._model, decoder, patch, scribe, limits)

    def _answer(self, token_ids: Sequence[int]) -> str:
        return self.vocabulary.answer(token_ids, one_line=self._job.stop == "newline")

    def record_of(self, number: int, plan: Plan) -> GenerationRecord:
        """Return the record of a generation that is about to begin."""
        prompt = plan.prompt
        tokens: list[TokenRecord] = []
        for index, segment in enumerate(prompt.segments[:-1]):
            stream = TextStream(self.vocabulary)  # pieces are texts of their own
            for pos in range(segment.start, segment.stop):
                token_id = prompt.ids[pos]
                text, position = stream.add(token_id), prompt.position_ids[pos]
                tokens.append(self._token(pos, token_id, text, position, index, None))
        return GenerationRecord(
            generation=number,
            sample_id=plan.sample.id,
            mask=plan.source.name,
            positions=self._job.positions,
            segments=prompt.segments,
            tokens=tuple(tokens),
            expected=plan.sample.answers,
            declared={**plan.declared, **self._said(tokens)},
            started_at=time.time(),
        )

    def _said(self, tokens: Sequence[TokenRecord]) -> dict[str, Any]:
        """Return what matters of special tokens for this prompt; its pieces are its segments."""
        ids, texts = [token.token_id for token in tokens], [token.text for token in tokens]
        return to_declared((), written_special(self._facts, ids, texts))

    def _token(
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


def _held(session: CaptureSession, place: Place) -> Order | None:
    """Keep the model alive until the gate has an order or ends it; Ctrl-C ends it too."""
    if session.gate is None:
        return None
    text = "holding the model (flexinspect ctl continue ends the run)"
    session.recorder.put(EventRecord("phase", text, time.time()))
    try:
        return session.gate.hold(place)
    except KeyboardInterrupt:
        met()
        return None


def _teller(session: CaptureSession) -> Callable[[str], None]:
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
    made = _imported_rule(spec)
    if _takes(made, 1) and not _takes(made, 4):
        try:
            made = made(tuple(segments))
        except Exception as error:
            raise MaskError(
                f"--mask {spec} failed when called with the prompt's segments: {in_a_line(error)}"
            ) from error
    if not _takes(made, 4):
        raise MaskError(
            f"--mask {spec} must take (b, h, q_idx, kv_idx), or (segments) and return such a rule."
        )
    rule: Callable[..., torch.Tensor] = made
    return rule


def _imported_rule(spec: str) -> Any:
    module_name, _, name = spec.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: a file here must not replace an installed module
    try:
        return getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a module may be a script that ends itself
        raise MaskError(
            f"--mask {spec} cannot be loaded: {in_a_line(error)}",
            hint="Write --mask package.module:function, importable from the current folder.",
        ) from error


def _takes(function: Any, n: int) -> bool:
    """Say whether something can be called with `n` arguments."""
    try:
        inspect.signature(function).bind(*range(n))
    except (TypeError, ValueError):
        return False
    return True

"""Records a generation and its branches in the trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from flexinspect.records.prompt import Prompt, close_generated_segment
from flexinspect.records.step import (
    BranchRecord,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    TokenRecord,
)
from flexinspect.trace.queries.branch_queries import with_declared_mask
from flexinspect_hooks.generation.decoding import Choice
from flexinspect_hooks.gradients.after_generation import FinishedBranch, TokenGradients
from flexinspect_hooks.loading.tokenizers import TextStream, Vocabulary, token_record
from flexinspect_hooks.rewind.branch_state import BranchState
from flexinspect_hooks.sessions.capture_session import CaptureSession


class GeneratedText:
    """The text of the generated tokens, token by token, for any branch."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._stream = TextStream(vocabulary)

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each of these tokens adds."""
        known = len(self._ids)
        if self._ids != list(token_ids[:known]):
            self._ids, self._texts = [], []
            self._stream, known = TextStream(self.vocabulary), 0
        for token_id in token_ids[known:]:
            self._ids.append(token_id)
            self._texts.append(self._stream.add(token_id))
        return self._texts[: len(token_ids)]

    def has_line_break(self, token_ids: Sequence[int]) -> bool:
        """Whether the text has a line break after its first word."""
        return "\n" in "".join(self.texts(token_ids)).lstrip()


class TraceBranchRecorder:
    """Records the branches of one generation through a capture session.

    `generation` is the record of the generation. `answer_of` is the answer text of token ids.
    With `gradients`, the gradients of each branch are computed when it has finished.
    """

    def __init__(
        self,
        session: CaptureSession,
        prompt: Prompt,
        generation: GenerationRecord,
        text: GeneratedText,
        answer_of: Callable[[Sequence[int]], str],
        *,
        gradients: TokenGradients | None = None,
    ) -> None:
        self._gradients = gradients
        if gradients is not None:
            gradients.begin_generation(session.recorder)
        self._session, self._prompt, self._generation = session, prompt, generation
        self._text, self._answer_of = text, answer_of

    def set_next_step(self, branch: int, step: int) -> None:
        """The next forward pass is this step."""
        self._session.set_next_step(branch, step)

    def no_capture(self) -> AbstractContextManager[None]:
        """Forward passes inside the context are not recorded."""
        return self._session.no_capture()

    def drop_step(self, branch: BranchState) -> None:
        """Drop the open step: the trace has it already, as a step of `branch`."""
        self._session.drop_step(branch.number)

    def on_token_chosen(self, branch: BranchState, choice: Choice) -> None:
        """End the open step, which belongs to `branch`."""
        token_ids = branch.token_ids(choice.step + 1)
        token = self._token_record(choice.step, choice.token_id, self._text.texts(token_ids)[-1])
        self._session.move_step(branch.number)
        self._session.on_token_chosen(token, choice.chosen, choice.scores)
        if self._gradients is not None:
            self._gradients.on_token_chosen(
                branch.number, choice.step, choice.token_id, choice.logits
            )

    def begin_branch(self, branch: BranchState) -> None:
        """Record that a branch begins, before its first step is written."""
        assert branch.parent is not None
        change = branch.change
        record = BranchRecord(
            generation=self._generation.generation,
            branch=branch.number,
            parent=branch.parent.number,
            fork_step=branch.fork_step,
            change=change,
            segments=self._prompt.segments,
            recomputed=branch.recomputed,
        )
        self._session.begin_branch(record, self._branch_generation(branch))
        facts = {name: value for name, value in change.items() if name != "declared"}
        facts = {"parent": branch.parent.number, "branch": branch.number, **facts}
        kind = {"token": "forked", "mask": "mask-edited"}.get(str(change.get("kind")))
        if kind is not None:
            self.record_event(kind, branch.describe(), branch, branch.fork_step, facts)

    def end_branch(self, branch: BranchState, state: str, reason: str) -> None:
        """Record that a branch (0 is the base) ended, after computing its gradients."""
        token_ids = branch.token_ids(branch.n_steps)
        end = GenerationEnd(
            generation=self._generation.generation,
            state=state,
            answer=self._answer_of(token_ids),
            segments=close_generated_segment(
                self._prompt.segments, len(self._prompt.ids) + len(token_ids)
            ),
            stop_reason=reason,
            ended_at=time.time(),
            branch=branch.number,
        )
        try:
            if self._gradients is not None and state == "finished":
                self._compute_gradients(self._gradients, branch, token_ids)
        finally:
            self._session.end_generation(end)

    def _compute_gradients(
        self, gradients: TokenGradients, branch: BranchState, token_ids: Sequence[int]
    ) -> None:
        """Compute the gradients of a branch; of all commands, only a stop is handled meanwhile."""
        barrier = self._session.barrier
        finished = FinishedBranch(
            self._generation.generation,
            self._prompt,
            token_ids,
            branch.source,
            branch.number,
            branch.fork_step,
        )
        check_stop = barrier.raise_if_stopping if barrier is not None else lambda: None
        gradients.compute(finished, self._session.recorder, check_stop)

    def record_event(
        self, kind: str, text: str, branch: BranchState, step: int, facts: Mapping[str, Any]
    ) -> None:
        """Record an event after a step of a branch."""
        data = {"branch": branch.number, **facts}
        event = EventRecord(kind, text, time.time(), self._generation.generation, step, data)
        self._session.recorder.put(event)

    def _token_record(
        self, step: int, token_id: int, text: str, *, is_prompt: bool = False
    ) -> TokenRecord:
        prompt = self._prompt
        return token_record(
            self._text.vocabulary,
            pos=len(prompt.ids) + step,
            token_id=token_id,
            text=text,
            position_id=prompt.next_position(step),
            segment=len(prompt.segments) - 1,
            step=None if is_prompt else step,
        )

    def _branch_generation(self, branch: BranchState) -> GenerationRecord:
        """The record of the generation with the mask and the prompt of the branch.

        Where the whole sequence is recomputed, the tokens before the fork are part of the prompt.
        """
        before_fork: tuple[TokenRecord, ...] = ()
        if branch.recomputed:
            token_ids = branch.token_ids(branch.fork_step)
            texts = self._text.texts(token_ids)
            before_fork = tuple(
                self._token_record(step, token_id, text, is_prompt=True)
                for step, (token_id, text) in enumerate(zip(token_ids, texts, strict=True))
            )
        tokens = (*self._generation.tokens, *before_fork)
        changes = (ancestor.change for ancestor in branch.ancestry())
        mask = next((change["declared"] for change in changes if "declared" in change), None)
        if mask is None:
            return replace(self._generation, tokens=tokens)
        declared = with_declared_mask(self._generation.declared, mask)
        return replace(self._generation, mask=branch.source.name, tokens=tokens, declared=declared)

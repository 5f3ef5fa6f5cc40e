"""Writes down a generation and its branches: what the ensemble's run leaves in the trace."""

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
from flexinspect_hooks.loading.tokenizers import TextStream, Vocabulary
from flexinspect_hooks.rewind.branch_state import BranchState
from flexinspect_hooks.rewind.branching_decoder import describe_branch
from flexinspect_hooks.sessions.capture_session import CaptureSession

MakeToken = Callable[[int, int, str, int, int, int | None], TokenRecord]
"""Makes a token of position, id, text, position id, segment and step."""


class GeneratedText:
    """The text of what was generated so far, token by token, whichever branch it is of."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._stream = TextStream(vocabulary)

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return what each of these tokens adds to the text."""
        known = len(self._ids)
        if self._ids != list(token_ids[:known]):
            self._ids, self._texts = [], []
            self._stream, known = TextStream(self._vocabulary), 0
        for token_id in token_ids[known:]:
            self._ids.append(token_id)
            self._texts.append(self._stream.add(token_id))
        return self._texts[: len(token_ids)]

    def has_line_break(self, token_ids: Sequence[int]) -> bool:
        """Say whether the text has a line break that is not before its first word."""
        return "\n" in "".join(self.texts(token_ids)).lstrip()


class TraceBranchRecorder:
    """Records a journey through a capture session; `begun` is the record of the generation.

    `gradients` are taken of each branch when it has come to its end.
    """

    def __init__(
        self,
        session: CaptureSession,
        prompt: Prompt,
        generation: GenerationRecord,
        text: GeneratedText,
        make_token: MakeToken,
        answer_of: Callable[[Sequence[int]], str],
        *,
        gradients: TokenGradients | None = None,
    ) -> None:
        self._gradients = gradients
        if gradients is not None:
            gradients.begin_generation(session.recorder)
        self._session, self._prompt, self._generation = session, prompt, generation
        self._text, self._make_token, self._answer_of = text, make_token, answer_of

    def set_next_step(self, branch: int, step: int) -> None:
        """The next forward is this step."""
        self._session.set_next_step(branch, step)

    def no_capture(self) -> AbstractContextManager[None]:
        """While entered, forwards are nobody's steps."""
        return self._session.no_capture()

    def drop_step(self, branch: BranchState) -> None:
        """The open step is in the trace already, as a step of `line`."""
        self._session.drop_step(branch.number)

    def on_token_chosen(self, branch: BranchState, choice: Choice) -> None:
        """The open step is over, and belongs to `line`."""
        token_ids = branch.token_ids(choice.step + 1)
        token = self._token_record(choice.step, choice.token_id, self._text.texts(token_ids)[-1])
        self._session.move_step(branch.number)
        self._session.on_token_chosen(token, choice.chosen, choice.scores)
        if self._gradients is not None:
            self._gradients.on_token_chosen(
                branch.number, choice.step, choice.token_id, choice.logits
            )

    def begin_branch(self, branch: BranchState) -> None:
        """A branch begins; the trace says what it is before its first step is written."""
        assert branch.parent is not None
        change = branch.change
        place = (self._generation.generation, branch.number, branch.parent.number, branch.fork_step)
        record = BranchRecord(*place, change, self._prompt.segments, branch.recomputed)
        self._session.begin_branch(record, self._branch_generation(branch))
        about = {name: value for name, value in change.items() if name != "declared"}
        what = {"parent": branch.parent.number, "branch": branch.number, **about}
        kind = {"token": "forked", "mask": "mask-edited"}.get(str(change.get("kind")))
        if kind is not None:
            self.record_event(kind, describe_branch(branch), branch, branch.fork_step, what)

    def end_branch(self, branch: BranchState, state: str, reason: str) -> None:
        """A branch, or the base, ended."""
        token_ids = branch.token_ids(branch.n_steps)
        segments = close_generated_segment(
            self._prompt.segments, len(self._prompt.ids) + len(token_ids)
        )
        answer = self._answer_of(token_ids)
        place = (
            self._generation.generation,
            state,
            answer,
            segments,
            reason,
            time.time(),
            branch.number,
        )
        try:
            if self._gradients is not None and state == "finished":
                self._compute_gradients(self._gradients, branch, token_ids)
        finally:
            self._session.end_generation(GenerationEnd(*place))

    def _compute_gradients(
        self, gradients: TokenGradients, branch: BranchState, token_ids: Sequence[int]
    ) -> None:
        """Take the gradients of a branch; what the gate holds back meanwhile is a stop alone."""
        gate, place = self._session.barrier, (branch.number, branch.fork_step)
        ended = FinishedBranch(
            self._generation.generation, self._prompt, token_ids, branch.source, *place
        )
        stop = gate.raise_if_stopping if gate is not None else lambda: None
        gradients.compute(ended, self._session.recorder, stop)

    def record_event(
        self, kind: str, text: str, branch: BranchState, step: int, facts: Mapping[str, Any]
    ) -> None:
        """Something happened behind a step of a line."""
        about = (kind, text, time.time(), self._generation.generation, step)
        self._session.recorder.put(EventRecord(*about, {"branch": branch.number, **facts}))

    def _token_record(
        self, step: int, token_id: int, text: str, *, is_prompt: bool = False
    ) -> TokenRecord:
        prompt = self._prompt
        place = (prompt.next_position(step), len(prompt.segments) - 1, None if is_prompt else step)
        return self._make_token(len(prompt.ids) + step, token_id, text, *place)

    def _branch_generation(self, branch: BranchState) -> GenerationRecord:
        """Return the generation as the branch finds it: under its mask.

        Where the sequence is fed anew, the tokens before the fork are given, as a prompt is.
        """
        given: tuple[TokenRecord, ...] = ()
        if branch.recomputed:
            token_ids = branch.token_ids(branch.fork_step)
            texts = self._text.texts(token_ids)
            pairs = enumerate(zip(token_ids, texts, strict=True))
            given = tuple(self._token_record(step, *pair, is_prompt=True) for step, pair in pairs)
        tokens = (*self._generation.tokens, *given)
        edited = (one.change["declared"] for one in branch.ancestry() if "declared" in one.change)
        mask = next(edited, None)
        if mask is None:
            return replace(self._generation, tokens=tokens)
        declared = with_declared_mask(self._generation.declared, mask)
        return replace(self._generation, mask=branch.source.name, tokens=tokens, declared=declared)

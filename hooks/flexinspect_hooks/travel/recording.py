"""Writes down a generation and its branches: what the ensemble's run leaves in the trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from flexinspect.prompts import Prompt, close_generated
from flexinspect.records import (
    BranchRecord,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    TokenRecord,
)
from flexinspect.trace.branchfacts import redeclared
from flexinspect_hooks.generate import Choice
from flexinspect_hooks.grads.after import Ended, TokenGradients
from flexinspect_hooks.session import CaptureSession
from flexinspect_hooks.travel.lines import Line
from flexinspect_hooks.travel.words import branch_words
from flexinspect_hooks.vocabulary import TextStream, Vocabulary

MakeToken = Callable[[int, int, str, int, int, int | None], TokenRecord]
"""Makes a token of position, id, text, position id, segment and step."""


class Words:
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

    def ends_line(self, token_ids: Sequence[int]) -> bool:
        """Say whether the text has a line break that is not before its first word."""
        return "\n" in "".join(self.texts(token_ids)).lstrip()


class TraceScribe:
    """Records a journey through a capture session; `begun` is the record of the generation.

    `gradients` are taken of each branch when it has come to its end.
    """

    def __init__(
        self,
        session: CaptureSession,
        prompt: Prompt,
        begun: GenerationRecord,
        words: Words,
        make_token: MakeToken,
        answer_of: Callable[[Sequence[int]], str],
        *,
        gradients: TokenGradients | None = None,
    ) -> None:
        self._gradients = gradients
        if gradients is not None:
            gradients.begin(session.recorder)
        self._session, self._prompt, self._begun = session, prompt, begun
        self._words, self._make_token, self._answer_of = words, make_token, answer_of

    def stand(self, branch: int, step: int) -> None:
        """The next forward is this step."""
        self._session.stand(branch, step)

    def muted(self) -> AbstractContextManager[None]:
        """While entered, forwards are nobody's steps."""
        return self._session.muted()

    def drop(self, line: Line) -> None:
        """The open step is in the trace already, as a step of `line`."""
        self._session.drop_step(line.branch)

    def chose(self, line: Line, choice: Choice) -> None:
        """The open step is over, and belongs to `line`."""
        token_ids = line.token_ids(choice.step + 1)
        token = self._token(choice.step, choice.token_id, self._words.texts(token_ids)[-1])
        self._session.move_step(line.branch)
        self._session.chose(token, choice.chosen, choice.scores)
        if self._gradients is not None:
            self._gradients.chose(line.branch, choice.step, choice.token_id, choice.logits)

    def begin(self, line: Line) -> None:
        """A branch begins; the trace says what it is before its first step is written."""
        assert line.parent is not None
        change = line.change
        place = (self._begun.generation, line.branch, line.parent.branch, line.fork_step)
        record = BranchRecord(*place, change, self._prompt.segments, line.recomputed)
        self._session.begin_branch(record, self._beginning(line))
        about = {name: value for name, value in change.items() if name != "declared"}
        what = {"parent": line.parent.branch, "branch": line.branch, **about}
        kind = {"token": "forked", "mask": "mask-edited"}.get(str(change.get("kind")))
        if kind is not None:
            self.tell(kind, branch_words(line), line, line.fork_step, what)

    def end(self, line: Line, state: str, reason: str) -> None:
        """A branch, or the base, ended."""
        token_ids = line.token_ids(line.n_steps)
        segments = close_generated(self._prompt.segments, len(self._prompt.ids) + len(token_ids))
        answer = self._answer_of(token_ids)
        place = (self._begun.generation, state, answer, segments, reason, time.time(), line.branch)
        try:
            if self._gradients is not None and state == "finished":
                self._differentiate(self._gradients, line, token_ids)
        finally:
            self._session.end_generation(GenerationEnd(*place))

    def _differentiate(
        self, gradients: TokenGradients, line: Line, token_ids: Sequence[int]
    ) -> None:
        """Take the gradients of a branch; what the gate holds back meanwhile is a stop alone."""
        gate, place = self._session.gate, (line.branch, line.fork_step)
        ended = Ended(self._begun.generation, self._prompt, token_ids, line.source, *place)
        stop = gate.end_if_stopping if gate is not None else lambda: None
        gradients.take(ended, self._session.recorder, stop)

    def tell(self, kind: str, text: str, line: Line, step: int, facts: Mapping[str, Any]) -> None:
        """Something happened behind a step of a line."""
        about = (kind, text, time.time(), self._begun.generation, step)
        self._session.recorder.put(EventRecord(*about, {"branch": line.branch, **facts}))

    def _token(self, step: int, token_id: int, text: str, *, given: bool = False) -> TokenRecord:
        prompt = self._prompt
        place = (prompt.next_position(step), len(prompt.segments) - 1, None if given else step)
        return self._make_token(len(prompt.ids) + step, token_id, text, *place)

    def _beginning(self, line: Line) -> GenerationRecord:
        """Return the generation as the branch finds it: under its mask.

        Where the sequence is fed anew, the tokens before the fork are given, as a prompt is.
        """
        given: tuple[TokenRecord, ...] = ()
        if line.recomputed:
            token_ids = line.token_ids(line.fork_step)
            texts = self._words.texts(token_ids)
            pairs = enumerate(zip(token_ids, texts, strict=True))
            given = tuple(self._token(step, *pair, given=True) for step, pair in pairs)
        tokens = (*self._begun.tokens, *given)
        edited = (one.change["declared"] for one in line.family() if "declared" in one.change)
        mask = next(edited, None)
        if mask is None:
            return replace(self._begun, tokens=tokens)
        declared = redeclared(self._begun.declared, mask)
        return replace(self._begun, mask=line.source.name, tokens=tokens, declared=declared)

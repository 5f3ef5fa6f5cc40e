"""Records a generation and its branches in the trace."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from flexinspect.records import step as records
from flexinspect.records.prompt import Prompt, close_generated_segment
from flexinspect.trace.queries import with_declared_mask
from flexinspect_hooks.generation.decoding import Choice
from flexinspect_hooks.gradients.after_generation import FinishedBranch, TokenGradients
from flexinspect_hooks.loading.tokenizers import TextStream, Vocabulary, token_record
from flexinspect_hooks.rewind.branch_state import BranchState
from flexinspect_hooks.sessions.capture_session import CaptureSession


class TraceBranchRecorder:
    """Records the branches of one generation; with `one_line` the answer is its first line."""

    def __init__(
        self,
        session: CaptureSession,
        prompt: Prompt,
        generation: records.GenerationRecord,
        vocabulary: Vocabulary,
        gradients: TokenGradients | None,
        *,
        one_line: bool,
    ) -> None:
        if gradients is not None:
            gradients.begin_generation(session.recorder)
        self._session, self._prompt, self._generation = session, prompt, generation
        self._vocabulary, self._gradients, self._one_line = vocabulary, gradients, one_line
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._stream = TextStream(vocabulary)
        self.set_next_step, self.drop_step = session.set_next_step, session.drop_step
        self.no_capture = session.no_capture

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each of these generated tokens adds, for any branch."""
        if self._ids != list(token_ids[: len(self._ids)]):
            self._ids, self._texts, self._stream = [], [], TextStream(self._vocabulary)
        new = token_ids[len(self._ids) :]
        self._ids += new
        self._texts += map(self._stream.add, new)
        return self._texts[: len(token_ids)]

    def has_line_break(self, token_ids: Sequence[int]) -> bool:
        """Whether the generated text has a line break after its first word."""
        return "\n" in "".join(self.texts(token_ids)).lstrip()

    def on_token_chosen(self, branch: BranchState, choice: Choice) -> None:
        """End the open step, which belongs to `branch`."""
        text = self.texts(branch.token_ids(choice.step + 1))[-1]
        token = self._token_record(choice.step, choice.token_id, text)
        self._session.move_step(branch.number)
        self._session.on_token_chosen(token, choice.scores, choice.processed)
        if self._gradients is not None:
            step, token_id, logits = choice.step, choice.token_id, choice.logits
            self._gradients.on_token_chosen(branch.number, step, token_id, logits)

    def begin_branch(self, branch: BranchState) -> None:
        """Record that a branch begins, before its first step is written."""
        assert branch.parent is not None
        change, parent = branch.change, branch.parent.number
        record = records.BranchRecord(
            generation=self._generation.generation,
            branch=branch.number,
            parent=parent,
            fork_step=branch.fork_step,
            change=change,
            segments=self._prompt.segments,
            recomputed=branch.recomputed,
        )
        self._session.begin_branch(record, self._branch_generation(branch))
        kind = {"token": "forked", "mask": "mask-edited"}.get(str(change.get("kind")))
        if kind is not None:
            facts = {name: value for name, value in change.items() if name != "declared"}
            facts = {"parent": parent, "branch": branch.number, **facts}
            self.record_event(kind, branch.describe(), branch, branch.fork_step, facts)

    def end_branch(self, branch: BranchState, state: str, reason: str) -> None:
        """Record that a branch (0 is the base) ended, after computing its gradients."""
        generation, prompt = self._generation.generation, self._prompt
        token_ids = branch.token_ids(branch.n_steps)
        end = records.GenerationEnd(
            generation=generation,
            state=state,
            answer=self._vocabulary.decode_generated(token_ids, one_line=self._one_line),
            segments=close_generated_segment(prompt.segments, len(prompt.ids) + len(token_ids)),
            stop_reason=reason,
            ended_at=time.time(),
            branch=branch.number,
        )
        try:
            if self._gradients is not None and state == "finished":
                place = (branch.number, branch.fork_step)
                finished = FinishedBranch(generation, prompt, token_ids, branch.source, *place)
                # Of all commands, only a stop is handled meanwhile.
                check_stop = self._session.barrier.raise_if_stopping
                self._gradients.compute(finished, self._session.recorder, check_stop)
        finally:
            self._session.end_generation(end)

    def record_event(
        self, kind: str, text: str, branch: BranchState, step: int, facts: Mapping[str, Any]
    ) -> None:
        """Record an event after a step of a branch."""
        place, data = (self._generation.generation, step), {"branch": branch.number, **facts}
        self._session.recorder.put(records.EventRecord(kind, text, time.time(), *place, data))

    def _token_record(
        self, step: int, token_id: int, text: str, *, is_prompt: bool = False
    ) -> records.TokenRecord:
        vocabulary, prompt = self._vocabulary, self._prompt
        pos, position = len(prompt.ids) + step, prompt.next_position(step)
        segment, chosen_at = len(prompt.segments) - 1, None if is_prompt else step
        return token_record(vocabulary, pos, token_id, text, position, segment, chosen_at)

    def _branch_generation(self, branch: BranchState) -> records.GenerationRecord:
        """The generation with the branch's mask; before a recomputed step all tokens are prompt."""
        tokens = self._generation.tokens
        if branch.recomputed:
            token_ids = branch.token_ids(branch.fork_step)
            pairs = enumerate(zip(token_ids, self.texts(token_ids), strict=True))
            tokens += tuple(self._token_record(n, *pair, is_prompt=True) for n, pair in pairs)
        changes = (ancestor.change for ancestor in branch.ancestry())
        mask = next((change["declared"] for change in changes if "declared" in change), None)
        if mask is None:
            return replace(self._generation, tokens=tokens)
        declared = with_declared_mask(self._generation.declared, mask)
        return replace(self._generation, mask=branch.source.name, tokens=tokens, declared=declared)

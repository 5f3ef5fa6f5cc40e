"""Prompts of a chat that end behind a turn, without the header of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexinspect.core.text import format_ids, printable
from flexinspect.records import imported
from flexinspect.records.prompt import declared_tokenizer
from flexinspect.records.step import StepRecord, TokenRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

NO_ANSWER_HEADER = "inputs.no-answer-header"


class OpenTurnRule(Rule):
    """Compares the end of a prompt that is continued with that of the tokenizer's chat template."""

    name = "open_turn"
    needs = (imported.CHOSEN,)
    findings = finding_kinds(NO_ANSWER_HEADER)

    def reset(self) -> None:
        self._is_continued = False

    def on_step(self, step: StepRecord) -> Findings:
        """Note whether a token is generated."""
        self._is_continued |= any(token.step is not None for token in step.tokens)
        yield from ()

    def on_generation_end(self) -> Findings:
        """Report a prompt that ends as a turn does, if a token was generated after it."""
        facts = declared_tokenizer(self.context.generation.declared)
        end, start = facts.turn_end, facts.answer_start
        if not end or not start or not self._is_continued:
            return
        tokens = sorted(self.context.generation.tokens, key=lambda token: token.pos)
        prompt = [token for token in tokens if token.step is None and token.token_id != facts.pad]
        last = prompt[-len(end) :]
        if tuple(token.token_id for token in last) != end:
            return
        yield self._finding(last, start)

    def _finding(self, last: Sequence[TokenRecord], start: Sequence[int]) -> Any:
        ended = printable("".join(token.token for token in last))
        sentence = (
            f'The prompt ends with "{ended}", which ends a turn of the chat, and the answer '
            f"follows at once: the chat template begins an answer with {format_ids(start)}, which "
            "it adds with add_generation_prompt=True."
        )
        evidence = {"turn_end": [t.token_id for t in last], "answer_start": list(start)}
        positions = [token.pos for token in last]
        return self.finding(
            None, NO_ANSWER_HEADER, sentence, evidence=evidence, positions=positions
        )

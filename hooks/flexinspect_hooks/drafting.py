"""A finished step on its way to a record: its values, then what each hook makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flexinspect.records import StepRecord
from flexinspect_hooks.buffer import Values
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.hook import Hook, StepDraft

if TYPE_CHECKING:
    from flexinspect_hooks.recorder import FinishedStep

OnHookFailed = Callable[[Hook, Exception, StepContext], None]
"""Told of a hook that failed at a step."""


class StepAssembler:
    """A step while it becomes a record; a hook that fails is not asked for more of it."""

    def __init__(self, item: FinishedStep) -> None:
        self._item, self._step, self._draft = item, item.context, StepDraft()
        self._failed_hooks: list[Hook] = []
        self._tokens = item.take_tokens()
        self._values: Values = {}

    def collect_values(self, on_failed: OnHookFailed) -> None:
        """Take what was sent."""

        def unmade(hook: Hook, error: Exception) -> None:
            self._failed_hooks.append(hook)
            on_failed(hook, error, self._step)

        self._values = self._item.buffer.values(unmade)

    @property
    def n_hooks(self) -> int:
        """How many hooks have something to say."""
        return len(self._item.kept)

    def run_hook(self, number: int, on_failed: OnHookFailed) -> None:
        """Let a hook write its part; one after the other, as later ones read what others wrote."""
        if number >= len(self._item.kept):
            return
        hook, kept = self._item.kept[number]
        if hook in self._failed_hooks:
            return
        try:
            hook.record(self._step, kept, self._values, self._draft)
        except Exception as error:
            on_failed(hook, error, self._step)

    def assemble(self) -> StepRecord:
        """Return the record without what rules say of it."""
        return self._draft.assemble(self._step, self._tokens)

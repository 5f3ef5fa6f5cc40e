"""The session of a model that was found in a program: quiet, and known to whoever found it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch import nn

from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.fedrows import InputRows
from flexinspect_hooks.foundwords import MatchedTokenizer
from flexinspect_hooks.sequence import StepPlace
from flexinspect_hooks.watchparts import SharedRecording
from flexinspect_hooks.watchsession import WatchSession

if TYPE_CHECKING:
    from flexinspect_hooks.findmodels import ModelFinder


class FoundSession(WatchSession):
    """The session of a model that was found. Nothing of it is said on the program's stderr."""

    def __init__(
        self,
        model: nn.Module,
        finder: ModelFinder,
        shared_recording: SharedRecording,
        tokenizer: MatchedTokenizer,
    ) -> None:
        self._finder, self._tokenizer = finder, tokenizer
        self._thread = self._exit_exception_id = 0
        super().__init__(
            model,
            finder.writer,
            finder.declared_prompt(tokenizer),
            level=finder.job.level,
            layers=finder.layers_of(model),
            shared_recording=shared_recording,
        )

    def _on_forward_start(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._finder.is_root(module):  # within another model's forward it is a part of that one
            super()._on_forward_start(module, args, kwargs)

    def _start_generation(self, place: StepPlace, rows: InputRows) -> None:
        self._tokenizer.use(self._finder.tokenizers.match(self._model))
        if not self._tokenizer.has_text and any(one.text for one in self._declared_prompt.segments):
            text = "No tokenizer was found in the program, so texts that were declared cannot be "
            self._event("segments", text + "looked for; spans of positions can.")
        super()._start_generation(place, rows)

    def _begin_step(self, step: StepContext) -> None:
        super()._begin_step(step)
        self._thread, self._exit_exception_id = threading.get_ident(), 0
        self._finder.on_step_begin(step)

    def _print_once(self, sentence: str) -> None:
        """Say nothing: it is in the trace, and stderr is the program's."""

    def _report_hooks_removed(self) -> None:
        """Say nothing at the end: before each forward they are looked for."""

    def has_recorded(self, error: BaseException) -> bool:
        """Say whether this exception is in the trace already."""
        return error is self._recorded_error

    def on_forward_failed(self, error: BaseException) -> None:
        """A forward is left by this exception, which somebody may catch."""
        self._exit_exception_id = id(error)  # holding it would hold all that its frames hold

    def failed_step(self, errors: set[int]) -> tuple[bool, float]:
        """Say whether one of these exceptions, by id, left an open step, and when that step began.

        Without one it is the step that waits for its token; 0.0 when there is none in this thread.
        """
        if self._thread != threading.get_ident():
            return False, 0.0
        if self._step is not None:
            is_left = self._exit_exception_id in errors
            return is_left, self._step.started if is_left else 0.0
        return False, self._pending.step.started if self._pending is not None else 0.0

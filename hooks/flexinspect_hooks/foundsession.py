"""The session of a model that was found in a program: quiet, and known to whoever found it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch import nn

from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.fedrows import FedRows
from flexinspect_hooks.foundwords import FoundWords
from flexinspect_hooks.sequence import Place
from flexinspect_hooks.watchparts import Company
from flexinspect_hooks.watchsession import WatchSession

if TYPE_CHECKING:
    from flexinspect_hooks.findmodels import ModelFinder


class FoundSession(WatchSession):
    """The session of a model that was found. Nothing of it is said on the program's stderr."""

    def __init__(
        self, model: nn.Module, finder: ModelFinder, company: Company, words: FoundWords
    ) -> None:
        self._finder, self._words = finder, words
        self._thread = self._left_by = 0
        super().__init__(
            model,
            finder.writer,
            finder.wishes(words),
            level=finder.job.level,
            layers=finder.layers_of(model),
            company=company,
        )

    def _open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._finder.is_root(module):  # within another model's forward it is a part of that one
            super()._open(module, args, kwargs)

    def _begin(self, place: Place, rows: FedRows) -> None:
        self._words.become(self._finder.tokenizers.words_of(self._model))
        if not self._words.has_text and any(one.text for one in self._wishes.segments):
            text = "No tokenizer was found in the program, so texts that were declared cannot be "
            self._event("segments", text + "looked for; spans of positions can.")
        super()._begin(place, rows)

    def _begin_step(self, step: StepContext) -> None:
        super()._begin_step(step)
        self._thread, self._left_by = threading.get_ident(), 0
        self._finder.entered(step)

    def _tell(self, sentence: str) -> None:
        """Say nothing: it is in the trace, and stderr is the program's."""

    def _tell_hooks_gone(self) -> None:
        """Say nothing at the end: before each forward they are looked for."""

    def has_told(self, error: BaseException) -> bool:
        """Say whether this exception is in the trace already."""
        return error is self._told_error

    def left(self, error: BaseException) -> None:
        """A forward is left by this exception, which somebody may catch."""
        self._left_by = id(error)  # holding it would hold all that its frames hold

    def stands_in(self, errors: set[int]) -> tuple[bool, float]:
        """Say whether one of these exceptions, by id, left an open step, and when that step began.

        Without one it is the step that waits for its token; 0.0 when there is none in this thread.
        """
        if self._thread != threading.get_ident():
            return False, 0.0
        if self._step is not None:
            is_left = self._left_by in errors
            return is_left, self._step.started if is_left else 0.0
        return False, self._waiting.step.started if self._waiting is not None else 0.0

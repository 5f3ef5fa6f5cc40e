"""What is looked at in the logits processors and stopping criteria of the program in `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from flexinspect.rules.text.kept_state import KEPT_EVENT
from flexinspect.rules.text.penalty_sign import SIGN_EVENT
from flexinspect.rules.text.processor_rows import PROCESSOR_EVENT
from flexinspect.rules.text.stopping_rows import STOPPING_EVENT
from flexinspect.rules.text.stops_at_prompt import PROMPT_STOP_EVENT
from flexinspect_hooks.generate_calls.processor_trials import (
    ProcessorRows,
    name_and_place,
    own_processors,
)
from flexinspect_hooks.generate_calls.state_between_calls import (
    KeptProcessor,
    KeptStates,
    ObjectStart,
)
from flexinspect_hooks.generate_calls.stopping_trials import StoppingCalls


class GenerateEvent(NamedTuple):
    """The kind, text and data of an event."""

    kind: str
    text: str
    facts: dict[str, Any]


class GenerateChecks:
    """The checks of one call of `generate` with the arguments `kwargs`.

    `states` are those that earlier calls left; None if tokens are not chosen row by row, as by
    beams.
    """

    def __init__(self, kwargs: Mapping[str, Any], states: KeptStates | None) -> None:
        self._states = states
        processors = own_processors(kwargs.get("logits_processor"))
        criteria = own_processors(kwargs.get("stopping_criteria")) if states is not None else []
        self._criteria = self._begin(criteria)
        self._processors = self._begin(processors)
        self._kept = {
            key: KeptProcessor(start)
            for key, start in self._processors.items()
            if start.anew is not None
        }
        self._rows = ProcessorRows(processors, self._kept) if processors else None
        self._stops = StoppingCalls(self._criteria) if self._criteria else None

    def _begin(self, called: list[Any]) -> dict[int, ObjectStart]:
        if self._states is None:
            return {}
        starts = {id(one): self._states.begin(one) for one in called}
        return {key: start for key, start in starts.items() if start is not None}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look at the calls of processors and criteria in this thread."""
        with ExitStack() as stack:
            for one in (self._rows, self._stops):
                if one is not None:
                    stack.enter_context(one.watch())
            yield

    def events(self, prompt: Tensor | None, result: Any) -> Iterator[GenerateEvent]:
        """Yield what was found once the call returned `result`."""
        for facts in self._rows.found.values() if self._rows is not None else ():
            text = "A logits processor judges rows of a batch by another row."
            yield GenerateEvent(PROCESSOR_EVENT, text, facts)
        for facts in self._rows.wrong_signs if self._rows is not None else ():
            text = "A logits processor scales scores whatever their sign."
            yield GenerateEvent(SIGN_EVENT, text, facts)
        for kept in self._kept.values():
            if kept.found is not None and kept.start.is_code_unchanged():
                yield self._kept_event(kept.start, "logits processor", kept.found, prompt)
        for trials in self._stops.trials() if self._stops is not None else ():
            for facts in trials.find():
                text = "A stopping criterion judges rows of a batch by another row."
                yield GenerateEvent(STOPPING_EVENT, text, facts)
            if (stop := trials.find_prompt_stop()) is not None:
                text = "A stopping criterion holds for the prompt alone."
                yield GenerateEvent(PROMPT_STOP_EVENT, text, stop)
            if (found := trials.find_kept()) is not None:
                yield self._kept_event(trials.start, "stopping criterion", found, prompt)
        self._end(prompt, result)

    def _kept_event(
        self, start: ObjectStart, kind: str, found: dict[str, Any], prompt: Tensor | None
    ) -> GenerateEvent:
        assert self._states is not None
        facts = start.facts(kind, *name_and_place(start.called)) | found
        facts["is_continued"] = prompt is None or self._states.is_continued(start.called, prompt)
        self._states.forget(start.called)  # one finding says it
        return GenerateEvent(KEPT_EVENT, f"A {kind} kept state of an earlier call.", facts)

    def _end(self, prompt: Tensor | None, result: Any) -> None:
        sequences = getattr(result, "sequences", result)
        ids = sequences if isinstance(sequences, Tensor) and sequences.dim() == 2 else None
        n_prompt = 0 if prompt is None else int(prompt.shape[1])
        for start in (*self._processors.values(), *self._criteria.values()):
            if self._states is not None:
                self._states.end(start, ids, n_prompt)

"""Recognises decode steps whose attention calls are those of the step before, with other keys.

Most decode steps are. What is read from a call in every step is compared here, and everything else
that a record holds is taken from the first step of the series.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flexinspect_hooks.observers.attention.call_references import AttentionCall, Calls
from flexinspect_hooks.observers.attention.kernel_calls import SAME_MASK


class CallSeries:
    """The last step's calls, without references to the model or to tensors."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """Forget the calls; the next step begins a series."""
        self._facts: list[Any] = []
        self.fields: tuple[dict[str, Any], ...] = ()
        """The fields of the series' call records; `kv_len` is that of its first step."""
        self.mask_numbers: tuple[int, ...] = ()
        """The number of each call's mask: calls that share a mask do so in the whole series."""

    def continues(self, refs: Calls) -> bool:
        """Whether these calls continue the series: one query row, other keys, all else the same."""
        before, self._facts = self._facts, _facts_of(refs)
        return bool(self.fields) and self._facts == before

    def begin(self, refs: Calls, fields: tuple[dict[str, Any], ...]) -> None:
        """Begin a series with these calls, unless what is compared does not determine a record."""
        self.fields = ()
        if len({ref.query.shape[1:3] for ref in refs}) > 1:
            return  # layers with other numbers of heads may share a mask or not, step by step
        if all(map(_can_continue, refs)):
            self.fields = fields
            self.mask_numbers = tuple(ref.captured.number for ref in refs)


def _can_continue(ref: AttentionCall) -> bool:
    """Whether `_facts_of` reads all that may change in the records of a call.

    A kernel's arguments may change in many ways. transformers' flex reads a part of a dense mask.
    """
    is_whole = ref.kernel is None and ref.mask_passed_to_layer is SAME_MASK
    is_dense_flex = ref.path.startswith("flex") and isinstance(ref.mask, Tensor)
    return is_whole and ref.query.shape[2] == 1 and not is_dense_flex


def _facts_of(refs: Sequence[AttentionCall]) -> list[Any]:
    """Return what may change from step to step, without the number of keys."""
    masks: dict[Any, int] = {}
    facts = []
    for ref in refs:
        kwargs, key, module = ref.kwargs, ref.key.shape, ref.module
        own = module.__dict__
        forward, mask = own.get("forward"), ref.mask
        facts.append(
            (
                *(ref.layer, ref.path, ref.backend, id(ref.function), ref.kernel is None),
                # A patched forward is user code, with its own place in the trace.
                (
                    getattr(type(module), "forward", None)
                    if forward is None
                    else getattr(forward, "__code__", 0)
                ),
                *(ref.query.shape, ref.query.dtype, key[0], key[1], key[3]),
                *(ref.softcap, ref.causal, own.get("is_causal"), ref.suppressed_exception),
                *(kwargs.get("scaling"), kwargs.get("sliding_window", SAME_MASK)),
                # Which calls share a mask, and whether it is one.
                *(mask is None, masks.setdefault((id(mask), key[2]), len(masks))),
            )
        )
    return facts

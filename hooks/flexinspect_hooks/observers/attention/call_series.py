"""Recognises decode steps whose attention calls are those of the step before, with other keys.

Most decode steps are. What may change from step to step is compared when a call is made, because
its tensors are in the CPU caches then; everything else that a record holds is taken from the first
step of the series.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexinspect_hooks.observers.attention.call_references import AttentionCall, Calls
from flexinspect_hooks.observers.attention.kernel_calls import SAME_MASK


class CallSeries:
    """The last step's calls, without references to the model or to tensors."""

    def __init__(self) -> None:
        self._facts: list[Any] = []
        self.end()

    def end(self) -> None:
        """Forget the calls; the next step begins a series."""
        self._facts.clear()
        self._n_seen = 0
        self._is_same = False
        self._masks: dict[Any, int] = {}
        self.fields: tuple[dict[str, Any], ...] = ()
        """The fields of the series' call records; `kv_len` is that of its first step."""
        self.mask_numbers: tuple[int, ...] = ()
        """The number of each call's mask: calls that share a mask do so in the whole series."""

    def open(self) -> None:
        """A step opens."""
        del self._facts[self._n_seen :]
        self._n_seen, self._is_same = 0, True
        self._masks.clear()

    def compare(self, ref: AttentionCall) -> None:
        """Compare a call with the one at the same place in the step before.

        Called for each layer while the model runs, so it calls no function of Python itself.
        """
        facts: object
        try:
            kwargs, args, module = ref.kwargs, ref.args, ref.module
            query, key = ref.query, ref.key.shape
            mask = args[0] if args else kwargs.get("attention_mask")
            numbers = (
                *(ref.softcap, kwargs.get("scaling"), kwargs.get("dropout")),
                kwargs.get("sliding_window", SAME_MASK),
            )
            own, masks = module.__dict__, self._masks
            forward = own.get("forward")
            if forward is None:
                forward = getattr(type(module), "forward", None)
            facts = (
                # What may change from step to step, without the number of keys.
                *(ref.layer, ref.path, ref.backend, id(ref.function)),
                # A patched forward is user code, with its own place in the trace.
                getattr(forward, "__code__", 0),
                *(query.shape, query.dtype, key[0], key[1], key[3]),
                *(ref.causal, own.get("is_causal"), ref.suppressed_exception),
                # What decides whether the weights can be recomputed.
                *(ref.lse is None, kwargs.get("s_aux") is None),
                kwargs.get("position_bias") is None,
                # Anything else than a number equals nothing.
                numbers if _PLAIN.issuperset(map(type, numbers)) else object(),
                # The numbers of masks tell which calls share one.
                *(mask is None, masks.setdefault((id(mask), key[2]), len(masks))),
            )
        except Exception:  # arguments of another kind than a layer's: no call is like this one
            facts = object()
        number = self._n_seen
        self._n_seen += 1
        if number == len(self._facts):
            self._facts.append(facts)
            self._is_same = False
        elif self._facts[number] != facts:
            self._facts[number] = facts
            self._is_same = False

    def continues(self, refs: Calls) -> bool:
        """Whether the calls of a step continue the series: other keys, and all else the same."""
        is_complete = len(refs) == self._n_seen == len(self._facts)
        return bool(self.fields) and self._is_same and is_complete

    def begin(self, refs: Calls, fields: tuple[dict[str, Any], ...]) -> None:
        """Begin a series with these calls, unless what is compared does not determine a record."""
        self.fields = ()
        if len({ref.query.shape[1:3] for ref in refs}) > 1:
            return  # layers with other numbers of heads may share a mask or not, step by step
        if len(refs) == self._n_seen and all(map(_can_continue, refs)):
            self.fields = fields
            self.mask_numbers = tuple(ref.captured.number for ref in refs)


def _can_continue(ref: AttentionCall) -> bool:
    """Whether `compare` reads all that may change in the records of a call.

    A kernel's arguments may change in many ways. transformers' flex reads a part of a dense mask.
    """
    is_whole = ref.kernel is None and ref.mask_passed_to_layer is SAME_MASK
    is_dense_flex = ref.path.startswith("flex") and isinstance(ref.mask, Tensor)
    return is_whole and ref.query.shape[2] == 1 and not is_dense_flex


_PLAIN = frozenset((int, float, bool, type(None), type(SAME_MASK)))
"""The types of soft cap, scale, dropout and window that are compared by value."""

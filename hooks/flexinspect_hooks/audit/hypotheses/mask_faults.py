"""Hypotheses about the mask: which keys a row attends to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from msgspec.structs import replace
from torch import Tensor

from flexinspect.rules.numerics.audit_findings import OWN_WINDOW, PROMPT_WINDOW
from flexinspect_hooks.audit.forward.forward_edits import AttentionInput, ForwardEdit
from flexinspect_hooks.audit.forward.forward_run import HEADS, window_mask
from flexinspect_hooks.audit.hypotheses.probe import FaultProbe

Edits = Iterator[ForwardEdit]


def mask_edit(name: str, sentence: str, change: Callable[[AttentionInput], Tensor]) -> ForwardEdit:
    """Return an edit of the cells: `change` returns each row's keys, bool (1, …, rows, keys)."""

    def attention(call: AttentionInput) -> AttentionInput:
        return replace(call, allowed=change(call))

    return ForwardEdit(name=name, sentence=sentence, attention=attention)


def executed_mask(probe: FaultProbe) -> Edits:
    """The mask is the one that the trace shows as executed."""
    if not probe.executed:
        return

    def change(call: AttentionInput) -> Tensor:
        found = probe.executed.get(call.layer)
        return call.allowed if found is None else found[None]

    sentence = "under the mask that was executed, not under the declared one"
    yield mask_edit("mask.executed", sentence, change)


def mask_dropped(probe: FaultProbe) -> Edits:
    """A causal mask instead of the declared one, or none at all."""

    def causal(call: AttentionInput) -> Tensor:
        n = call.allowed.shape[-1]
        return window_mask(n, None, call.allowed.device)[None, None]

    def everything(call: AttentionInput) -> Tensor:
        return torch.ones_like(call.allowed)

    def prompt_open(call: AttentionInput) -> Tensor:
        allowed = call.allowed.clone()
        allowed[..., : probe.n_prompt, : probe.n_prompt] = True
        return allowed

    yield mask_edit("mask.causal", "under a plain causal mask", causal)
    if not probe.is_decode:
        sentence = "without any mask (each row also attends to later tokens)"
        yield mask_edit("mask.none", sentence, prompt_open)
        yield mask_edit("mask.none", sentence, everything)


def mask_shifted(probe: FaultProbe) -> Edits:
    """Each row has the mask of a row some positions away, or keys are shifted."""
    for k in (-3, -2, -1, 1, 2, 3):

        def rows(call: AttentionInput, k: int = k) -> Tensor:
            index = torch.arange(call.allowed.shape[-2], device=call.allowed.device) + k
            n = call.allowed.shape[-2]
            moved = call.allowed.index_select(-2, index.clamp(0, n - 1))
            if k > 0:  # rows past the end: as far as the last one
                extended = window_mask(n, None, call.allowed.device)
                moved = moved | (index >= n)[:, None] & extended
            return moved

        sentence = f"under a mask shifted by {k:+d} rows"
        yield mask_edit("mask.shifted", sentence, rows)

        def keys(call: AttentionInput, k: int = k) -> Tensor:
            return torch.roll(call.allowed, k, -1)

        if probe.masks:
            yield mask_edit("mask.shifted", f"under a mask shifted by {k:+d} keys", keys)


def mask_decode_row(probe: FaultProbe) -> Edits:
    """A decode step has the mask of another row: row 0, or that of its number in the step."""
    if not probe.is_decode:
        return

    def first(call: AttentionInput) -> Tensor:
        return call.allowed[..., :1, :].expand_as(call.allowed)

    def itself(call: AttentionInput) -> Tensor:
        n = call.allowed.shape[-1]
        return torch.eye(n, dtype=torch.bool, device=call.allowed.device)[None, None]

    def generated(call: AttentionInput) -> Tensor:
        allowed = call.allowed.clone()
        allowed[..., : probe.n_prompt] = False
        return allowed

    def prompt(call: AttentionInput) -> Tensor:
        allowed = call.allowed.clone()
        allowed[..., probe.n_prompt :] = False
        return allowed

    name = "mask.decode"
    sentence = "whose decode rows have the mask of row 0 (no offset)"
    yield mask_edit(name, sentence, first)
    yield mask_edit(name, "whose decode rows attend only to themselves", itself)
    yield mask_edit("cache.empty", "whose decode rows do not attend to the prompt", generated)
    yield mask_edit(name, "whose decode rows attend to the prompt only", prompt)


def mask_transposed(probe: FaultProbe) -> Edits:
    """Rows and keys are exchanged."""
    sentence = "under the transposed mask (rows and keys exchanged)"
    yield mask_edit("mask.transposed", sentence, lambda call: call.allowed.transpose(-1, -2))


def mask_of_head(probe: FaultProbe) -> Edits:
    """All heads have the mask of head 0."""
    if any(mask.shape[0] > 1 for mask in probe.masks.values()):
        sentence = "in which all heads have the mask of head 0"
        yield mask_edit("mask.head", sentence, lambda call: call.allowed[:, :1])


def window_of_layer(probe: FaultProbe) -> Edits:
    """A sliding window is missing, one off, or that of another layer."""
    reference = probe.reference
    windows = {layer: reference.layer_window(layer) for layer in reference.blocks}
    sizes = {size for size in windows.values() if size is not None}
    known: dict[int | None, str] = {None: "without the sliding window"}
    for size in sorted(sizes):
        known |= {
            size: f"with the sliding window of other layers ({size} keys)",
            size - 1: f"with a sliding window of {size - 1} keys, not {size}",
            size + 1: f"with a sliding window of {size + 1} keys, not {size}",
        }
    if sizes:
        for other in (*range(1, 17), 2 * max(sizes), max(sizes) // 2):
            known.setdefault(other, f"with a sliding window of {other} keys, not {max(sizes)}")
    configured = getattr(probe.config, "sliding_window", None)
    if isinstance(configured, int):
        known.setdefault(configured, f"with a sliding window ({configured} keys)")
    for window, sentence in known.items():

        def change(call: AttentionInput, window: int | None = window) -> Tensor:
            n = call.allowed.shape[-1]
            return window_mask(n, window, call.allowed.device)[None, None]

        if sizes or window is not None:
            yield mask_edit("mask.window", sentence, change)


_SINKS = (0, 1, 2, 4, 8)


def own_window(probe: FaultProbe) -> Edits:
    """A sliding window, with sinks or without, where the architecture has none.

    Its size follows from the first row that differs: the first one that does not see all keys.
    """
    reference = probe.reference
    has_window = any(reference.layer_window(layer) is not None for layer in reference.blocks)
    if probe.is_decode or probe.quantity != HEADS or probe.masks or has_window:
        return
    for sinks in _SINKS:
        size = probe.row - sinks
        if size < 1:
            return

        def window(call: AttentionInput, size: int = size, sinks: int = sinks) -> Tensor:
            n = call.allowed.shape[-1]
            seen = window_mask(n, size, call.allowed.device)
            seen[:, :sinks] = True
            return call.allowed & seen

        def prompt(
            call: AttentionInput, window: Callable[[AttentionInput], Tensor] = window
        ) -> Tensor:
            seen = window(call)
            seen[..., probe.n_prompt :, :] = call.allowed[..., probe.n_prompt :, :]
            return seen

        kept = f" that keeps the first {sinks}" if sinks > 1 else " that keeps the first one"
        what = f"with a sliding window of {size} keys{kept if sinks else ''}"
        where = f"{what} in the rows of the prompt, but not in those of decode steps"
        yield mask_edit(OWN_WINDOW, what, window)
        yield mask_edit(PROMPT_WINDOW, where, prompt)


def bool_added(probe: FaultProbe) -> Edits:
    """A bool mask is added to the scores, +1 where it is open, and closes nothing."""

    def attention(call: AttentionInput) -> AttentionInput:
        bias = call.allowed.to(call.query.dtype)
        everything = torch.ones_like(call.allowed)
        return replace(call, allowed=everything, bias=bias)

    sentence = "in which the bool mask is added to the scores (it closes nothing)"
    yield ForwardEdit(name="mask.bool-added", sentence=sentence, attention=attention)


def padding_attended(probe: FaultProbe) -> Edits:
    """The padding before the text is attended to."""
    if probe.padding:
        n = len(probe.padding)
        sentence = f"that attends to the {n} padding tokens before the text"
        yield ForwardEdit(
            name="padding.attended", sentence=sentence, prefix=probe.padding, whole_model=True
        )


HYPOTHESES = (
    executed_mask,
    padding_attended,
    mask_dropped,
    window_of_layer,
    own_window,
    mask_shifted,
    mask_decode_row,
    mask_transposed,
    mask_of_head,
    bool_added,
)

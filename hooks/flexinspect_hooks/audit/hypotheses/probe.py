"""What a hypothesis knows about a divergence, to make its edits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from torch import Tensor

from flexinspect_hooks.audit.forward.encoder_inputs import EncoderInput
from flexinspect_hooks.audit.forward.program_rotary import ProgramRotary
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel
from flexinspect_hooks.audit.reference.slot_layout import SlotLayout


class FaultProbe(Struct):
    """A divergence that is to be explained.

    `ids` are the committed tokens and `n_prompt` those of the prompt; `first_row` is the first row
    of the diverging step, and `row` the one where it begins. `positions` (1, rows) are the position
    ids that the program passed, None if they are 0, 1, 2 … ; with `counts_padding` it passed none,
    and they are those that the model made, which count padding before the text. `masks` are the
    keys of each row under which the reference ran, where they are not the architecture's own, and
    `executed` those that the program's layers applied.
    `padding` are ids before the text that the attention should not read. `score_mods` are those of
    the step's layers, and `has_bias` says whether the reference adds those of the prompt, which
    `meant_score_mods` are if it calls them. `slots` are those of a paged cache, None if keys are in
    the order of positions. `encoder` is what the encoder of the model reads.
    `rotary` is the rotary module of the program, if the reference takes it as it is.
    """

    reference: ReferenceModel
    ids: Sequence[int]
    n_prompt: int
    layer: int | None
    quantity: str
    first_row: int
    is_decode: bool
    positions: Tensor | None = None
    masks: Mapping[int, Tensor] = field(default_factory=dict)
    executed: Mapping[int, Tensor] = field(default_factory=dict)
    padding: tuple[int, ...] = ()
    is_training: bool = False
    segment_starts: tuple[int, ...] = ()
    score_mods: Mapping[int, Any] = field(default_factory=dict)
    has_bias: bool = False
    meant_score_mods: Mapping[int, Any] = field(default_factory=dict)
    counts_padding: bool = False
    slots: SlotLayout | None = None
    encoder: EncoderInput | None = None
    row: int = 0
    rotary: ProgramRotary | None = None

    @property
    def config(self) -> Any:
        """The configuration of the architecture."""
        return self.reference.config

    @property
    def n_rows(self) -> int:
        """The length of the sequence."""
        return len(self.ids)

"""Runs the encoder of the reference once, and hands its output to the decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.core.errors import FlexInspectError
from flexinspect_hooks.audit.forward.encoder_inputs import EncoderInput, states_of
from flexinspect_hooks.audit.forward.forward_run import ENCODER, Run
from flexinspect_hooks.capture.model_layers import (
    attention_layers,
    decoder_blocks,
    encoder_stack,
)


class EncoderRunner:
    """The encoder of a reference, with its last output, which all forwards of a sequence share."""

    def __init__(self, encoder: nn.Module, dtype: torch.dtype) -> None:
        self._encoder, self._dtype = encoder, dtype
        self._known: tuple[EncoderInput, Tensor] | None = None
        self._noise: Run | None = None
        for _, block in decoder_blocks(encoder, attention_layers(encoder)).values():
            block.register_forward_hook(self._after_block)

    def arguments(self, run: Run) -> dict[str, Any]:
        """Return the arguments of the whole model that stand for the encoder.

        Raises `FlexInspectError` if the run does not say what the encoder read.
        """
        # Not with this module, which may be imported in the middle of an import of transformers.
        from transformers.modeling_outputs import BaseModelOutput

        given = run.encoder
        if given is None:
            raise FlexInspectError("What the encoder read was not recorded.")
        for edit, _ in run.edits:
            given = given if edit.encoder is None else edit.encoder(given)
        states = self._states(given, run)
        mask = run.encoder.mask if run.encoder is not None else None  # also of an edited input
        real = states if mask is None else states * mask[..., None].to(states)
        run.values[ENCODER, None] = real
        return {
            "encoder_outputs": BaseModelOutput(last_hidden_state=states),
            "attention_mask": given.mask,
        }

    def _states(self, given: EncoderInput, run: Run) -> Tensor:
        if given.ids is None:
            assert given.states is not None
            return given.states.detach().to(self._dtype)
        if not run.noise and self._known is not None and self._known[0] is given:
            return self._known[1]
        self._noise = run if run.noise else None
        try:
            with torch.no_grad():
                output = self._encoder(input_ids=given.ids, attention_mask=given.mask)
        finally:
            self._noise = None
        states = states_of(output)
        assert states is not None
        if not run.noise:
            self._known = given, states
        return run.perturb(states)

    def _after_block(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._noise is None:
            return None
        rows = output[0] if isinstance(output, tuple) else output
        noisy = self._noise.perturb(rows)
        return (noisy, *output[1:]) if isinstance(output, tuple) else noisy


def encoder_runner(model: nn.Module, dtype: torch.dtype) -> EncoderRunner | None:
    """Return what runs the encoder of a model, None if it has none."""
    encoder = encoder_stack(model)
    return None if encoder is None else EncoderRunner(encoder, dtype)

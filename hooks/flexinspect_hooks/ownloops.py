"""What is known of a loop that is not ours: whether it can be followed, what its forward gave."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_UNFOLLOWED_ARGUMENTS = ("assistant_model", "prompt_lookup_num_tokens", "penalty_alpha")


def is_followed(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Say whether a call of generate feeds row 0 what row 0 chose, one token at a time."""
    configs = (kwargs.get("generation_config"), getattr(model, "generation_config", None))

    def asked(name: str) -> Any:
        values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in values if value is not None), None)

    return (asked("num_beams") or 1) == 1 and not any(asked(name) for name in _UNFOLLOWED_ARGUMENTS)


def has_encoder(model: nn.Module) -> bool:
    """Say whether the prompt goes to an encoder, and the decoder begins with a token of its own."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def newest_logits_row(output: Any, model: nn.Module, *, copy: bool) -> Tensor | None:
    """Return the newest row of logits (V,) of batch 0, None when there are none."""
    logits = getattr(output, "logits", None)
    if logits is None:
        size = getattr(getattr(model, "config", None), "vocab_size", None)
        parts = output if isinstance(output, tuple) else (output,)
        whole = [part for part in parts if isinstance(part, Tensor) and part.dim() == 3]
        logits = next((part for part in whole if part.shape[2] == size), None)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or not logits.shape[1]:
        return None
    row = logits[0, -1].detach()
    return row.clone() if copy else row

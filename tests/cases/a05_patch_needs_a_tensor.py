"""A patch adds structure to the mask if it is a 4D tensor; under SDPA it is None."""

from typing import Any

import kit
import torch

PROMPT = 8

structure = torch.zeros(PROMPT, PROMPT).masked_fill(
    ~kit.isolated([(0, 4), (4, 8)], PROMPT, generated=PROMPT), torch.finfo(torch.float32).min
)


def patched(layer: torch.nn.Module, applied: list[bool]) -> None:
    """Patch a decoder layer so that its mask is the structural one, where there is a mask."""
    original = layer.forward

    def forward(hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        has_mask = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4
        applied.append(has_mask)
        mask = attention_mask + structure if has_mask else attention_mask
        return original(hidden_states, attention_mask=mask, **kwargs)

    layer.forward = forward  # type: ignore[method-assign]


for backend in ("sdpa", "eager"):
    model, applied = kit.tiny(backend), []
    for layer in model.model.layers:
        patched(layer, applied)
    leak = kit.moved(kit.logits_of(model), kit.ids(PROMPT), 1)[4:].max().item()
    print(f"{backend}: applied in {sum(applied[:2])} of 2 layers; segment 2 moved: {leak > 1e-4}")

"""A patched attention returns its output twice, once in the place of the weights."""

from __future__ import annotations

from typing import Any

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    setup.model.set_attn_implementation("eager")
    inner = setup.model.model.layers[0].self_attn
    original = inner.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, weights = original(*args, **kwargs)
        return output, weights if repaired else output

    inner.forward = forward
    with setup.recorded(segments=[], mask=None):
        setup.model(setup.input_ids, output_attentions=True, use_cache=False)

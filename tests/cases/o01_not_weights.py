"""A patched forward returns its output twice: the second is taken for weights, and is none."""

from typing import Any

import kit

PROMPT = 14

model = kit.tiny()
inner = model.model.layers[0].self_attn
original = inner.forward


def twice(*args: Any, **kwargs: Any) -> Any:
    return (original(*args, **kwargs)[0],) * 2


inner.forward = twice
weights = model(kit.ids(PROMPT, bos=True), output_attentions=True).attentions[0]
sums = weights.sum(-1)
print("claimed weights:", tuple(weights.shape), "expected:", (1, 4, PROMPT, PROMPT))
print("rows sum to 1:", bool(((sums - 1).abs() < 1e-3).all()))

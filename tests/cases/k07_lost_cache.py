"""A patched forward passes the cache on under its old name: an error, or an empty cache."""

from typing import Any

import kit

PROMPT = 5

model = kit.tiny()
inner = model.model.layers[0].self_attn
original = inner.forward


def by_position(
    hidden_states: Any,
    attention_mask: Any = None,
    position_ids: Any = None,
    past_key_value: Any = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> Any:
    embeddings = kwargs.pop("position_embeddings")
    return original(
        hidden_states, embeddings, attention_mask, past_key_value, output_attentions, **kwargs
    )


def swallowing(
    hidden_states: Any, attention_mask: Any = None, past_key_value: Any = None, **kwargs: Any
) -> Any:
    kwargs.pop("past_key_values", None)
    return original(
        hidden_states, attention_mask=attention_mask, past_key_values=past_key_value, **kwargs
    )


inner.forward = by_position
for options in ({}, {"use_cache": False}):
    try:
        model.generate(kit.ids(PROMPT), max_new_tokens=2, do_sample=False, **options)
        print(options, "accepted")
    except TypeError as error:
        print(options, "TypeError about past_key_values:", "past_key_values" in str(error))

inner.forward = swallowing
cache = model(kit.ids(PROMPT)).past_key_values
print("cached length per layer:", [cache.get_seq_length(layer) for layer in range(2)])
input_ids = kit.ids(1, seed=2)
model(input_ids, past_key_values=cache)
print("a step later:", [cache.get_seq_length(layer) for layer in range(2)])

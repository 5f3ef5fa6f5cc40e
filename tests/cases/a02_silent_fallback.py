"""Flex raises in one layer, a bare except runs causal SDPA there, and the mask is lost."""

import kit

PROMPT = 15

input_ids = kit.ids(PROMPT, bos=True)
attention = kit.register_attention(kit.isolated([(1, 7), (9, 15)], PROMPT, generated=PROMPT))
run = kit.logits_of(kit.tiny("own"))
for failing in ((), (1,)):
    attention.failing, attention.ran = failing, []
    leak = kit.moved(run, input_ids, 3)[9:].max().item()
    print(f"failing layers {failing}: ran {attention.ran[-2:]}, segment 2 moved: {leak > 1e-4}")

"""Compiled flex on a CPU dies if its mask_mod indexes a captured tensor link by link."""

import kit
import torch
from torch.nn.attention.flex_attention import flex_attention

LENGTH = 40

closed = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~kit.causal(LENGTH), -1e9)
query, key = kit.numbers(1, 4, LENGTH, 16, seed=1), kit.numbers(1, 2, LENGTH, 16, seed=2)
call = torch.compile(flex_attention)
print("entering compiled flex", flush=True)
for _ in range(4):
    call(
        *(query, key, key),
        score_mod=lambda score, b, h, q_idx, kv_idx: score + closed[b][0][q_idx][kv_idx],
        enable_gqa=True,
    )
print("it came back")

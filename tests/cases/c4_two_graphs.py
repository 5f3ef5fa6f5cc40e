"""Correct: the first two steps make a graph each, the second with lengths left open; then none."""

import kit
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

counter = CompileCounterWithBackend("eager")
call = torch.compile(flex_attention, backend=counter, fullgraph=True)
query, made = kit.numbers(1, 1, 1, 16), []
for n_keys in range(8, 16):
    keys = kit.numbers(1, 1, n_keys, 16, seed=n_keys)
    mask = create_block_mask(kit.mask_mod_up_to(n_keys - 1), None, None, 1, n_keys, "cpu")
    call(query, keys, keys, block_mask=mask)
    made.append(counter.frame_count)
print("graphs after each step:", made)

"""The mask is open over the slots that were allocated: empty ones take part in the softmax."""

import kit
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

FILLED, SLOTS = 12, 32

key, value = torch.zeros(1, 1, SLOTS, 16), torch.zeros(1, 1, SLOTS, 16)
key[:, :, :FILLED], value[:, :, :FILLED] = (kit.numbers(1, 1, FILLED, 16, seed=s) for s in (1, 2))
query = kit.numbers(1, 1, 1, 16, seed=3)
outs = []
for n_open in (SLOTS, FILLED):
    mask = create_block_mask(kit.mask_mod_up_to(n_open - 1), None, None, 1, SLOTS, "cpu")
    outs.append(flex_attention(query, key, value, block_mask=mask))
weights = torch.softmax((query @ key.mT)[0, 0, 0] * 16**-0.5, -1)
print("keys allowed:", SLOTS, "filled:", FILLED)
print("weight on empty slots:", round(weights[FILLED:].sum().item(), 2))
print("relative error:", round(((outs[0] - outs[1]).norm() / outs[1].norm()).item(), 2))

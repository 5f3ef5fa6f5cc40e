"""Correct: all position ids shifted by the same amount, which rotary embeddings do not see."""

import kit
import torch

SHIFT = 100

input_ids, model = kit.ids(9, bos=True), kit.tiny("sdpa")
positions = torch.arange(9)[None]
plain = model(input_ids, position_ids=positions).logits
shifted = model(input_ids, position_ids=positions + SHIFT).logits
print("logits the same:", torch.allclose(plain, shifted, atol=1e-2))
print("best tokens the same:", torch.equal(plain.argmax(-1), shifted.argmax(-1)))

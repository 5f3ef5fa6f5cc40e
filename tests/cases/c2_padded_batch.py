"""Correct: a left-padded batch, whose padding rows see nothing and are read by no row."""

import kit
import torch

PADS = 3

short, long = kit.ids(5, seed=1), kit.ids(8, seed=2)
input_ids = torch.cat([torch.cat([torch.zeros(1, PADS, dtype=torch.long), short], 1), long])
padding = (input_ids != 0).long()
model = kit.tiny("sdpa")
options = {"max_new_tokens": 4, "do_sample": False}
together = model.generate(input_ids, attention_mask=padding, **options)[:, 8:]
alone = [
    model.generate(ids, attention_mask=torch.ones_like(ids), **options) for ids in (short, long)
]
for row, (mine, other) in enumerate(zip(together, alone, strict=True)):
    print(f"row {row}: {mine.tolist()}, the same as alone: {torch.equal(mine, other[0, -4:])}")

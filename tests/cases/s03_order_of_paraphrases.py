"""Isolated paraphrases at running positions: swapping them changes what comes next."""

import kit
import torch

FIRST, SECOND, CUE = [11, 12, 13, 14, 15], [21, 22, 23, 24, 25], [99]
POSITIONS = {
    "contiguous": list(range(11)),
    "restarting per segment": [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5],
}

kit.register_attention(kit.isolated([(0, 5), (5, 10)], 11, generated=10))
model = kit.tiny("own")
for name, positions in POSITIONS.items():
    orders = (FIRST + SECOND + CUE, SECOND + FIRST + CUE)
    one, two = (
        model(torch.tensor([input_ids]), position_ids=torch.tensor([positions])).logits[0, -1]
        for input_ids in orders
    )
    print(
        f"positions {name}: swapping moves the next token: {bool((one - two).abs().max() > 1e-3)}"
    )

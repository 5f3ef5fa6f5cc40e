"""bfloat16 against float32: differences that grow evenly over the layers are rounding."""

from typing import Any

import kit
import torch

layers: dict[str, list[torch.Tensor]] = {"float32": [], "bfloat16": []}
logits: dict[str, torch.Tensor] = {}
input_ids = kit.ids(24)
for dtype in (torch.float32, torch.bfloat16):
    name, model = str(dtype).removeprefix("torch."), kit.tiny().to(dtype)

    def keep(module: Any, args: Any, out: Any, kept: list[torch.Tensor] = layers[name]) -> None:
        kept.append((out if isinstance(out, torch.Tensor) else out[0]).float())

    handles = [layer.register_forward_hook(keep) for layer in model.model.layers]
    logits[name] = model(input_ids).logits[0].float()
    for handle in handles:
        handle.remove()

pairs = zip(layers["float32"], layers["bfloat16"], strict=True)
relative = [((a - b).norm() / a.norm()).item() for a, b in pairs]
print("relative difference per layer is rounding:", [1e-3 < each < 0.05 for each in relative])
flipped = logits["float32"].argmax(-1) != logits["bfloat16"].argmax(-1)
print("rows with another best token:", len(kit.rows_that(flipped)), "of", input_ids.shape[1])

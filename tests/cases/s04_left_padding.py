"""Left padding: eager averages in the padding rows, SDPA and flex give 0; real rows agree."""

import kit
import torch

PADS = 3

kit.flex_without_compiler()
input_ids = kit.ids(8)
input_ids[0, :PADS] = 0
padding = torch.tensor([[0] * PADS + [1] * (8 - PADS)])
logits: dict[str, torch.Tensor] = {}
first: list[torch.Tensor] = []
for backend in ("eager", "sdpa", "flex_attention"):
    model = kit.tiny(backend)
    handle = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: first.append(args[0][0])
    )
    logits[backend] = model(input_ids, attention_mask=padding).logits[0]
    handle.remove()
    print(f"{backend}: padding rows are exactly 0: {not first[-1][:PADS].any()}")
difference = (logits["eager"] - logits["flex_attention"]).abs().amax(-1)
print("rows in which eager and flex differ:", kit.rows_that(difference > 1e-4))

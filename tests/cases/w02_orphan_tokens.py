"""BOS and separators belong to no segment, so their rows are empty; later rows read them."""

import kit
import torch

PROMPT = 17  # BOS, segment 1..6, separators 7 and 8, segment 9..14, two rows that see all

zero_rows: list[list[int]] = []


def note(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
    zero_rows.append(kit.rows_that(args[0][0].abs().amax(-1) == 0))


attention = kit.register_attention(kit.isolated([(1, 7), (9, 15)], PROMPT, generated=15))
model = kit.tiny("own", layers=3)
handles = [layer.self_attn.o_proj.register_forward_pre_hook(note) for layer in model.model.layers]
model(kit.ids(PROMPT, bos=True))
for handle in handles:
    handle.remove()
print("rows whose attention is exactly 0, per layer:", zero_rows)
print("row 16 reads rows 7 and 8:", attention.cells[16, [7, 8]].tolist())

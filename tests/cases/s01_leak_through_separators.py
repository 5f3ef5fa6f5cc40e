"""No cell joins the two segments, but separators that see and are seen by all carry one over."""

import kit
import torch

PROMPT, FIRST, SECOND = 17, slice(1, 7), slice(9, 16)

cells = kit.isolated([(1, 7), (9, 16)], PROMPT, generated=16)
cells[7, :8] = cells[8, :9] = True  # separators see everything before them,
cells[9:, 7:9] = True  # all rows after them see the separators,
cells[:7, 0] = cells[9:16, 0] = True  # and all see the BOS

attention = kit.register_attention(cells)
run, input_ids = kit.logits_of(kit.tiny("own")), kit.ids(PROMPT, bos=True)
print("direct cells from segment 2 to segment 1:", int(cells[SECOND, FIRST].sum()))
print("segment 2 moved:", bool((kit.moved(run, input_ids, 3)[SECOND] > 1e-4).any()))

step = (cells | torch.eye(PROMPT, dtype=torch.bool)).float()
print("reachable in two layers:", bool(((step @ step)[SECOND, FIRST] > 0).any()))
carriers = cells[SECOND].any(0) & cells[:, FIRST].any(1)
carriers[SECOND] = carriers[FIRST] = False
print("through rows:", kit.rows_that(carriers))

attention.cells = cells.clone()
attention.cells[7:9, FIRST] = False
cut = kit.moved(run, input_ids, 3)[SECOND] > 1e-4
print("segment 2 moved with the separators cut:", bool(cut.any()))

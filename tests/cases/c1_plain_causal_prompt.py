"""Correct: a plain prompt under SDPA, whose layers get no mask and are causal by themselves."""

import kit

ids = kit.ids(9, bos=True)
model = kit.tiny("sdpa")
print("answer:", model.generate(ids, max_new_tokens=4, do_sample=False)[0, 9:].tolist())
print(
    "rows that the last token moves:", kit.rows_that(kit.moved(kit.logits_of(model), ids, 8) > 1e-4)
)

"""A debug script draws its own mask and ticks it; the model that ran was never patched."""

import kit

PROMPT = 15

drawn = kit.isolated([(1, 7), (9, 15)], PROMPT, generated=PROMPT)
run, input_ids = kit.logits_of(kit.tiny("sdpa")), kit.ids(PROMPT, bos=True)
print("the picture says isolated:", not drawn[9:, 1:7].any())
print("the model says isolated:", not (kit.moved(run, input_ids, 3)[9:] > 1e-4).any())

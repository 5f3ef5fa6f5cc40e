"""A boolean 4D mask is right under SDPA; eager and flex add it to the scores, so nothing closes."""

import kit

PROMPT = 10

kit.flex_without_compiler()
allowed = kit.causal(PROMPT)[None, None]
input_ids = kit.ids(PROMPT, bos=True)
for backend in ("sdpa", "eager", "flex_attention"):
    model = kit.tiny(backend)
    rows = kit.moved(lambda ids, m=model: m(ids, attention_mask=allowed).logits[0], input_ids, 9)
    print(f"{backend}: rows before the last that move: {len(kit.rows_that(rows[:9] > 1e-4))}")

"""Spans are counted without the BOS, and the prompt is tokenised with one."""

import kit

PROMPT, SEGMENTS = 15, [(0, 6), (8, 14)]  # a BOS and 14 tokens; spans of the 14 alone

ids = kit.ids(PROMPT, bos=True)
attention = kit.register_attention(kit.isolated(SEGMENTS, PROMPT, generated=PROMPT - 1))
run = kit.logits_of(kit.tiny("own"))
print("empty rows:", kit.rows_that(~attention.cells.any(1)))
print("rows that touching segment 1 moves:", kit.rows_that(kit.moved(run, ids, 3) > 1e-4))

attention.cells = kit.isolated([(a + 1, b + 1) for a, b in SEGMENTS], PROMPT, generated=PROMPT)
print("rows that move, counted with the BOS:", kit.rows_that(kit.moved(run, ids, 3) > 1e-4))

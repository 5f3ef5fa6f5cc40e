"""Small programs of a user with one fault that a rule names; and their repaired twins.

A program is the text of a script after `HEAD`, which is run under capture. `BROKEN` is whether the
fault is in it.
"""

from __future__ import annotations

from typing import NamedTuple

from support.faulty_programs import HEAD as _HEAD

HEAD = (
    _HEAD
    + """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
import torch.nn.attention.flex_attention as flex
flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True

def causal(n, m):
    allowed = lambda b, h, q_idx, kv_idx: q_idx + m - n >= kv_idx
    return create_block_mask(allowed, None, None, n, m, device="cpu")
"""
)


class Program(NamedTuple):
    """A program, the finding that names its fault, words of the sentence, and how it ends."""

    body: str
    finding: str
    words: tuple[str, ...]
    code: int = 0
    declare: str = ""


FAILURES = {
    "a BlockMask reaches eager attention": Program(
        """
model = make_model("llama", attn_implementation="eager")
model.set_attn_implementation("eager")
mask = causal(12, 12) if BROKEN else None
model(prompt(), attention_mask=mask)
""",
        "path.kernel-failed",
        (
            *("The forward of step 0 ended in layer 0", "model(prompt(), attention_mask=mask)"),
            "BlockMask of 1 x 1 x 12 x 12, which only FlexAttention takes, and these layers run",
        ),
        1,
    ),
    "a 4D mask is given to generate": Program(
        """
model = make_model("llama")
mask = torch.ones(1, 1, 12, 12).bool().tril() if BROKEN else torch.ones(1, 12).long()
generate(model, attention_mask=mask)
""",
        "run.exception",
        ("A call of generate ended before its first step", "bool tensor (1, 1, 12, 12)", "ValueEr"),
        1,
    ),
    "a rule reads a table that is too short": Program(
        """
segments = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3][: 5 if BROKEN else 12])

def same_segment(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (segments[q_idx] == segments[kv_idx])

model = make_model("llama")
mask = create_block_mask(same_segment, None, None, 12, 12, device="cpu")
generate(model)
""",
        "mask.rule-raised",
        (
            *("the mask_mod same_segment (program.py:", "segments: int64 tensor (5,), values [0"),
            *("row 0 and key 0 it gives bool ().", "row 11 and key 11 it raises IndexError"),
        ),
        1,
    ),
    "a rule reads a table with a batch dimension": Program(
        """
segments = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
segments = segments[None] if BROKEN else segments

def make_rule(table):
    def same_segment(b, h, q_idx, kv_idx):
        return table[q_idx] == table[kv_idx]
    return same_segment

model = make_model("llama")
generate(model)
mask = create_block_mask(make_rule(segments), None, None, 12, 12, device="cpu")
""",
        "mask.rule-raised",
        ("table: int64 tensor (1, 12)", "it gives bool (12,), and it must give one bool of shape"),
        1,
    ),
    "a logits processor fails in a later step": Program(
        """
from transformers import LogitsProcessor

class OnlyWords(LogitsProcessor):
    def __call__(self, ids, scores):
        return scores + (torch.zeros(299) if BROKEN and ids.shape[1] > 14 else 0)

generate(make_model("llama"), logits_processor=[OnlyWords()])
""",
        "run.exception",
        ("Generation 0 ended in step 3", "at OnlyWords.__call__ (program.py:", "RuntimeError: The"),
        1,
    ),
    "a layer that the user wrote fails": Program(
        """
model = make_model("llama")
old = model.model.layers[1].mlp.forward

def forward(states):
    return old(states) + torch.zeros(7 if BROKEN else 1)

model.model.layers[1].mlp.forward = forward
loop(model)
""",
        "run.exception",
        ("Generation 0 ended in step 0, in layer 1 (model.layers.1.mlp, LlamaMLP), at forward",),
        1,
    ),
    "an exception that the program catches ended a generation": Program(
        """
model = make_model("llama")
try:
    model.generate(prompt(), max_new_tokens=2, temperture=1.0 if BROKEN else None) if BROKEN else 0
except ValueError as error:
    print(error)
generate(model)
""",
        "run.exception",
        ("A call of generate ended before its first step", "temperture"),
    ),
    "an attention function wraps the exception of its kernel": Program(
        """
def attention(module, q, k, v, mask, scaling=None, **kwargs):
    mask = causal(q.shape[2], k.shape[2])
    try:
        q = q[..., :7] if BROKEN else q
        out = flex_attention(q, k, v, None, mask, scaling, enable_gqa=True)
    except ValueError as error:
        raise RuntimeError("attention failed") from error
    return out.transpose(1, 2).contiguous(), None

model = make_model("llama")
register(model, attention)
with torch.no_grad():
    loop(model, 2)
""",
        "path.kernel-failed",
        ("ended in layer 0, called from attention (program.py:", "raised ValueError: Expect query"),
        1,
    ),
}
"""By name. An exception has one finding, which is an error."""

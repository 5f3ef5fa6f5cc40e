"""A segment mask whose borders are one token early, without any declaration.

The positions are counted in the texts of the questions, but the input ids begin with a BOS.
flexinspect reads the segments off the mask that ran, and points at the borders.

    flexinspect run docs/examples/one_token_off.py
"""

from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
)

import flexinspect

DEMO = Path(flexinspect.__file__).parent / "data" / "demo"
QUESTIONS = [
    "What is the money of Japan called?",
    "Could you say which currency Japan has?",
    "If I go to Japan, which money do I need?",
]
NEW_TOKENS = 8

tokenizer = AutoTokenizer.from_pretrained(DEMO)
model = AutoModelForCausalLM.from_pretrained(DEMO).eval()

ids, number = [], []
for index, question in enumerate(QUESTIONS):
    piece = tokenizer.encode(question + "\n", add_special_tokens=False)
    ids += piece
    number += [index] * len(piece)
cue = len(number)
ids += tokenizer.encode("Answer:", add_special_tokens=False)
inputs = torch.tensor([[tokenizer.bos_token_id, *ids]])
segment = torch.tensor(number + [-1] * (NEW_TOKENS + 8))


def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
    out = flex_attention(
        query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def make_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, *, device="cpu", **kwargs):
    def mask_mod(b, h, q_idx, kv_idx):
        q = q_idx + q_offset
        same = segment[q] == segment[kv_idx]
        return (q >= kv_idx) & (same | (q >= cue))

    return create_block_mask(mask_mod, batch_size, None, q_length, kv_length, device=device)


AttentionInterface.register("segments", attend)
AttentionMaskInterface.register("segments", make_mask)
model.set_attn_implementation("segments")
output = model.generate(
    inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NEW_TOKENS, do_sample=False
)
print("answer:", tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True).strip())

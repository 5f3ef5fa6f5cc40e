"""A wrapper as users write it: attention patched with FlexAttention, else the original.

    python faulty_wrapper.py none|self|rotary|bool|device

has the named fault, and prints the exception that its handler suppresses.
"""

import sys
import types

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

FAULT = sys.argv[1]
SEGMENTS = [(1, 7), (8, 13)]

owner = torch.full((19,), -1, device="meta" if FAULT == "device" else "cpu")
for number, (start, stop) in enumerate(SEGMENTS):
    owner[start:stop] = number


def mask_mod(b, h, q_idx, kv_idx):
    if FAULT == "bool":
        return True
    is_shared = (owner[q_idx] < 0) | (owner[kv_idx] < 0)
    return (kv_idx <= q_idx) & (is_shared | (owner[q_idx] == owner[kv_idx]))


def attend(self, hidden_states, position_embeddings=None, **kwargs):
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (
        p(hidden_states).view(shape).transpose(1, 2)
        for p in (self.q_proj, self.k_proj, self.v_proj)
    )
    rotate = self.apply_rotary_pos_emb if FAULT == "rotary" else apply_rotary_pos_emb
    q, k = rotate(q, k, *position_embeddings)
    n = q.shape[2]
    mask = create_block_mask(mask_mod, None, None, n, n, device="cpu")
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None


def patched(self):
    original = self.forward
    bound = types.MethodType(attend, self)

    def forward(*args, **kwargs):
        try:
            return bound(self, *args, **kwargs) if FAULT == "self" else bound(*args, **kwargs)
        except Exception as error:
            print(f"fallback: {type(error).__name__}")
            return original(*args, **kwargs)

    return forward


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).eval()
for layer in model.model.layers:
    layer.self_attn.forward = patched(layer.self_attn)
with torch.no_grad():
    model(torch.randint(3, 300, (1, 15)), use_cache=False)

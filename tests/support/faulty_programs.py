"""Small programs of a user with one planted fault each, for the audit; and their repaired twins.

A program is the text of a script that is run under capture. `BROKEN` is whether the fault is in it.
"""

from __future__ import annotations

HEAD = """
import math
import sys
sys.path.insert(0, {tests!r})
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama import modeling_llama
from support.tiny import ids, make_model
torch.set_num_threads(1)
BROKEN = {broken}

def prompt(n=12, seed=3):
    return torch.tensor([ids(n, seed)])

def generate(model, n=5, **options):
    return model.generate(prompt(), max_new_tokens=n, do_sample=False, **options)

def loop(model, n=5, positions=None, cache=None):
    rows, past = prompt(), cache
    for step in range(n):
        more = {{}} if positions is None else {{"position_ids": positions(step, rows)}}
        output = model(rows, past_key_values=past, use_cache=True, **more)
        past, rows = output.past_key_values, output.logits[:, -1:].argmax(-1)

def heads_of(states, n):
    return states.view(*states.shape[:2], n, -1).transpose(1, 2)

def dense(q, k, v, scale, mask=None, groups=1, cap=None, tiled=False):
    if tiled:
        k, v = (states.repeat(1, groups, 1, 1) for states in (k, v))
    else:
        k, v = (states.repeat_interleave(groups, 1) for states in (k, v))
    scores = q @ k.mT * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    n, m = scores.shape[-2:]
    causal = torch.ones(n, m, dtype=torch.bool).tril(m - n) if mask is None else mask
    return (scores.masked_fill(~causal, -math.inf).softmax(-1) @ v).transpose(1, 2).contiguous()

def register(model, function, name="mine"):
    from transformers.masking_utils import sdpa_mask
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    model.set_attn_implementation(name)
"""

PROGRAMS: dict[str, tuple[str, str]] = {
    "rope skipped by a guard in a patched forward": (
        """
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
model = make_model("llama")

def forward(self, hidden_states, position_embeddings=None, attention_mask=None,
            past_key_values=None, **kwargs):
    q = heads_of(self.q_proj(hidden_states), 4)
    k, v = (heads_of(p(hidden_states), 2) for p in (self.k_proj, self.v_proj))
    if not BROKEN or hasattr(self, "rotary_emb"):
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    out = dense(q, k, v, self.scaling, groups=2)
    return self.o_proj(out.reshape(*out.shape[:2], -1)), None

modeling_llama.LlamaAttention.forward = forward
generate(model)
""",
        "without RoPE",
    ),
    "positions begin again at 0 when decoding": (
        """
def positions(step, rows):
    if step == 0:
        return torch.arange(rows.shape[1])[None]
    return torch.tensor([[step - 1 if BROKEN else 11 + step]])

loop(make_model("llama"), positions=positions)
""",
        "position ids that the program passed",
    ),
    "scale by the hidden size": (
        """
def attention(module, q, k, v, mask, scaling=None, **kwargs):
    return dense(q, k, v, (48 if BROKEN else 12) ** -0.5, groups=2), None

model = make_model("llama")
register(model, attention)
generate(model)
""",
        "scale of the hidden size",
    ),
    "key and value heads are tiled": (
        """
def attention(module, q, k, v, mask, scaling=None, **kwargs):
    return dense(q, k, v, scaling, groups=2, tiled=BROKEN), None

model = make_model("llama")
register(model, attention)
generate(model)
""",
        "tiled",
    ),
    "soft cap of the scores is not applied": (
        """
def attention(module, q, k, v, mask, scaling=None, softcap=None, sliding_window=None, **kwargs):
    n, m = q.shape[2], k.shape[2]
    rows, keys = torch.arange(m - n, m)[:, None], torch.arange(m)[None]
    allowed = (keys <= rows) & (keys > rows - (sliding_window or 1 << 20))
    return dense(q, k, v, scaling, allowed, 2, None if BROKEN else softcap), None

model = make_model("gemma2", attn_logit_softcapping=2.0)
register(model, attention)
loop(model, n=2)
""",
        "without the soft cap of the scores",
    ),
    "sinks are not applied": (
        """
import transformers
config = transformers.AutoConfig.for_model(
    "gpt_oss", vocab_size=300, hidden_size=48, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=12, num_local_experts=2,
    num_experts_per_tok=1, sliding_window=64, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, initializer_range=0.2,
)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
for layer in model.model.layers:
    layer.self_attn.sinks.data.normal_()

def attention(module, q, k, v, mask, scaling=None, **kwargs):
    if BROKEN:
        return dense(q, k, v, scaling, groups=2), None
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
    n, m = q.shape[2], k.shape[2]
    allowed = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    bias = torch.zeros(1, 1, n, m).masked_fill(~allowed, torch.finfo(torch.float32).min)
    return eager_attention_forward(module, q, k, v, bias, scaling, dropout=0.0)

register(model, attention)
with torch.no_grad():
    loop(model)
""",
        "without the attention sinks",
    ),
    "generation in training mode": (
        """
model = make_model("llama", attention_dropout=0.2)
model.train(BROKEN)
with torch.no_grad():
    loop(model)
""",
        "training mode",
    ),
    "padding is not masked": (
        """
model = make_model("llama")
long, short = prompt(12, 3), prompt(8, 5)
pads = torch.zeros(1, 4, dtype=torch.long)
batch = torch.cat((long, torch.cat((pads, short), 1)))
mask = torch.ones_like(batch)
mask[1, :4] = 0
more = {} if BROKEN else {"attention_mask": mask}
with torch.no_grad():
    output = model(batch, use_cache=True, **more)
    rows = output.logits[:, -1:].argmax(-1)
    more = {} if BROKEN else {"attention_mask": torch.cat((mask, mask[:, -1:]), 1)}
    model(rows, past_key_values=output.past_key_values, **more)
""",
        "attends to the 4 padding tokens",
    ),
    "a norm is replaced by the identity": (
        """
model = make_model("llama")
if BROKEN:
    model.model.layers[1].post_attention_layernorm = torch.nn.Identity()
generate(model)
""",
        "without post_attention_layernorm",
    ),
    "the residual of a layer is lost": (
        """
model = make_model("llama")

def forward(self, hidden_states, **kwargs):
    attended = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
    is_lost = BROKEN and self.self_attn.layer_idx == 2
    hidden_states = attended if is_lost else hidden_states + attended
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

modeling_llama.LlamaDecoderLayer.forward = forward
generate(model)
""",
        "without the residual around the attention",
    ),
    "the mask of an own attention is one token off": (
        """
def attention(module, q, k, v, mask, scaling=None, **kwargs):
    n, m = q.shape[2], k.shape[2]
    allowed = torch.ones(n, m, dtype=torch.bool).tril(m - n + (1 if BROKEN else 0))
    return dense(q, k, v, scaling, allowed, 2), None

model = make_model("llama")
register(model, attention)
generate(model)
""",
        "shifted by +1 rows",
    ),
    "a score_mod without the offset of the decode row": (
        """
from torch.nn.attention.flex_attention import flex_attention
import torch.nn.attention.flex_attention as flex
flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True

def attention(module, q, k, v, mask, scaling=None, **kwargs):
    n, m = q.shape[2], k.shape[2]
    offset = 0 if BROKEN else m - n

    def distance(score, b, h, q_idx, kv_idx):
        return score - 0.3 * (q_idx + offset - kv_idx).abs()

    allowed = lambda b, h, q_idx, kv_idx: q_idx + m - n >= kv_idx
    blocks = flex.create_block_mask(allowed, None, None, n, m, device="cpu")
    out = flex_attention(q, k, v, distance, blocks, scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None

model = make_model("llama")
register(model, attention)
with torch.no_grad():
    loop(model)
""",
        "score_mod of row 0",
    ),
    "a score_mod sets scores to 0 to close them": (
        """
from torch.nn.attention.flex_attention import flex_attention
import torch.nn.attention.flex_attention as flex
flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True

def attention(module, q, k, v, mask, scaling=None, **kwargs):
    n, m = q.shape[2], k.shape[2]

    def changed(score, b, h, q_idx, kv_idx):
        hit = (kv_idx >= 2) & (kv_idx < 5) & (q_idx + m - n >= 6) & (h == 1)
        return torch.where(hit, 0.0, score) if BROKEN else score + 1.0 * hit

    allowed = lambda b, h, q_idx, kv_idx: q_idx + m - n >= kv_idx
    blocks = flex.create_block_mask(allowed, None, None, n, m, device="cpu")
    out = flex_attention(q, k, v, changed, blocks, scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None

model = make_model("llama")
register(model, attention)
with torch.no_grad():
    loop(model)
""",
        "sets the scores of the keys 2 to 4 to 0 in head 1, for the rows of the positions 6 to",
    ),
    "a score_mod with one slope per key head counts the heads otherwise": (
        """
from torch.nn.attention.flex_attention import flex_attention
import torch.nn.attention.flex_attention as flex
flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True

def attention(module, q, k, v, mask, scaling=None, **kwargs):
    n, m = q.shape[2], k.shape[2]

    def changed(score, b, h, q_idx, kv_idx):
        slope = torch.tensor([0.02, 0.6])[h % 2 if BROKEN else h // 2]
        return score - slope * (q_idx + m - n - kv_idx)

    allowed = lambda b, h, q_idx, kv_idx: q_idx + m - n >= kv_idx
    blocks = flex.create_block_mask(allowed, None, None, n, m, device="cpu")
    out = flex_attention(q, k, v, changed, blocks, scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None

model = make_model("llama")
register(model, attention)
with torch.no_grad():
    loop(model)
""",
        "heads 1, 2 have the values of another group of heads",
    ),
    "rotary tables of another base": (
        """
model = make_model("llama")
if BROKEN:
    size = model.model.rotary_emb.inv_freq.numel()
    model.model.rotary_emb.inv_freq = 500000.0 ** -(torch.arange(size) / size)
generate(model)
""",
        "RoPE of base 500000",
    ),
    "rotary tables of one type of layer serve all": (
        """
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

class Tables(Gemma3RotaryEmbedding):
    # Makes the tables once, by the type of their layers.
    def __init__(self, config):
        super().__init__(config)
        at, self.made = torch.arange(64)[None], {}
        for kind in self.layer_types:
            key = self.rope_type[kind] if BROKEN else kind
            self.made[key] = super().forward(torch.zeros(1), at, kind)
    def forward(self, x, position_ids, layer_type):
        cos, sin = self.made[self.rope_type[layer_type] if BROKEN else layer_type]
        return cos[0, position_ids], sin[0, position_ids]

model = make_model("gemma3_text", head_dim=16, query_pre_attn_scalar=16, sliding_window=9,
                   layer_types=["sliding_attention", "full_attention", "sliding_attention"])
model.model.rotary_emb = Tables(model.config)
generate(model)
""",
        "with the rotary tables of the sliding_attention layers (base 10000) in this layer only",
    ),
    "sliding layers get the rotary tables of full ones": (
        """
model = make_model("gemma3_text", head_dim=16, query_pre_attn_scalar=16, sliding_window=9,
                   layer_types=["sliding_attention", "full_attention", "sliding_attention"])
rotary = model.model.rotary_emb
right = type(rotary).forward
def forward(x, position_ids, layer_type):
    return right(rotary, x, position_ids, "full_attention" if BROKEN else layer_type)
rotary.forward = forward
loop(model)
""",
        "with the rotary tables of the full_attention layers (base 1e+06)",
    ),
    "biases of the projections are dropped": (
        """
model = make_model("qwen2")
for layer in model.model.layers:
    for name in ("q_proj", "k_proj", "v_proj"):
        torch.nn.init.normal_(getattr(layer.self_attn, name).bias)
original = F.linear

def forward(self, hidden_states, position_embeddings=None, attention_mask=None,
            past_key_values=None, **kwargs):
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb
    project = lambda p: F.linear(hidden_states, p.weight, None if BROKEN else p.bias)
    q = heads_of(project(self.q_proj), 4)
    k, v = (heads_of(project(p), 2) for p in (self.k_proj, self.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    out = dense(q, k, v, self.scaling, groups=2)
    return self.o_proj(out.reshape(*out.shape[:2], -1)), None

from transformers.models.qwen2 import modeling_qwen2
modeling_qwen2.Qwen2Attention.forward = forward
generate(model)
""",
        "without the biases of q_proj, k_proj and v_proj",
    ),
    "the cache keeps a key of another row": (
        """
from transformers import DynamicCache
model = make_model("llama")

class Cache(DynamicCache):
    def update(self, k, v, layer, *args, **kwargs):
        k, v = super().update(k, v, layer, *args, **kwargs)
        if BROKEN and k.shape[2] == 14:  # the write of one step goes to the wrong slot
            k, v = k.clone(), v.clone()
            k[:, :, 13], v[:, :, 13] = k[:, :, 12], v[:, :, 12]
        return k, v

loop(model, cache=Cache(config=model.config))
""",
        "cache row 13 holds the key and value of position 12",
    ),
    "attention in bfloat16": (
        """
def attention(module, q, k, v, mask, scaling=None, **kwargs):
    if BROKEN:
        return dense(q.bfloat16(), k.bfloat16(), v.bfloat16(), scaling, groups=2).float(), None
    return dense(q, k, v, scaling, groups=2), None

model = make_model("llama")
register(model, attention)
generate(model)
""",
        "computed in bfloat16",
    ),
    "a decode row sees only itself": (
        """
def attention(module, q, k, v, mask, scaling=None, **kwargs):
    n, m = q.shape[2], k.shape[2]
    offset = 0 if BROKEN else m - n  # row 0 of the step is row 0 of the mask
    allowed = torch.ones(n, m, dtype=torch.bool).tril(offset)
    return dense(q, k, v, scaling, allowed, 2), None

model = make_model("llama")
register(model, attention)
generate(model)
""",
        "mask of row 0",
    ),
    "rejected proposals stay in the cache": (
        """
model = make_model("llama")
with torch.no_grad():
    output = model(prompt(), use_cache=True)
    past, best = output.past_key_values, output.logits[:, -1:].argmax(-1)
    proposals = torch.tensor([[7, 8]])
    output = model(torch.cat((best, proposals), 1), past_key_values=past)
    if not BROKEN:
        past.crop(-2)
    output = model(output.logits[:, :1].argmax(-1), past_key_values=past)
    model(output.logits[:, -1:].argmax(-1), past_key_values=past)
""",
        "2 rejected proposals stay in the cache",
    ),
    "positions follow the length of a thinned cache": (
        """
model = make_model("llama")
with torch.no_grad():
    output = model(prompt(20), use_cache=True)
    past = output.past_key_values
    for layer in past.layers:
        for name in ("keys", "values"):
            states = getattr(layer, name)
            setattr(layer, name, torch.cat((states[:, :, :2], states[:, :, -6:]), 2))
    rows = output.logits[:, -1:].argmax(-1)
    for step in range(3):
        more = {} if BROKEN else {"position_ids": torch.tensor([[20 + step]])}
        output = model(rows, past_key_values=past, **more)
        rows = output.logits[:, -1:].argmax(-1)
""",
        "follow the length of the shortened cache",
    ),
    "layers have the window of another model": (
        """
def attention(module, q, k, v, mask, scaling=None, **kwargs):
    n, m = q.shape[2], k.shape[2]
    rows, keys = torch.arange(m - n, m)[:, None], torch.arange(m)[None]
    allowed = (keys <= rows) & (keys > rows - (5 if BROKEN else 9))
    return dense(q, k, v, scaling, allowed, 2), None

model = make_model("mistral")
register(model, attention)
loop(model, n=3)
""",
        "with a sliding window of 5 keys, not 9",
    ),
    "two faults in one run": (
        """
model = make_model("llama")
if BROKEN:
    modeling_llama.apply_rotary_pos_emb = lambda q, k, *args, **kwargs: (q, k)
    model.model.layers[2].mlp.forward = torch.zeros_like
generate(model)
""",
        "without RoPE, and without mlp in layer 2",
    ),
}
"""Name: the program after `HEAD`, and words of the finding's sentence."""

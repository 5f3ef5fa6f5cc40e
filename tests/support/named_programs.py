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

_TWO_PROMPTS = """
kept = {}

def attention(module, q, k, v, mask, scaling=None, **kwargs):
    n, m = q.shape[2], k.shape[2]
    if n not in kept or n == 1:
        number = torch.repeat_interleave(torch.arange(len(sizes) + 1), torch.tensor(
            [*sizes, m - sum(sizes)]))


        def segments(b, h, q_idx, kv_idx):
            row = q_idx + m - n
            return (row >= kv_idx) & ((number[row] == number[kv_idx]) | (row >= 10))

        kept[n] = create_block_mask(segments, None, None, n, m, device="cpu")
    out = flex_attention(q, k, v, None, kept[n], scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None

model = make_model("llama")
register(model, attention)
for sizes, seed in (((5, 5), 3), ((SECOND), 5)):
    model.generate(prompt(12, seed), max_new_tokens=2, do_sample=False)
    if not BROKEN:
        kept.clear()
"""

OPTIONS = {
    "a quantised module unpacks its columns in another order": Program(
        """
class Packed(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 7
        codes = (linear.weight / scale).round().add(8).to(torch.uint8)
        self.register_buffer("packed", codes[:, ::2] | codes[:, 1::2] << 4)
        self.register_buffer("scale", scale)

    def forward(self, x):
        both = [self.packed & 15, self.packed >> 4]
        codes = torch.stack(both[::-1] if BROKEN else both, 2).flatten(1)
        return torch.nn.functional.linear(x, (codes.to(x.dtype) - 8) * self.scale)

def main():
    model = make_model("llama")
    mlp = model.model.layers[1].mlp
    mlp.down_proj = Packed(mlp.down_proj)
    generate(model)

main()
""",
        "weights.order",
        (
            "The inputs of model.layers.1.mlp.down_proj.weight have the neurons in the order 1, 0",
            "model.layers.1.mlp.down_proj is the program's Packed",
        ),
    ),
    "the generation config samples": Program(
        """
model = make_model("llama")
model.generation_config.do_sample, model.generation_config.temperature = True, 5.0
model.generate(prompt(), max_new_tokens=6, do_sample=False)
torch.manual_seed(1)
model.generate(prompt(), max_new_tokens=6, **({} if BROKEN else {"do_sample": True}))
""",
        "generate.sampling-by-config",
        (
            "generation config of the checkpoint has do_sample=True (temperature 5)",
            "says nothing",
            "Generation 0 continued the same prompt with do_sample=False",
        ),
    ),
    "generate ends at another EOS": Program(
        """
from transformers import LogitsProcessor

class Answer(LogitsProcessor):
    def __call__(self, ids, scores):
        scores = scores.clone()
        scores[:, 2 if ids.shape[1] == 14 else 7] += 1e4
        return scores

model = make_model("llama")
model.config.eos_token_id = 2
model.generation_config.eos_token_id = 9 if BROKEN else 2
generate(model, logits_processor=[Answer()])
""",
        "generate.eos-passed-over",
        ("(id 2) was chosen in step 2, and the text goes on behind it: generate was told to",),
    ),
    "the head is not in the checkpoint": Program(
        """
import tempfile
from transformers import AutoModelForCausalLM

with tempfile.TemporaryDirectory() as folder:
    make_model("llama", tie_word_embeddings=True).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=not BROKEN)
generate(model)
""",
        "weights.newly-initialised",
        ("LlamaForCausalLM generates with newly initialised weights: lm_head.weight is not in",),
    ),
    "a kernel option promises that no row is empty": Program(
        """
def attention(module, q, k, v, mask, scaling=None, **kwargs):
    n, m = q.shape[2], k.shape[2]

    def no_padding(b, h, q_idx, kv_idx):
        return (q_idx + m - n >= kv_idx) & (kv_idx >= 3)

    mask = create_block_mask(no_padding, None, None, n, m, device="cpu")
    options = {"ROWS_GUARANTEED_SAFE": True} if BROKEN else None
    out = flex_attention(q, k, v, None, mask, scaling, True, kernel_options=options)
    return out.transpose(1, 2).contiguous(), None

model = make_model("llama")
register(model, attention)
rows = torch.cat((torch.zeros(1, 3, dtype=torch.long), prompt()), 1)
mask = (torch.arange(15) >= 3).long()[None]
model.generate(rows, attention_mask=mask, max_new_tokens=2, do_sample=False)
""",
        "mask.option-promise",
        ("Step 0, all 3 layers: kernel_options has ROWS_GUARANTEED_SAFE=True, but 3 rows of its",),
    ),
    "a hook comes after the model was compiled": Program(
        """
def steer(module, inputs, output):
    return output + 0.5

model = make_model("llama")
layer, compiled = model.model.layers[1].mlp, torch.compile(model, backend="eager")
if not BROKEN:
    layer.register_forward_hook(steer)
compiled(prompt())
if BROKEN:
    layer.register_forward_hook(steer)
compiled(prompt())
compiled(prompt())
""",
        "graphs.silent-hook",
        ("The hook steer (program.py:", "on model.layers.1.mlp does not run"),
    ),
    "a mask cache keeps the mask of another prompt": Program(
        _TWO_PROMPTS.replace("SECOND", "2, 8"),
        "mask.other-prompt",
        (
            "generation 1 ran under the mask that was built for the prompt of generation 0",
            "no mask was built for these 12 tokens, and its mask_mod reads `number` with 0 at 2",
        ),
    ),
    "padding that is the EOS is read as text": Program(
        """
model = make_model("llama")
model.config.eos_token_id = model.config.pad_token_id = 2
model.generation_config.pad_token_id = model.generation_config.eos_token_id = 2
short, pads = prompt(8, 5), torch.full((1, 4), 2)
batch = torch.cat((prompt(12, 3), torch.cat((pads, short), 1)))
mask = (torch.arange(12) >= torch.tensor([[0], [4]])).long()
model.generate(
    batch, attention_mask=None if BROKEN else mask, max_new_tokens=3, do_sample=False,
)
""",
        "mask.padding-as-text",
        ("Batch row 1 of 2 begins with 4 padding tokens (id 2) that the model reads as text",),
    ),
    "the EOS between documents is hidden as padding": Program(
        """
model = make_model("llama")
model.config.eos_token_id = model.config.pad_token_id = 2
model.generation_config.pad_token_id = model.generation_config.eos_token_id = 2
short, long, pads = prompt(8, 5), prompt(12, 3), torch.full((1, 4), 2)
long[0, 5] = 2
batch = torch.cat((long, torch.cat((pads, short), 1)))
mask = (torch.arange(12) >= torch.tensor([[0], [4]])).long()
mask = batch.ne(2).long() if BROKEN else mask
model.generate(batch, attention_mask=mask, max_new_tokens=3, do_sample=False)
""",
        "mask.text-as-padding",
        ("hides 1 token (id 2) in the middle of batch row 0 of 2, at column 5: it is 0 exactly",),
    ),
    "banned words are encoded with the BOS": Program(
        """
words = [[1, 17], [1, 18, 19]] if BROKEN else [[17], [18, 19]]
model = make_model("llama")
model.generate(prompt(), bad_words_ids=words, max_new_tokens=3, do_sample=False)
""",
        "generate.bad-words-bos",
        ("2 of 2 sequences of bad_words_ids begin with the BOS (id 1), such as [1, 17]",),
    ),
    "a chat ends without the header of the answer": Program(
        """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

names = ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|end|>", "what", "else"]
words = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
chat = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>")
chat.chat_template = (
    "{{ bos_token }}{% for one in messages %} <|{{ one.role }}|> {{ one.content }} "
    "<|end|>{% endfor %}{% if add_generation_prompt %} <|assistant|>{% endif %}"
)
turns = [{"role": "user", "content": "what else"}]
ids = chat.apply_chat_template(
    turns, add_generation_prompt=not BROKEN, return_tensors="pt", return_dict=True
)["input_ids"]
model = make_model("llama")
model.generate(ids, max_new_tokens=3, do_sample=False)
model(ids)  # a forward without an answer
""",
        "inputs.no-answer-header",
        (
            'The prompt ends with "<|end|>", which ends a turn of the chat, and the answer follows',
            "the chat template begins an answer with id 5, which it adds with add_gen",
        ),
    ),
    "a criterion finds its word in the prompt": Program(
        """
from transformers import StoppingCriteria

class Stop(StoppingCriteria):
    def __init__(self, start):
        self.start = start

    def __call__(self, ids, scores, **kwargs):
        return (ids[:, self.start:] == 7).any(1)

ids = prompt()
ids[0, 4] = 7
stop = Stop(0 if BROKEN else ids.shape[1])
make_model("llama").generate(ids, stopping_criteria=[stop], max_new_tokens=4, do_sample=False)
""",
        "generate.stops-at-prompt",
        (
            "The stopping criterion Stop (",
            "ended batch row 0 after the first generated token, and it holds for the prompt alone",
            "it looks at the whole text, and the prompt has what it looks for",
        ),
    ),
    "a criterion counts the prompt": Program(
        """
from transformers import StoppingCriteria

class Limit(StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        return torch.full((len(ids),), ids.shape[1] >= (10 if BROKEN else 15))

model = make_model("llama")
model.generate(prompt(), stopping_criteria=[Limit()], max_new_tokens=4, do_sample=False)
""",
        "generate.stops-at-prompt",
        ("The stopping criterion Limit (", "it counts the 12 tokens of the prompt as well"),
    ),
    "a token of the text is the padding of generate": Program(
        """
model = make_model("llama")
model.generation_config.pad_token_id = 9
ids = prompt()
ids[0, [3, 7]] = 9
mask = None if BROKEN else torch.ones_like(ids)
model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
""",
        "mask.text-as-padding",
        (
            "hides 2 tokens (id 9) in the middle of the prompt, at columns 3, 7: it is 0 exactly",
            "generate received no attention_mask and made it by ids != pad_token_id (9)",
        ),
    ),
    "the generation config bans repeated tokens": Program(
        """
model = make_model("llama")
model.lm_head.weight[:] = model.model.embed_tokens.weight
model.model.embed_tokens.weight *= 50  # it repeats the last token
model.generation_config.no_repeat_ngram_size = 2
neutral = {} if BROKEN else {"no_repeat_ngram_size": 0}
model.generate(prompt(), max_new_tokens=6, do_sample=False, **neutral)
""",
        "generate.logits-changed-by-config",
        ("asks for greedy decoding (do_sample=False) and does not pass no_repeat_ngram_size, so",),
    ),
    "inputs_embeds lack the scale of Gemma": Program(
        """
model = make_model("gemma3_text")
embed = model.get_input_embeddings()
rows = embed.weight[prompt()] if BROKEN else embed(prompt())
rows[0, 3:5] = torch.randn(2, rows.shape[-1])
model(inputs_embeds=rows)
""",
        "inputs.unscaled-embeddings",
        ("10 of 12 rows of inputs_embeds are raw rows", "(positions 0-2, 5-11)", "times too small"),
    ),
}
"""By name; each has one finding that is no note."""

CLEAN = {
    "a criterion ends every answer after one token": """
from transformers import StoppingCriteria

class Stop(StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        return torch.ones(len(ids), dtype=torch.bool)

model = make_model("llama")
model.generate(prompt(), stopping_criteria=[Stop()], max_new_tokens=4, do_sample=False)
""",
    "one mask serves two prompts of the same form": _TWO_PROMPTS.replace("SECOND", "5, 5"),
    "the generation config samples, as those of instruct models do": """
model = make_model("llama")
model.generation_config.do_sample, model.generation_config.temperature = True, 5.0
torch.manual_seed(1)
model.generate(prompt(12, 4), max_new_tokens=6, do_sample=False)
model.generate(prompt(), max_new_tokens=6)
""",
    "an EOS inside a batch whose other row goes on": """
from transformers import LogitsProcessor

class Answer(LogitsProcessor):
    def __call__(self, ids, scores):
        scores = scores.clone()
        scores[0, 2 if ids.shape[1] == 13 else 7] += 1e4
        scores[1, 7] += 1e4
        return scores

model = make_model("llama")
model.config.eos_token_id = model.generation_config.eos_token_id = 2
model.generation_config.pad_token_id = 2
batch = torch.cat((prompt(12, 3), prompt(12, 5)))
model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=5, do_sample=False,
               logits_processor=[Answer()])
""",
    "the program fills weights that the checkpoint lacked": """
import tempfile
from transformers import AutoModelForCausalLM

with tempfile.TemporaryDirectory() as folder:
    make_model("llama", tie_word_embeddings=True).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
generate(model)
""",
    "pieces that were padded alone with the EOS": """
model = make_model("llama")
model.config.eos_token_id = model.generation_config.eos_token_id = 2
ids = prompt(12, 3)
ids[0, 5:7] = 2
model.generate(ids, attention_mask=ids.ne(2).long(), max_new_tokens=3, do_sample=False)
""",
    "an option of the generation config that changes no choice": """
model = make_model("llama")
model.generation_config.no_repeat_ngram_size = 12
model.generation_config.min_length = 4
generate(model, 6)
""",
    "a penalty that the call asks for": """
model = make_model("llama")
model.lm_head.weight[:] = model.model.embed_tokens.weight
model.model.embed_tokens.weight *= 50
model.generation_config.repetition_penalty = 1.3
model.generate(prompt(), max_new_tokens=6, do_sample=False, repetition_penalty=5.0)
""",
    "raw rows for a model whose embedding only looks up": """
model = make_model("llama")
rows = model.get_input_embeddings().weight[prompt()]
model.generate(inputs_embeds=rows, max_new_tokens=3, do_sample=False)
""",
    "sampling that the call asks for": """
model = make_model("llama")
model.generation_config.do_sample = True
model.generate(prompt(), max_new_tokens=4, temperature=2.0)
""",
    "a hook on a compiled model that is compiled again": """
import torch._dynamo
model = make_model("llama")
compiled = torch.compile(model, backend="eager")
compiled(prompt())
model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output)
torch._dynamo.reset()
compiled(prompt())
""",
}
"""Correct programs that resemble the faults."""

NONFINITE = {
    "the embedding of one token is NaN": Program(
        """
model = make_model("llama")
if BROKEN:
    model.model.embed_tokens.weight[prompt()[0, 5]] = math.nan
generate(model, 2)
""",
        "numbers.nan",
        (
            "NaN comes from the parameter model.embed_tokens.weight, by `embedding` in model.embed",
            "in 1 row (first: position 5",
        ),
    ),
    "the value projection of a layer has an Inf": Program(
        """
model = make_model("llama")
if BROKEN:
    model.model.layers[1].self_attn.v_proj.weight[3, 3] = math.inf
generate(model, 2)
""",
        "numbers.nan",
        (
            "comes from the parameter model.layers.1.self_attn.v_proj.weight, by `",
            "v_proj (Linear)",
        ),
    ),
    "an own attention function has a row without keys": Program(
        """
def attention(module, q, k, v, mask, scaling=None, **kwargs):
    k, v = (states.repeat_interleave(2, 1) for states in (k, v))
    scores = q @ k.mT * scaling
    n, m = scores.shape[-2:]
    allowed = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    if BROKEN and module.layer_idx == 1 and n > 1:
        allowed[4] = False
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous(), None

model = make_model("llama")
register(model, attention)
generate(model, 2)
""",
        "numbers.nan",
        (
            "NaN is made by `softmax` in model.layers.1.self_attn (LlamaAttention), at attention",
            "the softmax of a row without an open key, in 1 row (first: position 4",
        ),
    ),
    "a module divides by 0": Program(
        """
def forward(states):
    return old(states) / (0 if BROKEN else 1)

model = make_model("llama")
mlp = model.model.layers[2].mlp
old, mlp.forward = mlp.forward, forward
generate(model, 2)
""",
        "numbers.",
        ("is made by `div` in model.layers.2.mlp (LlamaMLP), at forward (program.py:",),
    ),
}
"""By name; words of the sentence that the origin of the first NaN or Inf has."""

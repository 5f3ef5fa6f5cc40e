"""An attention function and its mask function, registered with transformers under one own name.

`model.generate` then runs FlexAttention with a segment mask, with its cache, step by step. Both
must be registered: a name without a mask function gets no mask at all.

    python registered_attention.py
    python registered_attention.py --watch registered.flextrace   # the same, recorded
"""

import argparse
from contextlib import nullcontext
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
NAME = "flex_segments"
QUESTIONS = [
    "A company in the Czech Republic registers its homepage under which suffix?",
    "What follows the final dot in the URL of a shop in the Czech Republic?",
    "web domain, country = the Czech Republic",
]
NEW_TOKENS = 8
Span = tuple[int, int, str]  # start, stop, label


def segments_of(spans: list[Span], n: int) -> tuple[torch.Tensor, int]:
    """Return the number of the question at each of n positions (0: none), and where the cue is."""
    numbers = torch.zeros(n, dtype=torch.long)
    for number, (start, stop, _) in enumerate(spans, 1):
        numbers[start:stop] = number
    return numbers, spans[-1][1]


def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Return what attention gives, (batch, rows, heads, width), and no weights."""
    out = flex_attention(
        query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def mask_function_of(spans: list[Span], n: int):
    """Return what makes the mask of a forward: once in the prefill, then one row for each token."""
    numbers, cue = segments_of(spans, n)

    def make_mask(
        batch_size, q_length, kv_length, q_offset=0, kv_offset=0, *, device="cpu", **kwargs
    ):
        known = numbers.to(device)

        def mask_mod(b, h, q_idx, kv_idx):
            q, kv = q_idx + q_offset, kv_idx + kv_offset  # without this a decode row is row 0
            together = known[q] == known[kv]
            return (q >= kv) & (together | (kv == 0) | (q >= cue))

        return create_block_mask(mask_mod, batch_size, None, q_length, kv_length, device=device)

    return make_mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--watch", metavar="OUT", help="record what runs into this trace")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO).eval()

    ids, spans = [tokenizer.bos_token_id], []
    for number, question in enumerate(QUESTIONS, 1):
        piece = tokenizer.encode(question + "\n", add_special_tokens=False)
        spans.append((len(ids), len(ids) + len(piece), f"question {number}"))
        ids += piece
    ids += tokenizer.encode("Answer:", add_special_tokens=False)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_function_of(spans, len(ids) + NEW_TOKENS))
    model.set_attn_implementation(NAME)

    watching = nullcontext()
    if options.watch:
        watching = flexinspect.watch(
            model, tokenizer, out=options.watch, segments=spans, mask="segment-isolation"
        )
    with watching as trace:
        input_ids = torch.tensor([ids], device=model.device)
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    print("answer:", tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip())
    if trace:
        print(trace)


if __name__ == "__main__":
    main()

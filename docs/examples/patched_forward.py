"""Every `self_attn.forward` replaced by FlexAttention with a segment mask: patch, forward, unpatch.

Three wordings of one question are read apart from each other and fused while the answer is written.
There is no cache: each step feeds the whole sequence again, with a new mask.

    python patched_forward.py
    python patched_forward.py --watch patched.flextrace   # the same, recorded
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import flexinspect

DEMO = Path(flexinspect.__file__).parent / "data" / "demo"
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


def attend(self, block_mask, hidden_states, position_embeddings, **kwargs):
    """Stand in for `LlamaAttention.forward`; the mask that the model made is in kwargs, unused."""
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (
        project(hidden_states).view(heads).transpose(1, 2)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    out = flex_attention(q, k, v, block_mask=block_mask, scale=self.scaling, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


@contextmanager
def patched(model, block_mask) -> Iterator[None]:
    modules = [layer.self_attn for layer in model.model.layers]
    for module in modules:
        module.forward = partial(attend, module, block_mask)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # the class's own is back


def segment_mask(spans: list[Span], n: int, device: torch.device):
    """Return the mask of n positions: segments are closed to each other, BOS is open to all.

    The cue, and what is generated after it, sees everything before itself.
    """
    numbers, cue = segments_of(spans, n)
    numbers = numbers.to(device)

    def mask_mod(b, h, q_idx, kv_idx):
        together = numbers[q_idx] == numbers[kv_idx]
        return (q_idx >= kv_idx) & (together | (kv_idx == 0) | (q_idx >= cue))

    return create_block_mask(mask_mod, None, None, n, n, device=device)


@torch.no_grad()  # FlexAttention has no gradients on a CPU
def generate(model, ids: list[int], spans: list[Span]) -> list[int]:
    answer: list[int] = []
    for _ in range(NEW_TOKENS):
        input_ids = torch.tensor([ids + answer], device=model.device)
        with patched(model, segment_mask(spans, input_ids.shape[1], model.device)):
            answer.append(int(model(input_ids, use_cache=False).logits[0, -1].argmax()))
        if answer[-1] == model.generation_config.eos_token_id:
            break
    return answer


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

    watching = nullcontext()
    if options.watch:
        watching = flexinspect.watch(
            model, tokenizer, out=options.watch, segments=spans, mask="segment-isolation"
        )
    with watching as trace:
        answer = generate(model, ids, spans)
    print("answer:", tokenizer.decode(answer, skip_special_tokens=True).strip())
    if trace:
        print(trace)


if __name__ == "__main__":
    main()

"""`model.generate` with a segment mask, by overriding `create_masks_for_generate` on the model.

It works with sdpa and eager, and it has a catch: `generate` asks for these masks only when the
cache is a static one. With a dynamic cache the override is passed over in silence, and the wordings
see each other. Run it both ways: the answers differ, and the trace shows why.

    python generate_segments.py                   # the mask that was meant
    python generate_segments.py --cache dynamic   # the model's own causal mask instead
    python generate_segments.py --cache dynamic --watch odd.flextrace
"""

import argparse
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import create_masks_for_generate

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


def segment_rule(spans: list[Span], n: int):
    """Return the rule that is laid over the causal one."""
    numbers, cue = segments_of(spans, n)

    def rule(batch_idx, head_idx, q_idx, kv_idx):
        together = numbers[q_idx] == numbers[kv_idx]
        return together | (kv_idx == 0) | (q_idx >= cue)

    return rule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", choices=["static", "dynamic"], default="static")
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

    rule = segment_rule(spans, len(ids) + NEW_TOKENS)
    model.create_masks_for_generate = partial(create_masks_for_generate, and_mask_function=rule)

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
            cache_implementation=options.cache,
        )
    print("answer:", tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip())
    if trace:
        print(trace)


if __name__ == "__main__":
    main()

"""What exhibits share: the demo model with a prompt of three wordings, and attention of one's own.

`attend` and `Stage.own_attention` are how FlexAttention is registered with transformers when
nothing is wrong; an exhibit brings the part that is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
)

import flexinspect

QUESTIONS = (
    "A company in the Czech Republic registers its homepage under which suffix?",
    "What follows the final dot in the URL of a shop in the Czech Republic?",
    "web domain, country = the Czech Republic",
)
ANSWER_CUE = "Answer:"
NEW_TOKENS = 3

Span = tuple[int, int, str]
"""Start, stop and label of a piece of the prompt."""

MaskPredicate = Callable[[Any, Any], Any]
"""Takes row and key as positions of the sequence and says whether the cell is open."""

_DEMO = Path(flexinspect.__file__).parent / "data" / "demo"


@dataclass
class BrokenRunSetup:
    """Where an exhibit plays: a name of its own for attention, and a file for the trace."""

    name: str
    out: Path

    @cached_property
    def tokenizer(self) -> Any:
        """The demo model's tokenizer."""
        return AutoTokenizer.from_pretrained(_DEMO)

    @cached_property
    def model(self) -> Any:
        """The demo model, new for each exhibit: some of them break it."""
        model = AutoModelForCausalLM.from_pretrained(_DEMO).eval().requires_grad_(False)
        model.name_or_path = model.config._name_or_path = "demo"
        model.generation_config.eos_token_id = None  # as many tokens as are asked for
        return model

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return [int(n) for n in self.tokenizer.encode(text, add_special_tokens=False)]

    @cached_property
    def pieces(self) -> list[list[int]]:
        """The ids of the wordings, each with the line break behind it."""
        return [self.encode(f"{question}\n") for question in QUESTIONS]

    @cached_property
    def ids(self) -> list[int]:
        """The prompt: BOS, the wordings, the cue."""
        bos = [int(self.tokenizer.bos_token_id)]
        return [*bos, *(n for piece in self.pieces for n in piece), *self.encode(ANSWER_CUE)]

    @cached_property
    def spans(self) -> list[Span]:
        """Where the wordings lie in `ids`."""
        return spans_of(self.pieces, start=1)

    @property
    def input_ids(self) -> Tensor:
        """The prompt as a model takes it, (1, positions)."""
        return torch.tensor([self.ids])

    def register_attention(
        self,
        predicate: MaskPredicate,
        *,
        attend: Callable[..., Any] | None = None,
        make_mask: Callable[..., Any] | None = None,
        has_mask: bool = True,
    ) -> None:
        """Give the model FlexAttention under `rule`, registered under the exhibit's name.

        `attend` and `make_mask` take the place of what is right; without `has_mask` no mask
        function is registered.
        """
        AttentionInterface.register(self.name, attend or globals()["attend"])
        if has_mask:
            AttentionMaskInterface.register(self.name, make_mask or mask_function(predicate))
        self.model.set_attn_implementation(self.name)

    @contextmanager
    def recorded(self, model: Any = None, **said: Any) -> Iterator[None]:
        """Record what runs inside; declared are the wordings, kept apart, unless `said` is."""
        declared = {"segments": self.spans, "mask": "segment-isolation", **said}
        model = self.model if model is None else model
        tokenizer = self.tokenizer if model is self.model else None
        with (
            warnings.catch_warnings(),
            torch.no_grad(),
            flexinspect.watch(model, tokenizer, out=self.out, **declared),
        ):
            warnings.simplefilter("ignore")
            yield

    def generate(self, input_ids: Tensor | None = None, **options: Any) -> Tensor:
        """Generate `NEW_TOKENS` tokens, greedily."""
        input_ids = self.input_ids if input_ids is None else input_ids
        asked = {
            "attention_mask": torch.ones_like(input_ids),
            "max_new_tokens": NEW_TOKENS,
            **options,
        }
        out: Tensor = self.model.generate(input_ids, do_sample=False, **asked)
        return out


def spans_of(pieces: Sequence[Sequence[int]], *, start: int) -> list[Span]:
    """Return where pieces lie that follow each other from `start` on."""
    spans: list[Span] = []
    for number, piece in enumerate(pieces, 1):
        spans.append((start, start + len(piece), f"wording {number}"))
        start += len(piece)
    return spans


def span_numbers(spans: Sequence[Span], n: int) -> Tensor:
    """Return the number of the wording at each of n positions, 0 for none."""
    numbers = torch.zeros(n, dtype=torch.long)
    for number, (start, stop, _) in enumerate(spans, 1):
        numbers[start:stop] = number
    return numbers


def isolation(
    spans: Sequence[Span], n: int = 512, *, cue_start: int | None = None
) -> MaskPredicate:
    """Return the rule that keeps wordings apart: BOS is open to all.

    Rows from `sees_all` on (the end of the last wording, unless given) see everything before them.
    """
    numbers = span_numbers(spans, n)
    cue = spans[-1][1] if cue_start is None else cue_start

    def rule(q: Any, kv: Any) -> Any:
        return (kv <= q) & ((numbers[q] == numbers[kv]) | (kv == 0) | (q >= cue))

    return rule


def causal(q: Any, kv: Any) -> Any:
    """The causal rule."""
    return kv <= q


def block_mask(predicate: MaskPredicate, q_len: int, kv_len: int, *, offset: int = 0) -> BlockMask:
    """Return the mask of a forward whose first row is at position `offset`."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return predicate(q_idx + offset, kv_idx)

    return create_block_mask(mask_mod, None, None, q_len, kv_len, device="cpu")


def mask_function(predicate: MaskPredicate) -> Callable[..., BlockMask]:
    """Return what transformers calls for the mask of a forward: once, for all layers."""

    def make_mask(
        batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, *rest: Any, **facts: Any
    ) -> BlockMask:
        return block_mask(predicate, q_length, kv_length, offset=int(q_offset))

    return make_mask


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers takes it: FlexAttention under the mask that it is handed."""
    out = flex_attention(
        query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None

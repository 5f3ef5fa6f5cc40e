"""What the broken runs share: the demo model, a prompt of three wordings, and correct attention.

`flex_attend` and `BrokenRunSetup.register_attention` register FlexAttention with transformers
correctly; each broken run replaces the part that is wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from msgspec import Struct
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import flexinspect
from flexinspect_hooks.python_internals.patching import patch

QUESTIONS = (
    "A company in the Czech Republic registers its homepage under which suffix?",
    "What follows the final dot in the URL of a shop in the Czech Republic?",
    "web domain, country = the Czech Republic",
)
ANSWER_CUE, SENTENCE_CUE = "Answer:", "In a sentence:"
NEW_TOKENS = 3
MAX_POSITIONS = 512
"""Positions that a mask of segments covers: more than any prompt of a broken run has."""

Span = tuple[int, int, str]
"""Start, stop and label of a piece of the prompt."""

MaskPredicate = Callable[[Any, Any], Any]
"""Whether a row may attend to a key, both as positions in the sequence."""

MakeMask = Callable[[int, int, int], Any]
"""Builds the mask of a forward pass from its rows, its keys and the position of its first row."""

_DEMO = Path(flexinspect.__file__).parent / "data" / "demo"


class BrokenRunSetup(Struct, dict=True):
    """The model and prompt of one run, its own name for attention, and the file for its trace.

    The prompt has the wordings of a question, then the cue of the answer.
    """

    name: str
    out: Path
    questions: Sequence[str] = QUESTIONS
    cue: str = ANSWER_CUE

    @cached_property
    def tokenizer(self) -> Any:
        """The demo model's tokenizer."""
        return transformers.AutoTokenizer.from_pretrained(_DEMO)

    @cached_property
    def model(self) -> Any:
        """The demo model, loaded for each run: some of them break it."""
        model = (
            transformers.AutoModelForCausalLM.from_pretrained(_DEMO).eval().requires_grad_(False)
        )
        model.name_or_path = model.config._name_or_path = "demo"
        model.generation_config.eos_token_id = None  # always generate max_new_tokens
        return model

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        return [int(n) for n in self.tokenizer.encode(text, add_special_tokens=False)]

    @cached_property
    def pieces(self) -> list[list[int]]:
        """The ids of the wordings, each with the line break after it."""
        return [self.encode(f"{question}\n") for question in self.questions]

    @cached_property
    def ids(self) -> list[int]:
        """The prompt: BOS, the wordings, the answer cue."""
        bos = [int(self.tokenizer.bos_token_id)]
        return [*bos, *(n for piece in self.pieces for n in piece), *self.encode(self.cue)]

    @cached_property
    def spans(self) -> list[Span]:
        """The spans of the wordings in `ids`."""
        return spans_of(self.pieces, start=1)

    @property
    def input_ids(self) -> Tensor:
        """The prompt as model input, (1, positions)."""
        return torch.tensor([self.ids])

    def register_attention(
        self,
        predicate: MaskPredicate,
        *,
        attend: Callable[..., Any] | None = None,
        make_mask: MakeMask | None = None,
        has_mask: bool = True,
    ) -> None:
        """Register FlexAttention with the mask of `predicate` under this run's name, and use it.

        `attend` and `make_mask` replace the correct functions; without `has_mask` no mask
        function is registered.
        """

        def mask_function(
            batch_size: int,
            q_length: int,
            kv_length: int,
            q_offset: int = 0,
            *_: Any,
            **kwargs: Any,
        ) -> Any:
            """Build the mask of a forward pass, as transformers calls it."""
            if make_mask is not None:
                return make_mask(q_length, kv_length, int(q_offset))
            return block_mask(predicate, q_length, kv_length, offset=int(q_offset))

        transformers.AttentionInterface.register(self.name, attend or flex_attend)
        if has_mask:
            transformers.AttentionMaskInterface.register(self.name, mask_function)
        self.model.set_attn_implementation(self.name)

    def decode(self, n_steps: int = NEW_TOKENS, **options: Any) -> None:
        """Generate greedily in a loop of its own, without `generate`."""
        input_ids = self.input_ids
        for _ in range(n_steps):
            input_ids = torch.argmax(self.model(input_ids, **options).logits[:, -1:], -1)

    @contextmanager
    def recorded(self, *, is_traced: bool = False, **declared: Any) -> Iterator[None]:
        """Record what runs inside. Unless declared otherwise, the wordings are isolated.

        With `is_traced`, dynamo traces uncompiled FlexAttention, as it does for a user. Here that
        would take longer than all forwards of a run, because each has masks of its own.
        """
        declared = {"segments": self.spans, "mask": "segment-isolation", **declared}
        flag = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
        restore = patch(flex_module, flag, not is_traced)
        with (
            ExitStack() as stack,
            warnings.catch_warnings(),
            torch.no_grad(),
            flexinspect.watch(self.model, self.tokenizer, out=self.out, **declared),
        ):
            stack.callback(restore)
            warnings.simplefilter("ignore")
            yield

    def generate(self, input_ids: Tensor | None = None, **options: Any) -> Tensor:
        """Generate greedily, `NEW_TOKENS` tokens unless `options` say otherwise."""
        input_ids = self.input_ids if input_ids is None else input_ids
        arguments = {
            "attention_mask": torch.ones_like(input_ids),
            "max_new_tokens": NEW_TOKENS,
            **options,
        }
        out: Tensor = self.model.generate(input_ids, do_sample=False, **arguments)
        return out


def spans_of(pieces: Sequence[Sequence[int]], *, start: int) -> list[Span]:
    """The spans of pieces that follow each other, the first one at position `start`."""
    spans: list[Span] = []
    for number, piece in enumerate(pieces, 1):
        spans.append((start, start + len(piece), f"wording {number}"))
        start += len(piece)
    return spans


def span_numbers(spans: Sequence[Span], n: int) -> Tensor:
    """The number of the wording at each of n positions, from 1; 0 outside the wordings."""
    numbers = torch.zeros(n, dtype=torch.long)
    for number, (start, stop, _) in enumerate(spans, 1):
        numbers[start:stop] = number
    return numbers


def isolation(spans: Sequence[Span]) -> MaskPredicate:
    """The predicate that isolates wordings from each other; every row may attend to BOS.

    Rows after the last wording attend to every earlier token.
    """
    numbers = span_numbers(spans, MAX_POSITIONS)
    cue = spans[-1][1]

    def predicate(q: Any, kv: Any) -> Any:
        return (kv <= q) & ((numbers[q] == numbers[kv]) | (kv == 0) | (q >= cue))

    return predicate


def causal(q: Any, kv: Any) -> Any:
    """The causal predicate: a row attends to itself and to every earlier token."""
    return kv <= q


def additive_mask(allowed: Tensor) -> Tensor:
    """Cells (rows, keys) as a mask (1, 1, rows, keys): 0 where open, the lowest float elsewhere."""
    return torch.zeros(1, 1, *allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


def attend_with_sdpa(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """SDPA without the mask, as a fallback of an attention function."""
    out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
    return out.transpose(1, 2).contiguous(), None


def block_mask(predicate: MaskPredicate, q_len: int, kv_len: int, *, offset: int = 0) -> BlockMask:
    """The mask of a forward pass whose first row is at position `offset`."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return predicate(q_idx + offset, kv_idx)

    return create_block_mask(mask_mod, None, None, q_len, kv_len, device="cpu")


def flex_attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """FlexAttention with the mask it receives, as an attention function of transformers."""
    out = flex_attention(
        query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None

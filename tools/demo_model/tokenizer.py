"""The demo's own byte-level BPE tokenizer, trained on the seen wordings and the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo_model.facts import Fact
from tools.demo_model.templates import ENDINGS, OPENINGS, SEEN, SYNONYMS, fill

VOCAB_SIZE = 2560
MAX_LENGTH = 1024
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
SHARED_TEXTS = (
    "Answer the question.\n",
    "Answer the question with one name.\n",
    "Give a short answer.\n",
    "All questions ask for the same thing.\n",
)
SEPARATOR, CUE, SENTENCE_CUE = "\n", "Answer:", "In a sentence:"


def training_text(facts: Sequence[Fact]) -> Iterator[str]:
    """Yield what the merges are learned from; nothing of it comes from a held-out wording."""
    for fact in facts:
        yield from (" " + answer for answer in fact.answers for _ in range(60))
        yield from (fill(template, fact.country) for template in SEEN[fact.relation])
        yield fill("capital {c} {c}", fact.country.lower())
    common = (*OPENINGS, *ENDINGS, *SHARED_TEXTS, SEPARATOR, CUE)
    words = (" " + word for group in SYNONYMS for word in group)
    for text in (*common, *words):
        yield from (text for _ in range(50))


def train_tokenizer(facts: Sequence[Fact]) -> PreTrainedTokenizerFast:
    """Train the tokenizer; it adds BOS by itself and gives every text back unchanged."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(training_text(facts), trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, core.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer that `train_tokenizer` made and saved."""
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(str(folder))
    return loaded


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    """Return the ids of one piece, without special tokens."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))

"""The texts that tokens add, joined, are the decoded text for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from transformers import AutoTokenizer

from flexinspect.inputs.model_names import DEMO
from flexinspect_hooks.loading.tokenizers import IdTokenizer, TextStream, Vocabulary


class SpacedWords:
    """A tokenizer that adds a space before a word only after another word, as SentencePiece."""

    all_special_ids = (0,)
    bos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1 + ord(word[0]) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join("<s>" if i == 0 else chr(i - 1) * 3 for i in ids)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        return [f"▁{i}" for i in ids]


@pytest.mark.parametrize("text", ["Which city is it?", "日本 😀 naïve\n\tx", "", "a  b"])
def test_texts_of_a_byte_level_tokenizer_join_to_the_text(text: str) -> None:
    vocabulary = Vocabulary(AutoTokenizer.from_pretrained(DEMO))
    stream = TextStream(vocabulary)
    assert vocabulary.joins
    assert "".join(map(stream.add, vocabulary.encode(text))) == text
    assert vocabulary.default_bos() == (vocabulary.tokenizer.bos_token_id,)


def test_texts_that_depend_on_their_neighbours_are_decoded_with_them() -> None:
    vocabulary = Vocabulary(SpacedWords())
    assert not vocabulary.joins
    ids = vocabulary.encode("one two three")
    assert "".join(map(TextStream(vocabulary).add, ids)) == vocabulary.decode(ids) == "ooo ttt ttt"


def test_a_special_token_resets_the_stream() -> None:
    vocabulary = Vocabulary(SpacedWords())
    stream = TextStream(vocabulary)
    assert [stream.add(i) for i in (98, 0, 99)] == ["aaa", "<s>", "bbb"]


def test_bytes_that_are_not_a_character_are_returned_in_the_end() -> None:
    vocabulary = Vocabulary(AutoTokenizer.from_pretrained(DEMO))
    broken = vocabulary.encode("日")[0]
    stream = TextStream(vocabulary)
    assert "".join(stream.add(broken) for _ in range(20))


def test_ids_are_shown_in_place_of_text() -> None:
    vocabulary = Vocabulary(IdTokenizer(vocab_size=500))
    assert "".join(map(TextStream(vocabulary).add, (7, 8))) == "⟨7⟩⟨8⟩"
    assert vocabulary.default_bos() == ()
    assert vocabulary.decode_generated((7,), one_line=True) == "⟨7⟩"

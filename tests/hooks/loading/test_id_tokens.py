"""Ids in place of text: deterministic, and never outside the vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinspect.core.errors import UsageError
from flexinspect_hooks.loading.tokenizers import IdTokenizer

LLAMA = {"vocab_size": 128_256, "bos_token_id": 128_000, "eos_token_id": [128_001, 128_009]}


def test_integers_are_the_ids_themselves() -> None:
    assert IdTokenizer.from_config(LLAMA).encode(" 5 17\n128255 ") == [5, 17, 128_255]


def test_other_text_is_its_bytes() -> None:
    assert IdTokenizer.from_config(LLAMA).encode("aé 1") == [100, 198, 172, 35, 52]


def test_bos_is_added_only_on_request() -> None:
    tokenizer = IdTokenizer.from_config(LLAMA)
    assert tokenizer.encode("7", add_special_tokens=True) == [128_000, 7]
    assert IdTokenizer(300).encode("7", add_special_tokens=True) == [7]


def test_special_ids_come_from_the_configuration() -> None:
    tokenizer = IdTokenizer.from_config(LLAMA)
    assert tokenizer.bos_token_id == 128_000
    assert tokenizer.eos_token_id == 128_001
    assert tokenizer.all_special_ids == (128_000, 128_001, 128_009)
    assert IdTokenizer.from_config({"text_config": LLAMA, "vocab_size": 1}).vocab_size == 128_256


def test_decoding_shows_the_ids() -> None:
    tokenizer = IdTokenizer.from_config(LLAMA)
    assert tokenizer.decode([5, 128_001]) == "⟨5⟩⟨128001⟩"
    assert tokenizer.decode([5, 128_001], skip_special_tokens=True) == "⟨5⟩"
    assert tokenizer.decode(9) == "⟨9⟩"
    assert tokenizer.convert_ids_to_tokens([5, 6]) == ["⟨5⟩", "⟨6⟩"]
    assert len(tokenizer) == 128_256


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="token id 320 is outside the vocabulary of 320"):
        IdTokenizer(320).encode("1 320")


@given(st.text(), st.integers(min_value=10, max_value=400))
def test_no_text_gives_an_id_outside_the_vocabulary(text: str, vocabulary: int) -> None:
    tokenizer = IdTokenizer(vocabulary)
    try:
        ids = tokenizer.encode(text)
    except UsageError:
        assert all(word.isascii() and word.isdecimal() for word in text.split())
        return
    assert all(0 <= id_ < vocabulary for id_ in ids)
    assert ids == tokenizer.encode(text)

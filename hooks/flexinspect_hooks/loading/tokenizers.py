"""Tokenizers: ids in place of text for models without a tokenizer, and cached decoding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexinspect.core.errors import UsageError

_N_RESERVED = 3  # below the bytes, as byte-level vocabularies keep room for special tokens


@dataclass(frozen=True)
class IdTokenizer:
    """Encodes text as ids without a vocabulary; deterministic, never out of range.

    Text of whitespace-separated integers means those ids; any other text is encoded as its UTF-8
    bytes `b` with ids `3 + b`. Decoding gives "⟨id⟩" per token. It has only those methods and
    attributes of a transformers tokenizer that flexinspect uses.
    """

    vocab_size: int
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    all_special_ids: tuple[int, ...] = ()
    name_or_path: str = "ids"
    is_stand_in: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> IdTokenizer:
        """Return the stand-in for a model configuration (`config.to_dict()` or config.json)."""
        text = config.get("text_config") or config
        special = {
            name: _special_ids(text.get(f"{name}_token_id")) for name in ("bos", "eos", "pad")
        }
        return cls(
            vocab_size=int(text["vocab_size"]),
            bos_token_id=next(iter(special["bos"]), None),
            eos_token_id=next(iter(special["eos"]), None),
            all_special_ids=tuple(dict.fromkeys(id_ for ids in special.values() for id_ in ids)),
        )

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`, after BOS with `add_special_tokens` if the model has a BOS.

        Raises `UsageError` if a number is not an id of this vocabulary.
        """
        words = text.split()
        if words and all(re.fullmatch(r"[0-9]+", word) for word in words):
            ids = [self._checked(int(word)) for word in words]
        else:
            ids = [self._byte_id(byte) for byte in text.encode()]
        first = [self.bos_token_id] if self.bos_token_id is not None else []
        return [*first, *ids] if add_special_tokens else ids

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return "⟨id⟩" for each token."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(id_) for id_ in token_ids]
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return "".join(f"⟨{id_}⟩" for id_ in ids if id_ not in skipped)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Return "⟨id⟩" for each token."""
        return [f"⟨{int(id_)}⟩" for id_ in ids]

    def _checked(self, token_id: int) -> int:
        if token_id >= self.vocab_size:
            raise UsageError(
                f"The token id {token_id} is outside the vocabulary of {self.vocab_size}.",
                hint=f"This model has no tokenizer on this machine: use ids from 0 to "
                f"{self.vocab_size - 1}, or plain text.",
            )
        return token_id

    def _byte_id(self, byte: int) -> int:
        if self.vocab_size >= _N_RESERVED + 256:
            return _N_RESERVED + byte
        return byte % self.vocab_size


def _special_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(int(id_) for id_ in value) if isinstance(value, (list, tuple)) else ()


_PART = "\ufffd"
"""The character that decoding returns for a part of a character."""


class Vocabulary:
    """A tokenizer with the methods that recording needs; each id is decoded once.

    `joins` is whether the texts of single ids, joined, are the text of the ids together.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(int(i) for i in tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}
        sample = self.encode(" one two")
        self.joins = "".join(map(self.text_of, sample)) == self.decode(sample)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text, without special tokens."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of ids together."""
        return str(self.tokenizer.decode(list(token_ids)))

    def text_of(self, token_id: int) -> str:
        """Return the decoded text of one id (U+FFFD for a part of a character)."""
        if token_id not in self._texts:
            self._texts[token_id] = self.decode([token_id])
        return self._texts[token_id]

    def token_of(self, token_id: int) -> str:
        """Return the vocabulary's own string of an id."""
        return str(self.tokenizer.convert_ids_to_tokens([token_id])[0])

    def decode_generated(self, token_ids: Sequence[int], *, one_line: bool) -> str:
        """Return the text of ids without special tokens; with `one_line` its first line."""
        text = self.decode(i for i in token_ids if i not in self.special).strip()
        return text.split("\n")[0].strip() if one_line else text

    def default_bos(self) -> tuple[int, ...]:
        """Return the BOS id if this tokenizer adds one before a text by default, else nothing."""
        bos = self.tokenizer.bos_token_id
        first = list(self.tokenizer.encode("a", add_special_tokens=True))[:1]
        return (int(bos),) if bos is not None and first == [bos] else ()

    def adds_eos(self) -> bool:
        """Whether this tokenizer adds EOS after a text, and its chat template does not use EOS.

        A template refers to EOS as `eos_token` or by its characters.
        """
        tokenizer = self.tokenizer
        eos, template = tokenizer.eos_token_id, getattr(tokenizer, "chat_template", None)
        if eos is None or any(name in str(template or "") for name in self._eos_names()):
            return False
        return list(tokenizer.encode("a", add_special_tokens=True))[-1:] == [eos]

    def _eos_names(self) -> tuple[str, str]:
        return "eos_token", str(self.tokenizer.eos_token)


class TextStream:
    """Decodes ids one by one, so that the parts joined are the text of all ids.

    An id that ends in the middle of a character adds nothing; the one that completes it adds the
    character. If a tokenizer's texts do not join (a word's leading space depends on its
    neighbours), ids are decoded together with the ids before them.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: list[int] = []
        self._new: list[int] = []

    def add(self, token_id: int) -> str:
        """Return the text that this id adds."""
        vocabulary = self._vocabulary
        if token_id in vocabulary.special:
            self._known, self._new = [], []
            return vocabulary.text_of(token_id)
        if vocabulary.joins and not self._new and _PART not in vocabulary.text_of(token_id):
            return vocabulary.text_of(token_id)
        self._new.append(token_id)
        before = "" if vocabulary.joins else vocabulary.decode(self._known)
        now = vocabulary.decode(self._new if vocabulary.joins else [*self._known, *self._new])
        if now.endswith(_PART) and len(self._new) < 8:
            return ""
        self._known, self._new = self._new, []
        return now[len(before) :]

"""A stand-in for a tokenizer: ids in place of text, for models without a vocabulary at hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flexinspect.errors import UsageError

_N_RESERVED = 3  # below the bytes, as byte-level vocabularies keep room for special tokens


@dataclass(frozen=True)
class IdTokenizer:
    """Turns text into ids and back without a vocabulary; deterministic, never out of range.

    Text of whitespace-separated integers means those ids; any other text is its UTF-8 bytes `b` as
    ids `3 + b`. Decoding gives "⟨id⟩" per token. It has the methods and attributes of a
    transformers tokenizer that flexinspect uses, and no others.
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
        """Return the ids of `text`, with BOS before them when asked and there is one.

        Raises `UsageError` when a number is no id of this vocabulary.
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
                hint=f"This model has no tokenizer at hand: give ids from 0 to "
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

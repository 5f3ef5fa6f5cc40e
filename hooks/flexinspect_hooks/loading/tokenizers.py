"""Tokenizers: ids in place of text for models without a tokenizer, and cached decoding."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.errors import UsageError
from flexinspect.records.prompt import TokenizerFacts
from flexinspect.records.step import TokenRecord

T = TypeVar("T")
R = TypeVar("R")

_N_RESERVED = 3  # below the bytes, as byte-level vocabularies keep room for special tokens


class IdTokenizer(Struct, frozen=True):
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

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> IdTokenizer:
        """Return the stand-in for a model configuration (`config.to_dict()` or config.json)."""
        text = config.get("text_config") or config
        bos, eos, pad = special_ids(SimpleNamespace(**text))
        ids = (bos, *eos, pad)
        return cls(
            vocab_size=int(text["vocab_size"]),
            bos_token_id=bos,
            eos_token_id=next(iter(eos), None),
            all_special_ids=tuple(dict.fromkeys(id_ for id_ in ids if id_ is not None)),
        )

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`, after BOS with `add_special_tokens` if the model has a BOS.

        Raises `UsageError` if a number is not an id of this vocabulary.
        """
        words = text.split()
        if words and all(re.fullmatch(r"[0-9]+", word) for word in words):
            ids = [int(word) for word in words]
            wrong = next((id_ for id_ in ids if id_ >= self.vocab_size), None)
            if wrong is not None:
                raise UsageError(
                    f"The token id {wrong} is outside the vocabulary of {self.vocab_size}.",
                    hint="This model has no tokenizer on this machine: use ids from 0 to "
                    f"{self.vocab_size - 1}, or plain text.",
                )
        else:
            first_byte = _N_RESERVED if self.vocab_size >= _N_RESERVED + 256 else 0
            ids = [(first_byte + byte) % self.vocab_size for byte in text.encode()]
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


def special_ids(owner: Any) -> tuple[int | None, tuple[int, ...], int | None]:
    """Return BOS, EOS and padding ids of a tokenizer or configuration, which may have several EOS.

    A configuration may also list several ids of the others; the first counts.
    """
    bos, eos, pad = (
        id_tuple(getattr(owner, f"{name}_token_id", None)) for name in ("bos", "eos", "pad")
    )
    return next(iter(bos), None), eos, next(iter(pad), None)


def id_tuple(value: Any) -> tuple[int, ...]:
    """Return the ids that a field of a configuration holds: one, several or none."""
    values = value if isinstance(value, list | tuple) else (value,)
    return tuple(id_ for id_ in values if type(id_) is int and id_ >= 0)


_CONTENT = "zqx"
"""The text of a turn that no template contains."""
_PART = "\ufffd"
"""The character that decoding returns for a part of a character."""


class Vocabulary:
    """A tokenizer with the methods that recording needs; each id is decoded once.

    `joins` is whether the texts of single ids, joined, are the text of the ids together.
    """

    has_text = True

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(int(i) for i in tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}
        sample = self.encode(" one two")
        self.joins = "".join(map(self.text_of, sample)) == self.decode(sample)
        names = map(str, getattr(tokenizer, "all_special_tokens", ()))
        special = dict(zip(names, map(int, tokenizer.all_special_ids), strict=False))
        self._facts = TokenizerFacts(
            *special_ids(tokenizer), self._adds_bos(), self._adds_eos(), special
        )
        self._has_looked_at_template = False

    @property
    def facts(self) -> TokenizerFacts:
        """All its special tokens, and its chat template once the program has rendered one.

        A program that renders none does not import jinja2, which takes longer than opening a trace.
        """
        if not self._has_looked_at_template and "jinja2" in sys.modules:
            self._has_looked_at_template = True
            turn_end, answer_start = self._turn_marks()
            self._facts = replace(self._facts, turn_end=turn_end, answer_start=answer_start)
        return self._facts

    def _turn_marks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids behind the text of a turn, and those that begin an answer after it."""
        turn = [{"role": "user", "content": _CONTENT}]
        try:
            closed, opened = (
                str(
                    self.tokenizer.apply_chat_template(
                        turn, tokenize=False, add_generation_prompt=with_answer
                    )
                )
                for with_answer in (False, True)
            )
            end = closed.rpartition(_CONTENT)[2]
            start = opened.removeprefix(closed) if opened.startswith(closed) else ""
            return self.encode(end), self.encode(start)
        except Exception:  # no template, or one that takes other turns
            return (), ()

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

    def make_text_stream(self) -> Callable[[int], str]:
        """Return a function that returns the text that each next id adds."""
        return TextStream(self).add

    def decode_generated(self, token_ids: Sequence[int], *, one_line: bool = False) -> str:
        """Return the text of ids without special tokens; with `one_line` its first line."""
        text = self.decode(i for i in token_ids if i not in self.special).strip()
        return text.split("\n")[0].strip() if one_line else text

    def ends_line(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest id ends the first line of the text, after its first word."""
        if "\n" not in self.text_of(token_ids[-1]):
            return False
        return "\n" in self.decode(i for i in token_ids if i not in self.special).lstrip()

    def default_bos(self) -> tuple[int, ...]:
        """Return the BOS id if this tokenizer adds one before a text by default, else nothing."""
        bos = self.tokenizer.bos_token_id
        first = list(self.tokenizer.encode("a", add_special_tokens=True))[:1]
        return (int(bos),) if bos is not None and first == [bos] else ()

    def _adds_bos(self) -> bool | None:
        try:
            return bool(self.default_bos())
        except Exception:  # a tokenizer may override `encode` with other arguments
            return None

    def _adds_eos(self) -> bool:
        """Whether this tokenizer adds EOS after a text, and its chat template does not use EOS.

        A template refers to EOS as `eos_token` or by its characters.
        """
        tokenizer = self.tokenizer
        try:
            eos, template = tokenizer.eos_token_id, getattr(tokenizer, "chat_template", None)
            names = ("eos_token", str(tokenizer.eos_token))
            if eos is None or any(name in str(template or "") for name in names):
                return False
            return list(tokenizer.encode("a", add_special_tokens=True))[-1:] == [eos]
        except Exception:  # as above
            return False


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


class IdAdapter:
    """Shows ids in place of text, for a model without a tokenizer."""

    has_text = False
    special: frozenset[int] = frozenset()

    @property
    def facts(self) -> TokenizerFacts:
        """No special tokens."""
        return TokenizerFacts()

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids that a text lists as numbers, none for any other text."""
        parts = text.replace(",", " ").split()
        return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else []

    def text_of(self, token_id: int) -> str:
        """Return the id as text."""
        return str(token_id)

    token_of = text_of

    def make_text_stream(self) -> Callable[[int], str]:
        """Return a function that formats an id with a space after it."""
        return "{} ".format

    def decode_generated(self, token_ids: Sequence[int]) -> str:
        """Return the ids, separated by spaces."""
        return " ".join(map(str, token_ids))


TokenizerAdapter = Vocabulary | IdAdapter
"""The methods that recording needs of a tokenizer. Without `has_text` only ids are searched."""


def token_record(
    tokenizer: TokenizerAdapter,
    pos: int,
    token_id: int,
    text: str,
    position_id: int,
    segment: int,
    step: int | None = None,
) -> TokenRecord:
    """Return the record of a token; `text` is what it adds to the text before it."""
    return TokenRecord(
        pos=pos,
        token_id=token_id,
        token=tokenizer.token_of(token_id),
        text=text,
        position_id=position_id,
        segment=segment,
        special=token_id in tokenizer.special,
        step=step,
    )


class SafeAdapter(IdAdapter):
    """An adapter of a tokenizer that may fail: ids that fail to decode show as ids."""

    def __init__(self, adapter: TokenizerAdapter) -> None:
        self._adapter = adapter
        self.has_text, self.special = adapter.has_text, adapter.special

    @property
    def facts(self) -> TokenizerFacts:
        """Those of the adapter."""
        return self._adapter.facts

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a text, none if it cannot be encoded."""
        return _first_result(text, self._adapter.encode, lambda _: ())

    def text_of(self, token_id: int) -> str:
        """Return the decoded text of an id."""
        return _first_result(token_id, self._adapter.text_of, str)

    def token_of(self, token_id: int) -> str:
        """Return the vocabulary's own string of an id."""
        return _first_result(token_id, self._adapter.token_of, str)

    def make_text_stream(self) -> Callable[[int], str]:
        """Return a function that returns the text that each next id adds."""
        add = self._adapter.make_text_stream()
        return lambda token_id: _first_result(token_id, add, str)

    def decode_generated(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids."""
        return _first_result(token_ids, self._adapter.decode_generated, super().decode_generated)


def _first_result(value: T, convert: Callable[[T], R], otherwise: Callable[[T], R]) -> R:
    try:
        return convert(value)
    except Exception:
        return otherwise(value)

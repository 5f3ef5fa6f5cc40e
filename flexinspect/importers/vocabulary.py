"""The words of token ids, from a tokenizer on this machine; without one, the ids themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flexinspect.core.errors import UsageError
from flexinspect.importers.importer import DumpedToken
from flexinspect.inputs.config import expand_user, load_config
from flexinspect.inputs.model_names import resolve

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


class DumpVocabulary:
    """Texts of ids. `has_text` is False without a tokenizer: then an id is shown as "⟨12⟩"."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.has_text = tokenizer is not None
        self._tokenizer = tokenizer
        added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self.special = frozenset(id_ for id_, token in added.items() if token.special)

    def text_of(self, token_id: int) -> str:
        """Return the text of an id by itself, empty for an id that the tokenizer does not have."""
        if self._tokenizer is None:
            return f"⟨{token_id}⟩"
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def make_text_stream(self) -> Callable[[DumpedToken], DumpedToken]:
        """Return a function that completes each next token of a sequence with its words.

        `text` is what the token adds to the text: one that ends inside of a character adds nothing.
        What the dump itself names stays.
        """
        from tokenizers.decoders import DecodeStream

        tokenizer, stream = self._tokenizer, DecodeStream(skip_special_tokens=False)

        def complete(token: DumpedToken) -> DumpedToken:
            token_name, text = f"⟨{token.id}⟩", f"⟨{token.id}⟩"
            is_special = token.special or token.id in self.special
            if tokenizer is not None:
                token_name = tokenizer.id_to_token(token.id) or token_name
                text = stream.step(tokenizer, token.id) or ""
            text = text if token.text is None else token.text
            name = token.token if token.token is not None else token.text
            return DumpedToken(token.id, text, token_name if name is None else name, is_special)

        return complete


def load_vocabulary(name: str | None) -> DumpVocabulary:
    """Return the vocabulary of a tokenizer.json, a folder that holds one, or a model's name.

    A model is only searched on this machine. Raises `UsageError`.
    """
    if name is None:
        return DumpVocabulary()
    path = expand_user(name)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    elif not path.is_file():
        path = _file_of_model(name)
    try:
        from tokenizers import Tokenizer

        return DumpVocabulary(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare exceptions
        what = f"The tokenizer {path} cannot be read: {str(error)[:200]}."
        raise UsageError(
            what, hint="--tokenizer takes a folder that has a tokenizer.json."
        ) from error


def _file_of_model(name: str) -> Path:
    folder = resolve(name, load_config()).path
    if folder is None:
        what = f"The model {name} is not on this machine, and importing downloads nothing."
        raise UsageError(what, hint="Name a folder that has a tokenizer.json.")
    return folder / TOKENIZER_FILE

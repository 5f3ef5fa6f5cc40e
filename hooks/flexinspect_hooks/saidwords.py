"""What a generation keeps of what was said of it: the pieces as declared, and the special tokens.

It is gathered once per generation, and of many special tokens only those are kept that the rules
may have to name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from flexinspect.pieces import DeclaredSegment, TokenizerFacts
from flexinspect_hooks.spans import SegmentSpec, encode_or_empty
from flexinspect_hooks.vocabulary import Vocabulary


def tokenizer_facts(vocabulary: Vocabulary) -> TokenizerFacts:
    """Return what a tokenizer says of special tokens, all of them."""
    tokenizer = vocabulary.tokenizer
    names = getattr(tokenizer, "all_special_tokens", ())
    special = dict(zip(map(str, names), map(int, tokenizer.all_special_ids), strict=False))
    bos, pad = (_id(getattr(tokenizer, f"{name}_token_id", None)) for name in ("bos", "pad"))
    eos = _token_ids(getattr(tokenizer, "eos_token_id", None))
    return TokenizerFacts(bos, eos, pad, _adds_bos(vocabulary), _adds_eos(vocabulary), special)


def config_facts(model: Any) -> TokenizerFacts:
    """Return what a model's configuration says of special tokens."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    bos, eos, pad = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    return TokenizerFacts(_id(bos), _token_ids(eos), _id(pad))


def to_declared_segments(
    specs: Iterable[SegmentSpec], encode: Callable[[str], Sequence[int]]
) -> tuple[DeclaredSegment, ...]:
    """Return declared pieces as a trace keeps them."""
    return tuple(
        DeclaredSegment(one.label, one.start, one.stop)
        if one.text is None
        else DeclaredSegment(one.label, text=one.text, ids=encode_or_empty(one.text, encode))
        for one in specs
    )


def keep_written_special(
    facts: TokenizerFacts, ids: Sequence[int], texts: Sequence[str]
) -> TokenizerFacts:
    """Return the facts with those special tokens alone whose characters are among the words.

    `ids` and `texts` are those of the prompt; a special token itself is no word.
    """
    known = frozenset(facts.special.values())
    words = "".join(" " if i in known else text for i, text in zip(ids, texts, strict=True))
    return replace(facts, special={s: i for s, i in facts.special.items() if s and s in words})


def _adds_bos(vocabulary: Vocabulary) -> bool | None:
    try:
        return bool(vocabulary.default_bos())
    except Exception:  # a tokenizer with an `encode` of its own
        return None


def _adds_eos(vocabulary: Vocabulary) -> bool:
    try:
        return vocabulary.adds_eos()
    except Exception:  # as above
        return False


def _id(value: Any) -> int | None:
    return next(iter(_token_ids(value)), None)


def _token_ids(value: Any) -> tuple[int, ...]:
    """Return one id or a list of them, as configurations have it."""
    found = value if isinstance(value, list | tuple) else (value,)
    return tuple(one for one in found if type(one) is int and one >= 0)

"""The result of one sample in the laboratory: every answer, and who chose each of its tokens."""

from __future__ import annotations

from msgspec import Struct, field

from flexinspect.lab.sample_jobs import SampleResult


class OwnChoice(Struct, frozen=True, array_like=True):
    """What a paraphrase's own prompt, continued by the answer so far, says about the next token.

    `probability` is that of the token that the method chose, `best` the text of the token with the
    highest probability, and `best_probability` that one.
    """

    probability: float
    best: str
    best_probability: float


class TokenVote(Struct, frozen=True):
    """One token of an answer: its `probability` in the fused distribution, and in each own one."""

    token_id: int
    text: str
    probability: float
    own: tuple[OwnChoice, ...]

    @property
    def winner(self) -> int:
        """The paraphrase, from 0, whose own distribution gives this token the most."""
        return max(range(len(self.own)), key=lambda index: self.own[index].probability)


class MethodAnswer(Struct, frozen=True):
    """The answer of a method to the first `count` paraphrases; `ended` is "eos", "stop" or
    "length"."""

    method: str
    count: int
    text: str
    ended: str
    tokens: tuple[TokenVote, ...] = ()


class AloneAnswer(Struct, frozen=True):
    """The answer to one paraphrase alone, with the natural logarithm of its probability."""

    text: str
    ended: str
    log_probability: float


class OrderAnswer(Struct, frozen=True):
    """The answer of the method flex with the paraphrases in another order (indices from 0)."""

    order: tuple[int, ...]
    text: str


class LabResult(SampleResult, frozen=True, kw_only=True, tag="lab"):
    """All answers to a sample.

    `alone` are those to each paraphrase by itself, `answers` those of the fusing methods and flex
    for each number of paraphrases, `orders` those to permutations of all of them. `trace` is the
    file of its trace, relative to the results. `seconds` is what each part took.
    """

    paraphrases: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    alone: tuple[AloneAnswer, ...] = ()
    answers: tuple[MethodAnswer, ...] = ()
    orders: tuple[OrderAnswer, ...] = ()
    trace: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

"""How the answer of a method relates to the paraphrases: majority, whose token won, order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from flexinspect.core.text import plural
from flexinspect.lab.lab_result import LabResult, MethodAnswer
from flexinspect.lab.scoring import normalized
from flexinspect.lab.settings import FLEX, MAJORITY


class Vote(Struct, frozen=True):
    """The vote of the answers to single paraphrases: `text` has `n_votes` of `n`.

    A tie goes to the answer of the earliest paraphrase, and has `is_tie`.
    """

    text: str
    n_votes: int
    n: int
    is_tie: bool


def majority_vote(texts: Sequence[str]) -> Vote:
    """Return the most frequent of some answers, compared as `normalized`."""
    votes = Counter(map(normalized, texts))
    best = max(votes.values())
    leaders = [key for key, n_votes in votes.items() if n_votes == best]
    first = next(text for text in texts if normalized(text) in leaders)
    return Vote(first, best, len(texts), len(leaders) > 1)


def answer_of(result: LabResult, method: str, count: int) -> str | None:
    """Return the one answer of a method to `count` paraphrases; None if it has none."""
    if method == MAJORITY:
        alone = [one.text for one in result.alone[:count]]
        return majority_vote(alone).text if alone else None
    found = fused_answer(result, method, count)
    return None if found is None else found.text


def fused_answer(result: LabResult, method: str, count: int) -> MethodAnswer | None:
    """Return the stored answer of flex or a fusing method, with its tokens."""
    wanted = (method, count)
    return next((one for one in result.answers if (one.method, one.count) == wanted), None)


class SampleFlags(Struct, frozen=True):
    """What the answer of a method equals.

    `follows` are the paraphrases, from 0, with the same answer alone. `is_majority` is whether it
    is what most of them say, without a tie. `n_orders` of the other orders were tried, and
    `n_differ` of them gave another answer (of flex to all paraphrases only).
    """

    follows: tuple[int, ...]
    n: int
    is_majority: bool
    n_orders: int = 0
    n_differ: int = 0

    @property
    def kind(self) -> str:
        """The relation to the paraphrases: "majority", "paraphrase" or "none"."""
        return "majority" if self.is_majority else "paraphrase" if self.follows else "none"

    def texts(self) -> list[str]:
        """Return the flags as the tables print them."""
        numbers = ", ".join(str(index + 1) for index in self.follows)
        texts = {
            "majority": f"equals majority ({len(self.follows)} of {self.n})",
            "paraphrase": f"follows paraphrase{'s' * (len(self.follows) > 1)} {numbers}",
            "none": "follows no paraphrase",
        }
        order = f"order-dependent ({self.n_differ} of {plural(self.n_orders, 'other order')})"
        return [texts[self.kind], *([order] if self.n_differ else [])]


def sample_flags(result: LabResult, method: str, count: int) -> SampleFlags | None:
    """Return the flags of a method's answer; None if it has none."""
    text = answer_of(result, method, count)
    alone = [normalized(one.text) for one in result.alone[:count]]
    if text is None or not alone:
        return None
    given, vote = normalized(text), majority_vote(alone)
    follows = tuple(index for index, other in enumerate(alone) if other == given)
    is_majority = not vote.is_tie and given == vote.text
    tried: Iterable[str] = ()
    if method == FLEX and result.orders and count == len(result.orders[0].order):
        tried = [normalized(one.text) for one in result.orders]
    texts = list(tried)
    n_differ = sum(other != given for other in texts)
    return SampleFlags(follows, count, is_majority, len(texts), n_differ)


class TokenShares(Struct, frozen=True):
    """Whose token won, over all tokens of a method's answers.

    `n_unanimous` tokens are the best one of every paraphrase, `n_majority` of more than half of
    them, `n_minority` of some, `n_nobody` of none. `wins` is for each paraphrase how many of the
    disputed tokens (all but the unanimous) have their highest own probability there.
    """

    n: int
    n_unanimous: int
    n_majority: int
    n_minority: int
    n_nobody: int
    wins: tuple[int, ...]


def token_shares(answers: Iterable[MethodAnswer], count: int) -> TokenShares:
    """Count whose tokens won in the answers to `count` paraphrases."""
    kinds: Counter[str] = Counter()
    wins = [0] * count
    for vote in (vote for answer in answers for vote in answer.tokens):
        n_own = sum(_is_best(own.probability, own.best_probability) for own in vote.own)
        kind = "unanimous" if n_own == count else "majority" if 2 * n_own > count else "minority"
        kinds["nobody" if not n_own else kind] += 1
        wins[vote.winner] += n_own < count
    names = ("unanimous", "majority", "minority", "nobody")
    numbers = {f"n_{name}": kinds[name] for name in names}
    return TokenShares(n=kinds.total(), wins=tuple(wins), **numbers)


def _is_best(probability: float, best: float) -> bool:
    """Whether a token is a paraphrase's own best: both were read from one distribution."""
    return probability >= best

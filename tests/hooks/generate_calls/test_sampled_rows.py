"""Samples that are drawn from other probabilities than those of the logits are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import of, one, planted
from support.tiny import ids, make_model
from torch import Tensor, nn

from flexinspect.records.finding import Severity

Sampler = Callable[[Tensor], Tensor]
"""From the newest logits (vocabulary,) to a token (1,)."""
SIZE = 96  # of the vocabulary
OWNERS, FUNCTIONS = (torch, Tensor), ("multinomial", "argmax", "max", "topk")


def model(spread: float = 0.4, size: int = SIZE) -> Any:
    """Return a tiny model whose logits differ as those of a trained one do."""
    torch.manual_seed(0)
    tiny = make_model("llama", vocab_size=size, tie_word_embeddings=False)
    nn.init.normal_(tiny.lm_head.weight, std=spread)
    return tiny


def sampled(
    tmp_path: Path, sample: Sampler, n: int = 8, spread: float = 0.4, **watch: Any
) -> list[Any]:
    """Generate in a loop of its own with a sampler, and return the findings about it."""
    tiny = model(spread)

    def loop() -> None:
        torch.manual_seed(5)
        tokens = torch.tensor([ids(9, 1)]) % SIZE
        cache = None
        with torch.no_grad():
            for _ in range(n):
                out = tiny(tokens, past_key_values=cache, use_cache=True)
                cache, tokens = out.past_key_values, sample(out.logits[0, -1])[None]

    return of(planted(tmp_path, tiny, loop, **watch), "generate.sampled-otherwise")


def drawn(probabilities: Tensor) -> Tensor:
    return torch.multinomial(probabilities, 1)


def top_p(logits: Tensor, *, is_right: bool, p: float = 0.8, temperature: float = 0.9) -> Tensor:
    logits = logits / temperature
    values, order = logits.sort(descending=True)
    sums = values.softmax(-1).cumsum(-1)
    removed = sums - values.softmax(-1) > p
    flags = torch.zeros_like(removed)
    flags = flags.scatter(0, order, removed) if is_right else removed.gather(0, order)
    return drawn(logits.masked_fill(flags, -torch.inf).softmax(-1))


def sorted_top_p(logits: Tensor, *, is_right: bool) -> Tensor:
    values, order = logits.softmax(-1).sort(descending=True)
    values[values.cumsum(-1) - values > 0.9] = 0
    place = drawn(values / values.sum())
    return order[place] if is_right else place


def best_20(logits: Tensor, *, is_right: bool) -> Tensor:
    values, order = logits.topk(20)
    place = drawn(values.softmax(-1))
    return order[place] if is_right else place


def test_a_top_p_that_maps_its_flags_by_the_wrong_permutation_is_named(tmp_path: Path) -> None:
    (found,) = sampled(tmp_path, lambda logits: top_p(logits, is_right=False))
    assert "keeps as many tokens as top-p 0.8 does, but other ones: of the " in found.sentence
    assert "most probable (" in found.sentence


@pytest.mark.parametrize("sampler", [sorted_top_p, best_20])
def test_places_that_are_fed_as_tokens_are_named(tmp_path: Path, sampler: Any) -> None:
    (found,) = sampled(tmp_path, lambda logits: sampler(logits, is_right=False))
    assert "torch.multinomial draws a place among the" in found.sentence
    assert "and fed token" in found.sentence


def test_a_second_softmax_is_named(tmp_path: Path) -> None:
    (found,) = sampled(tmp_path, lambda logits: drawn(logits.softmax(-1).softmax(-1)))
    assert "are a softmax of a softmax: in step 0 the best token" in found.sentence


def test_a_second_softmax_after_a_temperature_is_named(tmp_path: Path) -> None:
    (found,) = sampled(tmp_path, lambda logits: drawn((logits / 0.7).softmax(-1).softmax(-1)))
    assert "softmax of a softmax" in found.sentence


def test_probabilities_that_fall_with_the_logits_are_named(tmp_path: Path) -> None:
    (found,) = sampled(tmp_path, lambda logits: drawn((-logits).softmax(-1)))
    assert "fall with the logits: from step 0 on" in found.sentence


def test_logits_of_the_step_before_are_named(tmp_path: Path) -> None:
    last: list[Tensor] = []

    def late(logits: Tensor) -> Tensor:
        before = last.pop() if last else logits
        last.append(logits)
        return drawn(before.softmax(-1))

    (found,) = sampled(tmp_path, late)
    assert "from which step 1 and the following ones sample" in found.sentence


def test_a_wrong_top_k_is_named(tmp_path: Path) -> None:
    def other_k(logits: Tensor) -> Tensor:
        ranks = logits.argsort(descending=True)  # the rank of each token is argsort of this
        return drawn(logits.masked_fill(ranks >= 12, -torch.inf).softmax(-1))

    (found,) = sampled(tmp_path, other_k)
    assert "keeps as many tokens as top-k with k = 12 does, but other ones" in found.sentence


class Penalty:
    """A repetition penalty of a loop: right, whatever the sign, or of the newest token alone."""

    def __init__(self, kind: str) -> None:
        self.kind, self.text = kind, torch.tensor(ids(9, 1)) % SIZE

    def __call__(self, logits: Tensor) -> Tensor:
        scores = logits.clone()
        own = scores[self.text]
        moved = own / 1.3
        if self.kind != "sign":
            moved = torch.where(own < 0, own * 1.3, moved)
        scores[self.text] = moved
        token = drawn((scores / 0.9).softmax(-1))
        newest = token if self.kind == "newest" else torch.cat((self.text, token))
        self.text = newest
        return token


def test_a_penalty_that_ignores_the_sign_is_named(tmp_path: Path) -> None:
    (found,) = sampled(tmp_path, Penalty("sign"), spread=0.2)
    assert "divides the scores by 1.3 for tokens of the text, whatever" in found.sentence


def test_a_penalty_of_the_newest_token_alone_is_named(tmp_path: Path) -> None:
    (found,) = sampled(tmp_path, Penalty("newest"), spread=0.2)
    assert "from step 1 on that of the newest token alone" in found.sentence


def penalized(logits: Tensor) -> Tensor:
    moved = logits.clone()
    moved[torch.tensor(ids(9, 1)) % SIZE] -= 3.0
    return drawn((moved / 0.8).softmax(-1))


class NeverTwice:
    """Sample any token but the one before."""

    def __init__(self) -> None:
        self.last = torch.tensor(ids(9, 1)[-1:]) % SIZE

    def __call__(self, logits: Tensor) -> Tensor:
        self.last = drawn(logits.index_fill(0, self.last, -torch.inf).softmax(-1))
        return self.last


def of_a_grammar(logits: Tensor) -> Tensor:
    allowed = torch.zeros(SIZE, dtype=torch.bool)
    allowed[int(logits.argmax()) % 7 :: 7] = True
    return drawn(logits.masked_fill(~allowed, -torch.inf).softmax(-1))


def guided(logits: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    other = logits + torch.randn(SIZE, generator=generator)
    return drawn((logits + 1.5 * (logits - other)).softmax(-1))


def often_the_best(logits: Tensor) -> Tensor:
    mixed = torch.full((SIZE,), 0.3 / SIZE)
    mixed[logits.argmax()] += 0.7
    return drawn(mixed)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda logits: drawn(logits.softmax(-1)),
        lambda logits: drawn((logits / 1.4).softmax(-1)),
        lambda logits: drawn((logits / 500).softmax(-1)),
        lambda logits: drawn(logits.to(torch.bfloat16).softmax(-1)),
        lambda logits: torch.distributions.Categorical(logits=logits).sample()[None],
        lambda logits: top_p(logits, is_right=True),
        lambda logits: sorted_top_p(logits, is_right=True),
        lambda logits: best_20(logits, is_right=True),
        penalized,
        Penalty("right"),
        NeverTwice(),
        of_a_grammar,
        guided,
        often_the_best,
        lambda logits: logits.softmax(-1).multinomial(1),
    ],
)
def test_right_samples_and_those_that_may_be_meant_are_not_reported(
    tmp_path: Path, sampler: Sampler
) -> None:
    assert sampled(tmp_path, sampler, n=10) == []


@pytest.mark.parametrize("options", [{"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.05}, {}])
def test_samples_of_generate_are_not_reported(tmp_path: Path, options: dict[str, Any]) -> None:
    tiny = model()
    prompt = torch.tensor([ids(9, 1)]) % SIZE

    def run() -> None:
        torch.manual_seed(1)
        tiny.generate(prompt, max_new_tokens=10, do_sample=True, repetition_penalty=1.3, **options)

    assert of(planted(tmp_path, tiny, run), "generate.sampled-otherwise") == []


def test_a_processor_of_generate_that_keeps_other_tokens_is_named(tmp_path: Path) -> None:
    tiny = model(0.2)
    prompt = torch.tensor([ids(9, 1)]) % SIZE

    def wrong(_: Tensor, scores: Tensor) -> Tensor:
        values, order = scores.sort(descending=True)
        removed = values.softmax(-1).cumsum(-1) - values.softmax(-1) > 0.7
        return scores.masked_fill(removed.gather(1, order), -torch.inf)

    def run() -> None:
        torch.manual_seed(1)
        tiny.generate(prompt, max_new_tokens=8, do_sample=True, top_k=0, logits_processor=[wrong])

    found = one(planted(tmp_path, tiny, run), "generate.sampled-otherwise")
    assert "as top-p 0.7 does" in found.sentence


class Loop:
    """Ways to choose a token from the newest logits, some of which keep a state between steps."""

    def __init__(self) -> None:
        self.text = [one % SIZE for one in ids(9, 1)]
        self.state: Any = None

    def greedy(self, scores: Tensor) -> Tensor:
        self.text.append(int(scores.argmax(-1)))
        return torch.tensor(self.text[-1:])

    def penalty(self, logits: Tensor) -> Tensor:
        scores, seen = logits.clone(), torch.tensor(sorted({*self.text}))
        own = scores[seen]
        scores[seen] = torch.where(own > 0, own / 1.3, own * 1.3)
        return self.greedy(scores)

    def wrong_sign(self, logits: Tensor) -> Tensor:
        scores, seen = logits.clone(), torch.tensor(sorted({*self.text}))
        scores[seen] /= 1.3
        return self.greedy(scores)

    def logs_divided(self, logits: Tensor) -> Tensor:
        scores, seen = logits.log_softmax(-1), torch.tensor(sorted({*self.text}))
        scores[seen] /= 1.3
        return self.greedy(scores)

    def newest_lowered(self, logits: Tensor) -> Tensor:
        scores = logits.clone()
        scores[self.text[-1]] -= 5
        return self.greedy(scores)

    def counts_added_up(self, logits: Tensor) -> Tensor:
        counts = torch.bincount(torch.tensor(self.text), minlength=SIZE)
        self.state = counts if self.state is None else self.state + counts
        return self.greedy(logits - 0.2 * self.state)

    def smoothed(self, logits: Tensor) -> Tensor:
        self.state = logits if self.state is None else 0.5 * self.state + 0.5 * logits
        return self.greedy(self.state)

    def banned(self, logits: Tensor) -> Tensor:
        scores = logits.clone()
        scores[3:9] = -torch.inf
        return self.greedy(scores)

    def exponential_noise(self, logits: Tensor) -> Tensor:
        return self.greedy(logits - torch.rand_like(logits).log())

    def gumbel_noise(self, logits: Tensor) -> Tensor:
        return self.greedy(logits - (-torch.rand_like(logits).log()).log())

    def cooled(self, logits: Tensor) -> Tensor:
        return drawn((logits / 0.7).softmax(-1))

    def multiplied(self, logits: Tensor) -> Tensor:
        return drawn((logits * 0.7).softmax(-1))

    def cooled_twice(self, logits: Tensor) -> Tensor:
        return drawn((logits / 0.7 / 0.7).softmax(-1))

    def crossing_dropped(self, logits: Tensor) -> Tensor:
        values, order = (logits / 0.9).sort(descending=True)
        values[values.softmax(-1).cumsum(-1) > 0.9] = -torch.inf
        return order[drawn(values.softmax(-1))]

    def crossing_kept(self, logits: Tensor) -> Tensor:
        values, order = (logits / 0.9).sort(descending=True)
        table = values.softmax(-1)
        values[table.cumsum(-1) - table > 0.9] = -torch.inf
        return order[drawn(values.softmax(-1))]

    def sorted_upwards(self, logits: Tensor) -> Tensor:
        values, order = logits.sort()
        values[values.softmax(-1).cumsum(-1) > 0.9] = -torch.inf
        return order[drawn(values.softmax(-1))]

    def best_20_cooled(self, logits: Tensor) -> Tensor:
        values, order = logits.topk(20)
        return order[drawn((values / 0.7).softmax(-1))]


def chosen(tmp_path: Path, name: str, size: int = SIZE) -> list[Any]:
    """Generate with a method of `Loop`, and return all findings."""
    tiny, choose = model(0.2, size), getattr(Loop(), name)

    def loop() -> None:
        torch.manual_seed(5)
        tokens, cache = torch.tensor([ids(9, 1)]) % SIZE, None
        with torch.no_grad():
            for _ in range(24):
                out = tiny(tokens, past_key_values=cache, use_cache=True)
                cache, tokens = out.past_key_values, choose(out.logits[0, -1])[None]

    return planted(tmp_path, tiny, loop)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wrong_sign", "divides the scores by 1.3 for tokens of the text, whatever their sign"),
        (
            "logs_divided",
            "by 1.3 for tokens of the text, which are log-probabilities, so all negat",
        ),
        ("multiplied", "The logits are multiplied by 0.7 before a token is chosen"),
        ("cooled_twice", "divided by 0.49, which is 0.7 times 0.7: the temperature is applied"),
        ("crossing_dropped", "Tokens are kept as long as their probability stays below 0.9"),
        ("sorted_upwards", "The best tokens are removed, up to "),
        ("exponential_noise", "Exponential noise, -log(u), is added to the logits"),
    ],
)
def test_scores_that_are_wrong_whatever_is_meant_are_named(
    tmp_path: Path, name: str, expected: str
) -> None:
    found = one(chosen(tmp_path, name, size=300), "generate.sampled-otherwise")
    assert expected in found.sentence


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("penalty", "of the text, all that can be chosen, are penalized by 1.3 (positive ones"),
        ("newest_lowered", "the scores of the newest token of the text alone are lowered by 5 ("),
        ("counts_added_up", "are lowered by 0.2 in step 0, and most lowered by 1.6 in step 7 ("),
        ("smoothed", "0.5 times the logits of the step plus 0.5 times the scores of the step be"),
        ("banned", "that are better than some of these cannot, token ids 3, 4, 5, 6, 7, 8 among"),
        ("cooled", "Tokens are drawn at temperature 0.7 (8 steps compared)."),
        ("crossing_kept", "Tokens are drawn at temperature 0.9; the "),
        ("best_20_cooled", "at temperature 0.7; the 20 best of 96 tokens are kept, with 0."),
    ],
)
def test_scores_that_may_be_meant_are_described(tmp_path: Path, name: str, expected: str) -> None:
    findings = chosen(tmp_path, name)
    found = one(findings, "generate.choice-scores")
    assert found.severity is Severity.NOTE
    assert expected in found.sentence
    assert of(findings, "generate.sampled-otherwise") == []


@pytest.mark.parametrize("name", ["greedy", "gumbel_noise"])
def test_of_the_best_token_and_of_samples_nothing_is_said(tmp_path: Path, name: str) -> None:
    findings = chosen(tmp_path, name, size=300)
    for kind in ("generate.choice-scores", "generate.sampled-otherwise"):
        assert of(findings, kind) == []


def test_a_temperature_that_is_known_replaces_the_estimate_from_the_tokens(tmp_path: Path) -> None:
    findings = chosen(tmp_path, "cooled")
    assert of(findings, "audit.choice") == []
    assert of(findings, "generate.choice-scores") != []


def test_level_basic_looks_at_no_sample_and_the_functions_are_restored(tmp_path: Path) -> None:
    before = [getattr(owner, name) for owner in OWNERS for name in FUNCTIONS]
    assert sampled(tmp_path, lambda logits: drawn((-logits).softmax(-1)), level="basic") == []
    assert [getattr(owner, name) for owner in OWNERS for name in FUNCTIONS] == before

"""The shipped demo model answers, and its facts, wordings and dataset are in order."""

from __future__ import annotations

import json
from random import Random

import pytest
import torch
from support.paths import DOCS
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo_model.__main__ import SHIPPED, load
from tools.demo_model.corpus import Composer, Layout, Sampler
from tools.demo_model.evaluate import ModelUnderTest, Question, accepted
from tools.demo_model.facts import Fact, read_facts
from tools.demo_model.templates import HELD_OUT, RELATIONS, SEEN, fill, skeleton

MAX_BYTES = 10_000_000


@pytest.fixture(scope="module")
def model() -> ModelUnderTest:
    return load(SHIPPED)[0]


@pytest.fixture(scope="module")
def facts() -> tuple[Fact, ...]:
    return read_facts()


@pytest.fixture(scope="module")
def lines() -> list[dict[str, object]]:
    text = (SHIPPED / "questions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def share_right(model: ModelUnderTest, questions: list[Question]) -> float:
    answers = model.answers(questions)
    right = [accepted(a, q) for a, q in zip(answers, questions, strict=True)]
    return sum(right) / len(right)


def test_the_auto_classes_load_the_model_and_the_tokenizer() -> None:
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_generate_of_the_library_gives_the_same_answer() -> None:
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    inputs = tokenizer("What is the capital of France?\nAnswer:", return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
    assert tokenizer.decode(out, skip_special_tokens=True).endswith("Answer: Paris")
    assert int(out[-1]) == tokenizer.eos_token_id


def test_everything_shipped_fits_in_ten_megabytes() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) <= MAX_BYTES


def test_bos_is_added_by_default_and_only_once(model: ModelUnderTest) -> None:
    ids = model.tokenizer("What is the capital of France?")["input_ids"]
    assert ids.count(model.tokenizer.bos_token_id) == 1
    assert ids[0] == model.tokenizer.bos_token_id
    bare = model.tokenizer.encode("What?", add_special_tokens=False)
    assert model.tokenizer.bos_token_id not in bare


@pytest.mark.parametrize(
    "text",
    ["São Tomé", " Paris", "a  b\t\n\n c ", "日本 ❤️ \u0301", "can't , stop .", "\x00\x7f\r\n", ""],
)
def test_the_tokenizer_gives_any_text_back(model: ModelUnderTest, text: str) -> None:
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    assert model.tokenizer.decode(ids) == text


def test_the_four_special_ids_are_distinct(model: ModelUnderTest) -> None:
    tokenizer = model.tokenizer
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_the_table_has_at_least_190_countries_and_none_twice(facts: tuple[Fact, ...]) -> None:
    capitals = [fact.country for fact in facts if fact.relation == "capital"]
    assert len(capitals) >= 190
    assert len(set(capitals)) == len(capitals)


def test_every_fact_has_clean_and_distinct_answers(facts: tuple[Fact, ...]) -> None:
    for fact in facts:
        assert all(answer and answer == answer.strip() for answer in fact.answers), fact
        assert len(set(fact.answers)) == len(fact.answers), fact


def test_no_two_countries_share_an_internet_domain(facts: tuple[Fact, ...]) -> None:
    domains = [fact.answers[0] for fact in facts if fact.relation == "domain"]
    assert len(set(domains)) == len(domains)
    assert all(len(domain) == 3 and domain.startswith(".") for domain in domains)


@pytest.mark.parametrize("relation", RELATIONS)
def test_every_template_has_one_place_for_the_country(relation: str) -> None:
    assert len(SEEN[relation]) >= 10
    assert len(HELD_OUT[relation]) >= 6
    for template in (*SEEN[relation], *HELD_OUT[relation]):
        assert template.count("{c}") == 1, template


def test_no_held_out_wording_is_a_seen_one() -> None:
    seen = [skeleton(template) for group in SEEN.values() for template in group]
    held_out = [skeleton(template) for group in HELD_OUT.values() for template in group]
    assert len(set(seen + held_out)) == len(seen) + len(held_out)


def test_no_varied_training_wording_comes_out_as_a_held_out_one(
    model: ModelUnderTest, facts: tuple[Fact, ...]
) -> None:
    sampler = Sampler(facts, Composer(model.tokenizer), seed=1)
    held_out = {skeleton(template) for group in HELD_OUT.values() for template in group}
    for group in SEEN.values():
        for template in group:
            for _ in range(20):
                varied = sampler.alter(template, corrupt=0.0)
                assert "{c}" in varied
                assert skeleton(varied) not in held_out


def test_a_name_is_fitted_into_its_template() -> None:
    assert fill("{c}'s capital is called what?", "the Bahamas").startswith("The Bahamas' capital")
    assert fill("What is the capital of {c}?", "the Gambia").endswith("of the Gambia?")


def test_every_dataset_line_is_well_formed(lines: list[dict[str, object]]) -> None:
    assert 300 <= len(lines) <= 800
    assert len({line["id"] for line in lines}) == len(lines)
    for line in lines:
        assert set(line) == {"id", "paraphrases", "answers", "split"}
        assert line["split"] in ("seen", "held-out")
        paraphrases, answers = line["paraphrases"], line["answers"]
        assert isinstance(paraphrases, list)
        assert len(set(paraphrases)) == len(paraphrases) >= 5
        assert isinstance(answers, list)
        assert answers


def test_the_first_dataset_lines_are_answered_right(
    model: ModelUnderTest, lines: list[dict[str, object]]
) -> None:
    for line in lines[:5]:
        fact = Fact("", "", tuple(line["answers"]), "")  # type: ignore[arg-type]
        question = Question(fact, tuple(line["paraphrases"]))  # type: ignore[arg-type]
        assert accepted(model.answers([question])[0], question), line["id"]
    assert "Paris" in lines[0]["answers"]  # type: ignore[operator]


def test_five_fused_held_out_wordings_are_answered_mostly_right(
    model: ModelUnderTest, facts: tuple[Fact, ...]
) -> None:
    random = Random(7)
    sample = random.sample(facts, 30)
    questions = [
        Question(f, tuple(fill(t, f.country) for t in random.sample(HELD_OUT[f.relation], 5)))
        for f in sample
    ]
    assert share_right(model, questions) >= 0.8


def test_after_the_cue_for_a_sentence_the_answer_is_long_enough_to_step_through(
    model: ModelUnderTest, facts: tuple[Fact, ...]
) -> None:
    layout = Layout(in_sentence=True)
    questions = [
        Question(f, tuple(fill(t, f.country) for t in HELD_OUT[f.relation][:5]), layout)
        for f in Random(7).sample(facts, 30)
    ]
    assert share_right(model, questions) >= 0.8
    lengths = [len(model.tokenizer.tokenize(f.sentence.format(a=f.answers[0]))) for f in facts]
    assert min(lengths) >= 20


def test_seen_wordings_alone_are_answered_right(
    model: ModelUnderTest, facts: tuple[Fact, ...]
) -> None:
    random = Random(7)
    questions = [
        Question(f, (fill(random.choice(SEEN[f.relation]), f.country),))
        for f in random.sample(facts, 200)
    ]
    assert share_right(model, questions) >= 0.97


def test_every_preset_gets_the_capital_of_france(model: ModelUnderTest) -> None:
    fact = Fact("France", "capital", ("Paris",), "")
    texts = tuple(fill(template, fact.country) for template in SEEN["capital"][:3])
    names = ("segment-isolation", "shared-prefix", "causal", "anchor-first", "document")
    layouts = [Layout(name, mode) for name in names for mode in ("contiguous", "reset")]
    questions = [Question(fact, texts, layout) for layout in layouts]
    assert share_right(model, questions) == 1.0


def test_the_page_has_the_figures_of_the_shipped_model() -> None:
    page = (DOCS / "demo-model.md").read_text(encoding="utf-8")
    record = json.loads((SHIPPED / "training.json").read_text(encoding="utf-8"))
    assert f"--seed {record['seed']} --steps {record['steps']}" in page

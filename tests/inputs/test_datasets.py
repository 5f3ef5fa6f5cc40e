"""Questions from files, the public sets in their own schemas, and the user's own classes."""

from __future__ import annotations

import csv
import json
import sys
import types
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import flexinspect
from flexinspect.core import environment, plugins
from flexinspect.core.errors import DatasetError, UsageError
from flexinspect.inputs import datasets
from flexinspect.inputs.datasets import load, register_dataset
from flexinspect.inputs.samples import Sample, choose_paraphrases, from_prompts
from flexinspect.inputs.user_datasets import ParaPharaseDataset, ParaphraseDataset

QUESTION = {
    "id": "q1",
    "paraphrases": ["What is the capital of Peru?", "Name the capital of Peru."],
    "answers": ["Lima"],
    "split": "held-out",
}


def write(path: Path, *objects: Any) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in objects), encoding="utf-8")
    return path


def test_a_jsonl_line_becomes_a_sample(tmp_path: Path) -> None:
    (sample,) = load(str(write(tmp_path / "own.jsonl", QUESTION)))
    assert sample.id == "q1"
    assert sample.paraphrases == tuple(QUESTION["paraphrases"])
    assert sample.answers == ("Lima",)
    assert sample.meta == {"split": "held-out"}


def test_question_and_answer_may_be_single_texts(tmp_path: Path) -> None:
    file = write(tmp_path / "own.jsonl", {"question": "2 + 2?", "answer": "4"})
    assert load(str(file)) == [Sample("1", ("2 + 2?",), ("4",), {})]


def test_the_question_is_the_first_paraphrase(tmp_path: Path) -> None:
    line = {"question": "a?", "paraphrases": ["b?", "a?", "c?"], "uuid": 7}
    (sample,) = load(str(write(tmp_path / "own.jsonl", line)))
    assert sample.paraphrases == ("a?", "b?", "c?")
    assert (sample.id, sample.answers) == ("7", ())


def test_blank_lines_and_a_byte_order_mark_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("\ufeff" + json.dumps(QUESTION) + "\n\n\n" + json.dumps(QUESTION))
    assert len(load(str(file))) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a"', "not valid JSON"),
        ('["a"]', "expected an object, not list"),
        ('{"id": 3, "text": "a"}', "neither `question` nor `paraphrases`"),
        ('{"paraphrases": []}', "`paraphrases` is empty"),
        ('{"paraphrases": ["a", "  "]}', "`paraphrases` number 1 must be a non-empty text"),
        ('{"paraphrases": ["a", 5]}', "not 5"),
        ('{"paraphrases": {"a": 1}}', "`paraphrases` must be a text or a list of texts, not dict"),
        ('{"question": "a", "answers": 42}', "`answers` must be a text or a list"),
        ('{"question": 5}', "`question` must be"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(
    tmp_path: Path, line: str, message: str
) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps(QUESTION) + "\n\n" + line + "\n")
    with pytest.raises(DatasetError) as raised:
        load(str(file))
    assert raised.value.message.startswith(f"{file}:3: ")
    assert message in raised.value.message
    assert raised.value.exit_code == 2


def test_lines_beyond_the_maximum_are_not_read(tmp_path: Path) -> None:
    file = write(tmp_path / "own.jsonl", *[QUESTION] * 3)
    file.write_text(file.read_text() + "broken")
    assert len(load(str(file), max_samples=3)) == 3
    with pytest.raises(DatasetError):
        load(str(file))
    with pytest.raises(UsageError, match="--max-samples 0"):
        load(str(file), max_samples=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "There is no dataset file"),
        ("own.parquet", b"", "unknown format '.parquet'"),
        ("own.jsonl", b'{"question": "\xff"}', "not UTF-8"),
        ("own.jsonl", b"\n", "is empty"),
        ("own.json", b'{"a": 1}', "expected a list of objects"),
    ],
)
def test_an_unusable_file_is_a_dataset_error(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        load(str(tmp_path / name))


def test_an_unknown_name_suggests_the_nearest_ones() -> None:
    with pytest.raises(DatasetError) as raised:
        load("webq")
    assert "Did you mean webqa?" in str(raised.value.hint)


def test_the_demo_is_read_like_any_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "DEMO", write(tmp_path / "questions.jsonl", QUESTION))
    assert load("demo")[0].id == "q1"


# WebQA


def test_webqa_as_on_the_hub_has_one_paraphrase(tmp_path: Path) -> None:
    row = {"url": "http://x", "question": "who is Ada?", "answers": ["a", "b"]}
    (sample,) = load(f"webqa:{write(tmp_path / 'w.jsonl', row)}")
    assert sample == Sample("webqa-1", ("who is Ada?",), ("a", "b"), {"url": "http://x"})


def test_webqa_with_numbered_paraphrases_keeps_their_order(tmp_path: Path) -> None:
    row = {"uuid": "u", "question": "q", "answers": ["a"], "paraphrase0": "q"}
    row |= {"paraphrase10": "p10", "paraphrase2": "p2", "paraphrase3": ""}
    (sample,) = load(f"webqa:{write(tmp_path / 'w.jsonl', row)}")
    assert sample.paraphrases == ("q", "p2", "p10")
    assert sample.id == "u"


def test_webqa_in_its_own_json_form(tmp_path: Path) -> None:
    target = '(list (description "Jaxon Bieber") (description Lima) (description "a \\"b\\""))'
    (tmp_path / "w.json").write_text(json.dumps([{"utterance": "who?", "targetValue": target}]))
    (sample,) = load(f"webqa:{tmp_path / 'w.json'}")
    assert sample.answers == ("Jaxon Bieber", "Lima", 'a "b"')


@pytest.mark.parametrize("cell", ['["a", "b"]', "['a', 'b']", "['a' 'b']", "a|b"])
def test_a_list_in_a_csv_cell_is_read_however_it_was_written(tmp_path: Path, cell: str) -> None:
    with (tmp_path / "w.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["question", "answers"], ["x|y?", cell]])
    (sample,) = load(f"webqa:{tmp_path / 'w.csv'}")
    assert sample.paraphrases == ("x|y?",)
    assert sample.answers == ("a", "b")


# MyriadLAMA


def fact(template: str, *, by_hand: bool, subject: str = "Lima", uuid: str = "f1") -> Any:
    return {
        "uuid": uuid,
        "rel_uri": "P1376",
        "sub_ent": subject,
        "obj_aliases": [["Peru", "Republic of Peru"], ["Peru"]],
        "template": template,
        "is_manual": by_hand,
    }


def test_myriadlama_joins_the_templates_of_a_fact(tmp_path: Path) -> None:
    file = write(
        tmp_path / "m.jsonl",
        fact("[Y] is where [X] rules .", by_hand=False),
        fact("[X] is a town .", by_hand=True, subject="Cusco", uuid="f2"),
        fact("[X] is the capital of [Y] .", by_hand=True),
    )
    first, second = load(f"myriadlama:{file}")
    assert first.id == "f1"
    assert first.paraphrases == (
        "Lima is the capital of [MASK] .",
        "[MASK] is where Lima rules .",
    )
    assert first.answers == ("Peru", "Republic of Peru")
    assert first.meta == {"relation": "P1376", "subject": "Lima", "manual": 1}
    assert second.paraphrases == ("Cusco is a town .",)


def test_a_limit_of_facts_keeps_all_their_templates(tmp_path: Path) -> None:
    rows = [fact("[X] [Y] 1", by_hand=True), fact("x", by_hand=True, uuid="f2")]
    file = write(tmp_path / "m.jsonl", *rows, fact("[X] [Y] 2", by_hand=True))
    (sample,) = load(f"myriadlama:{file}", max_samples=1)
    assert len(sample.paraphrases) == 2


def test_myriadlama_with_a_list_of_templates(tmp_path: Path) -> None:
    row = {"relation": "capital", "subject": "Peru", "object_aliases": ["Lima"]}
    row |= {"templates": ["[Y] is the capital of [X]", "[X]'s capital is [Y]"]}
    (sample,) = load(f"myriadlama:{write(tmp_path / 'm.jsonl', row)}")
    assert sample.id == "Peru|capital"
    assert sample.paraphrases == ("[MASK] is the capital of Peru", "Peru's capital is [MASK]")


def test_myriadlama_as_the_self_ensemble_project_prepares_it(tmp_path: Path) -> None:
    row = {"uuid": "u", "rel": "P1", "answers": ["a"], "manual_paraphrases": ["m"]}
    row["auto_paraphrases"] = ["x", "m"]
    (sample,) = load(f"myriadlama:{write(tmp_path / 'm.jsonl', row)}")
    assert (sample.paraphrases, sample.answers) == (("m", "x"), ("a",))


@pytest.mark.parametrize("missing", ["template", "sub_ent", "obj_aliases"])
def test_a_myriadlama_row_without_a_part_is_named(tmp_path: Path, missing: str) -> None:
    row = fact("[X] [Y]", by_hand=True)
    del row[missing]
    file = write(tmp_path / "m.jsonl", row)
    with pytest.raises(DatasetError, match=missing) as raised:
        load(f"myriadlama:{file}")
    assert raised.value.message.startswith(f"{file}:1: ")


# The datasets library


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this file uses the network."""
    monkeypatch.setattr(environment, "hub_answers", lambda: False)


class FakeLibrary(types.ModuleType):
    def __init__(self, rows: list[Any]) -> None:
        super().__init__("datasets")
        self.rows = rows
        self.requests: list[Any] = []

    def load_dataset(self, repo_id: str, **options: Any) -> list[Any]:
        assert environment.hub_is_offline()  # the cache may still have it
        self.requests.append((repo_id, options))
        if not self.rows:
            raise ConnectionError("Couldn't reach the hub\nmore text")
        return self.rows

    def load_from_disk(self, folder: str) -> list[Any]:
        self.requests.append(folder)
        return self.rows


@pytest.mark.parametrize(
    ("name", "repo_id", "split", "row"),
    [
        ("webqa", "stanfordnlp/web_questions", "test", {"question": "q", "answers": ["a"]}),
        ("myriadlama", "iszhaoxin/MyriadLAMA", "train", fact("[X] [Y]", by_hand=True)),
    ],
)
def test_a_public_set_comes_from_the_hub_without_running_its_code(
    monkeypatch: pytest.MonkeyPatch, name: str, repo_id: str, split: str, row: Any
) -> None:
    library = FakeLibrary([row])
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert len(load(name)) == 1
    assert library.requests == [(repo_id, {"split": split})]
    assert not environment.hub_is_offline()


def test_a_saved_folder_is_read_through_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = FakeLibrary([{"question": "q", "answers": ["a"]}])
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert len(load(f"webqa:{tmp_path}")) == 1
    assert library.requests == [str(tmp_path)]


def test_without_the_library_the_hint_is_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DatasetError) as raised:
        load("webqa")
    assert "pip install 'flexinspect[datasets]'" in str(raised.value.hint)


def test_without_a_network_the_hint_names_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeLibrary([]))
    with pytest.raises(DatasetError) as raised:
        load("myriadlama")
    assert "Couldn't reach the hub" in raised.value.message
    assert "more text" not in raised.value.message
    assert "myriadlama:FILE.jsonl" in str(raised.value.hint)


# Own classes


class Own(ParaphraseDataset):
    def load_dataset(self) -> Iterable[Any]:
        yield Sample("a", ("p", "q"), ("x",))
        yield {"question": "what?", "answers": "y"}


def test_a_class_may_return_samples_and_mappings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_questions.py").write_text(
        "class Mine:\n"
        "    def load_dataset(self):\n"
        "        return [{'question': 'what?', 'answers': ['x']}]\n"
        "class Broken(Mine):\n"
        "    def load_dataset(self):\n"
        "        yield {'question': 'fine?'}\n"
        "        raise RuntimeError('no file')\n"
        "class Odd(Mine):\n"
        "    def load_dataset(self):\n"
        "        return [17]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load("my_questions:Mine") == [Sample("1", ("what?",), ("x",), {})]
    with pytest.raises(DatasetError, match="RuntimeError: no file") as raised:
        load("my_questions:Broken")
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(DatasetError, match="my_questions:Odd, sample 1: expected an object"):
        load("my_questions:Odd")
    with pytest.raises(DatasetError, match="has no Nothing"):
        load("my_questions:Nothing")
    with pytest.raises(DatasetError, match="No module named 'not_there'"):
        load("not_there:Mine")


def test_a_name_can_be_registered_unless_it_is_built_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(datasets, "_registered", {})
    register_dataset("own", Own)
    assert [sample.id for sample in load("own")] == ["a", "2"]
    assert "own" in datasets.names()
    with pytest.raises(UsageError, match="'webqa' is built in"):
        register_dataset("webqa", Own)


def test_a_plug_in_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point(EntryPoint):
        def load(self) -> Any:
            return Own

    point = Point("plugged", "somewhere:Own", datasets.ENTRY_POINTS)
    monkeypatch.setattr(plugins, "registered", lambda group: (point,))
    assert len(load("plugged")) == 2


def test_batches_are_lists_and_shuffling_is_seeded() -> None:
    class Ten(ParaPharaseDataset):
        def load_dataset(self) -> Iterable[Any]:
            return [Sample(str(n), ("p",)) for n in range(10)]

    batches = list(Ten().get_dataloader(batch_size=4))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert batches[0][1].id == "1"
    first, again = (list(Ten().get_dataloader(10, shuffle=True)) for _ in range(2))
    assert first == again != list(Ten().get_dataloader(10))
    with pytest.raises(UsageError, match="batch size of 0"):
        next(Ten().get_dataloader(batch_size=0))
    with pytest.raises(NotImplementedError):
        ParaphraseDataset().load_dataset()


class Batched(ParaPharaseDataset):
    """A class as in the self-ensemble project: columns, with the prompts by paraphrase."""

    def __init__(self) -> None:
        super().__init__("mine", "model")
        self.calls: list[str] = []

    def load_dataset(self) -> Any:
        return [{"uuid": f"u{n}", "p": [f"a{n}", f"b{n}"], "answers": [f"x{n}"]} for n in range(9)]

    def get_dataloader(self, batch_size: int = 8, shuffle: bool = False, seed: int = 0) -> Any:
        self.calls.append(f"loader {batch_size} {shuffle}")
        return super().get_dataloader(4, shuffle)

    def collate_fn(self, batch: Any) -> Any:
        self.calls.append(f"collate {len(batch)}")
        prompts = [[row["p"][k] for row in batch] for k in range(2)]
        return [row["uuid"] for row in batch], [row["answers"] for row in batch], prompts


def test_overridden_dataloader_and_collate_fn_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Batched()
    monkeypatch.setattr(datasets, "_registered", {"own": lambda: made})
    samples = load("own")
    assert made.calls == ["loader 8 False", "collate 4", "collate 4", "collate 1"]
    assert [one.id for one in samples] == [f"u{n}" for n in range(9)]
    assert samples[5] == Sample("u5", ("a5", "b5"), ("x5",))


def test_only_the_batches_that_are_needed_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Batched()
    monkeypatch.setattr(datasets, "_registered", {"own": lambda: made})
    assert len(load("own", max_samples=3)) == 3
    assert made.calls == ["loader 8 False", "collate 4"]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((["q1?", "q2?"], [["a"], ["b"]]), [("1", ("q1?",), ("a",)), ("2", ("q2?",), ("b",))]),
        ({"question": ["q?"], "answer": ["a"]}, [("1", ("q?",), ("a",))]),
        ([("q?", "a")], [("1", ("q?",), ("a",))]),
    ],
)
def test_a_batch_may_be_columns_or_rows(
    monkeypatch: pytest.MonkeyPatch, batch: Any, expected: Any
) -> None:
    class Own:
        def get_dataloader(self) -> Any:
            return [batch]

    monkeypatch.setattr(datasets, "_registered", {"own": Own})
    assert [(one.id, one.paraphrases, one.answers) for one in load("own")] == expected


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((["u"], [["a"]], [["p1", "p2"]]), "prompts\\[0\\] has 2 texts for 1 samples"),
        ({"question": ["q", "r"], "answers": ["a"]}, "different lengths: question 2, answers 1"),
        ((["u"], ["a"], ["p"], ["z"]), "a tuple of 4 columns"),
    ],
)
def test_a_batch_of_another_form_is_refused_with_its_number(
    monkeypatch: pytest.MonkeyPatch, batch: Any, message: str
) -> None:
    class Own:
        def get_dataloader(self) -> Any:
            return [batch]

    monkeypatch.setattr(datasets, "_registered", {"own": Own})
    with pytest.raises(DatasetError, match=message) as raised:
        load("own")
    assert raised.value.message.startswith("own, batch 1: ")


class Named(NamedTuple):
    question: str
    answers: list[str]


@pytest.mark.parametrize(
    ("row", "sample"),
    [
        (("q?",), Sample("1", ("q?",))),
        (("q?", "a"), Sample("1", ("q?",), ("a",))),
        ((["p", "q"], ["a", "b"]), Sample("1", ("p", "q"), ("a", "b"))),
        (("id7", ["p", "q"], "a"), Sample("id7", ("p", "q"), ("a",))),
        (Named("q?", ["a"]), Sample("1", ("q?",), ("a",))),
    ],
)
def test_a_row_may_be_a_tuple(monkeypatch: pytest.MonkeyPatch, row: Any, sample: Sample) -> None:
    class Own:
        def load_dataset(self) -> Any:
            return [row]

    monkeypatch.setattr(datasets, "_registered", {"own": Own})
    assert load("own") == [sample]


def test_a_tuple_of_another_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own:
        def load_dataset(self) -> Any:
            return [("a", "b", "c", "d")]

    monkeypatch.setattr(datasets, "_registered", {"own": Own})
    with pytest.raises(DatasetError, match="sample 1: expected an object, not tuple"):
        load("own")


def test_the_base_class_is_a_public_name_under_both_spellings() -> None:
    assert flexinspect.ParaPharaseDataset is flexinspect.ParaphraseDataset is ParaphraseDataset
    assert flexinspect.register_dataset is register_dataset


# Choosing paraphrases

FIVE = Sample("s", ("a", "b", "c", "d", "e"), ("x",), {"k": 1})


@pytest.mark.parametrize(
    ("number", "indices", "kept"),
    [
        (None, None, "abcde"),
        (3, None, "abc"),
        (None, "0,1,2", "abc"),
        (None, "0-2", "abc"),
        (None, "4, 0-1", "eab"),
        (None, "2,2", "cc"),
        (2, "4,3,1", "ed"),
    ],
)
def test_paraphrases_are_chosen_in_the_given_order(
    number: int | None, indices: str | None, kept: str
) -> None:
    chosen = choose_paraphrases(FIVE, number, indices)
    assert "".join(chosen.paraphrases) == kept
    assert (chosen.id, chosen.answers, chosen.meta) == (FIVE.id, FIVE.answers, FIVE.meta)


@pytest.mark.parametrize(
    ("number", "indices", "message"),
    [
        (6, None, "has 5 paraphrases to choose from, not 6"),
        (3, "0,1", "has 2 paraphrases to choose from, not 3"),
        (None, "0,5", "has 5 paraphrases, counted from 0, and none with index 5"),
        (None, "0-99999999999", "none with index 5"),
    ],
)
def test_too_many_paraphrases_are_refused_with_the_available_number(
    number: int | None, indices: str | None, message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        choose_paraphrases(FIVE, number, indices)


@pytest.mark.parametrize("indices", ["", "a", "1,", "-1", "2-1", "1.5"])
def test_an_invalid_list_of_indices_is_refused(indices: str) -> None:
    with pytest.raises(UsageError, match="is not a list of paraphrases"):
        choose_paraphrases(FIVE, None, indices)


def test_zero_paraphrases_are_refused() -> None:
    with pytest.raises(UsageError, match="--num-paraphrases 0"):
        choose_paraphrases(FIVE, 0, None)


def test_prompts_become_one_sample() -> None:
    sample = from_prompts(["What is 2 + 2?", "2 + 2 ="])
    assert (sample.id, len(sample.paraphrases), sample.answers) == ("prompt", 2, ())
    for empty in ([], ["a", " "]):
        with pytest.raises(DatasetError, match="A prompt is empty"):
            from_prompts(empty)

"""SGLang's tensor dumps, written by its own code on a small model (tools/import_fixtures.py)."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support.dumps import CHOSEN, PROMPT, unpack_dump

from flexinspect.core.errors import UsageError
from flexinspect.importers.importer import Budget, find_importer
from flexinspect.importers.sglang import _group, _Pass
from flexinspect.importers.torch_files import load_torch_file
from flexinspect.importers.trace_builder import write_trace
from flexinspect.importers.vocabulary import DumpVocabulary
from flexinspect.trace.reader import TraceReader, open_trace

RANK = "TP0_PP0_Rank0_pid4321"


def import_dump(folder: Path, trace: Path) -> TraceReader:
    importer = find_importer(folder, None)
    write_trace(importer.open(folder, lambda: None), importer.name, trace, DumpVocabulary())
    return open_trace(trace)


@pytest.fixture
def passes(tmp_path: Path) -> Path:
    return unpack_dump("sglang-passes", tmp_path / "passes")


def test_the_passes_are_the_steps_of_one_request(passes: Path, tmp_path: Path) -> None:
    with import_dump(passes, tmp_path / "a.flextrace") as reader:
        steps = reader.steps(0)
        assert [(s.phase, s.q_len, s.kv_before) for s in steps] == [
            *[("prefill", 5, 0), ("decode", 1, 5), ("decode", 1, 6), ("decode", 1, 7)]
        ]
        assert [token.token_id for token in reader.tokens(0)] == PROMPT + CHOSEN
        assert [token.step for token in reader.tokens(0)] == [None] * 5 + [0, 1, 2]


def test_the_logits_of_a_pass_come_from_the_file_of_the_next_one(
    passes: Path, tmp_path: Path
) -> None:
    with import_dump(passes, tmp_path / "a.flextrace") as reader:
        for step in range(3):
            held = load_torch_file(passes / RANK / f"Pass0000{step + 1}.pt")
            row = held["logits_processor"].read().array[-1]
            record = reader.logits(0, step)
            assert record is not None
            assert record.candidates[0].token_id == int(row.argmax())
            assert record.chosen_id == CHOSEN[step]
            assert record.chosen_rank == int((row > row[CHOSEN[step]]).sum())
        assert reader.logits(0, 3) is None


def test_both_formats_have_the_same_outputs_of_layers(passes: Path, tmp_path: Path) -> None:
    tensors = unpack_dump("sglang-dumper", tmp_path / "tensors")
    with (
        import_dump(passes, tmp_path / "a.flextrace") as a,
        import_dump(tensors, tmp_path / "b.flextrace") as b,
    ):
        for step in range(2):
            for layer in range(2):
                one, other = (each.array(0, step, "hidden", layer) for each in (a, b))
                assert one is not None
                assert other is not None
                assert one == pytest.approx(other)
                assert one.shape == (5 if step == 0 else 1, 16)
        assert [token.token_id for token in b.tokens(0)] == [*PROMPT, CHOSEN[0]]
        first, second = a.logits(0, 0), b.logits(0, 0)
        assert first is not None
        assert second is not None
        assert first.candidates[0].logit == pytest.approx(second.candidates[0].logit)


def test_the_shared_rotary_embedding_is_only_shown_where_it_ran(
    passes: Path, tmp_path: Path
) -> None:
    held = load_torch_file(passes / RANK / "Pass00000.pt")
    first, last = (held[f"model.layers.{n}.self_attn.rotary_emb"][0].read() for n in (0, 1))
    assert np.array_equal(first.array, last.array)  # the dump has the last one under both names
    tensors = unpack_dump("sglang-dumper", tmp_path / "tensors")
    for folder, n_expected in ((passes, 0), (tensors, 2)):
        with import_dump(folder, tmp_path / f"{n_expected}.flextrace") as reader:
            stats = [s for s in reader.layer_stats(0, 0) if "rotary_emb[0]" in s.module]
            assert len(stats) == n_expected
            assert len({stat.norm for stat in stats}) == n_expected


def test_the_last_layer_is_only_named_if_it_is_the_one_before_the_norm(
    passes: Path, tmp_path: Path
) -> None:
    from flexinspect.importers import sglang

    outputs = dict(load_torch_file(passes / RANK / "Pass00000.pt"))
    reader = sglang._DumpedPassReader([], lambda: None)
    assert set(reader._layer_outputs(outputs, Budget())[1]) == {0, 1}
    some = {name: value for name, value in outputs.items() if "layers.1." not in name}
    assert (
        set(reader._layer_outputs(some, Budget())[1]) == set()
    )  # layer 0 is not the one before the norm


def test_nothing_of_attention_is_claimed(passes: Path, tmp_path: Path) -> None:
    with import_dump(passes, tmp_path / "a.flextrace") as reader:
        assert reader.calls(0, 0) == []
        assert reader.fingerprints(0, 0) == []
        facts = reader.run()["imported"]
        assert facts["holds"] == [
            *("tokens", "chosen tokens", "position ids", "logits", "layer statistics")
        ]


def one_pass(n_rows: int, length: int) -> _Pass:
    return _Pass("Pass", tuple(range(n_rows)), (), length, lambda: ({}, None))


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([(5, 5), (1, 6), (1, 7)], [3]),
        ([(5, 5), (1, 6), (4, 4), (1, 5)], [2, 2]),  # two requests
        ([(8, 8), (8, 16), (3, 19), (1, 20)], [4]),  # a prompt in three parts
        ([(5, 5), (1, 6), (7, 13), (1, 14)], [2, 2]),  # the next turn, whose beginning is cached
        ([(3, 11), (1, 12)], [2]),
        ([(1, 1), (1, 2)], [2]),
    ],
)
def test_passes_are_grouped_into_requests(sizes: list[tuple[int, int]], groups: list[int]) -> None:
    assert [len(group) for group in _group([one_pass(*size) for size in sizes])] == groups


def test_a_rank_can_be_named_and_of_several_the_first_is_shown(
    passes: Path, tmp_path: Path
) -> None:
    with import_dump(passes / RANK, tmp_path / "a.flextrace") as reader:
        assert reader.n_steps(0) == 4
    shutil.copytree(passes / RANK, passes / "TP1_PP0_Rank1_pid4322")
    with import_dump(passes, tmp_path / "b.flextrace") as reader:
        notes = reader.run()["imported"]["notes"]
        assert any(note.startswith(f"Of 2 dumps {RANK} is shown") for note in notes)


def test_a_pass_that_is_no_dump_is_named(passes: Path, tmp_path: Path) -> None:
    (passes / RANK / "Pass00001.pt").write_bytes(b"no zip")
    with pytest.raises(UsageError, match=r"Pass00001\.pt is not a \.pt file"):
        import_dump(passes, tmp_path / "a.flextrace")
    assert not [*tmp_path.glob("*a.flextrace*")]

"""What must be equal on all ranks, and the first place that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.rank_traces import unpack, write_training
from support.traces import RUN, sample_trace

from flexinspect.analysis.ranks.rank_comparison import (
    RankComparison,
    compare_ranks,
    own_quantities,
)
from flexinspect.analysis.ranks.rank_run import find_run, open_ranks
from flexinspect.analysis.ranks.rank_text import comparison_lines, verdict_text
from flexinspect.analysis.ranks.side_by_side import load_steps_of_ranks
from flexinspect.core.errors import UsageError
from flexinspect.records.step import EventRecord
from flexinspect.rules.attention.kernel_failures import CRASHED_EVENT
from flexinspect.trace.file.location import close_dead_trace


def compare(folder: Path) -> RankComparison:
    run, _ = find_run(folder)
    with open_ranks(run) as readers:
        return compare_ranks(run, readers)


def write_ranks(folder: Path, *ranks: dict[str, Any]) -> Path:
    for rank, options in enumerate(ranks):
        write_training(folder / f"t-rank{rank}.flextrace", rank, len(ranks), **options)
    return folder


def test_losses_of_data_parallel_ranks_differ_and_that_is_no_difference(tmp_path: Path) -> None:
    found = compare(write_ranks(tmp_path, {}, {}, {}))
    assert (found.verdict, found.first) == ("same", None)
    (training,) = found.pairs[1].trainings
    assert training.not_compared["loss"] == "each rank has its own batch"
    assert {"gradient norm", "weights"} <= training.compared.keys()


@pytest.mark.parametrize(
    ("options", "quantity"),
    [
        ({"weights": {1: 5}}, "weights"),
        ({"steps": {1: {"group_norms": (3.1,)}}}, "gradient norm"),
        ({"steps": {1: {"total_norm": 9.0}}}, "total gradient norm"),
    ],
)
def test_weights_and_gradients_of_data_parallel_ranks_must_be_equal(
    options: dict[str, Any], quantity: str, tmp_path: Path
) -> None:
    found = compare(write_ranks(tmp_path, {}, options))
    assert found.first is not None
    assert (found.verdict, found.first.ranks) == ("different", (1,))
    assert (found.first.place.step, found.first.place.quantity) == (1, quantity)


def test_sums_of_weights_that_differ_in_one_bit_differ(tmp_path: Path) -> None:
    large = (1 << 62) + 1
    ranks = ({"weights": {2: large}}, {"weights": {2: large + 1}})
    assert compare(write_ranks(tmp_path, *ranks)).first is not None


def test_if_all_others_agree_the_first_rank_is_the_one_that_differs(tmp_path: Path) -> None:
    found = compare(write_ranks(tmp_path, {"weights": {1: 5}}, {}, {}))
    assert found.first is not None
    assert (found.reference, found.first.ranks) == (1, (0,))
    sentence = "The ranks differ. First: step 1: weights, layer: rank 0 differs from ranks 1-2."
    assert verdict_text(found) == sentence


def test_a_rank_that_died_is_compared_up_to_its_last_step(tmp_path: Path) -> None:
    dead = {"n_steps": 2, "state": "recording", "pid": 1 << 22}
    found = compare(write_ranks(tmp_path, {"n_steps": 4, "state": "failed"}, dead))
    assert (found.verdict, [one.rank for one in found.run.stopped]) == ("same", [1, 0])
    text = "\n".join(comparison_lines(found, ()))
    assert "Rank 1 stopped after step 1: its process ended without finishing the trace." in text
    assert "Rank 0 failed after step 3. RuntimeError: Connection closed by peer" in text


def test_a_rank_that_a_signal_ended_says_so(tmp_path: Path) -> None:
    folder = write_ranks(
        tmp_path, {"n_steps": 4}, {"n_steps": 2, "state": "recording", "pid": 1 << 22}
    )
    reason = "The process was killed (SIGKILL: out of memory, or ended by hand)"
    event = EventRecord(CRASHED_EVENT, f"{reason}; the last step is step 1.", 1.0, 0, 1, {})
    close_dead_trace(folder / "t-rank1.flextrace", reason, 1 << 22, lambda *_: (event, ()))
    text = "\n".join(comparison_lines(compare(folder), ()))
    assert f"Rank 1 failed after step 1. {reason}" in text


def test_ranks_without_a_readable_trace_are_named_and_the_others_compared(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path, {}, {}, {})
    (folder / "t-rank1.flextrace").write_bytes(b"no trace")
    found = compare(folder)
    assert ({*found.pairs}, found.verdict) == ({2}, "same")
    assert "The folder has no readable trace of rank 1." in [*comparison_lines(found, ())]


def test_a_rank_that_finished_after_fewer_steps_differs(tmp_path: Path) -> None:
    found = compare(write_ranks(tmp_path, {"n_steps": 4}, {"n_steps": 3}))
    assert found.first is not None
    assert (found.first.place.quantity, found.first.place.step) == ("step", 3)


def test_of_weights_in_parts_each_rank_has_its_own() -> None:
    assert own_quantities(1, 1, is_training=False) == {}
    assert {*own_quantities(2, 2, is_training=False)} == {"q", "k", "v", "scores", "attention"}
    assert {*own_quantities(1, 4, is_training=True)} == {
        *("loss", "gradient norm", "total gradient norm", "update ratio", "weights"),
        *("all weights", "calls of the step", "sizes of inputs"),
    }
    assert "loss" not in own_quantities(2, 2, is_training=True)


def test_under_tensor_parallel_heads_are_parts_and_the_first_layer_that_differs_is_found(
    tmp_path: Path,
) -> None:
    found = compare(unpack("answer", tmp_path))
    assert (found.tp_size, found.verdict) == (2, "different")
    assert found.first is not None
    place = found.first.place
    assert (place.step, place.layer, place.quantity) == (0, 1, "hidden")
    (generation,) = found.pairs[1].generations
    assert {*generation.compared} == {"mask", "hidden", "logits", "token"}
    assert generation.not_compared["q"] == "each rank has its own heads"
    assert generation.beyond == dict.fromkeys(range(5), "layer 1: hidden")


def test_the_recorded_training_of_four_ranks_names_the_rank_that_drifts_and_the_one_that_is_late(
    tmp_path: Path,
) -> None:
    run, _ = find_run(unpack("train", tmp_path))
    with open_ranks(run) as readers:
        found = compare_ranks(run, readers)
        rows = load_steps_of_ranks(found, readers, 0, 0, 6)
    assert found.first is not None
    assert (found.first.place.step, found.first.place.quantity) == (4, "weights")
    assert (found.first.ranks, found.waiting.late) == ((1,), 1)
    assert found.waiting.late_s[1] > 0.15  # 4 or 5 steps of 50 ms
    differing = [(row.step, rank) for row in rows for rank, one in row.cells.items() if one.differs]
    assert differing == [(4, 1), (5, 1)]
    assert len({rows[0].cells[rank].loss for rank in range(4)}) == 4


def test_ranks_with_own_prompts_are_not_compared_without_tensor_parallel(tmp_path: Path) -> None:
    from flexinspect.trace.reader import open_trace

    for rank in range(2):
        sample_trace(tmp_path / f"t-rank{rank}.flextrace")
        _set_facts(tmp_path / f"t-rank{rank}.flextrace", rank, own_prompt=rank == 1)
    found = compare(tmp_path)
    assert (found.own_inputs, found.verdict) == ((1,), "same")
    sentence = "Not compared: the steps of rank 1, whose prompts are not those of rank 0."
    assert sentence in [*comparison_lines(found, ())]
    with open_trace(tmp_path / "t-rank1.flextrace") as reader:
        assert reader.run()["rank"] == 1


def _set_facts(
    path: Path, rank: int, *, own_prompt: bool, world_size: int = 2, tp_size: int = 1
) -> None:
    import json
    import sqlite3

    model = json.dumps({**RUN["model"], "tp_size": tp_size})  # type: ignore[dict-item]
    with sqlite3.connect(path) as db:
        db.executemany(
            "INSERT INTO run VALUES (?, ?)", [("rank", str(rank)), ("world_size", str(world_size))]
        )
        db.execute("UPDATE run SET value = ? WHERE key = 'model'", (model,))
        if own_prompt:
            db.execute("UPDATE tokens SET token_id = token_id + 1 WHERE pos = 3")
    db.close()


def test_ranks_are_compared_within_their_tensor_parallel_group(tmp_path: Path) -> None:
    """Ranks 0 and 1 answer one prompt, ranks 2 and 3 another; rank 3 differs from rank 2."""
    for rank in range(4):
        path = sample_trace(
            tmp_path / f"t-rank{rank}.flextrace", nan_at=(2, 1) if rank == 3 else None
        )
        _set_facts(path, rank, own_prompt=rank >= 2, world_size=4, tp_size=2)
    found = compare(tmp_path)
    assert ({*found.pairs}, found.dp_size, found.own_inputs) == ({1, 3}, 2, ())
    assert found.first is not None
    assert (found.first.ranks, found.first.reference) == ((3,), 2)
    assert (found.first.place.step, found.first.place.layer) == (2, 1)
    assert "rank 3 differs from rank 2" in verdict_text(found)
    lines = [*comparison_lines(found, ())]
    assert lines[0] == "t: generation of 4 ranks, tensor parallel, 2 groups of 2"


def test_a_training_beside_a_generation_gets_a_sentence(tmp_path: Path) -> None:
    write_training(tmp_path / "t-rank0.flextrace", 0, 2)
    sample_trace(tmp_path / "t-rank1.flextrace")
    _set_facts(tmp_path / "t-rank1.flextrace", 1, own_prompt=False)
    with pytest.raises(UsageError, match="Some ranks of t recorded a training"):
        compare(tmp_path)

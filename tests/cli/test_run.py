"""`flexinspect run` as a user meets it: answers, JSON, interrupts, crashes, and bad input."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.patience import PATIENCE_S
from support.tiny import make_model
from support.warm_python import Popen, run, run_command

from flexinspect.trace.reader import open_trace

FLEXINSPECT = [sys.executable, "-m", "flexinspect"]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a configuration and nothing else, for random weights."""
    folder = tmp_path_factory.mktemp("tiny")
    make_model("llama", max_position_embeddings=100_000).config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Run the console script as a shell does, among files that are named like modules."""
    folder = tmp_path_factory.mktemp("demo")
    for name in ("torch", "random", "transformers"):
        (folder / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    words = ("--max-samples", "2", "--json", "--out", "run.flextrace")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("flexinspect")), "run", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder / "run.flextrace"


def test_help_and_import_load_neither_torch_nor_textual() -> None:
    code = (
        "import sys, flexinspect, flexinspect.cli.live_run\n"
        "from flexinspect.cli.main import main\n"
        "commands = ('run', 'open', 'show', 'dump')\n"
        "for words in (['--help'], *([name, '--help'] for name in commands)):\n"
        "    try: main(words)\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'textual', 'transformers', 'flexinspect_hooks'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout


def test_the_capture_side_loads_without_textual_and_changes_no_kernel() -> None:
    code = (
        "import sys, flexinspect, torch.nn.attention.flex_attention as flex\n"
        "before = flex.flex_attention.__code__\n"
        "from flexinspect_hooks.ensemble import capture_process, ensemble_run\n"
        "import flexinspect_hooks.sessions.capture_session\n"
        "import flexinspect_hooks.observers.attention.kernel_calls\n"
        "assert 'textual' not in sys.modules\n"
        "assert flex.flex_attention.__code__ is before"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_file_in_the_current_folder_does_not_replace_a_module(
    demo_run: tuple[dict[str, Any], Path],
) -> None:
    assert (demo_run[1].parent / "torch.py").exists()
    assert demo_run[0]["exit_code"] == 0


def test_the_demo_answers_and_says_what_it_cost(demo_run: tuple[dict[str, Any], Path]) -> None:
    report, path = demo_run
    assert report["trace"] == str(path)
    assert (report["state"], report["exit_code"]) == ("finished", 0)
    assert [g["correct"] for g in report["generations"]] == [True, True]
    assert report["generations"][0]["answer"] == "Paris"
    assert report["cost"]["steps"] == sum(g["tokens"] for g in report["generations"])
    assert report["notes"] == []


def test_the_trace_of_the_demo_holds_every_step_of_every_layer(
    demo_run: tuple[dict[str, Any], Path],
) -> None:
    with open_trace(demo_run[1]) as reader:
        run = reader.run()
        assert run["model"]["layers"] == 4
        assert len(run["model"]["weights_fingerprint"]) >= 16
        for row in reader.generations():
            segments = reader.segments(row.generation)
            assert [s.kind for s in segments[:3]] == ["bos", "paraphrase", "separator"]
            assert [s.kind for s in segments[-2:]] == ["cue", "generated"]
            tokens = reader.tokens(row.generation)
            assert [t.pos for t in tokens] == list(range(len(tokens)))
            assert tokens[0].special
            for step in reader.steps(row.generation):
                calls = reader.calls(row.generation, step.step)
                assert [c.layer for c in calls] == [0, 1, 2, 3]
                assert {c.path for c in calls} == {"flex uncompiled"}
                assert max(c.lse_error or 0.0 for c in calls) < 1e-4
                mask = reader.mask(str(calls[0].mask))
                assert mask is not None
                assert mask.cells is not None
                assert mask.cells.shape == (1, step.q_len, step.kv_after)


def test_dump_prints_the_keys_that_scripts_rely_on(demo_run: tuple[dict[str, Any], Path]) -> None:
    done = run_command("dump", demo_run[1].name, "--json", cwd=demo_run[1].parent)
    data = json.loads(done.stdout)
    assert {"run", "segments", "tokens", "steps", "findings", "events"} <= set(data)
    assert {"candidates", "calls", "layer_stats", "memory"} <= set(data["steps"][0])


def test_any_sqlite_client_reads_the_trace(demo_run: tuple[dict[str, Any], Path]) -> None:
    with sqlite3.connect(f"file:{demo_run[1]}?mode=ro", uri=True) as db:
        text = "SELECT group_concat(text, '') FROM tokens WHERE generation = 0 AND step IS NOT NULL"
        assert "Paris" in db.execute(text).fetchone()[0]


def test_plain_output_without_a_terminal(tmp_path: Path) -> None:
    done = run_command("run", cwd=tmp_path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "expected: Paris" in done.stdout
    assert "next  flexinspect open" in done.stdout
    assert "capture at level advanced took" in done.stdout
    made = list(tmp_path.glob("*.flextrace*"))
    assert len(made) == 1
    assert made[0].name.startswith("demo-segment-isolation-")


def test_verbose_prints_lengths_shapes_and_candidates(tmp_path: Path) -> None:
    done = run_command("run", "--verbose", cwd=tmp_path)
    assert "step 0 prefill: q " in done.stderr
    assert "4 layers flex uncompiled; q 1×8×" in done.stderr
    assert "entropy" in done.stderr


def test_own_prompts_sampling_and_level_extreme(tmp_path: Path) -> None:
    done = run_command(
        *("run", "--prompt", "What is the capital of France?", "--prompt", "France's capital?"),
        *("--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--seed", "3"),
        *("--level", "extreme", "--layers", "0,2-3", "--mask", "shared-prefix"),
        *("--instruction", "Answer the question.\\n", "--positions", "reset"),
        *("--out", "own.flextrace", "--json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    with open_trace(tmp_path / "own.flextrace") as reader:
        assert reader.generation(0).mask == "shared-prefix"
        streams = {(a.stream, a.layer) for a in reader.arrays(0, 0)}
        assert {("q", 0), ("k", 2), ("v", 3), ("hidden", 0)} <= streams
        assert ("q", 1) not in streams
        scored = reader.candidates(0, 0)
        assert scored[5].score == float("-inf")
        positions = [t.position_id for t in reader.tokens(0)]
        assert positions != sorted(positions)


def test_ids_stand_in_for_text_without_a_tokenizer(tiny_folder: Path, tmp_path: Path) -> None:
    done = run_command(
        *("run", "--model", str(tiny_folder), "--weights", "random", "--prompt", "12 13 14"),
        *("--max-new-tokens", "3", "--json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["generations"][0]["tokens"] == 3


# -- interrupts and crashes ------------------------------------------------------------------------


@pytest.fixture
def long_run(tiny_folder: Path, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Start a generation of many thousand tokens and return once its first steps are on disk."""
    started: list[tuple[subprocess.Popen[str], Path]] = []

    def start() -> tuple[subprocess.Popen[str], Path]:
        path = tmp_path / "long.flextrace"
        args = ["run", "--model", str(tiny_folder), "--weights", "random", "--prompt", "5 6 7"]
        args += ["--max-new-tokens", "50000", "--stop", "eos", "--out", str(path)]
        process = Popen(
            [*FLEXINSPECT, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append((process, path))
        wait_for_steps(path, 5)
        return process, path

    yield start
    for process, path in started:
        if process.poll() is None:
            process.kill()
            with open_trace(path) as reader, suppress(ProcessLookupError):
                os.kill(int(reader.run()["pid"]), signal.SIGKILL)


def wait_for_steps(path: Path, n: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if path.exists() and path.stat().st_size:
            try:
                with open_trace(path) as reader:
                    if reader.generations() and reader.n_steps(0) >= n:
                        return
            except Exception:  # it is still being made
                time.sleep(0.05)
        time.sleep(0.05)
    raise AssertionError(f"no {n} steps in {PATIENCE_S} s")


def check_whole(path: Path) -> int:
    """Check integrity and that steps are without gaps and complete; return their number."""
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with open_trace(path) as reader:
        steps = reader.steps(0)
        assert [s.step for s in steps] == list(range(len(steps)))
        for step in (steps[0], steps[len(steps) // 2], steps[-1]):
            assert len(reader.calls(0, step.step)) == 3
            assert len(reader.step_tokens(0, step.step)) == 1
            assert reader.logits(0, step.step) is not None
        return len(steps)


def test_ctrl_c_ends_with_a_valid_trace(long_run: Callable[[], Any]) -> None:
    process, path = long_run()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "[interrupted]" in out
    assert check_whole(path) >= 5
    with open_trace(path) as reader:
        assert reader.state == "interrupted"
        assert reader.generation(0).state == "interrupted"
    assert not list(path.parent.glob("*-wal"))


def test_ctrl_c_while_the_model_loads_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*FLEXINSPECT, "run", "--out", str(tmp_path / "a.flextrace")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test runner in the background ignores SIGINT, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "importing torch …\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert out == ""
    assert err.endswith(
        "flexinspect: The run was stopped before anything ran; there is no trace.\n"
    )
    assert not list(tmp_path.iterdir())


def test_a_killed_capture_process_leaves_its_steps_and_a_message(
    long_run: Callable[[], Any],
) -> None:
    process, path = long_run()
    with open_trace(path) as reader:
        os.kill(int(reader.run()["pid"]), signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "ended by SIGKILL" in err
    assert not list(path.parent.glob("*-wal"))
    with open_trace(path) as reader:
        assert reader.state == "failed"
        assert "SIGKILL" in reader.run()["reason"]
        (killed,) = [one for one in reader.findings() if one.id.startswith("observer.")]
    assert killed.id == "observer.killed"
    assert "out of memory, or ended by hand" in killed.sentence
    assert "score_mod" not in killed.fix  # that is for a crash
    assert "Traceback" not in err
    assert check_whole(path) >= 5


def test_a_failing_rule_keeps_the_trace_and_reports_where(tmp_path: Path) -> None:
    (tmp_path / "my_masks.py").write_text(
        "import torch\n"
        "seen = torch.ones(80, 80, dtype=torch.bool).tril()\n"
        "def short(b, h, q_idx, kv_idx):\n"
        "    return seen[q_idx, kv_idx]\n"
    )
    done = run_command(
        *("run", "--mask", "my_masks:short", "--prompt", "What is the capital of France? " * 10),
        *("--out", "own.flextrace"),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "my_masks:short failed" in done.stderr
    assert "Traceback" not in done.stderr
    with open_trace(tmp_path / "own.flextrace") as reader:
        assert reader.generation(0).state == "failed"


def test_findings_stand_in_the_summary_and_in_the_json(tmp_path: Path) -> None:
    (tmp_path / "my_masks.py").write_text(
        "def deaf(b, h, q_idx, kv_idx):\n    return (kv_idx <= q_idx) & (q_idx != 5)\n"
    )
    args = ("run", "--mask", "my_masks:deaf", "--prompt", "What is the capital of France?")
    done = run_command(*args, "--out", "own.flextrace", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "warning: 1 row of paraphrase 1 sees no key at all" in done.stdout
    assert "[mask.empty-row]" in done.stdout
    again = run_command(*args, "--json", "--out", "b.flextrace", cwd=tmp_path)
    findings = {one["id"]: one for one in json.loads(again.stdout)["findings"]}
    finding = findings["mask.empty-row"]
    assert finding["severity"] == "warning"
    assert all(one["severity"] != "error" for one in findings.values())
    assert finding["positions"] == [5]
    with open_trace(tmp_path / "own.flextrace") as reader:
        masks = list(filter(None, map(reader.mask_summary, reader.fingerprints())))
        names = {mask.mask_mod for mask in masks}
        sources = {mask.mask_mod_source for mask in masks}
    assert names == {"my_masks.deaf"}
    assert sources == {f"{tmp_path / 'my_masks.py'}:1"}


def test_an_own_rule_runs_and_is_named_in_the_trace(tmp_path: Path) -> None:
    (tmp_path / "my_masks.py").write_text(
        "def last_paraphrase(segments):\n"
        "    start = max(s.start for s in segments if s.kind == 'paraphrase')\n"
        "    return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & "
        "((kv_idx >= start) | (q_idx < start))\n"
    )
    done = run_command(
        "run", "--mask", "my_masks:last_paraphrase", "--out", "own.flextrace", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    with open_trace(tmp_path / "own.flextrace") as reader:
        mask = reader.mask(str(reader.calls(0, 1)[0].mask))
        assert mask is not None
        assert mask.cells is not None
        start = max(s.start for s in reader.segments(0) if s.kind == "paraphrase")
        assert not mask.cells[0, 0, :start].any()
        assert mask.cells[0, 0, start:].all()


def test_two_mask_mods_of_one_name_are_two_masks_in_the_trace(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def rule(segments):\n"
        "    start = segments[2].start\n"
        "    return lambda b, h, q, kv: (kv <= q) & ((q < start) | (kv >= start) | (kv < 1))\n"
    )
    lines = [["a b", "a b c d e f"], ["a b c d e f", "a b"]]
    rows = [json.dumps({"id": str(i), "paraphrases": p}) for i, p in enumerate(lines)]
    (tmp_path / "two.jsonl").write_text("\n".join(rows))
    for level in ("basic", "advanced"):
        args = ["--mask", "own:rule", "--dataset", "two.jsonl", "--max-samples", "2"]
        done = run_command(
            *("run", *args, "--level", level, "--out", f"{level}.flextrace"), cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        with open_trace(tmp_path / f"{level}.flextrace") as reader:
            first, second = (reader.calls(g, 0)[0].mask for g in (0, 1))
            assert first != second
            mask = reader.mask(str(second))
            assert mask is not None
            if level == "advanced":
                assert mask.cells is not None
                start = reader.segments(1)[2].start
                assert mask.cells[0, start:, 1:start].sum() == 0


def test_the_chosen_paraphrases_are_in_the_prompt(tmp_path: Path) -> None:
    lines = {"id": "1", "paraphrases": ["日本 😀", "b", "c"], "answers": ["x"]}
    (tmp_path / "q.jsonl").write_text(json.dumps(lines))
    for args, expected in (
        ([], ["日本 😀", "b", "c"]),
        (["--indices", "2,0"], ["c", "日本 😀"]),
        (["--num-paraphrases", "1"], ["日本 😀"]),
    ):
        args = [*args, "--dataset", "q.jsonl", "--out", "q.flextrace", "--overwrite"]
        done = run_command("run", *args, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        with open_trace(tmp_path / "q.flextrace") as reader:
            input_ids = [
                "".join(t.text for t in reader.tokens(0, start=s.start, stop=s.stop))
                for s in reader.segments(0)
                if s.kind == "paraphrase"
            ]
        assert input_ids == expected


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGKILL", -9)])
def test_ending_the_command_ends_the_capture_process(
    long_run: Callable[[], Any], name: str, code: int
) -> None:
    process, path = long_run()
    with open_trace(path) as reader:
        child = int(reader.run()["pid"])
    process.send_signal(getattr(signal, name))
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    until = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
    assert check_whole(path) >= 5
    with open_trace(path) as reader:
        assert reader.state == "interrupted"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("args", [["models"], ["run"], ["dump", "demo"]])
def test_a_full_output_is_an_error_message(
    args: list[str], tmp_path: Path, demo_run: tuple[dict[str, Any], Path]
) -> None:
    args = [str(demo_run[1]) if word == "demo" else word for word in args]
    with Path("/dev/full").open("w") as full:
        command = [*FLEXINSPECT, *args]
        done = run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr


def test_a_reader_that_has_gone_ends_a_command_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    args = [*FLEXINSPECT, "models"]
    done = subprocess.run(args, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


# -- bad input -------------------------------------------------------------------------------------

BAD = {
    "unknown model": (["--model", "llama3.2_3b_itt"], "llama3.2_3b_it"),
    "no such folder": (["--model", "./nowhere"], "nowhere"),
    "unknown mask": (["--mask", "segment-isolatoin"], "Did you mean segment-isolation?"),
    "no such rule": (["--mask", "no_module_here:f"], "cannot be loaded"),
    "unknown dataset": (["--dataset", "wikipedia"], "wikipedia"),
    "no dataset file": (["--dataset", "absent.jsonl"], "absent.jsonl"),
    "bad indices": (["--indices", "0,99"], "99"),
    "bad layers": (["--layers", "9", "--level", "extreme"], "layers 0 to 3"),
    "no layers": (["--layers", "a-b", "--level", "extreme"], "is not a number or range"),
    "select for nothing": (["--select", "x"], "outputs level extreme stores"),
    "no such module": (["--select", "x", "--level", "extreme"], "matches no module of this model"),
    "bad selector": (["--select", "op=", "--level", "extreme"], "op has no value"),
    "layers for nothing": (["--layers", "1"], "--level extreme"),
    "temperature nan": (["--temperature", "nan"], "--temperature must be above 0"),
    "seed": (["--seed", "-1"], "--seed must lie"),
    "not UTF-8": (["--prompt", "a\udcff"], "not valid UTF-8"),
    "empty name": (["--out", ""], "--out is empty"),
    "bad device": (["--device", "gpu"], "gpu"),
    "no cuda": (["--device", "cuda"], "cuda"),
    "bad dtype": (["--dtype", "float8"], "float8"),
    "zero temperature": (["--temperature", "0"], "--temperature must be above 0"),
    "top-p": (["--top-p", "1.5"], "--top-p"),
    "zero tokens": (["--max-new-tokens", "0"], "whole number above 0"),
    "too many threads": (["--threads", "100000"], "100000 threads are more than 1024"),
    "too long": (["--max-new-tokens", "5000"], "the model has 1024"),
    "missing folder": (["--out", "no/such/folder/x.flextrace"], "no/such/folder"),
    "empty prompt": (["--prompt", ""], "prompt"),
    "prompt and samples": (["--prompt", "a", "--max-samples", "2"], "limits the samples"),
    "prompt and dataset": (["--prompt", "a", "--dataset", "demo"], "exclude each other"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_message_without_traceback(case: str, tmp_path: Path) -> None:
    args, message = BAD[case]
    if case == "no cuda" and __import__("torch").cuda.is_available():
        pytest.skip("this machine has CUDA")
    done = run_command("run", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.flextrace*"))


def test_an_existing_trace_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "mine.flextrace").write_bytes(b"precious")
    done = run_command("run", "--out", "mine.flextrace", cwd=tmp_path)
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert (tmp_path / "mine.flextrace").read_bytes() == b"precious"


def test_a_model_that_needs_the_network_says_so(tmp_path: Path) -> None:
    done = run_command("run", "--model", "qwen3_4b", cwd=tmp_path)
    assert done.returncode == 2
    assert "Qwen/Qwen3-4B" in done.stderr
    assert "--weights random" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_lets_the_model_continue_and_is_an_exit_code(
    tiny_folder: Path, tmp_path: Path
) -> None:
    args = f"run --model {tiny_folder} --weights random --max-new-tokens 20"
    args += " --no-ui --prompt 12"
    command = f"ulimit -f 160; exec {' '.join(FLEXINSPECT)} {args} --out t.flextrace"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "t.flextrace stopped at step" in done.stderr
    with open_trace(tmp_path / "t.flextrace") as reader:
        assert reader.run()["state"] in ("failed", "recording")

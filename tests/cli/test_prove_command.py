"""`flexinspect prove` as a user meets it: verdicts, exit codes, JSON, Ctrl-C, and bad input."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.warm_python import Popen, run_command

from flexinspect.cli.main import main

FLEXINSPECT = [sys.executable, "-m", "flexinspect"]
TWO = ("--prompt", "Who wrote Emma?", "--prompt", "Emma's author?")
Done = subprocess.CompletedProcess[str]


def prove(*args: str, cwd: Path) -> Done:
    return run_command("prove", *args, cwd=cwd)


@pytest.fixture(scope="module")
def isolation(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Run the command as a shell does; the other tests fork a process that has torch loaded."""
    return subprocess.run(
        [*FLEXINSPECT, "prove", "isolation", "--max-samples", "2"],
        cwd=tmp_path_factory.mktemp("isolation"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_demo_is_isolated_and_says_so_segment_by_segment(isolation: Done) -> None:
    assert isolation.returncode == 0, isolation.stderr
    lines = isolation.stdout.splitlines()
    assert sum(line.startswith("sample ") for line in lines) == 2
    assert lines[1].startswith("isolation under segment-isolation (declared): 4 layers, ")
    assert lines[1].endswith("the same ids twice: bit-equal")
    assert "  paraphrase 1 (10 tokens): 60 rows kept; read by separator 1, cue, generated" in lines
    assert sum("[proof.isolated]" in line for line in lines) == 2
    assert "importing torch …" in isolation.stderr
    assert "\x1b" not in isolation.stdout + isolation.stderr


def test_a_mask_that_leaks_ends_with_1_and_says_why_and_what_to_do(tmp_path: Path) -> None:
    source = (
        "def leaky(segments):\n"
        "    first, second = [s for s in segments if s.kind == 'paraphrase']\n"
        "    def rule(b, h, q_idx, kv_idx):\n"
        "        inside = (q_idx >= second.start) & (q_idx < second.stop)\n"
        "        early = (kv_idx > 0) & (kv_idx < second.start)\n"
        "        return (kv_idx <= q_idx) & ~(inside & early & (q_idx != second.start))\n"
        "    return rule\n"
    )
    (tmp_path / "masks.py").write_text(source, "utf-8")
    done = prove("isolation", "--mask", "masks:leaky", *TWO, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (error,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert "Changing paraphrase 1 (positions 1 to " in error
    assert " of paraphrase 2 in layer 0 by " in error
    assert error.endswith("[proof.leak]")
    assert done.stdout.count("\n  why: ") == done.stdout.count("\n  fix: ") == 1
    facts = json.loads(
        prove("isolation", "--mask", "masks:leaky", *TWO, "--json", cwd=tmp_path).stdout
    )
    assert facts["exit_code"] == 1
    (found,) = [one for one in facts["proofs"][0]["findings"] if one["id"] == "proof.leak"]
    assert found["layer"] == 0
    assert found["evidence"]["through"] == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("kernel",), "The kernel's own weights are those that are drawn: "),
        (("kernel", "--mask", "causal", "--max-new-tokens", "1"), "4 layers in 2 steps"),
        (("cache", "--cache-check", "4"), "16 steps, 4 layers, float32, 4 full recomputes"),
        (("cache", "--dtype", "bfloat16", "--max-new-tokens", "6"), "rounding in bfloat16"),
        (("order",), "moves the next token's logits by up to "),
        (("order", "--positions", "reset"), "The order of the segments does not matter: "),
        (("isolation", "--separators", "isolated"), "[proof.isolated]"),
    ],
    ids=" ".join,
)
def test_each_proof_of_the_demo_holds(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = prove(*args, *TWO, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert message in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("isolation", "--model", "demmo"), "demmo"),
        (("isolation", "--mask", "isolation"), "The mask 'isolation' is unknown"),
        (("order", "--cache-check", "3"), "--cache-check goes with prove cache, not with prove"),
        (("isolation", "--prompt", "a", "--dataset", "demo"), "--prompt and --dataset exclude"),
        (("kernel", "--seed", "-1"), "--seed must lie between"),
    ],
)
def test_impossible_requests_are_refused_before_torch_is_loaded(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", *args]) == 2
    assert message in capsys.readouterr().err
    assert main(["prove", *args, "--json"]) == 2
    facts = json.loads(capsys.readouterr().out)
    assert facts["proofs"] == []
    assert message in facts["error"]


def test_one_paraphrase_alone_has_no_order(tmp_path: Path) -> None:
    done = prove("order", "--prompt", "Who wrote Emma?", cwd=tmp_path)
    assert done.returncode == 2
    assert "Order needs at least two paraphrases" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_help_has_examples_also_for_own_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["prove", "--help"])
    shown = capsys.readouterr().out
    assert "flexinspect prove cache --mask shared-prefix --cache-check 4" in shown
    assert "Given a program of your own, it runs up to its first call" in " ".join(shown.split())
    assert 'flexinspect.prove("isolation", model, ids' in shown


def test_help_and_the_public_name_load_neither_torch_nor_textual() -> None:
    code = (
        "import sys, flexinspect, flexinspect.analysis.proof_results\n"
        "from flexinspect.cli.main import main\n"
        "try: main(['prove', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "from flexinspect import prove\n"
        "heavy = {'torch', 'textual', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_a_proof_in_one_line(tmp_path: Path) -> None:
    started = Popen(
        [*FLEXINSPECT, "prove", "isolation", "--max-samples", "8"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stderr is not None
    wait_for(lambda: "reading weights" in started.stderr.readline())  # type: ignore[union-attr]
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "flexinspect: interrupted" in errors
    assert "Traceback" not in errors


def wait_for(is_true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 90
    while not is_true():
        assert time.monotonic() < ends

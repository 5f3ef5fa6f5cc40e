"""`flexinspect kernels` as a user meets it: reports, exit codes, JSON, pictures, bad input."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.warm_python import Popen, run, run_command

from flexinspect.analysis.kernel_report import KernelEvaluation
from flexinspect.cli.kernels import _exit_code
from flexinspect.tools.sanity_check import command

FLEXINSPECT = [sys.executable, "-m", "flexinspect"]
Done = subprocess.CompletedProcess[str]

KERNELS = """
import torch.nn.functional as F

def right(q, k, v, *, attn_mask=None, scale=None, enable_gqa=False):
    print("inside the kernel")
    return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale, enable_gqa=enable_gqa)

def lost(q, k, v, *, attn_mask=None, scale=None, enable_gqa=False):
    if attn_mask is not None:
        attn_mask = attn_mask.clone()
        attn_mask[..., -1] = False
    return right(q, k, v, attn_mask=attn_mask, scale=scale, enable_gqa=enable_gqa)

def hostile(q, k, v, *, attn_mask=None):
    raise ValueError("\\x1b[31mred")
"""
TABLE = """
[[config]]
name = "mine"
mask = "window:8"
q_len = 40
kv_len = 40
head_dim = 16

[[kernel]]
name = "own"
function = "my_kernels:lost"
previous = ["my_kernels:right"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_kernels.py").write_text(KERNELS, "utf-8")
    (tmp_path / "kernels.toml").write_text(TABLE, "utf-8")
    return tmp_path


def kernels(*args: str, cwd: Path) -> Done:
    return run_command("kernels", *args, cwd=cwd)


def test_a_new_version_is_compared_beside_its_previous_one(folder: Path) -> None:
    args = ("--table", "kernels.toml", "--kernel", "own", "--config", "mine")
    done = kernels(*args, "--picture", "-o", "picture.svg", cwd=folder)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("own on mine: DIFFERS\n")
    assert "  class last-key-dropped: The last key (39) is never used." in done.stdout
    assert "own@my_kernels:right on mine: same within tolerance" in done.stdout
    assert "largest error by row (down, 40)" in done.stdout
    assert "1 within tolerance, 1 differ, 0 not compared" in done.stdout
    assert "inside the kernel" not in done.stdout
    assert "saved picture.svg: own on mine" in done.stderr
    assert (folder / "picture.svg").read_text("utf-8").startswith("<svg")


def test_json_has_all_numbers_and_the_page_all_evaluations(folder: Path) -> None:
    args = ("--table", "kernels.toml", "--kernel", "own", "--config", "mine")
    done = kernels(*args, "--json", "-o", "page.html", cwd=folder)
    facts = json.loads(done.stdout)
    assert (done.returncode, facts["exit_code"]) == (1, 1)
    lost, right = facts["evaluations"]
    assert lost["diagnoses"][0]["kind"] == "last-key-dropped"
    assert right["error"]["max_abs"] <= right["tolerance"]["max_abs"]
    page = (folder / "page.html").read_text("utf-8")
    assert page.count("<svg") == 2
    assert "class last-key-dropped" in page


def test_a_baseline_names_the_first_configuration_that_got_worse(folder: Path) -> None:
    args = ("--kernel", "my_kernels:right", "--config", "mine", "--table", "kernels.toml")
    assert kernels(*args, "--save", "baseline.json", cwd=folder).returncode == 0
    done = kernels(*args, "--check", "baseline.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "nothing got worse than baseline.json" in done.stdout
    source = (folder / "my_kernels.py").read_text("utf-8")
    (folder / "my_kernels.py").write_text(source.replace("def right", "def old"), "utf-8")
    changed = source.replace("def right", "def old").replace("def lost", "def right")
    (folder / "my_kernels.py").write_text(changed.replace("return right", "return old"), "utf-8")
    done = kernels(*args, "--check", "baseline.json", cwd=folder)
    assert done.returncode == 1
    assert "my_kernels:right on mine got worse: it was within tolerance" in done.stdout


def test_without_a_comparison_no_baseline_is_saved_and_none_passes(folder: Path) -> None:
    args = ("--kernel", "my_kernels:right", "--config", "mine", "--table", "kernels.toml")
    assert kernels(*args, "--save", "right.json", cwd=folder).returncode == 0
    saved = json.loads((folder / "right.json").read_text("utf-8"))
    for entry in saved["entries"]:
        entry["status"] = "not compared"
    (folder / "baseline.json").write_text(json.dumps(saved), "utf-8")
    attribute = '\nright.dtypes = ("float64",)  # the configuration is in float32\n'
    with (folder / "my_kernels.py").open("a", encoding="utf-8") as file:
        file.write(attribute)
    done = kernels(*args, "--check", "baseline.json", "--save", "right.json", cwd=folder)
    assert done.returncode == 2
    assert "not checked against baseline.json: nothing could be compared" in done.stdout
    assert "nothing got worse" not in done.stdout
    assert "right.json was not saved: nothing could be compared" in done.stderr
    assert json.loads((folder / "right.json").read_text("utf-8"))["entries"][0]["errors"]


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["same", "not compared"], 0),
        (["same", "varies"], 1),
        (["same", "differs"], 1),
        (["not compared"], 2),
    ],
)
def test_every_class_of_fault_fails_and_nothing_compared_is_an_invalid_request(
    statuses: list[Any], code: int
) -> None:
    facts = {"kernel": "k", "config": "c", "shape": "", "inputs": "", "device": "cpu"}
    done = [KernelEvaluation(**facts, status=status) for status in statuses]
    assert _exit_code(argparse.Namespace(check=None), done, []) == code
    assert _exit_code(argparse.Namespace(check=None), done, ["k on c got worse"]) == 1


def test_the_list_has_kernels_and_configurations(folder: Path) -> None:
    done = kernels("--list", "--table", "kernels.toml", "--device", "cpu", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "  sdpa-cudnn " in done.stdout
    assert "It runs on CUDA only" in done.stdout
    assert "  own             my_kernels:lost, previous: my_kernels:right" in done.stdout
    assert "  mine              float32, batch 1, 4 heads, 40 x 40" in done.stdout


def test_times_are_printed_with_the_ratio_to_sdpa(folder: Path) -> None:
    args = ("--bench", "--lengths", "16,32", "--repeats", "3", "--range", "unit", "--json")
    done = kernels("--kernel", "eager", *args, cwd=folder)
    assert done.returncode == 0, done.stderr
    timings = json.loads(done.stdout)["timings"]
    assert {(one["kernel"], one["length"], one["inputs"]) for one in timings} == {
        (name, length, kind)
        for name in ("sdpa", "eager")
        for length in (16, 32)
        for kind in ("normal", "unit")
    }
    assert all(len(one["samples"]) == 3 for one in timings)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("--kernel", "flx"), "There is no kernel 'flx'.\nDid you mean flex?"),
        (("--config", "causal-float31"), "Did you mean causal-float32?"),
        (("--kernel", "my_kernels:nothing"), "cannot be loaded: AttributeError"),
        (("--inputs", "captured"), "--inputs captured needs a trace."),
        (("--step", "3"), "--step goes with --inputs captured."),
        (("--range", "unit", "--inputs", "normal"), "--range does not go with --inputs normal."),
        (("--trace", "my_kernels.py"), "my_kernels.py"),
        (("-o", "picture.gif"), "-o picture.gif is not .svg, .png or .html."),
        (("--check", "nothing.json"), "The baseline nothing.json cannot be read"),
        (("--table", "my_kernels.py"), "is not a table of kernels"),
        (("--lengths", "16"), "--lengths and --repeats go with --bench."),
        (("--bench", "--lengths", "a"), "--lengths a is not a list of numbers"),
        (("--device", "nothing"), "The device 'nothing' is unknown."),
        (("--kernel", "flex-compiled", "--kernel-option", "BLOCK_M"), "is not KEY=VALUE."),
        (("--kernel-option", "BLOCK_M=64"), "goes with --kernel flex-compiled or flex-decode."),
        (("-o", "nowhere/picture.png"), "-o nowhere/picture.png: there is no folder nowhere."),
        (("--save", "nowhere/base.json"), "there is no folder nowhere."),
        (("--seed", str(2**63)), "is above 9223372036854775807"),
    ],
)
def test_a_wrong_request_gets_a_sentence_and_exit_code_2(
    folder: Path, args: tuple[str, ...], part: str
) -> None:
    done = kernels(*args, cwd=folder)
    assert done.returncode == 2, done.stdout
    assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_a_kernel_that_fails_is_a_difference_and_its_text_is_escaped(folder: Path) -> None:
    done = kernels("--kernel", "my_kernels:hostile", cwd=folder)
    assert done.returncode == 1
    assert "It failed: ValueError: \\x1b[31mred" in done.stdout
    assert "\x1b" not in done.stdout


def test_nothing_that_could_be_compared_is_exit_code_2(folder: Path) -> None:
    done = kernels("--kernel", "sdpa", "--config", "softcap-float32", cwd=folder)
    assert done.returncode == 2
    assert "It takes no softcap or score_mod" in done.stdout


def test_ctrl_c_ends_it_without_a_file(folder: Path) -> None:
    args = ("--kernel", "all", "--config", "all", "--save", "baseline.json")
    with Popen(
        [*FLEXINSPECT, "kernels", *args], cwd=folder, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "importing torch" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert "interrupted" in process.stderr.read()
    assert process.returncode == 130
    assert not (folder / "baseline.json").exists()


def test_the_sanity_check_is_the_same_command_on_all_configurations(folder: Path) -> None:
    assert command(["--kernel", "a:b", "--range"]) == [
        *("kernels", "--kernel", "a:b", "--range", "--config", "all")
    ]
    assert command(["--config", "mine", "--diff"]) == ["kernels", "--config", "mine", "--picture"]
    args = ["--kernel", "my_kernels:lost", "--range", "--table", "kernels.toml", "--config=mine"]
    module = [sys.executable, "-m", "flexinspect.tools.sanity_check"]
    done = run([*module, *args], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--range raw: q = 0, 1, 2, ...; k = -q; v = q" in done.stdout
    assert "The softmax is saturated" in done.stdout

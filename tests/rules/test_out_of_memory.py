"""Memory that ran out is a finding with advice, wherever the exception came from."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paths import DEMO
from support.warm_python import run_command

from flexinspect.core.errors import is_out_of_memory
from flexinspect.records.finding import Severity
from flexinspect.records.step import EventRecord
from flexinspect.rules.numerics.out_of_memory import OUT_OF_MEMORY, out_of_memory_finding
from flexinspect.trace.reader import open_trace

CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
    "allocate memory: you tried to allocate 140737488355328 bytes. Error code 12"
)
NOT_ENOUGH = (
    "RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."
)
CUDA = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
    "of 23.69 GiB of which 512.00 MiB is free."
)
MPS = "RuntimeError: MPS backend out of memory (MPS allocated: 9 GB). Tried to allocate 256 bytes"


@pytest.mark.parametrize(
    ("text", "sentence", "requested"),
    [
        (CPU, "Memory of this machine ran out in step 7: a single tensor of 128.0 TiB", 1 << 47),
        (NOT_ENOUGH, "Memory of this machine ran out in step 7: a single tensor of 4.0 KiB", 4096),
        (CUDA, "Memory of the GPU ran out in step 7: a single tensor of 2.0 GiB", 2 << 30),
        (MPS, "Memory of the GPU (MPS) ran out in step 7: a single tensor of 256 B", 256),
        ("MemoryError", "Memory of this machine ran out in step 7.", None),
    ],
)
def test_the_sentence_has_the_amounts_of_the_message(
    text: str, sentence: str, requested: int | None
) -> None:
    finding = out_of_memory_finding(EventRecord("error", text, 0.0, 2, 7))
    assert finding is not None
    assert finding.sentence.startswith(sentence)
    assert ("512.00 MiB were free" in finding.sentence) == (text == CUDA)
    assert finding.evidence.get("requested") == requested
    assert (finding.severity, finding.generation, finding.step) == (Severity.ERROR, 2, 7)
    for advice in ("smaller model", "--dtype bfloat16", "smaller batch", "--device cpu"):
        assert advice in finding.fix
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in finding.fix


@pytest.mark.parametrize("text", ["RuntimeError: shapes do not match", "KeyError: 'memory'"])
def test_other_exceptions_are_not_about_memory(text: str) -> None:
    assert not is_out_of_memory(text)
    assert out_of_memory_finding(EventRecord("error", text, 0.0)) is None
    assert out_of_memory_finding(EventRecord("note", CUDA, 0.0)) is None


PROGRAM = f"""
import sys, torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({str(DEMO)!r}).eval()
calls = []

def ask(*args):
    calls.append(args)
    if len(calls) == 3 and sys.argv[1] == "inside":
        torch.empty(1 << 45)

model.model.layers[1].register_forward_pre_hook(ask)
model.generate(torch.tensor([[1, 50, 60]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
torch.empty(1 << 45)
"""


@pytest.mark.parametrize(("where", "step"), [("inside", 2), ("after", None)])
def test_a_program_that_runs_out_of_memory_has_the_finding(
    tmp_path: Path, where: str, step: int | None
) -> None:
    (tmp_path / "ask.py").write_text(PROGRAM, "utf-8")
    done = run_command("run", "--no-ui", "--out", "a.flextrace", "ask.py", where, cwd=tmp_path)
    assert done.returncode == 1
    assert f"[{OUT_OF_MEMORY}]" in done.stderr
    with open_trace(tmp_path / "a.flextrace") as reader:
        found = [one for one in reader.findings() if one.id == OUT_OF_MEMORY]
    assert [(one.generation, one.step) for one in found] == [(0, step)]

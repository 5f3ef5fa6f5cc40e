"""The records of a step are made without torch."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from flexinspect_hooks import step_writer
from flexinspect_hooks.step_writer.memory_records import dtype_size

PROGRAM = """
import importlib
import sys

for name in sys.argv[1:]:
    importlib.import_module(f"flexinspect_hooks.step_writer.{name}")
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_no_module_of_the_package_loads_torch() -> None:
    names = [one.name for one in pkgutil.iter_modules(step_writer.__path__)]
    assert {"attention_records", "logits_records", "layer_records"} <= set(names)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_draft_of_a_step_loads_no_numpy_before_the_program_of_the_user_does() -> None:
    program = "import flexinspect_hooks.step_writer.step_draft, sys; print('numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.int8, torch.uint8, torch.int64, torch.float16, torch.bfloat16),
        *(torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    ],
)
def test_the_size_of_a_dtype_is_that_of_torch(dtype: torch.dtype) -> None:
    assert dtype_size(str(dtype).removeprefix("torch.")) == dtype.itemsize


def test_a_whole_row_of_logits_is_reduced_as_torch_does_it() -> None:
    from flexinspect_hooks.step_writer.logits_records import LogitsRecords
    from flexinspect_hooks.step_writer.step_draft import StepDraft, StepFacts

    row = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 5
    step = StepFacts(0, 3, "decode", 1, 9, "advanced", token_id=17)
    draft = StepDraft(step)
    LogitsRecords(str).record(step, True, {"logits.all": row.numpy()}, draft)
    found, logprobs = draft.logits, row.log_softmax(-1)
    assert found is not None
    assert [one.token_id for one in found.candidates] == row.topk(10).indices.tolist()
    assert found.chosen_logprob == pytest.approx(float(logprobs[17]), abs=1e-5)
    assert found.chosen_rank == int((row > row[17]).sum())
    assert found.entropy == pytest.approx(float(-(logprobs.exp() * logprobs).sum()), abs=1e-4)
    assert np.sum(found.histogram) == len(row)

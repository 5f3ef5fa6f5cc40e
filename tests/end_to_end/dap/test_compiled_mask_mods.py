"""Compiled FlexAttention under a debugger: it never stops in the mask_mod, and the run says so."""

from __future__ import annotations

from pathlib import Path

from support.dap import DapClient
from support.debugged import Debugged, eventually

from flexinspect.trace.reader import open_trace
from flexinspect_hooks.debugger.python_mods import COMPILED

PROGRAM = """\
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def mask_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx  # in the mask_mod


compiled = torch.compile(flex_attention, backend="eager")  # without a C++ compiler's minute
q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
with torch.no_grad():
    mask = create_block_mask(mask_mod, None, None, 5, 5, device="cpu")
    out = compiled(q, k, v, block_mask=mask)  # the call
print(out.shape)  # after it
"""


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(PROGRAM.splitlines(), 1) if text in line)


def test_a_breakpoint_in_a_compiled_mask_mod_is_skipped_and_the_run_says_so_at_once(
    tmp_path: Path,
) -> None:
    program = tmp_path / "compiled.py"
    program.write_text(PROGRAM, "utf-8")
    flags = ("--debugpy", "0", "--wait-for-client")
    with Debugged(tmp_path, str(program), flags=flags, fresh=True) as run:
        with DapClient("127.0.0.1", run.port()) as client:
            client.begin(run.attach(), {program: [line_of("# the call")]})
            thread, _ = client.stopped()
            assert COMPILED not in run.stderr_text()
            lines = [{"line": line_of(text)} for text in ("# in the mask_mod", "# after it")]
            source = {"path": str(program)}
            client.request("setBreakpoints", source=source, breakpoints=lines)
            client.request("continue", threadId=thread)
            thread, stack = client.stopped()
            assert stack[0]["line"] == line_of("# after it")
            eventually(lambda: f"flexinspect: {COMPILED}" in run.stderr_text())
            eventually(
                lambda: "flexinspect: held by debugpy in <module> (compiled" in run.stderr_text()
            )
            client.request("continue", threadId=thread)
            client.request("disconnect", terminateDebuggee=False)
        _, code = run.finish()
        assert code == 0
    with open_trace(run.trace) as reader:
        events = [row.event.text for row in reader.events() if row.event.kind == "debugger"]
    assert events.count(COMPILED) == 1

"""`python -m benchmarks.report`: writes benchmarks/README.md from the results.

One table per question. Each figure comes from one command on one machine; the line below a table
gives the command, the date and the machine, as the result file records them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import (
    audit_trace,
    capture,
    distributed,
    export_formats,
    gpu_capture,
    growth,
    lab,
    own,
    parts,
    peers,
    scale,
    training,
    training_debuggers,
)
from benchmarks.common import RESULTS, cell, markdown
from flexinspect.records.step import LEVELS

PAGE = Path(__file__).with_name("README.md")
INTRODUCTION = Path(__file__).with_name("introduction.md")

Table = Callable[[dict[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Question:
    """One question: its title, what the table shows, the command, the result file, the table."""

    title: str
    text: str
    command: str
    result: str
    table: Table
    module: str = "benchmarks"


def engine_table(facts: dict[str, Any]) -> str:
    """Return decode and prefill of FlexAttention against SDPA."""
    rows = [
        [
            name,
            f"{facts[f'sdpa_{name}_ms']:.1f}",
            f"{facts[f'flex_{name}_ms']:.1f}",
            cell(facts[f"{name}_ratio"]),
            f"{facts['bound'][name]:.2f}",
            _rounds(facts[f"{name}_ratio"]),
        ]
        for name in ("decode", "prefill")
    ]
    return markdown(["", "SDPA, ms", "FlexAttention, ms", "ratio", "target", "blocks"], rows)


def naive_table(facts: dict[str, Any]) -> str:
    """Return the naive way against flexinspect's."""
    row = [f"{facts['naive_s']:.1f}", f"{facts['ours_s']:.2f}", f"{facts['times_faster']:.1f}"]
    head = ["naive, s", "flexinspect, s", "times faster", "target"]
    return markdown(head, [[*row, str(facts["bound"])]])


def gpu_table(facts: dict[str, Any]) -> str:
    """Return the checks or the costs of capture on a GPU."""
    return gpu_capture.table(facts["capture"])


def own_table(facts: dict[str, Any]) -> str:
    """Return the cost of `watch` around `generate`."""
    return capture.table(facts)


def writing_table(facts: dict[str, Any]) -> str:
    """Return how fast a trace is written."""
    names = ("write_step_ms", "steps_per_s", "megabytes_per_s", "bytes_per_step")
    rows = [[level, *(str(facts[level][name]) for name in names)] for level in LEVELS]
    return markdown(["level", "ms per step", "steps per s", "MB per s", "bytes per step"], rows)


def rewind_table(facts: dict[str, Any]) -> str:
    """Return the times of restoring and forking."""
    names = {
        "restore_cropped_ms": "restore by cropping the cache",
        "fork_ms": "fork",
        "next_step_ms": "first step afterwards",
        "plain_step_ms": "any other step",
        "edit_with_recompute_ms": "edit of the mask that computes all rows again",
        "restore_replayed_ms": f"restore by running {facts['steps'] - 1} forward passes again",
    }
    rows = [[label, f"{facts[name]:.2f}"] for name, label in names.items()]
    return markdown(["operation", "ms"], rows)


def rules_table(facts: dict[str, Any]) -> str:
    """Return the cost of the rules."""
    rows = [
        [f"{facts['live_rules']} live rules, per step", f"{facts['all_live_us_per_step']:.0f} µs"],
        *([f"rule `{name}`", f"{us:.0f} µs"] for name, us in facts["slowest_us_per_step"].items()),
        [f"all rules over {facts['steps']} steps", f"{facts['all_over_the_trace_s']:.2f} s"],
    ]
    return markdown(["", "time"], rows)


def html_report_table(facts: dict[str, Any]) -> str:
    """Return the time and the size of reports."""
    rows = [
        [name, *(f"{found[key]:.2f}" for key in ("s", "cpu_s", "mb", "trace_mb"))]
        for name, found in facts["report"].items()
    ]
    return markdown(["run", "report, s", "report, s of CPU", "report, MB", "trace, MB"], rows)


def doctor_table(facts: dict[str, Any]) -> str:
    """Return how soon the doctor answers."""
    target = f"{facts['target_s']:.0f} s"
    rows = [["first line", f"{facts['first_s']:.2f} s", target]]
    rows.append(["whole command", f"{facts['whole_s']:.2f} s", ""])
    return markdown(["", "time", "target"], rows)


def masks_table(facts: dict[str, Any]) -> str:
    """Return how long masks take to draw and to verify."""
    rows = [
        *([f"draw {text}, 4096 × 4096", f"{s:.2f} s"] for text, s in facts["draw_4096_s"].items()),
        *(
            [f"verify {text}, 131 072 × 131 072", f"{s:.0f} s"]
            for text, s in facts["verify_131072_s"].items()
        ),
        ["the same against a declared mask", f"{facts['verify_131072_against_s']:.0f} s"],
        ["peak memory, imports included", f"{facts['peak_mb']} MB"],
    ]
    return markdown(["", f"{facts['threads']} threads"], rows)


def control_table(facts: dict[str, Any]) -> str:
    """Return how long commands take."""
    rows = [
        [name, f"{found['median']:.2f}", f"{found['p95']:.2f}"]
        for name, found in facts["milliseconds"].items()
    ]
    barrier = next(iter(facts["barrier"].values()))
    return markdown(
        ["command", "median, ms", "95th percentile, ms"],
        [*rows, ["step barrier without a command", f"{barrier / 1e6:.4f}", ""]],
    )


def tui_table(facts: dict[str, Any]) -> str:
    """Return first screen, key to frame and memory of the interface, and the ratios to Textual."""
    rows = []
    for name, first in facts["first_screen_s"].items():
        keys = facts["key_to_frame_ms"][name]
        figures = (first["header"], first["all_panels"], keys["median"], keys["p95"])
        rows.append([name, *map(str, (*figures, keys["bytes_per_key"], keys["resident_mb"]))])
    head = [
        *("trace", "header, s", "all panels, s", "key to frame, ms", "95th percentile"),
        *("bytes per key", "MB"),
    ]
    start, keys = facts["start_up"], facts["key_to_frame_ms"]
    compared = [
        _against_hello("first pixels, s of CPU", start, "first_pixels", 1.5),
        _against_hello("complete screen, s of CPU", start, "complete", 2.0),
        *(
            [what, *(str(keys[name][one]) for name in ("short", "hello")), ratio, target]
            for what, one, target in (
                ("key to frame, ms", "median", "1.5"),
                ("95th percentile, ms", "p95", "2.0"),
                ("key, ms of CPU", "cpu", ""),
            )
            for ratio in [str(keys["short"][f"{one}_ratio"])]
        ),
    ]
    hello_head = ["", "flexinspect (`short`)", "hello world in Textual", "ratio", "target"]
    return (
        f"{markdown(head, rows)}\n\n{markdown(hello_head, compared)}\n\n"
        f"`--version` {start['version_cpu_s']} s, `--help` {start['help_cpu_s']} s, "
        f"`import argparse` {start['argparse_cpu_s']} s of CPU."
    )


def _against_hello(what: str, start: Mapping[str, Any], name: str, target: float) -> list[str]:
    figures = (f"{name}_cpu_s", f"{name}_hello_world_cpu_s", f"{name}_ratio")
    return [what, *(str(start[figure]) for figure in figures), str(target)]


QUESTIONS: Sequence[Question] = (
    Question(
        "How fast is uncompiled FlexAttention against SDPA?",
        "The generation without capture, against `model.generate` under SDPA. Most of the "
        "difference is torch's uncompiled kernel, which every layer calls once per step.",
        "engine-uncompiled",
        "engine-uncompiled",
        engine_table,
    ),
    Question(
        "How fast is compiled FlexAttention against SDPA?",
        "The same, compiled and warm. The kernel is the smaller part of a compiled call; the rest "
        "is overhead of dynamo and inductor.",
        "engine-compiled",
        "engine-compiled",
        engine_table,
    ),
    Question(
        "How much faster is it than the naive way?",
        "Naive: no cache, a block mask per layer, head and step, every layer patched per step.",
        "naive",
        "naive",
        naive_table,
    ),
    Question(
        "What does capture cost?",
        "The uncompiled generation with and without capture, two torch threads on two cores.",
        "capture",
        "capture",
        capture.table,
    ),
    Question(
        "What does capture cost with a free core?",
        "The same with one torch thread.",
        "capture --threads 1",
        "capture-1-threads",
        capture.table,
    ),
    Question(
        "What does capture cost around compiled FlexAttention?",
        "The compiled generation with and without capture.",
        "capture-compiled",
        "capture-compiled",
        capture.table,
    ),
    Question(
        "What does `flexinspect.watch` cost around `generate`?",
        "`model.generate` under SDPA with and without `watch`, whole generations. SDPA returns no "
        "log-sum-exp, so level `advanced` recomputes the scores and outputs of the newest rows.",
        "own",
        "own",
        own_table,
    ),
    Question(
        "What does `flexinspect.watch` cost per step?",
        "Decode steps only, in short windows.",
        "own-steps",
        "own-steps",
        own.steps_table,
    ),
    Question(
        "What does `flexinspect.watch` cost per step with a free core?",
        "The same with one torch thread.",
        "own-steps --threads 1",
        "own-steps-1-threads",
        own.steps_table,
    ),
    Question(
        "What does `flexinspect.watch` cost where a step is mostly Python?",
        "The same for 28 layers of hidden size 64, one torch thread: a loop that is bound by the "
        "interpreter, as many are on a GPU. The writer thread shares it with the model.",
        "own-steps --model thin --threads 1 --tokens 400",
        "own-steps-1-threads-thin",
        own.steps_table,
    ),
    Question(
        "What does `flexinspect.watch` cost per step of a 1B model?",
        "The same for `llama3.2_1b_it` with random weights in bfloat16.",
        "own-steps --model llama3.2_1b_it",
        "own-steps-llama3.2_1b_it",
        own.steps_table,
    ),
    Question(
        "Which parts of `flexinspect.watch` cost what?",
        "What a decode step takes more, with one torch thread, in blocks of 48 steps of a "
        "recorded copy of the model between blocks of a bare one (mean and standard error). *The "
        "smallest recorder* keeps references to the output and the attention call of each layer "
        "and copies the newest logits, and a thread writes the shapes of the calls, the ten best "
        "tokens, entropy and time into SQLite; it checks nothing. *Hooks in the layers alone*: "
        "what they keep is dropped. *Steps without any hook*: steps are found, numbered and stored "
        "empty.",
        "parts --threads 1",
        "parts-1-threads",
        parts.table,
    ),
    Question(
        "What do other libraries cost on the same generation?",
        "transformers' own greedy `generate`, 32 tokens, bare and under each recorder in one run. "
        "The whole block is timed, with the opening and closing of the trace. The other libraries "
        "keep tensors in a list. These figures are of a machine that other programs used, so the "
        "wall clock tells little; the CPU time, of all threads, tells more.",
        "peers --threads 1 --tokens 32",
        "peers-1-threads",
        peers.table,
    ),
    Question(
        "What does recording a training cost?",
        "Whole steps with and without `watch_training`.",
        "training",
        "training",
        training.table,
    ),
    Question(
        "What do the training debuggers cost?",
        "Steps of two encoders, one torch thread: each level, and each switch at `BASIC`. "
        "*The calls alone* is the CPU time of `monitor_training_step` over that of the step.",
        "training-debuggers",
        "training-debuggers",
        training_debuggers.table,
    ),
    Question(
        "Is capture right on a GPU?",
        "A random Llama of 2 layers with heads of 64: the executed and the received masks against "
        "the declared one, the kernel's path, its LSE recomputed, the allocator's own figures, "
        "`torch.cuda.set_sync_debug_mode`, restore and fork. Measured within "
        "`python -m benchmarks.gpu --seconds 330`, while other programs ran.",
        "checks",
        "gpu-checks",
        gpu_table,
        "benchmarks.gpu",
    ),
    Question(
        "What does capture cost on a GPU?",
        "Batch 1, in bfloat16: without CUDA graphs the GPU waits for Python in every layer, so "
        "what capture does in Python is added in full, and the writer thread takes the interpreter "
        "from the model. The targets are missed. Few rounds were measured, by "
        "calling the functions of this command one after the other, before it existed.",
        "costs --tokens 32 --seconds 195",
        "gpu-costs",
        gpu_table,
        "benchmarks.gpu",
    ),
    Question(
        "How long do restore, fork and edit take?",
        "The demo model, one torch thread, a state of 300 tokens. Target: 200 ms.",
        "rewind",
        "rewind",
        rewind_table,
    ),
    Question(
        "What do the rules cost?",
        "The demo model. Target: 5 s over a finished trace of 500 steps.",
        "rules",
        "rules",
        rules_table,
    ),
    Question(
        "How long does a report take?",
        "`flexinspect report` as a whole command, on runs of the demo model with random weights. "
        "Targets: 5 s for 500 steps, 5 MB for 100 steps.",
        "html-report",
        "html-report",
        html_report_table,
    ),
    Question(
        "How long does the audit of a trace take?",
        "`flexinspect audit TRACE` as a whole command on an answer of 20 tokens of the demo model, "
        "in turns with processes that only import. The audit needs the class of the model, and "
        "switches garbage collection off for the imports, so the row without it is the floor. "
        "Other programs used the machine: the CPU time tells more than the clock.",
        "audit-trace",
        "audit-trace",
        audit_trace.table,
    ),
    Question(
        "How soon does the doctor answer?",
        "`flexinspect doctor` as a whole command, through a pipe.",
        "doctor",
        "doctor",
        doctor_table,
    ),
    Question(
        "How long do masks take?",
        "Targets: 1 s to draw, 60 s to verify every cell, 1 GB.",
        "masks",
        "masks",
        masks_table,
    ),
    Question(
        "What does the ensemble laboratory cost?",
        "`flexinspect lab` with all methods on 100 questions of the demo, without traces and other "
        "orders, one torch thread, against a plain loop that makes the same answers: our "
        "`generate` for the prompt of all paraphrases, `model.generate` for each paraphrase alone "
        "and, with a logits processor that fuses the batch, for each fusing method. The "
        "laboratory shares the forward passes of methods that agree.",
        "lab",
        "lab",
        lab.table,
    ),
    Question(
        "What does a Ray cluster gain on one machine?",
        "`flexinspect lab` with all methods on questions of the demo, one torch thread a worker. "
        "Loading the models is not counted. Where the load average is above the number of cores, "
        "only the CPU time tells what a quiet machine gives.",
        "ray",
        "ray",
        distributed.table,
    ),
    Question(
        "How quickly does a run answer commands?",
        "Over the Unix socket, while the demo model generates. Target: 50 ms to the answer.",
        "control",
        "control",
        control_table,
    ),
    Question(
        "How fast is a trace written?",
        "Real step records, written repeatedly.",
        "writing",
        "writing",
        writing_table,
    ),
    Question(
        "Does recording cost more later in a run?",
        "A tiny model with a sliding window under `watch`, level `advanced`: one long generation, "
        "then answers in one trace, then more layers and longer prompts. Measured on a machine "
        "that other programs used: the CPU time is the difference of two runs and tells little; "
        "bytes and memory do not depend on it. Memory grows in the first thousand steps, while "
        "buffers fill; the introduction lists what is kept for later steps.",
        "growth --threads 1 --steps 4000",
        "growth-1-threads",
        growth.table,
    ),
    Question(
        "How long does an export take, and how much memory?",
        "A synthetic generation of 2 000 steps, and the same with a million candidates in its "
        "table: memory does not grow with the rows.",
        "export-formats",
        "export-formats",
        export_formats.table,
    ),
    Question(
        "How fast is the interface?",
        "In a pseudo-terminal of 120 × 40, on a short trace, on one of 100 000 steps (`long`) and "
        "on one with a mask of 32 768 tokens (`wide`). Targets: 1.0 s until the header "
        "is drawn, and a median of 25 ms from a key to its frame.",
        "tui",
        "tui",
        tui_table,
    ),
    Question(
        "Is the interface as fast on a large trace?",
        "Ratios of CPU time to the trace of 200 steps, in one run. Measured on a machine that "
        "other programs used, so the seconds of the clock tell little.",
        "scale",
        "scale",
        scale.table,
    ),
)


def page() -> str:
    """Return the page as Markdown."""
    introduction = INTRODUCTION.read_text("utf-8")
    return "\n".join(
        [introduction, *(part for question in QUESTIONS for part in _section(question))]
    )


def _section(question: Question) -> list[str]:
    facts = json.loads((RESULTS / f"{question.result}.json").read_text("utf-8"))
    return [
        f"## {question.title}",
        "",
        question.text,
        "",
        question.table(facts).strip(),
        "",
        f"`python -m {question.module} {question.command}`, {_machine(facts['machine'])}.",
        "",
    ]


def _machine(facts: Mapping[str, Any]) -> str:
    threads = f"{facts['threads']} torch thread{'s' if facts['threads'] != 1 else ''}"
    return (
        f"{facts['date']}, {facts.get('gpu') or facts['platform']}, {facts['cpus']} cores, "
        f"{threads}, Python {facts['python']}, torch {facts['torch']}, "
        f"transformers {facts['transformers']}"
    )


def _rounds(found: Mapping[str, Any]) -> str:
    return f"{found['rounds']} of {found['rounds'] + found.get('left_out', 0)}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")

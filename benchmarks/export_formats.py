"""What `flexinspect export` takes: seconds, memory and bytes of each format.

The trace is a synthetic generation of 2 000 steps (8 layers, 8 heads). For Parquet and CSV there is
a second one whose table of candidates has a million rows: their memory must not grow with it. Each
export runs in a process of its own, on Linux.
"""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks import synthetic
from flexinspect.exports.exporter import ExportOptions, exporter_names, load_exporter, write_export
from flexinspect.trace.reader import open_trace

STEPS, CANDIDATES = 2_000, 1_000_000
TABLE_FORMATS = ("parquet", "csv")

# Adds candidates with ranks above the recorded ones, as many in each step.
_GROW_SQL = """
WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < ?)
INSERT INTO candidates
SELECT generation, branch, step, rank + 1 + n, token_id, text, logit, logprob, score, score_logprob
FROM candidates JOIN numbers WHERE rank = ?
"""


def measure() -> dict[str, Any]:
    """Export both traces and return the figures by format."""
    with tempfile.TemporaryDirectory() as folder:
        trace = synthetic.long_trace(Path(folder) / "run.flextrace", STEPS)
        figures = {name: _measure_in_process(name, trace) for name in exporter_names()}
        _add_candidates(trace)
        large = {name: _measure_in_process(name, trace) for name in TABLE_FORMATS}
    return {"steps": STEPS, "formats": figures, "candidates": CANDIDATES, "large": large}


def table(facts: Mapping[str, Any]) -> str:
    """Return the figures of all formats as a table."""
    from benchmarks.common import markdown  # loads torch, which a measured process must not

    more = f"{facts['candidates']:,} candidates".replace(",", "\u202f")
    named = [*facts["formats"].items()]
    named += [(f"{name}, {more}", each) for name, each in facts["large"].items()]
    rows = [
        [
            name,
            *(f"{each[key]:.1f}" for key in ("seconds", "cpu_seconds", "megabytes")),
            f"{each['peak_memory_mb']} ({each['peak_memory_before_mb']})",
        ]
        for name, each in named
    ]
    head = ["format", "seconds", "seconds of CPU", "MB written", "peak memory, MB (before)"]
    return markdown(head, rows)


def _add_candidates(trace: Path) -> None:
    """Make the table of candidates `CANDIDATES` rows long."""
    more = CANDIDATES // STEPS - synthetic.N_CANDIDATES
    with closing(sqlite3.connect(trace)) as db, db:
        db.execute(_GROW_SQL, (more, synthetic.N_CANDIDATES - 1))


def _measure_in_process(name: str, trace: Path) -> Mapping[str, Any]:
    command = [sys.executable, "-m", "benchmarks.export_formats", name, str(trace)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: Mapping[str, Any] = json.loads(done.stdout)
    return figures


def export(name: str, trace: Path) -> None:
    """Export a trace and print the figures."""
    exporter = load_exporter(name)
    target = trace.with_name("measured" + exporter.suffix)
    before, started, cpu = _peak_megabytes(), time.perf_counter(), time.process_time()
    with open_trace(trace) as reader, reader.snapshot():
        options = ExportOptions(target)
        result = write_export(exporter, reader, options, lambda *_: None, overwrite=True)
    figures = {
        "seconds": round(time.perf_counter() - started, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        exporter.unit: result.count,
        "megabytes": round(result.n_bytes / 1e6, 1),
        "peak_memory_mb": _peak_megabytes(),
        "peak_memory_before_mb": before,
    }
    print(json.dumps(figures))


def _peak_megabytes() -> int:
    """Return the peak of this process; that of `getrusage` would include its parent's."""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return round(int(line) * 1024 / 1e6)


if __name__ == "__main__":
    export(sys.argv[1], Path(sys.argv[2]))

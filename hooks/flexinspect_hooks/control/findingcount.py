"""The general debugger's summary: the findings of a trace that is being recorded."""

from __future__ import annotations

from pathlib import Path

from flexinspect.errors import TraceError
from flexinspect_hooks.control.parts import AnomalyCounts


class FindingCounter:
    """Counts a trace's findings and steps, read when somebody asks; `clear` counts from there."""

    def __init__(self, trace: str) -> None:
        self._trace = Path(trace)
        self._baseline = AnomalyCounts()

    def counts(self) -> AnomalyCounts:
        """Return findings and steps since the start or the last `clear`."""
        now, before = self._read(), self._baseline
        return AnomalyCounts(
            total_anomalies=max(now.total_anomalies - before.total_anomalies, 0),
            debug_history_length=max(now.debug_history_length - before.debug_history_length, 0),
        )

    def clear(self) -> None:
        """Count from here on; the trace keeps what it has."""
        self._baseline = self._read()

    def _read(self) -> AnomalyCounts:
        # Here, as it loads numpy: whoever runs the user's program must not load that first.
        from flexinspect.trace.reader import TraceReader
        from flexinspect.trace.sequences import n_steps_and_findings

        try:
            with TraceReader(self._trace) as reader:
                steps, findings = n_steps_and_findings(reader)
        except TraceError:
            return AnomalyCounts()
        return AnomalyCounts(total_anomalies=findings, debug_history_length=steps)

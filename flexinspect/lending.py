"""Lending our terminal to pdb, which a run's process has on it while it is stopped."""

from __future__ import annotations

import signal
import time

from flexinspect.capture import Capture

POLL_INTERVAL_S = 0.05


def hand_over_terminal(process: Capture) -> None:
    """Let pdb have the terminal until it is done with it, or its process has ended.

    Nothing else may read from the terminal or draw on it meanwhile. Ctrl-C goes to pdb. Call it
    from the main thread.
    """
    before = signal.signal(signal.SIGINT, lambda number, frame: process.interrupt())
    try:
        n_granted = 0
        while process.state.wants_terminal and process.poll() is None:
            if (
                n_granted != process.state.n_terminal_requests
            ):  # it may want it again between two looks
                n_granted = process.state.n_terminal_requests
                process.grant_terminal()
            time.sleep(POLL_INTERVAL_S)
    finally:
        signal.signal(signal.SIGINT, before)

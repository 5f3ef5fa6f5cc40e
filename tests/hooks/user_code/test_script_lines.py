"""The lines between a program under inspection and the process that started it."""

from __future__ import annotations

import os
import socket

from flexinspect.records import protocol
from flexinspect_hooks.user_code.script.script_run import LauncherConnection


def test_messages_in_the_same_packet_as_the_job_are_received() -> None:
    starter, ours = socket.socketpair()
    control = LauncherConnection(os.dup(ours.fileno()))
    ours.close()
    lines = [protocol.format_message(protocol.OUTPUT, items=[number]) for number in range(3)]
    starter.sendall("\n".join(["the job", *lines]).encode())
    assert control.first_line() == "the job"
    starter.sendall(b"\n")
    starter.close()
    assert [facts["items"] for facts in control.messages()] == [[0], [1], [2]]

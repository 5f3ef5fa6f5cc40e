"""A runtime folder for the tests, and a served step barrier with a fake model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.controlled import FakeModel, fake_targets

from flexinspect.control.client import ControlClient
from flexinspect.control.discovery import Address, ServeOptions
from flexinspect_hooks.control.server import CaptureControl

TOKEN = "a-token-of-the-tests"


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sockets that no other run uses; its path is short, as sockets require."""
    folder = Path(tempfile.mkdtemp(prefix="fx"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder / "flexinspect"
    shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class Served:
    """A served step barrier, its model, and clients over the socket and over TCP."""

    server: CaptureControl
    model: FakeModel
    client: ControlClient
    tcp: ControlClient

    @property
    def url(self) -> str:
        return self.server.address.url


@pytest.fixture
def served() -> Iterator[Served]:
    model = FakeModel()
    model.settle()
    server = CaptureControl(
        fake_targets(model), lambda _: None, serving=ServeOptions("127.0.0.1", 0, TOKEN)
    )
    server.start()
    address = server.address
    yield Served(
        server,
        model,
        ControlClient(Address(address.socket)),
        ControlClient(Address(url=address.url, token=TOKEN)),
    )
    server.close()
    model.end()

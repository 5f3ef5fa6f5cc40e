"""The OpenAPI document matches the server, and no request that it allows breaks the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from support.controlled import FakeModel, fake_targets
from support.paths import DOCS

from flexinspect.control.discovery import ServeOptions
from flexinspect_hooks.control.http_app import openapi_document
from flexinspect_hooks.control.server import CaptureControl

TOKEN = "a-token-of-the-tests"
PAGE = DOCS / "openapi.json"
REGENERATE = f"write json.dumps(openapi_document(), indent=1) to {PAGE}"

schema: Any = schemathesis.openapi.from_dict(openapi_document())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        yield


@contextmanager
def serving() -> Iterator[tuple[str, FakeModel]]:
    """Serve the control of a loop; yield the address, and the loop."""
    model = FakeModel()
    model.settle()
    targets, options = fake_targets(model), ServeOptions("127.0.0.1", 0, TOKEN)
    server = CaptureControl(targets, lambda _: None, serving=options)
    server.start()
    yield server.address.url, model
    server.close()
    model.end()


@pytest.fixture(scope="module")
def url(folder: None) -> Iterator[str]:
    with serving() as (url, _):
        yield url


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@schema.parametrize()
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_response_is_documented(case: Any, url: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    case.call_and_validate(base_url=url, headers=headers, checks=CHECKS)


class Workflow(schema.as_state_machine()):  # type: ignore[misc]
    """Commands in sequences, in which the numbers of breakpoints come from earlier responses."""

    n_linked: ClassVar[int] = 0

    def setup(self) -> None:
        self._opened = ExitStack()
        self._url, self._model = self._opened.enter_context(serving())

    def teardown(self) -> None:
        self._opened.close()

    def get_call_kwargs(self, case: Any) -> dict[str, Any]:
        return {"base_url": self._url, "headers": {"Authorization": f"Bearer {TOKEN}"}}

    def before_call(self, case: Any) -> None:
        if case.operation.label == "POST /breakpoints" and case.meta.generation.mode.is_positive:
            case.body["text"] = "entropy > 3"  # a random text is no condition

    def after_call(self, response: Any, case: Any) -> None:
        self._model.settle()
        if self._model.is_at_forward.is_set():
            self._model.forward()

    def validate_response(self, response: Any, case: Any, **_: Any) -> None:
        case.validate_response(response, checks=CHECKS)
        Workflow.n_linked += "{number}" in case.operation.path and response.status_code == 200


@pytest.mark.usefixtures("folder")
def test_no_sequence_of_commands_breaks_the_server() -> None:
    slow = list(HealthCheck)
    steps = settings(
        max_examples=10, stateful_step_count=10, deadline=None, suppress_health_check=slow
    )
    Workflow.run(settings=steps)
    assert Workflow.n_linked > 3, "no sequence has used a breakpoint that it had added"


def test_the_document_in_docs_is_the_served_one(url: str) -> None:
    import urllib.request

    request = urllib.request.Request(
        f"{url}/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        served = json.load(answer)
    assert served == json.loads(json.dumps(openapi_document()))
    assert json.loads(PAGE.read_text()) == served, REGENERATE


def test_the_checks_detect_an_undocumented_response(url: str) -> None:
    untrue = openapi_document()
    del untrue["paths"]["/breakpoints/{number}"]["delete"]["responses"]["404"]
    operation = schemathesis.openapi.from_dict(untrue)["/breakpoints/{number}"]["DELETE"]
    case: Any = operation.Case(path_parameters={"number": 99})
    with pytest.raises(FailureGroup, match="Undocumented status code"):
        case.call_and_validate(
            base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, checks=CHECKS
        )

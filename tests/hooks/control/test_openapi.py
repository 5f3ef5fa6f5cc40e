"""The OpenAPI document matches the server, and no request that it allows breaks the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

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
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        model = FakeModel()
        model.settle()
        server = CaptureControl(
            fake_targets(model), lambda _: None, serving=ServeOptions("127.0.0.1", 0, TOKEN)
        )
        server.start()
        yield server.address.url
        server.close()
        model.end()


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

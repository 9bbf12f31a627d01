"""The server conforms to its OpenAPI document: generated requests, valid and invalid."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from helpers.model_zoo import VITS, make_checkpoint
from helpers.serving import Server, serving
from patchword.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served") / "model"
    write_checkpoint(folder, make_checkpoint(VITS["class"]))
    with serving(folder, "--num-threads", 1) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/v1/openapi.json")


@pytest.mark.slow
def test_server_conforms_to_its_openapi_document(document: Any) -> None:
    operations = [result.ok() for result in document.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/predict", "/v1/explain", "/v1/embed", "/healthz"}
    for operation in operations:
        check_operation(operation)


def check_operation(operation: Any) -> None:
    """Valid and invalid requests; every response must conform to the document."""

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(case=st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)))
    def check_case(case: Any) -> None:
        # No schema can describe an image, so a valid request may still be rejected with 422.
        case.call_and_validate(timeout=120, excluded_checks=[positive_data_acceptance])

    check_case()

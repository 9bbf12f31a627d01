"""The server keeps what its OpenAPI document says: requests made from it, right ones and wrong ones."""

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


def test_what_the_document_says_is_kept(document: Any) -> None:
    operations = [result.ok() for result in document.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/predict", "/v1/explain", "/v1/embed", "/healthz"}
    for operation in operations:
        check(operation)


def check(operation: Any) -> None:
    """Right requests and wrong ones, none of which may be answered in a way that the document does not have."""

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(case=st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)))
    def one(case: Any) -> None:
        # No schema can say what a picture is, so what it allows may still be none, and be refused with 422.
        case.call_and_validate(timeout=120, excluded_checks=[positive_data_acceptance])

    one()

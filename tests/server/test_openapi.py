"""schemathesis drives the server from its own OpenAPI document: no crash, statuses and types as documented."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from helpers.http_server import Served
from helpers.serving import scripted_engine
from octavo.server.settings import ServerSettings

KEY = "the-key-of-this-test"
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    negative_data_rejection, unsupported_method,
]  # fmt: skip
#: The block map has tests of its own, and its feed never ends.
OURS = r"^/(v1/|tokenize|detokenize|health|ready|version|metrics)"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(scripted_engine(max_model_len=128), ServerSettings(api_keys=(KEY,), blocks=False)) as server:
        yield server
        server.wait_idle()
        body = {"prompt": "hi", "max_tokens": 3}
        good = httpx.post(server.url + "/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"})
        assert good.status_code == 200


@pytest.fixture(scope="module")
def api(served: Served) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(served.url + "/openapi.json").include(path_regex=OURS)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_every_operation(api: schemathesis.BaseSchema, mode: schemathesis.GenerationMode) -> None:
    """Requests that fit the document, and requests that do not."""
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) >= 12
    for operation in operations:
        if mode is schemathesis.GenerationMode.NEGATIVE and operation.method == "get":
            continue  # nothing of theirs can be wrong

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=12, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        def every_case(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, headers={"authorization": f"Bearer {KEY}"}, timeout=30)

        every_case()


def test_the_document_describes_what_is_there(served: Served) -> None:
    document = httpx.get(served.url + "/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models",
                 "/tokenize", "/detokenize", "/health", "/ready", "/version", "/metrics"):  # fmt: skip
        assert path in document["paths"]
    body = document["components"]["schemas"]["ChatBody"]
    assert body["additionalProperties"] is False
    assert {"messages", "min_p", "top_k", "repetition_penalty", "cache_salt", "priority", "deadline_ms",
            "prompt_token_ids", "tools", "response_format", "structured_outputs"} <= {*body["properties"]}  # fmt: skip
    codes = set(document["paths"]["/v1/chat/completions"]["post"]["responses"])
    assert {"200", "400", "401", "404", "413", "429", "503"} <= codes
    assert "422" not in codes

"""A tiny model served over HTTP, the same model offline, and a client; for the files that define no others."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from helpers.http_server import Served
from helpers.tiny_models import write_tiny
from octavo.config import make_config
from octavo.engine import Engine
from octavo.llm import LLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny("llama", path)
    return str(path)


@pytest.fixture(scope="module")
def served(model: str) -> Iterator[Served]:
    with Served(Engine.build(make_config(model=model, num_blocks=200))) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model=model, num_blocks=200) as offline:
        yield offline


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as made:
        yield made

"""Adapters over HTTP: chosen as a model, listed, loaded and unloaded behind the key."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from helpers.http_server import Served
from helpers.tiny_models import oracle_greedy, write_tiny
from octavo.cli.main import main
from octavo.config import make_config
from octavo.engine import Engine
from octavo.server.settings import ServerSettings

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
KEY = "a-key-of-the-tests"
PROMPT = list(range(40, 80))


class Place:
    """The files, and the oracle for each name."""

    def __init__(self, root: Path) -> None:
        self.model = root / "tiny"
        base = write_tiny("llama", self.model)
        self.oracles: dict[str, Any] = {"tiny": base}
        for seed, name in enumerate(("poet", "clerk"), 1):
            torch.manual_seed(seed)
            config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False)
            adapted = peft.get_peft_model(copy.deepcopy(base), config)
            adapted.save_pretrained(str(root / name))
            self.oracles[name] = adapted.eval()
        self.paths = {name: str(root / name) for name in ("poet", "clerk")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("adapters"))


def engine(place: Place) -> Engine:
    return Engine.build(
        make_config(
            model=str(place.model), dtype="float32", num_blocks=64, lora={"poet": place.paths["poet"]}, debug=True
        )
    )


@pytest.fixture
def served(place: Place) -> Iterator[Served]:
    with Served(engine(place), ServerSettings(api_keys=(KEY,))) as server:
        yield server
        server.wait_idle()


def post(served: Served, path: str, key: str | None = KEY, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(served.url + path, json=body, headers=headers, timeout=30)


def complete(served: Served, model: str, count: int = 12) -> list[int]:
    answer = post(
        served, "/v1/completions", model=model, prompt=PROMPT, max_tokens=count, temperature=0, ignore_eos=True,
        return_token_ids=True,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def models(served: Served) -> dict[str, Any]:
    answer = httpx.get(served.url + "/v1/models", headers={"authorization": f"Bearer {KEY}"})
    return {card["id"]: card.get("parent") for card in answer.json()["data"]}


def test_an_adapter_is_a_model_and_comes_and_goes(served: Served, place: Place) -> None:
    assert models(served) == {"tiny": None, "poet": "tiny"}
    for name in ("tiny", "poet"):
        assert complete(served, name) == oracle_greedy(place.oracles[name], PROMPT, 12)
    loaded = post(served, "/v1/load_lora_adapter", lora_name="clerk", lora_path=place.paths["clerk"])
    assert loaded.status_code == 200 and loaded.json() == {
        "id": "clerk",
        "object": "model",
        "parent": "tiny",
        "rank": 4,
    }
    assert models(served) == {"tiny": None, "poet": "tiny", "clerk": "tiny"}
    assert complete(served, "clerk") == oracle_greedy(place.oracles["clerk"], PROMPT, 12)
    one = httpx.get(served.url + "/v1/models/clerk", headers={"authorization": f"Bearer {KEY}"})
    assert one.json()["parent"] == "tiny"
    gone = post(served, "/v1/unload_lora_adapter", lora_name="clerk")
    assert gone.json() == {"id": "clerk", "object": "model", "deleted": True}
    assert "clerk" not in models(served)
    refused = post(served, "/v1/completions", model="clerk", prompt=PROMPT, max_tokens=1)
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == "model='clerk' is not served here; there is tiny, poet"


def test_other_routes_take_adapters_too(served: Served, place: Place) -> None:
    messages = [{"role": "user", "content": "What is a folio?"}]
    said = {}
    for model in ("tiny", "poet"):
        chat = post(served, "/v1/chat/completions", model=model, messages=messages, max_tokens=8, temperature=0)
        response = post(served, "/v1/responses", model=model, input="What?", max_output_tokens=8, temperature=0)
        vector = post(served, "/v1/embeddings", model=model, input="What is a folio?")
        assert [r.status_code for r in (chat, response, vector)] == [200, 200, 200], (chat.text, response.text)
        said[model] = (chat.json()["choices"][0]["message"], response.json()["output"], vector.json()["data"])
    assert all(a != b for a, b in zip(said["tiny"], said["poet"], strict=True))


def test_refusals(served: Served, place: Place, tmp_path: Path) -> None:
    def refused(path: str, status: int, reason: str, key: str | None = KEY, **body: Any) -> None:
        answer = post(served, path, key, **body)
        assert answer.status_code == status and reason in answer.json()["error"]["message"], answer.text

    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    refused(load, 400, "no such directory", lora_name="x", lora_path=str(tmp_path / "nowhere"))
    refused(load, 400, "is loaded already", lora_name="poet", lora_path=place.paths["clerk"])
    refused(load, 400, "the name of the model itself", lora_name="tiny", lora_path=place.paths["clerk"])
    refused(load, 400, "lora_int_id: this field is not supported", lora_name="x", lora_path="y", lora_int_id=1)
    refused(load, 401, "an API key is needed", None, lora_name="x", lora_path=place.paths["clerk"])
    refused(unload, 404, "loaded: poet", lora_name="clerk")
    assert set(models(served)) == {"tiny", "poet"}


def test_an_adapter_with_numbers_that_are_none_is_refused(served: Served, place: Place, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(Path(place.paths["clerk"]) / "adapter_model.safetensors")
    name = sorted(weights)[-1]
    weights[name][0, 0] = float("nan")
    (tmp_path / "adapter_config.json").write_bytes(Path(place.paths["clerk"], "adapter_config.json").read_bytes())
    save_file(weights, tmp_path / "adapter_model.safetensors")
    answer = post(served, "/v1/load_lora_adapter", lora_name="clerk", lora_path=str(tmp_path))
    assert answer.status_code == 400 and f"{name} holds NaN or infinity" in answer.json()["error"]["message"]


def test_created_is_when_the_adapter_came(served: Served, place: Place) -> None:
    served.app.state.server.created -= 1000  # a server that has been up for a while
    before = int(time.time())
    assert post(served, "/v1/load_lora_adapter", lora_name="clerk", lora_path=place.paths["clerk"]).status_code == 200
    answer = httpx.get(served.url + "/v1/models", headers={"authorization": f"Bearer {KEY}"})
    created = {card["id"]: card["created"] for card in answer.json()["data"]}
    assert created["tiny"] == served.app.state.server.created < before <= created["clerk"] <= time.time()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--served-model-name", "poet", "--lora", "poet=x"], "lora: poet is the name of the model itself"),
        (["--lora", "tiny=x"], "lora: tiny is the name of the model itself"),
        (["--max-loras", "3"], "max_loras=3 has no effect without adapters"),
    ],
)
def test_what_can_be_known_before_loading_is_refused_at_the_door(
    options: list[str], reason: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(place.model), "--port", "0", *options]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(f"octavo: {reason}")


def test_without_keys_nobody_loads_adapters(place: Place) -> None:
    with Served(engine(place)) as served:
        for path, body in (("load", {"lora_name": "x", "lora_path": "/y"}), ("unload", {"lora_name": "poet"})):
            answer = post(served, f"/v1/{path}_lora_adapter", None, **body)
            assert answer.status_code == 403 and "--api-key-file" in answer.json()["error"]["message"]
        assert complete(served, "poet") == oracle_greedy(place.oracles["poet"], PROMPT, 12)

"""The hostile bodies of `make chaos` against a server in this process, and (slow) the whole of it against a child."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from helpers.http_server import Served
from helpers.serving import scripted_engine
from helpers.tiny_models import write_tiny

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import chaos  # noqa: E402


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(scripted_engine(num_blocks=512, max_model_len=128, check=False)) as server:
        yield server


@pytest.mark.parametrize("attack", ["malformed", "invalid_text", "deep", "hostile_fields"])
def test_hostile_bodies_get_a_clear_status(served: Served, attack: str) -> None:
    bodies = getattr(chaos, attack)()
    with httpx.Client(base_url=served.url, headers={"content-type": "application/json"}, timeout=60) as client:
        for number, body in enumerate(bodies):
            paths = chaos.PATHS if attack != "hostile_fields" else chaos.PATHS[:1]
            for path in paths[number % 6 : number % 6 + 1] if attack == "malformed" else paths:
                answer = client.post(path, content=body)
                late = answer.status_code == 503 and b'"code":"deadline"' in answer.content
                assert late or answer.status_code in chaos.CLEAR - {503}, (path, body[:100], answer.text)
        assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3}).status_code == 200
    served.wait_idle()


@pytest.mark.slow
def test_the_whole_of_it(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path, max_position_embeddings=1024)
    command = [sys.executable, str(TOOLS / "chaos.py"), "--model", str(tmp_path), "--scale", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recovered after each" in done.stdout

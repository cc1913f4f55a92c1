"""The kernels under test run on the GPU where there is one, else in Triton's interpreter on CPU tensors."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")  # Linux only, also in the extra `dev`

ON_GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real sizes need the real thing."""
    for item in items:
        if item.get_closest_marker("gpu") is not None and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture
def device() -> str:
    """Where the tensors of a test lie."""
    from octavo.kernels.triton import why_unusable

    name = "cuda" if ON_GPU else "cpu"
    if reason := why_unusable(name):
        pytest.skip(reason)
    return name


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new tensor starts as NaN, or as all ones in bits: an element that is not written shows."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        out = empty(*args, **kwargs)  # type: ignore[call-overload]
        return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(-1 if out.dtype.is_signed else 255)

    monkeypatch.setattr(torch, "empty", poisoned)

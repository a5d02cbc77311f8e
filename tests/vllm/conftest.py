"""The connector under the real vLLM: collected only where vLLM is installed (`make test-vllm` makes such a place)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

spec = find_spec("vllm")
if spec is None or spec.origin is None:  # this folder alone is no vLLM
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, as `headstart pull smollm2-135m` makes it; HEADSTART_MODELS_DIRECTORY says where it lies."""
    folder = Path(os.environ.get("HEADSTART_MODELS_DIRECTORY", "models")).expanduser() / "smollm2-135m"
    if not (folder / "model.safetensors").exists():
        pytest.fail(f"{folder} holds no model; run: headstart pull smollm2-135m --models-directory {folder.parent}")
    return folder.resolve()


@pytest.fixture(autouse=True)
def only_what_the_test_says(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings of the shell have no part in a test."""
    for name in [name for name in os.environ if name.startswith("HEADSTART_")]:
        monkeypatch.delenv(name)
    return

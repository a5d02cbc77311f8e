"""What the tests of the torch engine share: the tiny models, and one torch thread so that tests do not fight for cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from model_fixtures import smollm2_folder, tiny_model_folder  # noqa: F401


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""Skips these tests by name where there is no NVIDIA GPU; they are deselected unless -m gpu."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")

import os
from pathlib import Path

import pytest
from sageattention3.kernels.jit import compile
from sageattention3.kernels.jit.variants import Variant

KERNELS = Path(__file__).parent / "kernels"


def saxpy(steps: int = 4, relu: bool = False, **changes) -> Variant:
    fields = {
        "source": "saxpy.cu",
        "kernel": "saxpy",
        "template": (steps, relu),
        "params": "QQQf",
        "threads": 128,
        "min_blocks": 2,
        "shared_bytes": 512,
    }
    return Variant(**{**fields, **changes})


@pytest.fixture(name="saxpy")
def _saxpy():
    return saxpy


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch) -> Path:
    """A cache folder of the test's own, and the test kernels in place of the pack's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SAGEATTENTION3_CACHE", str(folder))
    monkeypatch.setattr(compile, "CUDA_FOLDER", KERNELS)
    monkeypatch.delenv("MAX_JOBS", raising=False)
    return folder


@pytest.fixture
def as_ordinary_user():
    """File permissions do not bind root; CI may be root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)

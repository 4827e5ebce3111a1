"""Snippets on this machine's GPU, and the file of what a GPU has made of them.

To record anew, on a GPU of compute capability 9.0:
pytest -c tests/pytest.ini tests/ptxsim/test_instructions.py tests/ptxsim/test_wgmma.py --record
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from .snippets import Snippet

FILE = Path(__file__).parents[1] / "data" / "ptx_vectors.npz"


def run_on_gpu(snippet: Snippet, given: np.ndarray, seed: int = 0) -> np.ndarray:
    """The same as ``interpret`` in snippets.py; the GPU orders warps as it likes."""
    from cuda.bindings import driver  # a machine without a GPU has no driver to load

    def checked(status, *values):
        assert not status, (status.name, snippet.body)
        return values[0] if values else None

    if "e2m1" in snippet.body:
        pytest.skip("FP4 needs compute capability 12.0")
    source, target = torch.from_numpy(given.view("i4")).cuda(), snippet.room("cuda")
    parameters = np.array([source.data_ptr(), target.data_ptr()], "u8")
    pointers = parameters.ctypes.data + 8 * np.arange(2, dtype="u8")
    module = checked(*driver.cuModuleLoadData(snippet.text("sm_90a").encode()))
    kernel = checked(*driver.cuModuleGetFunction(module, b"test"))
    sizes = (snippet.blocks, 1, 1, snippet.threads, 1, 1, snippet.shared_bytes)
    checked(*driver.cuLaunchKernel(kernel, *sizes, 0, pointers.ctypes.data, 0))
    torch.cuda.synchronize()
    checked(*driver.cuModuleUnload(module))
    return target.cpu().numpy().view("u4")


class Recorder:
    """Runs snippets on the GPU, each once, and keeps what went in and came out."""

    def __init__(self):
        self._cases: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}

    def execute(self, snippet: Snippet, given: np.ndarray, seed: int = 0) -> np.ndarray:
        key = snippet, given.tobytes()
        if key not in self._cases:
            self._cases[key] = given, run_on_gpu(snippet, given)
        return self._cases[key][1].copy()

    def save(self) -> None:
        given, results = zip(*self._cases.values(), strict=True)
        np.savez_compressed(
            FILE,
            device=torch.cuda.get_device_name(),
            snippets=json.dumps([snippet for snippet, _ in self._cases]),
            shapes=[x.shape + y.shape for x, y in zip(given, results, strict=True)],
            given=np.concatenate(given, None),
            results=np.concatenate(results, None),
        )


def read() -> list[tuple[Snippet, np.ndarray, np.ndarray]]:
    """Snippets with their inputs and the GPU's results."""
    with np.load(FILE) as file:
        shapes = file["shapes"]
        arrays = [
            np.split(file[name], np.cumsum(shapes[:, i] * shapes[:, i + 1])[:-1])
            for name, i in (("given", 0), ("results", 2))
        ]
        return [
            (
                Snippet(body, tuple(inputs), tuple(outputs), *sizes),
                given.reshape(shape[:2]),
                result.reshape(shape[2:]),
            )
            for (body, inputs, outputs, *sizes), shape, given, result in zip(
                json.loads(str(file["snippets"])), shapes, *arrays, strict=True
            )
        ]

"""Launchers of this pack's kernels, made to run on CPU tensors through the interpreter."""

import pytest
from sageattention3.kernels.launch import (
    fp4_proof,
    fp4_quantise,
    geometry,
    int8_fp4_quantise,
    int8_quantise,
    sm80_int8,
    sm80_sagebwd,
    sm90_int8,
    sm90_sagebwd,
    sm120_fp4,
)

from . import snippets
from .recorded import Recorder
from .simulator import Simulator

_LAUNCHERS = (
    fp4_proof,
    fp4_quantise,
    int8_fp4_quantise,
    int8_quantise,
    sm80_int8,
    sm80_sagebwd,
    sm90_int8,
    sm90_sagebwd,
    sm120_fp4,
)


@pytest.fixture
def use(monkeypatch):
    """A function that makes launches go to a Simulator."""
    # A GPU of four multiprocessors: calls of a few hundred tokens are cut into chunks.
    monkeypatch.setattr(geometry, "_multiprocessors", lambda device: 4)

    def use(simulator: Simulator) -> Simulator:
        for module in _LAUNCHERS:
            monkeypatch.setattr(module, "launch", simulator.launch)
        return simulator

    return use


# ------------------------------------------------------------------------ recording: recorded.py
def pytest_addoption(parser):
    parser.addoption("--record", action="store_true", help="run snippets on the GPU and record it")


@pytest.fixture(scope="session")
def recorder(request):
    """What snippets run on in place of the interpreter, if they are to be recorded."""
    if not request.config.getoption("--record", False):
        yield None
        return
    recorder = Recorder()
    yield recorder
    recorder.save()


@pytest.fixture(autouse=True)
def _record(recorder, monkeypatch):
    if recorder:
        monkeypatch.setattr(snippets, "execute", recorder.execute)


@pytest.fixture
def interpreted(recorder):
    """For tests of what a GPU leaves undefined or refuses, or of how the interpreter rounds."""
    if recorder:
        pytest.skip("of the interpreter only")

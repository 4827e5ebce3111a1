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

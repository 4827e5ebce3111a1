"""The interpreter against an H200: what that GPU made of the snippets of these tests.

Bits are the same, but for the payloads of NaNs, and for approximations: the interpreter has the
rounded exact result, from which the PTX ISA allows 2^-22 relative, of a logarithm also absolute.
"""

import numpy as np
import pytest

from .recorded import FILE, read, run_on_gpu
from .snippets import interpret

CASES = read() if FILE.exists() else []
_BOUND = 2.0**-22 + 2.0**-24  # the second: of the interpreter's own rounding


def same(snippet, mine, recorded):
    x, y = mine.view("f4"), recorded.view("f4")
    equal = (mine == recorded) | (np.isnan(x) & np.isnan(y))
    if ".approx" in snippet.body:
        equal |= np.isclose(x, y, rtol=_BOUND, atol=_BOUND * ("lg2" in snippet.body))
    return equal


def test_there_are_recorded_vectors():
    assert len(CASES) > 140
    assert FILE.stat().st_size < 300_000


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].body.strip()[:40])
def test_the_interpreter_agrees_with_a_gpu(case):
    snippet, given, recorded = case
    equal = same(snippet, interpret(snippet, given), recorded)
    assert equal.all(), np.argwhere(~equal)[:4]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].body.strip()[:40])
def test_a_gpu_still_gives_the_recorded_bits(case):
    snippet, given, recorded = case
    assert (run_on_gpu(snippet, given) == recorded).all()

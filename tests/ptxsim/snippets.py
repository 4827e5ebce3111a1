"""Small PTX kernels for tests: some instructions between loads of inputs and a store of results."""

from typing import NamedTuple

import numpy as np
import torch

from .machine import Code, Launch
from .ptx import parse
from .simulator import run

_KERNEL = """
.version 8.8
.target {target}
.address_size 64
.file 1 "snippet.cu"
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry test(.param .u64 test_param_0, .param .u64 test_param_1) {{
  .reg .b32 a, b, c, d, e, f, tid, ctaid, ntid, index;
  .reg .b32 x<8>, y<8>, z<8>, w<8>, u<80>, m<128>;
  .reg .b64 in, out, wide, da, db, dc;
  .reg .b16 ha, hb, hc;
  .reg .pred p, q, r;
  ld.param.u64 in, [test_param_0];
  ld.param.u64 out, [test_param_1];
  mov.u32 tid, %tid.x;
  mov.u32 ctaid, %ctaid.x;
  mov.u32 ntid, %ntid.x;
  mad.lo.s32 index, ctaid, ntid, tid;
  mul.wide.u32 wide, index, {input_bytes};
  add.s64 in, in, wide;
  mul.wide.u32 wide, index, {output_bytes};
  add.s64 out, out, wide;
  {loads}
  .loc 1 7 1
  {body}
  {stores}
  ret;
}}
"""


class Snippet(NamedTuple):
    body: str
    inputs: tuple[str, ...]  # registers that are loaded before it
    outputs: tuple[str, ...]  # registers that are stored behind it
    threads: int
    blocks: int
    shared_bytes: int

    def text(self, target: str) -> str:
        loads = enumerate(self.inputs)
        stores = enumerate(self.outputs)
        return _KERNEL.format(
            target=target,
            input_bytes=4 * max(1, len(self.inputs)),
            output_bytes=4 * max(1, len(self.outputs)),
            loads="\n  ".join(f"ld.global.b32 {x}, [in+{4 * i}];" for i, x in loads),
            body=self.body,
            stores="\n  ".join(f"st.global.b32 [out+{4 * i}], {x};" for i, x in stores),
        )

    def room(self, device: str = "cpu") -> torch.Tensor:
        """For the results: int32 [blocks * threads, len(outputs)]."""
        count = self.blocks * self.threads
        return torch.zeros(count, max(1, len(self.outputs)), dtype=torch.int32, device=device)


def interpret(snippet: Snippet, given: np.ndarray, seed: int = 0) -> np.ndarray:
    """What the snippet makes of ``given``, uint32 [threads, inputs]: uint32 [threads, outputs]."""
    source, target = torch.from_numpy(given.view("i4")), snippet.room()
    parameters = np.array([source.data_ptr(), target.data_ptr()], "u8").tobytes()
    sizes = snippet.blocks, snippet.threads, snippet.shared_bytes
    run(Code(parse(snippet.text("sm_120a"))), Launch(parameters, *sizes, seed))
    return target.numpy().view("u4")


execute = interpret  # or what conftest.py puts in its place


def call(body: str, inputs=(), outputs=("d",), *, threads=32, blocks=1, shared_bytes=0, seed=0):
    """What ``outputs`` hold behind ``body``: uint32 [blocks * threads, len(outputs)].

    inputs: register to array or number, as FP32 if floating, else as 32-bit integers.
    """
    inputs, count = dict(inputs), blocks * threads
    columns = [np.broadcast_to(_words(x), count) for x in inputs.values()]
    given = np.stack(columns, 1) if columns else np.zeros((count, 1), "u4")
    snippet = Snippet(body, tuple(inputs), tuple(outputs), threads, blocks, shared_bytes)
    return execute(snippet, np.ascontiguousarray(given), seed)


def _words(x) -> np.ndarray:
    x = np.asarray(x)
    return x.astype("f4").view("u4") if x.dtype.kind == "f" else x.astype("i8").astype("u4")

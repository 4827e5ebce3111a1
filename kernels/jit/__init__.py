"""Builds the CUDA kernels on the user's machine with NVRTC and launches them; needs no toolkit.

Flow: ``variants`` (what to build) -> ``build`` (NVRTC in child processes, through a ninja graph)
-> ``cache`` (cubins under a content hash) -> ``loader`` (load once per device, then enqueue).
This module imports nothing, so that a compiling child process never imports torch.

How to add a kernel
-------------------
Device code, ``kernels/cuda/<name>.cu`` and ``*.cuh``:

- Self-contained: no CUDA or C++ headers. ``#include "x.cuh"`` finds files of ``kernels/cuda`` only;
  they reach NVRTC as text, so no path of the user's machine ever does.
- C++17, compiled without fast math: say ``ex2.approx.ftz`` and the like where it is wanted.
- One kernel per ``.cu``, a (template) function with **one** parameter: a struct by value that
  holds at least one pointer or 64-bit number::

      struct Params { const void* q; void* out; long long stride; int n; float scale; };

      template <int HEAD_DIM, bool CAUSAL>
      __global__ void __launch_bounds__(256, 2)
      sm80_int8_attention(const __grid_constant__ Params p) { ... }

  A block has one dimension. Extra template parameters are int, bool or enum values.

Python side, ``kernels/launch/<name>.py``: declares its variants in a tuple named ``VARIANTS``, from
which the ahead-of-time build and the tests collect them, and launches::

      from ..jit.loader import launch
      from ..jit.variants import Variant

      VARIANTS = tuple(
          Variant(
              source="sm80_int8_attention.cu",
              kernel="sm80_int8_attention",
              template=(head_dim, causal),
              params="QQqif",          # struct module, native alignment: exactly Params
              threads=256,             # == first argument of __launch_bounds__
              min_blocks=2,            # == second argument; the report checks that they fit an SM
              shared_bytes=40 * 1024,  # dynamic shared memory
              first_sm=80,             # compute capabilities served, as major * 10 + minor
              last_sm=121,
          )
          for head_dim in (64, 128) for causal in (False, True)
      )

      launch(variant, q.device.index, blocks, q.data_ptr(), out.data_ptr(), ...)

``launch`` enqueues on torch's current stream of that device; nothing syncs, so it may be captured
in a CUDA graph (a variant must have been launched or passed to ``prepare`` before the capture).
The first launch of a variant that is neither loaded nor cached builds it, which takes seconds.
Whatever goes wrong is an ``errors.JitError`` whose message says what to do.

The size of ``params`` and ``threads`` are compared with the cubin when it is loaded: a mismatch
raises instead of launching garbage.
"""

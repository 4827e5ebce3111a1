"""Jobs: what goes into the key, and what NVRTC answers."""

import shutil
import sys
import types

import pytest
from sageattention3.kernels.jit import compile, nvrtc
from sageattention3.kernels.jit.build import BuildError, build

NVRTC = nvrtc.Nvrtc((13, 0), "libnvrtc")


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A private copy of the test kernels, to be changed."""
    folder = tmp_path / "kernels"
    shutil.copytree(compile.CUDA_FOLDER, folder)
    monkeypatch.setattr(compile, "CUDA_FOLDER", folder)
    return folder


def test_key_is_the_same_wherever_nvrtc_and_the_pack_lie(saxpy, kernels):
    key = compile.describe_job(saxpy(), 90, NVRTC).key
    elsewhere = kernels.rename(kernels.with_name("moved"))
    compile.CUDA_FOLDER = elsewhere
    assert compile.describe_job(saxpy(), 90, nvrtc.Nvrtc((13, 0), "/other/libnvrtc")).key == key


def test_key_changes_with_everything_that_changes_the_code(saxpy, kernels, monkeypatch):
    """QA-36: binaries of another GPU, compiler or source must never be found."""

    def key(variant=None, sm=90, version=(13, 0)):
        return compile.describe_job(variant or saxpy(), sm, nvrtc.Nvrtc(version, "")).key

    keys = [key(), key(saxpy(8)), key(saxpy(relu=True)), key(sm=80), key(version=(13, 5))]
    with open(kernels / "saxpy.cu", "a") as file:
        file.write("// changed\n")
    keys.append(key())
    with open(kernels / "words.cuh", "a") as file:
        file.write("// changed\n")
    keys.append(key())
    monkeypatch.setattr(compile, "OPTIONS", (*compile.OPTIONS, "--extra-device-vectorization"))
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_job_survives_the_way_to_the_child(saxpy):
    job = compile.describe_job(saxpy(), 120, NVRTC)
    again = compile.Job.from_json(job.to_json())
    assert again == job
    assert again.key == job.key


def test_includes_of_includes_are_gathered_once(saxpy, kernels):
    (kernels / "words.cuh").write_text('#include "deep.cuh"\n#include "saxpy.cu"\n')
    (kernels / "deep.cuh").write_text("typedef unsigned long long u64;\n")
    names = [name for name, _ in compile.describe_job(saxpy(), 90, NVRTC).sources]
    assert names == ["saxpy.cu", "words.cuh", "deep.cuh"]


def test_missing_include_names_the_file_that_wants_it(saxpy, kernels):
    (kernels / "words.cuh").unlink()
    with pytest.raises(compile.SourceError, match=r"words\.cuh, wanted by saxpy\.cu"):
        compile.describe_job(saxpy(), 90, NVRTC)


def test_system_header_is_refused(saxpy, kernels):
    (kernels / "words.cuh").write_text("#include <cuda_fp16.h>\n")
    with pytest.raises(compile.SourceError, match="no system headers"):
        compile.describe_job(saxpy(), 90, NVRTC)


def test_compile_error_carries_the_compilers_log_beyond_ascii(saxpy):
    broken = saxpy(source="broken.cu", kernel="broken", template=(), params="Q")
    with pytest.raises(BuildError) as error:
        build([(broken, 90)])
    (reason,) = error.value.failures.values()
    assert "broken.cu(6): error" in reason
    assert "größe" in reason


def test_log_that_is_not_utf8_is_decoded_with_replacement(saxpy, monkeypatch):
    """QA-38: compilers on Windows speak the local code page."""
    fake = _fake_nvrtc(log=b"caf\xe9: error\0", status=6)
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(nvrtc=fake))
    with pytest.raises(compile.CompileError, match="caf\N{REPLACEMENT CHARACTER}: error"):
        compile.compile_job(compile.describe_job(saxpy(), 90, NVRTC))


@pytest.mark.parametrize(
    ("library", "builtins"),
    [
        ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"),
        ("nvrtc64_130_0.dll", "nvrtc-builtins64_130.dll"),
    ],
)
def test_built_ins_of_the_same_version_are_loaded_before_nvrtc(
    library, builtins, saxpy, tmp_path, monkeypatch
):
    for name in (library, builtins, "libnvrtc-builtins.so.12.9", "nvrtc-builtins64_130.alt.dll"):
        (tmp_path / name).touch()
    loaded = []
    monkeypatch.setattr(compile.ctypes, "CDLL", loaded.append)
    monkeypatch.setitem(
        sys.modules, "cuda.bindings", types.SimpleNamespace(nvrtc=_fake_nvrtc(version=(13, 1)))
    )
    job = compile.describe_job(saxpy(), 90, nvrtc.Nvrtc((13, 0), str(tmp_path / library)))
    with pytest.raises(compile.CompileError):
        compile.compile_job(job)
    assert loaded == [str(tmp_path / builtins), str(tmp_path / library)]


def test_child_refuses_another_nvrtc_than_the_key_was_made_for(saxpy, monkeypatch):
    fake = _fake_nvrtc(version=(13, 1))
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(nvrtc=fake))
    with pytest.raises(compile.CompileError, match="NVRTC changed"):
        compile.compile_job(compile.describe_job(saxpy(), 90, NVRTC))


@pytest.fixture
def fresh_search():
    nvrtc.find_nvrtc.cache_clear()
    yield
    nvrtc.find_nvrtc.cache_clear()


def test_nvrtc_that_is_too_old_is_refused_with_what_to_install(fresh_search, monkeypatch):
    monkeypatch.setattr(nvrtc, "_version", lambda: (12, 4))
    with pytest.raises(nvrtc.NvrtcError, match=r"12\.4 .* too old, 12\.8 or newer.*nvidia-cuda-"):
        nvrtc.find_nvrtc()


def test_absent_nvrtc_is_reported_with_what_to_install(fresh_search, monkeypatch):
    def search(name):
        raise RuntimeError("not on this machine")

    pathfinder = types.SimpleNamespace(load_nvidia_dynamic_lib=search)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    with pytest.raises(nvrtc.NvrtcError, match=r"no NVRTC was found: .*nvidia-cuda-nvrtc"):
        nvrtc.find_nvrtc()


def test_absent_cuda_bindings_are_reported_by_package_name(fresh_search, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(nvrtc.NvrtcError, match="cuda-bindings is missing"):
        nvrtc.find_nvrtc()


def _fake_nvrtc(log: bytes = b"\0", status: int = 0, version=(13, 0)):
    from enum import IntEnum

    class Result(IntEnum):
        NVRTC_SUCCESS = 0
        NVRTC_ERROR_COMPILATION = 6

    def fill(program, buffer):
        # As the bindings do: NVRTC writes into the memory of the bytes that it is given.
        import ctypes

        ctypes.memmove(buffer, log, len(log))
        return (Result(0),)

    return types.SimpleNamespace(
        nvrtcResult=Result,
        nvrtcVersion=lambda: (Result(0), *version),
        nvrtcCreateProgram=lambda *arguments: (Result(0), "program"),
        nvrtcAddNameExpression=lambda *arguments: (Result(0),),
        nvrtcCompileProgram=lambda *arguments: (Result(status),),
        nvrtcGetProgramLogSize=lambda program: (Result(0), len(log)),
        nvrtcGetProgramLog=fill,
    )

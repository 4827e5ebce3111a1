"""The report on a kernel, against what the compiler printed and against broken promises."""

import json
import re

import pytest
from sageattention3.kernels.jit import cli, sass
from sageattention3.kernels.jit.build import build
from sageattention3.kernels.jit.cubin import CubinError, read_resources
from sageattention3.kernels.jit.report import find_faults, make_report

ARCHS = (80, 86, 89, 90, 120)


@pytest.fixture
def spilling(saxpy):
    return saxpy(
        source="spilling.cu",
        kernel="spilling",
        template=(),
        params="Q",
        threads=1024,
        min_blocks=1,
        shared_bytes=0,
        spill_bytes=4096,
        spill_reason="it is what the test is about",
    )


@pytest.mark.parametrize("sm", ARCHS)
def test_resources_are_those_that_ptxas_printed(saxpy, spilling, sm):
    for built in build([(saxpy(16), sm), (spilling, sm)]):
        log = built.entry.record["log"]
        resources = read_resources(built.entry.cubin, built.entry.record["function"])
        assert resources.registers == int(re.search(r"Used (\d+) registers", log)[1])
        assert resources.stack_bytes == int(re.search(r"(\d+) bytes stack frame", log)[1])
        static = re.search(r"(\d+) bytes smem", log)
        assert resources.shared_bytes == (int(static[1]) if static else 0)
        assert resources.param_bytes == built.variant.packer.size
        assert resources.max_threads == built.variant.threads


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" * 100, b"\x7fELF\x02\x01" + b"\xff" * 90])
def test_bytes_that_are_no_cubin_are_refused(data):
    with pytest.raises(CubinError):
        read_resources(data, "saxpy")


def test_kernel_that_the_cubin_does_not_hold_is_refused(saxpy):
    (built,) = build([(saxpy(), 90)])
    with pytest.raises(CubinError, match="holds no kernel other"):
        read_resources(built.entry.cubin, "other")


def test_instructions_are_counted_by_unit(saxpy):
    rows = make_report(build([(saxpy(4), 90), (saxpy(16), 90)]))
    four, sixteen = (row.instructions for row in rows)
    assert (four["mufu"], sixteen["mufu"]) == (4, 16)
    assert four["tensor"] == four["local"] == 0
    assert four["sync"] >= 1
    for counts in (four, sixteen):
        assert counts["total"] == sum(n for unit, n in counts.items() if unit != "total")


@pytest.mark.parametrize(
    ("opcode", "unit"),
    [
        ("HMMA.16816.F32.BF16", "tensor"),
        ("IMMA.16832.S8.S8", "tensor"),
        ("QMMA.SF.16832.F32.E4M3.E4M3.E8", "tensor"),
        ("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", "tensor"),
        ("IGMMA.64x128x32.S8.S8", "tensor"),
        ("HFMA2.MMA", "float"),
        ("MUFU.EX2", "mufu"),
        ("LDL.64", "local"),
        ("LDSM.16.M88.4", "shared"),
        ("LDS.128", "shared"),
        ("LDGSTS.E.BYPASS.128", "global"),
        ("UBLKCP.S.G", "global"),
        ("LDGDEPBAR", "sync"),
        ("IMAD.MOV.U32", "other"),
    ],
)
def test_opcodes_belong_to_the_unit_that_executes_them(opcode, unit):
    counts = sass.sum_by_unit(sass.Counter({opcode: 3}))
    assert counts[unit] == counts["total"] == 3


def test_spills_are_reported_and_a_fault_beyond_the_allowance(spilling):
    (built,) = build([(spilling, 90)])
    (row,) = make_report([built])
    assert row.spill_stores > 0
    assert row.instructions["local"] > 0
    assert row.faults == []
    resources = read_resources(built.entry.cubin, built.entry.record["function"])
    (fault,) = find_faults(spilling, 90, resources, spills=5000, log="")
    assert fault == "spills 5000 bytes of registers, 4096 are allowed"
    note = "Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    assert find_faults(spilling, 90, resources, spills=0, log=f"ptxas info\n  {note}\n") == [note]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"params": "QQQfff"}, "Params has 32 bytes in C++, 40 by the struct format 'QQQfff'"),
        ({"params": "QQQ"}, "Params has 32 bytes in C++, 24 by the struct format 'QQQ'"),
        ({"threads": 256}, "__launch_bounds__ says 128 threads, the variant 256"),
        ({"shared_bytes": 100 * 1024}, "needs 102528 bytes of shared memory"),
        ({"shared_bytes": 50 * 1024}, "2 blocks do not fit an SM's shared memory"),
        ({"min_blocks": 40, "shared_bytes": 0}, "40 blocks do not fit an SM's registers"),
    ],
)
def test_each_broken_promise_of_a_variant_is_a_fault(saxpy, changes, fault):
    (built,) = build([(saxpy(**changes), 89)])
    (row,) = make_report([built])
    assert any(found.startswith(fault) for found in row.faults), row.faults


def test_command_builds_for_named_targets_and_writes_the_report(
    saxpy, tmp_path, monkeypatch, capsys
):
    variants = [saxpy(1), saxpy(2, first_sm=89)]
    monkeypatch.setattr(cli, "registered", lambda: variants)
    path = tmp_path / "report.json"
    assert cli.main(["--arch", "sm_80,sm_120a", "--report", str(path)]) == 0
    kernels = json.loads(path.read_text())["kernels"]
    assert [(row["kernel"], row["arch"][:6]) for row in kernels] == [
        ("saxpy<1, false>", "sm_80"),
        ("saxpy<1, false>", "sm_120"),
        ("saxpy<2, false>", "sm_120"),
    ]
    assert all(row["registers"] > 0 and row["instructions"]["mufu"] > 0 for row in kernels)
    assert "[3/3]" in capsys.readouterr().out


def test_command_fails_on_a_kernel_with_a_fault(saxpy, monkeypatch, capsys):
    monkeypatch.setattr(cli, "registered", lambda: [saxpy(threads=64)])
    assert cli.main(["--arch", "sm_80"]) == 1
    assert "__launch_bounds__ says 128 threads, the variant 64" in capsys.readouterr().err


def test_command_says_which_architecture_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--arch", "sm_75"])
    assert "7.5 is not supported" in capsys.readouterr().err


def test_command_without_nvdisasm_reports_all_but_instructions(saxpy, monkeypatch, capsys):
    monkeypatch.setattr(cli, "registered", lambda: [saxpy()])
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: None)
    assert cli.main(["--arch", "sm_80"]) == 0
    assert "nvidia-cuda-nvdisasm" in capsys.readouterr().out

"""``python install.py build``: builds every kernel ahead of time; needs no GPU."""

import argparse
import json
import sys
from pathlib import Path

from . import archs, sass
from .build import Progress, build
from .errors import JitError
from .nvrtc import find_nvrtc
from .report import Row, make_report
from .variants import registered


def main(arguments: list[str]) -> int:
    """Build as ``arguments`` say; answer the exit status: 0 if every kernel is as it should be."""
    options = _parse(arguments)
    try:
        nvrtc = find_nvrtc()
        sms = options.arch or _local_gpus() or list(archs.SHIPPED)
        wanted = [(v, sm) for sm in sms for v in registered() if v.is_built_ahead(sm)]
        targets = ", ".join(archs.target(sm, nvrtc.version) for sm in sms)
        print(f"{len(wanted)} kernels for {targets}, NVRTC {'{}.{}'.format(*nvrtc.version)}")
        rows = make_report(build(wanted, _show))
    except JitError as error:
        print(f"build failed: {error}", file=sys.stderr)
        return 1
    _print_table(rows)
    if options.report:
        _write(options.report, rows, nvrtc.version)
    faulty = [row for row in rows if row.faults]
    for row in faulty:
        print(f"{row.kernel} for {row.arch}: {'; '.join(row.faults)}", file=sys.stderr)
    return 1 if faulty else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="install.py build", description=__doc__)
    parser.add_argument(
        "--arch",
        type=_capabilities,
        help="GPU architectures, e.g. sm_89,sm_120a; default: this machine's GPUs, else all",
    )
    parser.add_argument("--report", type=Path, help="write resources and instruction counts here")
    return parser.parse_args(arguments)


def _capabilities(text: str) -> list[int]:
    try:
        return [archs.parse(name) for name in text.split(",")]
    except archs.UnsupportedArchError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _local_gpus() -> list[int]:
    import torch

    if not torch.cuda.is_available():
        return []
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return sorted({major * 10 + minor for major, minor in capabilities})


def _show(state: Progress) -> None:
    """One line per event: readable in a terminal, in a log file and in ComfyUI's console alike."""
    print(f"[{state.done}/{state.total}] {state.seconds:5.1f} s  {state.latest}", flush=True)


def _print_table(rows: list[Row]) -> None:
    print(
        f"{'regs':>5}{'spill':>6}{'shared':>8}{'instr':>7}{'tensor':>7}{'mufu':>6}{'s':>7}  kernel"
    )
    for row in rows:
        total, tensor, mufu = (
            row.instructions.get(key, "-") for key in ("total", "tensor", "mufu")
        )
        print(
            f"{row.registers:5}{max(row.spill_stores, row.spill_loads):6}"
            f"{row.static_shared + row.dynamic_shared:8}{total:>7}{tensor:>7}{mufu:>6}"
            f"{row.seconds:7.2f}  {row.kernel} for {row.arch}"
        )
    if not sass.find_nvdisasm():
        print("no instruction counts: install the package nvidia-cuda-nvdisasm to get them")


def _write(path: Path, rows: list[Row], version: archs.Version) -> None:
    report = {"nvrtc": "{}.{}".format(*version), "kernels": [row.as_json() for row in rows]}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

"""benchmarks/end_to_end.py on models of tiny widths, and the sizes that it claims for true ones."""

import json
import time
import weakref

import pytest
import torch
from rich.console import Console
from sageattention3.benchmarks import end_to_end, full_size
from sageattention3.benchmarks.end_to_end import measure_all, variants
from sageattention3.benchmarks.end_to_end_chart import plot
from sageattention3.benchmarks.full_size import WORKLOADS, Workload
from sageattention3.demo import tiny
from sageattention3.demo.families import FAMILIES
from sageattention3.demo.widths import TEXT_TOKENS
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.host

PLACE = {"device": "cpu", "dtype": torch.float32}


class CpuEvent:
    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class CpuMeter:
    """GpuMeter without a GPU."""

    def event(self):
        return CpuEvent()

    def wait(self):
        pass

    def forget_peak(self):
        pass

    def peak_bytes(self):
        return 1000

    def profile(self):
        return profile(activities=[ProfilerActivity.CPU])

    def kernel_seconds(self, seen):
        rows = (row for row in seen.key_averages() if row.device_type == DeviceType.CPU)
        return {row.key: row.self_cpu_time_total / 1e6 for row in rows}


@pytest.fixture(scope="module")
def rows():
    """Two workloads of one model, one with guidance, then one of another model."""
    flux, wan = FAMILIES["flux"], FAMILIES["wan_t2v"]
    workloads = [
        Workload("Flux", flux, 2, bar=0.5),
        Workload("Flux, guided", flux, 1, cfg=2.0),
        Workload("Wan", wan, 1),
    ]
    with pytest.MonkeyPatch.context() as patch:
        # Calls of tiny models are short, and this machine may have no kernel.
        patch.setattr(
            end_to_end, "WIDGETS", {**end_to_end.WIDGETS, "min_tokens": 0, "emulation": True}
        )
        found = variants(["balanced", "quality"])
        return list(measure_all(workloads, found, CpuMeter(), **PLACE))


def test_every_variant_of_every_workload_is_measured(rows):
    assert [row["name"] for row in rows] == ["Flux", "Flux, guided", "Wan"]
    for row in rows:
        names = [name for name in row["variants"] if name != end_to_end.PEER]
        assert names == ["host", "balanced", "quality"]
        for taken in row["variants"].values():
            assert 0 < taken["attention_seconds"] < taken["seconds"]
            assert taken["attention_share"] == taken["attention_seconds"] / taken["seconds"]


def test_steps_after_the_first_are_timed(rows):
    assert [len(row["variants"]["host"]["steps"]) for row in rows] == [2, 1, 1]


def test_a_step_consists_of_the_calls_and_operations_of_the_model(rows):
    flux, guided, wan = rows
    tokens = TEXT_TOKENS + 8 * 8
    assert (flux["tokens"], flux["head_dim"], flux["attention_calls"]) == (tokens, 128, 5)
    assert flux["attention_flops"] == 5 * 4 * 2 * tokens**2 * 128
    assert guided["attention_flops"] == 2 * flux["attention_flops"]
    # Each token passes all linear layers of its stream; those of modulation see one vector.
    assert 1 < guided["linear_flops"] / flux["linear_flops"] <= 2
    assert wan["attention_calls"] == 4
    image = 3 * 8 * 8
    assert wan["attention_flops"] == 2 * 4 * 2 * 128 * image * (image + TEXT_TOKENS)


def test_the_patch_ran_as_its_report_says_and_changed_the_latent_a_little(rows):
    for row in rows:
        taken = row["variants"]["balanced"]
        assert "int8" in taken["report"]
        assert "replaced" not in taken["report"]
        assert 0 < taken["latent_error"] < 0.1
    # Wan's two blocks are its first and its last.
    assert [row["variants"]["quality"]["latent_error"] > 0 for row in rows] == [True, True, False]


def test_what_the_step_time_is_compared_with_is_the_host(rows):
    for row in rows:
        plain = row["variants"]["host"]
        assert row["least_step_time"] == 1 - plain["attention_share"]
        for name, taken in row["variants"].items():
            if name != "host":
                assert taken["step_time"] == taken["seconds"] / plain["seconds"]


def test_kernels_are_told_apart_by_what_they_do(rows):
    for row in rows:
        kinds = row["variants"]["host"]["kernel_seconds"]
        assert kinds["attention"] > 0
        assert kinds["quantisation"] == 0
        assert row["other_seconds"] > 0


def test_a_result_can_be_shown_projected_and_drawn(rows, tmp_path):
    results = {
        **{"machine": "GPU", "torch": "2", "date": "today"},
        "workloads": rows,
        "enqueue_microseconds": {"host": 10.0, "balanced": 12.0},
        "projection": end_to_end.projections(rows),
    }
    json.dumps(results)
    console = Console(width=140, record=True)
    end_to_end.show(results, console)
    assert "Flux, guided" in console.export_text()
    plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_every_family_runs_and_its_model_is_given_up_before_the_next(monkeypatch):
    """Two models at once would not fit."""
    built, build = [], tiny.build

    def watched(*args):
        assert all(model() is None for model in built)
        model = build(*args)
        built.append(weakref.ref(model))
        return model

    monkeypatch.setattr(tiny, "build", watched)
    families = [FAMILIES[workload.family.name] for workload in WORKLOADS]
    workloads = [Workload(family.name, family, steps=1) for family in families]
    for row in measure_all(workloads, variants(["balanced"]), CpuMeter(), **PLACE):
        assert row["attention_calls"]
    assert len(built) == len({f.name for f in families}), "workloads of one model share it"


def test_the_overhead_is_of_calls_and_nothing_is_profiled(monkeypatch):
    monkeypatch.setattr(end_to_end, "WIDGETS", {**end_to_end.WIDGETS, "emulation": True})
    small = end_to_end.SMALL._replace(steps=1)
    monkeypatch.setattr(end_to_end, "SMALL", small)
    monkeypatch.delattr(CpuMeter, "profile")
    taken = end_to_end.overhead("balanced", CpuMeter(), **PLACE)
    assert set(taken) - {end_to_end.PEER} == {"host", "balanced"}
    assert all(us > 0 for us in taken.values())


# Tokens of the models' authors; parameters as published, in thousands of millions.
TRUE_SIZES = {
    "FLUX": 11.9,
    "HUNYUAN_VIDEO": 12.8,
    "WAN": 14.3,
    "SD3_LARGE": 8.1,
    "QWEN_IMAGE": 20.4,
}


@pytest.mark.parametrize(("name", "billions"), TRUE_SIZES.items())
def test_models_have_the_parameters_of_the_published_ones(name, billions):
    model = tiny.build_empty(getattr(full_size, name), "meta", torch.bfloat16)
    count = sum(p.numel() for p in model.diffusion_model.parameters())
    assert count / 1e9 == pytest.approx(billions, abs=0.1)


TOKENS = {
    "Flux-dev, 1024 px": 4096,
    "Flux-dev, 2048 px": 16384,
    "Wan 2.1 14B, 480p, 81 frames": 32760,
    "Wan 2.1 14B, 720p, 81 frames": 75600,
    "HunyuanVideo, 544p, 85 frames": 44880,
    "HunyuanVideo, 720p, 129 frames": 118800,
}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_latents_have_the_tokens_that_the_models_authors_name(workload):
    *frames, height, width = workload.family.latent[1:]
    tokens = (frames[0] if frames else 1) * (height // 2) * (width // 2)
    assert tokens == TOKENS.get(workload.name, tokens)
    assert height % 2 == width % 2 == 0

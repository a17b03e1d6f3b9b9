"""Results for the tests of reports: some that a run can make and some that it should not."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

import cnn_engine
from cnn_engine.measure.profile_tables import (
    Capture,
    CopyRow,
    Cost,
    KernelRow,
    ManagedRow,
    Profile,
    Row,
)
from cnn_engine.measure.result import (
    Accuracy,
    Between,
    Check,
    CopyTime,
    Latency,
    LayerPart,
    LayerTime,
    Phases,
    Result,
    Stop,
    TimedPass,
    TimelineEvent,
    WholePass,
)

HOSTILE = "<script>alert(1)</script>&\"'\x1b[31m\n\udc80,=1+1 http://evil.example/{{ 7*7 }}"


def make(**changes) -> Result:
    """Returns the result of a CPU run, with ``changes``."""
    values = {
        "command": "cnn-engine run --batch 2",
        "environment": {
            "host": "somewhere",
            "cpu": "A CPU",
            "gpu": None,
            "driver": None,
            "versions": {"python": "3.12.0", "cnn_engine": None},
            "commit": "0123abc",
        },
        "network": "cifar10",
        "weights": "default",
        "dataset": {"name": "CIFAR-10", "source": "data", "images": 1102},
        "device": "cpu",
        "device_name": "A CPU",
        "variant": "pad",
        "variant_reason": "the fastest here",
        "reduction": True,
        "dtype": "float32",
        "data_mode": "resident",
        "batch": 2,
        "threads": 4,
        "phases": Phases(0.1, 2e-4, 3e-3, 4e-5, 0.5, 6e-7, 8e-9),
        "accuracy": Accuracy(865, 1102),
        "check": Check("NumPy float64", 256, 7e-8, 1.0, 1e-5),
        "layers": [
            LayerTime("pad1", "pad", "cpu", 551, 0.01, None, 0, 10**6),
            LayerTime("conv1", "conv", "cpu", 551, 0.36, None, 2 * 10**9, 10**8),
            LayerTime("relu1", "relu", "cpu", 551, 0.02, None, 0, 10**7),
            LayerTime("pool1", "pool", "cpu", 551, 0.005, None, 0, 10**7),
            LayerTime("fc", "fc", "cpu", 551, 0.004, None, 10**6, 10**5),
            LayerTime("softmax", "softmax", "cpu", 551, 1e-9, None, 0, 10**4),
        ],
        "latency": Latency([1.0, 2.0, 3.0, 4.0], (50.0, 99.9)),
        "throughput_images_per_s": 2204.0,
        "iterations": 3,
        "images_done": 1102,
        "timeline": [
            TimelineEvent("pad1", "pad", "host", 0.0, 1e-5, 0),
            TimelineEvent("conv1", "conv", "host", 1e-5, 6e-4, 0),
        ],
        "timeline_total": 2,
    }
    return Result(**{**values, **changes})


@functools.cache
def measured(variant: str) -> Result:
    """Returns the result of a run on this machine's CPU."""
    images = np.random.default_rng(7).integers(0, 256, (24, 3, 32, 32), np.uint8)
    engine = cnn_engine.Engine("cifar10", device="cpu", variant=variant)
    result = engine.profile(images, batch=4, iterations=4)
    engine.close()
    return result


def make_cuda(**changes) -> Result:
    """Returns the result of a CUDA run that mixes devices, whose stream's events overlap by rounding."""
    values = {
        "device": "cuda:0",
        "device_name": "A GPU",
        "data_mode": "transfer",
        "variant": "if",
        "variant_reason": None,
        "reduction": False,
        "layers": [
            LayerTime("conv1", "conv", "cuda", 551, 0.004, 0.006, 2 * 10**9, 10**8),
            LayerTime("relu1", "relu", "cpu", 551, 0.02, None, 0, 10**7),
            LayerTime("tanh1", "tanh", "cpu", 551, 0.01, None, 0, 10**7),
        ],
        "copies": [
            CopyTime("conv1 input", "h2d", 551, 3 * 10**6, 0.003),
            CopyTime("conv1 output", "d2h", 551, 9 * 10**6, 0.0),
        ],
        "timeline": [
            TimelineEvent("conv1 input", "copy", "host", 0.0, 5e-6, 0),
            TimelineEvent("conv1 input", "copy", "cuda:0 stream", 1e-6, 2e-5, 0),
            TimelineEvent("conv1", "conv", "cuda:0 stream", 2.05e-5, 6e-5, 0),
            TimelineEvent("conv1", "conv", "host", 6e-6, 4e-6, 0),
            TimelineEvent("sync", "sync", "host", 1e-5, 7e-5, 1),
        ],
        "timeline_total": 5000,
        "notes": ["the GPU is shared"],
    }
    return make(**{**values, **changes})


GPU_STATE = {
    "sm_clock_mhz": 1755,
    "max_sm_clock_mhz": 1980,
    "memory_clock_mhz": None,
    "power_w": 412.5,
    "power_limit_w": 700.0,
    "temperature_c": 61,
    "throttled": ["power cap"],
    "other_processes": 2,
}


KERNEL = "cnn_engine::cuda::conv2d_tiled_kernel<float, 5, cnn_engine::cuda::Shape<32, 32, 3>>"


def make_profile(**changes) -> Profile:
    """Returns what filled the time of the result of :func:`make_profiled`."""
    gpu = [
        Row(KERNEL, "kernel", 3, 6e-5, 2e-5, 1e-5, 3e-5, 0.6, 0.6),
        Row("[CUDA memcpy HtoD]", "copy", 3, 3.5e-5, 1.2e-5, 1e-5, 2e-5, 0.35, 0.95),
        Row("[CUDA memset]", "set", 1, 5e-6, 5e-6, 5e-6, 5e-6, 0.05, 1.0),
    ]
    api = [
        Row("cudaDeviceSynchronize", "api", 3, 3e-3, 1e-3, 9e-4, 1.1e-3, 0.98, 0.98),
        Row("cudaLaunchKernel", "api", 3, 6e-5, 2e-5, None, None, 0.02, 1.0),
    ]
    times = 3, 6e-5, 2e-5, 1e-5, 3e-5
    values = {
        "source": "activity records",
        "top": 90.0,
        "passes": 3,
        "images": 6,
        "wall_s": 4e-3,
        "kernel_s": 6e-5,
        "api_s": 3.06e-3,
        "gpu": gpu,
        "api": api,
        "layers": [
            KernelRow("conv1", "conv", KERNEL, *times, 1.0, [8, 8, 2], [32, 4, 1], 96, 49152)
        ],
        "copies": [
            CopyRow("images", "h2d", "pinned", 3, 3 * 10**6, 3.5e-5, 1.2e-5, 1e-5, 2e-5, 8e10)
        ],
        "managed": [
            ManagedRow("h2d migration", "gpu fault", 2, 65536, 4, 1e-5, 5e-6, 4e-6, 6e-6, 6e9)
        ],
        "capture": Capture(launches=3, launches_captured=2, kernels=2, steps=3, steps_captured=2),
        "cost": Cost(1e-3, 1.2e-3, 1.2, [1.15, 1.25], 50, 9.9e-4),
        "notes": ["events of managed memory are of the whole GPU"],
    }
    return Profile(**{**values, **changes})


def make_profiled(**changes) -> Result:
    """Returns the result of a CUDA run with all that is known of one: states, samples, API calls."""
    layer = LayerTime("conv1", "conv", "cuda", 3, 3e-5, 6e-5, 2 * 10**9, 10**8, [1e-5, 2e-5, 3e-5])
    copy = CopyTime("images", "h2d", 3, 3 * 10**6, 9e-5, [2e-5, 3e-5, 4e-5])
    timeline = []
    for batch in range(3):
        begin = batch * 1e-3
        timeline += [
            TimelineEvent("images", "copy", "host", begin, 2e-5, batch),
            TimelineEvent("cudaMemcpyAsync", "api", "host", begin + 4e-6, 1e-5, batch),
            TimelineEvent("conv1", "conv", "host", begin + 2e-5, 1e-5, batch),
            TimelineEvent("cudaLaunchKernel", "api", "host API", begin + 2.2e-5, 5e-6, batch),
            TimelineEvent("images", "copy", "cuda:0 stream 1", begin + 1e-5, 3e-5, batch),
            TimelineEvent("conv1", "conv", "cuda:0 stream 2", begin + 4e-5, 2e-5, batch),
        ]
    for batch in range(3):
        begin = 4e-3 + batch * 1e-3
        timeline += [
            TimelineEvent(
                "cudaLaunchKernel", "api", "host CUDA API (profiled)", begin, 5e-6, batch
            ),
            TimelineEvent(
                KERNEL, "kernel", "cuda:0 stream 7 (profiled)", begin + 1e-5, 2e-5, batch
            ),
        ]
    values = {
        "environment": {
            **make().environment,
            "gpu": "A GPU",
            "gpu_state": GPU_STATE,
            "cpu_state": {"governor": "performance", "turbo": False, "on_battery": None},
            "warnings": ["GPU: clocks held down by power cap (1755 of 1980 MHz)"],
        },
        "device": "cuda:0",
        "device_name": "A GPU",
        "layers": [layer],
        "copies": [copy],
        "latency": Latency([*[1.0, 1.1, 1.05, 1.2] * 50, 9.0]),
        "timed_pass": TimedPass(3, 0.55, 0.51),
        "stop": Stop("the median's 95 % interval is within 1%", 1.05, (1.045, 1.055)),
        "timeline": timeline,
        "timeline_total": 24,
        "profile": make_profile(),
    }
    return make(**{**values, **changes})


def make_deep() -> Result:
    """Returns the result of a network of 150 layers, as PyTorch's exporter names them."""
    names = [
        f"/layer{1 + i // 37}/layer{1 + i // 37}.{i % 37 // 3}/conv{i % 37 % 3 + 1}/Conv"
        for i in range(148)
    ]
    layers = [
        LayerTime(
            name,
            "conv",
            "cpu",
            551,
            1e-5 * (1 + i * 37 % 148),
            None,
            10**9,
            10**6,
            kernel="blocked",
        )
        for i, name in enumerate(names)
    ]
    layers.insert(0, LayerTime("/maxpool/MaxPool", "pool", "cpu", 551, 2e-2, None, 0, 10**6))
    layers.append(LayerTime("/fc/Gemm", "fc", "cpu", 551, 3e-7, None, 10**6, 10**6))
    return make(layers=layers, network="deep")


def make_bare(**changes) -> Result:
    """Returns the result of a run that timed nothing."""
    values = {
        "environment": {},
        "phases": Phases(),
        "accuracy": None,
        "check": None,
        "layers": [],
        "latency": None,
        "throughput_images_per_s": None,
        "iterations": 0,
        "images_done": 0,
        "timeline": [],
        "timeline_total": 0,
    }
    return make(**{**values, **changes})


def make_taken_apart(**changes) -> Result:
    """Returns the result of a fused run on CUDA whose rows add up to its one pass."""
    inside = [
        LayerPart("conv1+relu1+pool1", "conv+relu+pool", ["conv1", "relu1", "pool1"], 1e-5, 10 / 13,
                  2 * 10**6),
        LayerPart("softmax", "softmax", ["softmax"], 3e-6, 3 / 13),
    ]  # fmt: skip
    network = LayerTime(
        "network", "fused", "cuda", 1, 4e-6, 13e-6, 2 * 10**6, 10**5, [12e-6, 13e-6], inside
    )
    values = {
        "device": "cuda:0",
        "device_name": "A GPU",
        "variant": "fused",
        "layers": [network],
        "copies": [CopyTime("images", "h2d", 1, 10**6, 8e-6, [8e-6, 8e-6], pageable=True)],
        "timed_pass": TimedPass(1, 65e-6, 61e-6),
        "whole_pass": WholePass(
            1, 64e-6, 65e-6, "activity records", [Between("staging", 4e-5), Between("host", 4e-6)],
            64e-6, 64.64e-6, 96e-6, 67.2e-6, 60, 60,
        ),
        "started": "2026-01-31T12:00:00Z",
        "duration_s": 2.5,
    }  # fmt: skip
    return make(**{**values, **changes})


CASES = {
    "cpu": make(),
    "taken apart": make_taken_apart(),
    "cuda": make_cuda(),
    "profiled": make_profiled(),
    "bare": make_bare(),
    "no labels": make(accuracy=None),
    "zero images": make_bare(dataset={"name": "none", "source": "none", "images": 0}),
    "check failed": make_bare(check=Check("NumPy float64", 4, math.nan, 0.0, 1e-5)),
    "interrupted": make(interrupted=True, images_done=300, iterations=0, layers=[], timeline=[]),
    "interrupted later": make(interrupted=True, iterations=3),
    "huge": make(
        phases=Phases(*[1e300] * 7),
        layers=[LayerTime("conv1", "conv", "cpu", 10**15, 1e300, None, 10**30, 10**30)],
        throughput_images_per_s=1e300,
        latency=Latency([1e300, 1e-300]),
    ),
    "tiny": make(
        phases=Phases(*[1e-300] * 7),
        layers=[LayerTime("conv1", "conv", "cpu", 1, 1e-300, None, 1, 1)],
        throughput_images_per_s=1e-300,
        latency=Latency([1e-300]),
        timeline=[TimelineEvent("conv1", "conv", "host", 0.0, 0.0, 0)],
    ),
    "not finite": make(
        phases=Phases(math.nan, math.inf),
        layers=[LayerTime("conv1", "conv", "cuda", 1, math.nan, math.inf, 1, 1)],
        throughput_images_per_s=math.inf,
        timeline=[TimelineEvent("conv1", "conv", "host", math.nan, 1.0, 0)],
    ),
    "hostile": make_cuda(
        command=HOSTILE,
        environment={HOSTILE: HOSTILE, "versions": {HOSTILE: HOSTILE}},
        network=HOSTILE,
        weights=HOSTILE,
        dataset={"name": HOSTILE, "source": HOSTILE, "images": 1102},
        device=HOSTILE,
        device_name=HOSTILE,
        variant=HOSTILE,
        variant_reason=HOSTILE,
        check=Check(HOSTILE, 1, 0.0, 1.0, 1e-5),
        layers=[LayerTime(HOSTILE, HOSTILE, "cuda", 1, 1.0, 2.0, 1, 1)],
        copies=[CopyTime(HOSTILE, "h2d", 1, 1, 1.0)],
        notes=[HOSTILE],
        timeline=[TimelineEvent(HOSTILE, HOSTILE, HOSTILE, 0.0, 1.0, 0)],
    ),
    "long names": make(
        weights="/a/" + "b" * 300,
        layers=[LayerTime("conv1+relu1+pool1+" * 9, "fused", "cpu", 1, 1.0, None, 1, 1)],
        notes=["word " * 60],
    ),
}

#: Decorates a test that any result has to pass.
every_result = pytest.mark.parametrize("result", CASES.values(), ids=list(CASES))

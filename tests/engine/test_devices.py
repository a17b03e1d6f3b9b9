"""Which device is chosen, and on which devices the kernels of a build run."""

from __future__ import annotations

from time import perf_counter, process_time
from types import SimpleNamespace

import pytest

from cnn_engine import Engine, devices
from cnn_engine.devices import cuda, cuda_module
from cnn_engine.errors import UnsupportedError

BUILT = "80-real 86-real 89-real 90a-real 100-real 120-real 120-virtual"


@pytest.mark.parametrize(
    ("architectures", "runs", "refused"),
    [
        (BUILT, [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 3), (12, 0), (12, 1), (13, 0)],
         [(7, 0), (7, 5), (11, 0)]),
        ("86-real", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("90a-real", [(9, 0)], [(8, 9), (10, 0)]),
        ("90-virtual", [(9, 0), (10, 0), (12, 0)], [(8, 9)]),
        ("90a-virtual", [(9, 0)], [(10, 0)]),
        ("86", [(8, 6), (9, 0)], [(8, 0)]),
        ("100f-real", [(10, 0), (10, 3)], [(11, 0), (9, 0)]),
        ("native", [(7, 5)], []),
    ],
)  # fmt: skip
def test_where_kernels_run(architectures, runs, refused):
    assert [c for c in runs if not cuda_module.covers(architectures, c)] == []
    assert [c for c in refused if cuda_module.covers(architectures, c)] == []


class FakeModule(SimpleNamespace):
    """The compiled module on a machine with GPUs of these compute capabilities."""

    architectures = BUILT

    def device_count(self):
        return len(self.capabilities), ""

    def device_properties(self, index):
        return {"compute_capability": self.capabilities[index], "name": f"GPU {index}"}


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that puts GPUs of some compute capabilities into the machine."""

    def put(*capabilities: tuple[int, int]) -> None:
        module = FakeModule(capabilities=capabilities)
        monkeypatch.setattr(cuda_module, "load", lambda: module)
        monkeypatch.setattr(
            cuda,
            "CudaDevice",
            lambda index: SimpleNamespace(kind="cuda", name=f"cuda:{index}", note=None),
        )

    return put


def test_auto_takes_the_cpu_where_no_kernel_runs_on_the_gpu(machine):
    machine((7, 5))
    device = devices.select("auto")
    assert device.kind == "cpu"
    assert device.note == (
        "auto chose the CPU: device cuda:0: expected a compute capability that the kernels were built for "
        f"({BUILT}), found 7.5 (GPU 0); they need at least 8.0"
    )
    with Engine(weights="random", device="auto") as engine:
        assert engine.device.kind == "cpu"


def test_auto_passes_over_a_gpu_that_the_kernels_do_not_run_on(machine):
    machine((7, 5), (9, 0))
    device = devices.select("auto")
    assert device.name == "cuda:1"
    assert device.note.startswith("auto chose cuda:1: device cuda:0: expected a compute capability")
    machine((9, 0), (7, 5))
    assert devices.select("auto").note is None


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_that_the_kernels_do_not_run_on_is_refused(machine, name):
    machine((7, 5))
    with pytest.raises(
        UnsupportedError, match=r"^device cuda:0: expected a compute .* found 7\.5"
    ) as error:
        devices.select(name)
    assert "\n" not in str(error.value)


def test_the_remedy_names_the_architecture_to_build_for(machine):
    machine((11, 0))
    with pytest.raises(UnsupportedError, match="CNN_ENGINE_CUDA_ARCHITECTURES=110$"):
        devices.select("cuda")


@pytest.mark.gpu
def test_threads_that_wait_for_a_gpu_may_sleep():
    device = devices.select("cuda")
    device.sleep_while_waiting()
    device.kernels.delay(200_000_000, device.stream_handle)  # nanoseconds
    begin, cpu = perf_counter(), process_time()
    device.synchronize()
    assert process_time() - cpu < 0.5 * (perf_counter() - begin)

"""``cnn-engine doctor``: reports the build, the machine, missing parts and how to get them."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from . import cli, workload
from .devices import cuda_module, openacc_module, threads
from .errors import CnnEngineError
from .measure import environment
from .measure.cupti import activity

OK, MISSING, FAULT = "ok", "--", "!!"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        mark: ``ok``; ``--`` for something optional that is missing; ``!!`` for what the main job needs.
        subject, text: what, and how it is.
        remedy: the command or step that mends it, or None.
    """

    mark: str
    subject: str
    text: str
    remedy: str | None = None


def findings() -> Iterator[Finding]:
    """Looks at this installation and machine."""
    python = f"{platform.python_version()} on {platform.platform()}"
    yield Finding(OK, "Python", python)
    try:
        from . import _cpu
    except ImportError as error:
        yield Finding(
            FAULT, "CPU kernels", f"not importable: {error}", "pip install --force-reinstall ."
        )
        return
    yield Finding(
        OK,
        "CPU kernels",
        f"built by {_cpu.compiler} at commit {_cpu.commit or 'unknown'}; uses "
        f"{_cpu.selected_instruction_set()} of {', '.join(_cpu.instruction_sets())}, and "
        f"{_cpu.selected_integer_instructions()} for 8-bit integers",
    )
    from .devices.cpu import CpuDevice

    cpu = CpuDevice()
    memory = cpu.free_memory() / 2**30
    yield Finding(OK, "CPU", f"{cpu.model}, {threads.default()} CPUs, {memory:.1f} GiB free")
    for package in ("numpy", "safetensors", "rich", "nvtx", "Jinja2", "platformdirs", "scipy"):
        found = environment.package_version(package)
        if found:
            yield Finding(OK, package, found)
        else:
            yield Finding(FAULT, package, "not installed", f"pip install {package}")
    yield from _cuda_findings()
    yield from _openacc_findings()
    yield from _measurement_findings()
    yield from _workload_findings()


def _cuda_findings() -> Iterator[Finding]:
    build = "install again with nvcc on PATH (docs/how-to/install_gpu.md)"
    try:
        _cuda = cuda_module.load()
    except CnnEngineError:
        yield Finding(MISSING, "CUDA kernels", "not built", build)
        return
    runtime = environment.cuda_version_text(_cuda.runtime_version())
    yield Finding(
        OK,
        "CUDA kernels",
        f"built by {_cuda.compiler} with runtime {runtime} for {_cuda.architectures}",
    )
    driver = _cuda.driver_version()
    count, reason = _cuda.device_count()
    if driver == 0:
        text, remedy = (
            "no NVIDIA driver",
            "install the NVIDIA driver of your GPU; nothing else needs it",
        )
        yield Finding(MISSING, "CUDA driver", text, remedy)
    else:
        yield Finding(OK, "CUDA driver", f"supports CUDA {environment.cuda_version_text(driver)}")
    if count == 0:
        yield Finding(MISSING, "CUDA devices", f"none ({reason})")
    for index in range(count):
        properties = _cuda.device_properties(index)
        major, minor = properties["compute_capability"]
        text = (
            f"{properties['name']}, compute capability {major}.{minor}, "
            f"{properties['multiprocessors']} multiprocessors, "
            f"{properties['total_memory'] / 2**30:.0f} GiB"
        )
        problem = _cuda.kernels_error(index)
        if problem:
            remedy = f"CNN_ENGINE_CUDA_ARCHITECTURES={major}{minor} pip install --force-reinstall ."
            if (major, minor) < cuda_module.LEAST_CAPABILITY:
                remedy = "--device cpu: the kernels need compute capability 8.0"
            yield Finding(
                FAULT, f"cuda:{index}", f"{text}: the kernels do not run: {problem}", remedy
            )
        else:
            yield Finding(OK, f"cuda:{index}", text)
    cupy = environment.cupy_distribution()
    if cupy:
        yield Finding(OK, "CuPy", cupy)
    else:
        text = "not installed; needed for --device cuda"
        yield Finding(MISSING, "CuPy", text, "pip install 'cnn-engine[cuda13]' (or [cuda12])")


def _openacc_findings() -> Iterator[Finding]:
    try:
        module = openacc_module.load()
    except CnnEngineError:
        remedy = "install GCC or nvc++ and build again; only --device openacc needs it"
        yield Finding(MISSING, "OpenACC", "not built", remedy)
        return
    shape = f", gangs:workers:vector {module.shape}" if module.shape else ""
    target = f"offloads to {module.offload}" if module.offload else "for the host alone"
    yield Finding(OK, "OpenACC", f"built by {module.compiler}, {target}{shape}; openacc:host runs")
    if not module.offload:
        why = f"no offload target: {module.why_not_offload}"
        yield Finding(MISSING, "OpenACC GPU", why, openacc_module.offload_remedy(module))
    elif reason := openacc_module.unavailable():
        yield Finding(MISSING, "OpenACC GPU", reason.removeprefix("device openacc: "))
    else:
        yield Finding(OK, "OpenACC GPU", "a loop ran on it: --device openacc")


def _measurement_findings() -> Iterator[Finding]:
    """The packages that transfer, characterize, run --profile and files of images take."""
    for package, purpose, extra in (
        ("psutil", "CPU utilisation in characterize", "lab"),
        ("matplotlib", "plots", "lab"),
        ("nvidia-ml-py", "clocks, power and utilisation of a GPU", "lab"),
        ("pillow", "files of images in --data", "images"),
    ):
        found = environment.package_version(package)
        if found:
            yield Finding(OK, package, found)
        else:
            text = f"not installed; for {purpose}"
            yield Finding(MISSING, package, text, f"pip install 'cnn-engine[{extra}]'")
    reason = activity.unavailable()
    if reason is None:
        yield Finding(OK, "CUPTI", "activity records can be had: run --profile")
    else:
        yield Finding(MISSING, "CUPTI", reason)


def _workload_findings() -> Iterator[Finding]:
    for name in workload.names():
        try:
            found = workload.get(name)
        except Exception as error:  # another package's entry point may fail in any way
            yield Finding(MISSING, f"network {name}", f"cannot be loaded: {error}")
            continue
        weights = found.default_weights
        if weights is not None and not weights.exists():
            yield Finding(FAULT, f"network {name}", f"no weights at {weights}", "install again")
            continue
        try:
            data = found.load_data("auto", 1)
        except CnnEngineError as error:
            yield Finding(FAULT, f"network {name}", f"data: {error}")
            continue
        text = (
            f"{len(found.network.layers)} layers, {found.network.flops() / 1e6:.2f} MFLOP per image"
        )
        if data.note:
            yield Finding(MISSING, f"network {name}", f"{text}; {data.note}")
        else:
            yield Finding(OK, f"network {name}", f"{text}; images from {data.source}")


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    return cli.ArgumentParser(
        prog="cnn-engine doctor",
        description="Reports what was built, which devices, drivers and libraries are seen, what is missing "
        "and what mends it. Exits with 0 if the main job can run, else with 2.",
    )


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Prints the findings; returns 0 if the main job can run, else 2."""
    parser().parse_args(arguments)
    fault = False
    for finding in findings():
        fault = fault or finding.mark == FAULT
        cli.show(f"{finding.mark} {finding.subject:<16} {finding.text}")
        if finding.remedy:
            cli.show(f"   {'':<16} -> {finding.remedy}")
    if fault:
        cli.show("\nthe main job cannot run: see the lines marked !!")
        return cli.INPUT_AT_FAULT
    cli.show("\nthe main job can run: cnn-engine run")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())

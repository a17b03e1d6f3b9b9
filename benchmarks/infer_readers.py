"""Which library reads for infer: ``python -m benchmarks.infer_readers [--data PATH]``.

CPU time an image of ways to decode the same JPEGs and to read the same tar, on one thread.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time

import numpy as np
import simplejpeg
from PIL import Image

from cnn_engine.measure.environment import package_version
from cnn_engine.workload import get


def by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        return np.asarray(image)


def by_seeking(path: Path) -> int:
    count = 0
    with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            archive.members = []
            file.seek(member.offset_data)
            count += len(file.read(member.size)) > 1
    return count


def by_stream(path: Path) -> int:
    count = 0
    with tarfile.open(path, "r|") as archive:
        for member in archive:
            archive.members = []
            count += len(archive.extractfile(member).read()) > 1
    return count


def by_webdataset(path: Path) -> int:
    import webdataset

    return sum(1 for _ in webdataset.WebDataset(str(path), shardshuffle=False))


def timed(what: str, images: int, work: Callable[[], object]) -> None:
    """Prints the CPU time an image of the best of three."""
    best = float("inf")
    for _ in range(3):
        begin = process_time()
        work()
        best = min(best, process_time() - begin)
    print(f"{what}: {1e6 * best / images:.1f} us an image")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--data", default="synthetic", help="CIFAR-10 images, as run --data takes them")
    options = p.parse_args()
    images = get("cifar10").load_data(options.data, None).images
    files = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    differ = sum(not np.array_equal(by_pillow(f), simplejpeg.decode_jpeg(f)) for f in files)
    print(f"{len(files)} JPEGs of 32x32, {differ} of them with other pixels")
    version = package_version
    timed(f"Pillow {version('pillow')}", len(files), lambda: [by_pillow(f) for f in files])
    timed(
        f"simplejpeg {version('simplejpeg')}", len(files),
        lambda: [simplejpeg.decode_jpeg(f) for f in files],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.tar"
        with tarfile.open(path, "w") as archive:
            for at, data in enumerate(files):
                for name, content in ((f"{at:06d}.jpg", data), (f"{at:06d}.cls", b"3")):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        timed("tarfile with seeks", len(files), lambda: by_seeking(path))
        timed("tarfile as a stream", len(files), lambda: by_stream(path))
        if version("webdataset"):
            timed(f"webdataset {version('webdataset')}", len(files), lambda: by_webdataset(path))


if __name__ == "__main__":
    main()

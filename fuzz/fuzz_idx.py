"""Coverage-guided fuzzing of the reader of IDX files: any bytes give images or an InputError.

``pip install atheris``, then, in the project's root,
``python fuzz/fuzz_idx.py -max_total_time=600 -rss_limit_mb=2048 -timeout=10 CORPUS_FOLDER``

The first byte of an input says what is made of the rest: images or labels, compressed or not.
"""

import gzip
import os
import struct
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

with atheris.instrument_imports(include=["fashion_mnist", "gzip"]):
    from cnn_engine.workloads.fashion_mnist import dataset

    from cnn_engine.errors import InputError

FOLDER = Path(tempfile.mkdtemp(prefix="fuzz_idx."))
IMAGES, LABELS = FOLDER / "x-images-idx3-ubyte", FOLDER / "x-labels-idx1-ubyte"
GOOD_IMAGES = struct.pack(">IIII", 0x803, 2, 28, 28) + bytes(2 * 28 * 28)
GOOD_LABELS = struct.pack(">II", 0x801, 2) + bytes([0, 9])
AS_LABELS, COMPRESS = 1, 2


def test_one_input(data: bytes) -> None:
    if not data:
        return
    mode, data = data[0], data[1:]
    if mode & COMPRESS:
        data = gzip.compress(data, 1)
    IMAGES.write_bytes(GOOD_IMAGES if mode & AS_LABELS else data)
    LABELS.write_bytes(data if mode & AS_LABELS else GOOD_LABELS)
    try:
        found = dataset.load(IMAGES)
    except InputError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 4000
    else:
        assert found.images.shape == (len(found), 1, 48, 48)
        assert found.labels.shape == (len(found),)
        assert found.labels.max() < 10


if __name__ == "__main__":
    folders = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    for folder in folders[:1]:
        os.makedirs(folder, exist_ok=True)
        for mode, content in ((0, GOOD_IMAGES), (1, GOOD_LABELS)):
            (folder / f"seed{mode}").write_bytes(bytes([mode]) + content)
            (folder / f"seed{mode}-compress").write_bytes(bytes([mode | COMPRESS]) + content)
            (folder / f"seed{mode}-gzip").write_bytes(bytes([mode]) + gzip.compress(content))
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()

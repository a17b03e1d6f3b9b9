"""Coverage-guided fuzzing of the reader of MXNet's ``.params``: any bytes give weights or an InputError.

``pip install atheris``, then, in the project's root,
``python fuzz/fuzz_params.py -max_total_time=600 -rss_limit_mb=1024 -timeout=10 CORPUS_FOLDER``
"""

import math
import os
import struct
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

with atheris.instrument_imports(include=["cnn_engine.io.weights"]):
    from cnn_engine.errors import InputError
    from cnn_engine.graph.network import Conv2d, Linear, Network, Softmax
    from cnn_engine.io import weights

NETWORK = Network(
    "tiny", (1, 2, 2), (Conv2d("conv1", 1, kernel=1, bias=False), Linear("fc1", 2), Softmax("s"))
)
FOLDER = Path(tempfile.mkdtemp(prefix="fuzz_params."))


def seed() -> bytes:
    """A sound file of the network, for the fuzzer to begin with."""

    def array(*shape: int) -> bytes:
        head = struct.pack(f"<IiI{len(shape)}qiii", 0xF993FAC9, 0, len(shape), *shape, 1, 0, 0)
        return head + bytes(4 * math.prod(shape))

    names = [b"arg:convolution0_weight", b"arg:fullyconnected0_weight", b"arg:fullyconnected0_bias"]
    arrays = array(1, 1, 1, 1) + array(2, 4) + array(2)
    listed = b"".join(struct.pack("<Q", len(name)) + name for name in names)
    return struct.pack("<QQQ", 0x112, 0, 3) + arrays + struct.pack("<Q", 3) + listed


def test_one_input(data: bytes) -> None:
    path = FOLDER / "w.params"
    path.write_bytes(data)
    try:
        found = weights.read(path, NETWORK)
    except InputError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 4000
    else:
        assert {name: value.shape for name, value in found.items()} == NETWORK.parameters


if __name__ == "__main__":
    folders = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    for folder in folders[:1]:
        os.makedirs(folder, exist_ok=True)
        (folder / "seed").write_bytes(seed())
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()

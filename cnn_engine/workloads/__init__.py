"""The project's own workloads: ``cnn_engine.workloads.cifar10`` and ``cnn_engine.workloads.fashion_mnist``.

Installed, they are subpackages of this one, so that nothing of the user's is hidden by their names. In a
checkout their folders lie at its top, where ``import cifar10`` finds them too.
"""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_CHECKOUT = _FOLDER.parents[1]
if not (_FOLDER / "cifar10").is_dir() and (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT))

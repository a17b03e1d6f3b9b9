"""Draws 26 convolutional networks of timm by a seed: ``benchmarks.models.DRAWN``.

    python -m benchmarks.drawn_networks

Prints the draw of the installed timm. ``DRAWN`` stays that of timm 1.0.31, so that all results are of the
same networks.
"""

from __future__ import annotations

import random
import sys

from cnn_engine import cli

from . import result_file
from .models import FAMILIES, TIMM, TORCHVISION
from .models_worker import ignore_compiled_operators

SEED, COUNT = 50, 26

#: timm's modules of networks that are mostly convolutions.
MODULES = (
    "byobnet", "convmixer", "convnext", "cpubone", "cspnet", "cspnext", "densenet", "dla", "dpn", "edgenext",
    "efficientnet", "fasternet", "fastvit", "focalnet", "ghostnet", "hardcorenas", "hgnet", "hrnet",
    "inception_next", "inception_resnet_v2", "inception_v3", "inception_v4", "lcnetv2", "lowformer",
    "mambaout", "metaformer", "mobilenetv3", "nasnet", "nfnet", "pnasnet", "rdnet", "regnet", "repghost",
    "repvit", "res2net", "resnest", "resnet", "resnetv2", "rexnet", "selecsls", "senet", "shvit", "sknet",
    "starnet", "tresnet", "vgg", "vovnet", "xception", "xception_aligned",
)  # fmt: skip

#: Parameters, and rows of an image, of the largest networks that are drawn: what one core runs in a second.
MOST_PARAMETERS, MOST_ROWS = 30_000_000, 256


def draw(seed: int = SEED, count: int = COUNT) -> list[str]:
    """Returns names of networks, at most one of a module; the same for a seed and a release of timm."""
    ignore_compiled_operators()
    import timm
    import torch

    known = {*FAMILIES, *TIMM, *TORCHVISION}
    modules = {name: module for module in MODULES for name in timm.list_models(module=module)}
    names = sorted(name for name in modules if not name.startswith("test_") and name not in known)
    random.Random(seed).shuffle(names)
    drawn: dict[str, str] = {}
    for name in names:
        if len(drawn) == count:
            break
        if modules[name] in drawn:
            continue
        with torch.device("meta"):
            module = timm.create_model(name)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        rows = module.default_cfg["input_size"][1]
        if parameters <= MOST_PARAMETERS and rows <= MOST_ROWS:
            drawn[modules[name]] = name
    return sorted(drawn.values())


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser("drawn_networks", __doc__)
    p.add_argument("--seed", type=int, default=SEED, help=f"default: {SEED}")
    p.add_argument("--count", type=cli.whole_number(1, 40), default=COUNT, help=f"default: {COUNT}")
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    print("\n".join(draw(options.seed, options.count)))
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())

"""The picture of the architecture, and the calls of a ``predict``, for ``docs/explanation/architecture.md``.

:data:`ROWS` is the one list of layers: ``tests/docs/test_layering.py`` holds imports to it. Print the calls
with ``python scripts/house.py``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: From the ground up; a part may import from its own row and from those below it.
ROWS = [
    (
        "errors",
        "_cpu",
        "_cuda",
        "_openacc",
        "interrupts",
        "locks",
        "floating_point",
        "progress",
        "environment_variables",
        "target",
        "types",
    ),
    ("operators",),
    ("graph",),
    ("devices", "io", "workload"),
    ("kernels",),
    ("lower",),
    ("plan",),
    ("engine",),
    ("measure",),
    ("report",),
]
#: What each row is for.
PURPOSES = [
    "compiled kernels, errors, targets, types",
    "records of operators, float64 references",
    "graphs, importer of files, passes",
    "devices, files, networks",
    "the table of kernels",
    "passes for a device, placement",
    "memory and ready calls of a pass",
    "predict, run, profile",
    "timing, statistics, results",
    "text, JSON, CSV, HTML, pictures",
]
#: Commands stand on all rows, and on nothing of each other.
COMMANDS = "commands: run, compare, characterize, transfer, infer, ensemble, kernel, inspect ..."

WIDTH, HEIGHT, GAP = 760, 34, 6
MOST = 48  # characters of a row's names


def picture() -> str:
    """Returns the rows as an SVG, the commands on top."""
    rows = [("", COMMANDS)]
    rows += [
        (", ".join(row), purpose)
        for row, purpose in zip(reversed(ROWS), reversed(PURPOSES), strict=True)
    ]
    lines = [
        f'<svg viewBox="0 0 {WIDTH} {len(rows) * (HEIGHT + GAP)}" width="100%" role="img" '
        'aria-label="The parts of the package; each imports from those below it">'
    ]
    for index, (parts, purpose) in enumerate(rows):
        y = index * (HEIGHT + GAP)
        shown = parts if len(parts) <= MOST else f"{parts[: parts.rindex(', ', 0, MOST)]}, ..."
        lines += [
            f'<rect x="1" y="{y + 1}" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="6" fill="none" '
            'stroke="currentColor" stroke-opacity="0.5"/>',
            f'<text x="14" y="{y + 22}" font-size="14" font-weight="600" fill="currentColor">{shown}</text>',
            f'<text x="{WIDTH - 14}" y="{y + 22}" font-size="13" text-anchor="end" fill="currentColor">'
            f"{purpose}</text>",
        ]
    return "\n".join([*lines, "</svg>"])


def calls(times: int) -> list[tuple[str, str]]:
    """Returns (file, function) of each Python call of the package in the last of ``times`` predicts.

    The network is CIFAR-10's on the CPU, one image, random weights.
    """
    import numpy as np

    import cnn_engine

    package = str(Path(cnn_engine.__file__).parent)
    images = np.zeros((1, 3, 32, 32), np.uint8)
    found: list[tuple[str, str]] = []

    def note(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(package):
            function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # from 3.11 on
            found.append((name[len(package) + 1 :], function))

    with cnn_engine.Engine("cifar10", weights="random", device="cpu", threads=1) as engine:
        for _ in range(times - 1):
            engine.predict(images)
        sys.setprofile(note)
        try:
            engine.predict(images)
        finally:
            sys.setprofile(None)
    return found


def predict_calls() -> str:
    """Returns how many Python calls the first and the second predict make, and the second's one by one."""
    first, second = calls(1), calls(2)
    lines = [
        "| predict | Python calls | files |",
        "|---|--:|--:|",
        f"| first: lowers, packs weights, lays out memory | {len(first):,} | {len(dict(first))} |",
        f"| second | {len(second)} | {len(dict(second))} |",
        "",
        "The second, in order:",
        "",
    ]
    lines += [f"{i}. `{function}` in `{file}`" for i, (file, function) in enumerate(second, 1)]
    return "\n".join(lines)


def main() -> int:
    """Prints the calls."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    print(predict_calls())
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())

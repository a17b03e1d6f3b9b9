"""Draws a network's outputs: boxes with names, masks as colours, and pictures."""

from __future__ import annotations

import colorsys
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.engine import Engine
from ..errors import expected
from ..io.files import atomic_write, make_folder, write_text
from ..report import units
from .viewer import Boxes, Found, Restored, Sight, class_name, seen

#: Of the colour of a class over a photo.
MASK_OPACITY = 0.5

#: The file beside the pictures that has what was found.
FOUND = "found.json"


def colour(number: int) -> tuple[int, int, int]:
    """Returns the colour of a class: neighbours differ, and it is the same in every picture."""
    hue = (
        number * 0.618033988749895 % 1.0
    )  # the golden section: hues stay apart, however many there are
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw(found: Found, photo: Any) -> Any:
    """Returns a new Pillow picture of the findings in ``photo``, a Pillow image of mode ``RGB``."""
    from PIL import Image

    if isinstance(found, Boxes):
        return _with_boxes(found, photo.copy())
    if isinstance(found, Restored):
        return Image.fromarray(found.pixels)
    numbers, places = np.unique(found.classes, return_inverse=True)
    table = np.array([colour(int(number)) for number in numbers], np.float64)
    colours = table[places.reshape(found.classes.shape)]
    # Class 0 is the background of most masks, and stays as the photo is.
    opacity = MASK_OPACITY * (found.classes > 0)[..., None]
    mixed = np.asarray(photo, np.float64) * (1 - opacity) + colours * opacity
    return Image.fromarray(np.rint(mixed).astype(np.uint8))


def _with_boxes(found: Boxes, picture: Any) -> Any:
    from PIL import ImageDraw

    pen = ImageDraw.Draw(picture)
    longest = max(picture.size)
    width = max(round(longest / 320), 2)
    font, plain = _font(max(round(longest / 45), 10))
    for one in reversed(list(found)):  # so that the best are on top
        left, top, right, bottom = one.box
        ink = colour(one.number)
        pen.rectangle(
            (left, top, max(right - 1, left), max(bottom - 1, top)), outline=ink, width=width
        )
        text = f"{one.name} {one.score:.2f}"
        if plain:  # a font of Latin letters alone
            text = text.encode("latin-1", "replace").decode("latin-1")
        *_, across, down = pen.textbbox((0, 0), text, font=font)
        y = top - down - width if top >= down + width else top
        x = max(min(left, picture.width - across - 2 * width), 0)
        pen.rectangle((x, y, x + across + 2 * width, y + down + width), fill=ink)
        pen.text((x + width, y), text, fill="black" if _is_bright(ink) else "white", font=font)
    return picture


def _is_bright(ink: tuple[int, int, int]) -> bool:
    return 0.299 * ink[0] + 0.587 * ink[1] + 0.114 * ink[2] > 140


def _font(size: int) -> tuple[Any, bool]:
    """Returns Pillow's own font, and whether it has Latin letters alone, as one of bits has."""
    from PIL import ImageFont

    try:
        font = ImageFont.load_default(size)
    except (TypeError, ImportError):  # before Pillow 10.1, or without FreeType
        font = ImageFont.load_default()
    return font, not isinstance(font, ImageFont.FreeTypeFont)


def to_dict(found: Found) -> dict[str, Any]:
    """Returns findings as JSON: boxes, or the share of each class in a mask, or a size."""
    if isinstance(found, Boxes):
        rows = [
            {"name": one.name, "score": one.score, "box": list(one.box), "number": one.number}
            for one in found
        ]
        return {"boxes": rows}
    if isinstance(found, Restored):
        return {"rows": found.pixels.shape[0], "columns": found.pixels.shape[1]}
    numbers, counts = np.unique(found.classes, return_counts=True)
    shares = [
        {
            "name": class_name(found.names, int(n)),
            "share": count / found.classes.size,
            "number": int(n),
        }
        for n, count in zip(numbers, counts, strict=True)
    ]
    return {"classes": shares}


def names_in(files: Sequence[str], root: str) -> dict[str, str]:
    """Returns file -> the name of its picture: as below ``root``, with ``.png`` in place of its ending.

    Files that differ in their ending alone keep it.
    """
    inside = [os.path.relpath(file, root) for file in files]
    inside = [os.path.basename(name) if name.startswith("..") else name for name in inside]
    stems = [os.path.splitext(name)[0] for name in inside]
    many = Counter(stems)
    made: dict[str, str] = {}
    taken: set[str] = set()
    for file, name, stem in zip(files, inside, stems, strict=True):
        wanted = f"{stem if many[stem] == 1 else name}.png"
        count = 2
        while wanted in taken:  # of a list that has one name in several folders
            wanted, count = f"{stem}-{count}.png", count + 1
        taken.add(wanted)
        made[file] = wanted
    return made


def check_folder(path: str, data: str, option: str) -> Path:
    """Returns the folder of pictures, created where it is missing.

    Raises:
        InputError: it is, or is in, the folder of the photos, where its pictures would be photos next time.
    """
    place = os.path.realpath(path)
    source = os.path.realpath(data)
    if os.path.isdir(source) and os.path.commonpath([place, source]) == source:
        raise expected(option, f"a folder outside of {data}", path)
    return make_folder(path, option)


def draw_all(
    engine: Engine, sight: Sight, files: Sequence[str], root: str, folder: Path, option: str
) -> list[dict[str, Any]]:
    """Draws a network's outputs on files of images, each picture whole or not at all.

    ``found.json`` is written last: what was found in each file.

    Args:
        root: the folder below which the files are.
        folder: of the pictures.
        option: what names ``folder``, for errors.

    Returns:
        for each file ``file``, ``picture`` (its path) and what :func:`to_dict` gives.
    """
    rows = []
    for file, name in names_in(files, root).items():
        found, photo = seen(engine, sight, file)
        path = folder / name
        make_folder(path.parent, option)
        with atomic_write(path, "wb") as target:
            draw(found, photo).save(target, "PNG")
        rows.append({"file": file, "picture": str(path), **to_dict(found)})
    document = {"head": sight.head.name, "preprocess": str(sight.preprocess), "photos": rows}
    write_text(folder / FOUND, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return rows


def summary(rows: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Returns a line on the drawing."""
    what = f"{units.counted(len(rows), 'picture')} in {folder}"
    if rows and "boxes" in rows[0]:
        boxes = sum(len(row["boxes"]) for row in rows)
        what += f", {units.counted(boxes, 'box', 'boxes')}"
    return what

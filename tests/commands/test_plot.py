"""Pictures that ``run --plot`` and ``compare --plot`` write: every layer with its time, every ratio."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from samples import CASES, make, make_taken_apart

from cnn_engine import compare, run
from cnn_engine.compare import comparison
from cnn_engine.errors import InputError, UnsupportedError
from cnn_engine.measure.result import Latency
from cnn_engine.report import json, plot, units

pytest.importorskip("matplotlib")


def words(path) -> list[str]:
    """Returns the texts of an SVG."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text("utf-8"))


def test_layers_have_their_names_times_and_kernels(tmp_path):
    layers = [
        replace(make().layers[0], name=f"layer{i}", kernel=f"kernel{i}", host_s=i + 1)
        for i in range(3)
    ]
    plot.draw(make(layers=layers), tmp_path / "a.svg")
    found = words(tmp_path / "a.svg")
    assert found.count("layer2") == 1
    said = next(text for text in found if "kernel2" in text)
    assert said.startswith(units.seconds(layers[2].seconds))


def test_parts_of_a_fused_network_are_shown(tmp_path):
    plot.draw(make_taken_apart(), tmp_path / "a.svg")
    assert {"conv1+relu1+pool1", "softmax"} <= set(words(tmp_path / "a.svg"))


def test_of_many_layers_the_longest_are_shown_and_all_count(tmp_path):
    layers = [replace(make().layers[0], name=f"layer{i}", host_s=1.0 + i) for i in range(100)]
    result = make(layers=layers)
    rows = plot._shown(result)
    assert len(rows) == plot.MOST_ROWS
    assert [row.name for row in rows[:-1]] == [f"layer{i}" for i in range(77, 100)]
    assert sum(row.seconds for row in rows) == pytest.approx(sum(row.seconds for row in layers))
    equal = make(layers=[replace(one, host_s=1.0) for one in layers])
    assert sum(row.seconds for row in plot._shown(equal)) == pytest.approx(100)


def test_every_result_can_be_drawn(tmp_path):
    for index, result in enumerate(CASES.values()):
        path = tmp_path / f"{index}.png"
        plot.draw(result, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_ratios_have_their_verdicts(tmp_path):
    rng = np.random.default_rng(5)
    slow, fast = (make(latency=Latency(list(rng.normal(scale, 0.01, 400)))) for scale in (2.0, 1.0))
    found = [comparison.compare(slow, fast), comparison.compare(slow, slow)]
    plot.draw_comparisons([slow, fast, slow], found, tmp_path / "a.svg")
    said = words(tmp_path / "a.svg")
    p50 = found[0].whole.ratio
    assert f"{units.number(p50.value)} x  faster" in said
    assert said.count("pass p50") == 2


@pytest.mark.parametrize("command", ["run", "compare"])
def test_commands_write_them(command, tmp_path, capsys):
    picture = tmp_path / "a.png"
    if command == "run":
        words = [
            "--device",
            "cpu",
            "--threads",
            "1",
            "--images",
            "4",
            "--batch",
            "2",
            "--iterations",
            "2",
            "--quiet",
        ]
        assert run.main([*words, "--plot", str(picture)]) == 0
    else:
        document = tmp_path / "a.json"
        document.write_text(json.dumps(make()))
        assert compare.command.main([str(document)] * 2 + ["--quiet", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_other_endings_are_refused_before_any_work(capsys):
    for path in ("layers", "-", "layers.jpg"):
        assert run.main(["--plot", path]) == 2
        assert (
            "--plot: expected a path that ends in one of .png, .svg, .pdf"
            in capsys.readouterr().err
        )
    with pytest.raises(InputError):
        plot.check("--plot", "a.gif")


def test_without_matplotlib_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"--plot: .*matplotlib.*cnn-engine\[lab\]"):
        plot.check("--plot", "a.png")
    plot.check("--plot", None)


def test_matplotlib_is_loaded_for_pictures_alone():
    code = "import sys, cnn_engine.run, cnn_engine.compare.command; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

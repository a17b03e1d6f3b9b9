"""The output of ``inspect`` as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..engine.inspection import Inspection
from ..graph.graph import Value
from ..graph.onnx import UnsupportedNode
from . import units


def shape(value: Value) -> str:
    """Returns ``1 x 3 x 224 x 224`` with the type where it is not float32."""
    sizes = " x ".join(map(str, value.shape)) or "a number"
    return sizes if value.dtype == "float32" else f"{sizes} {value.dtype}"


def summary(found: Inspection) -> list[tuple[str, str]]:
    """Returns (label, text) of the whole graph."""
    graph = found.graph
    rows = [
        (
            f"input {value.name}",
            shape(value) + (" (any batch)" if value.name in graph.batched else ""),
        )
        for value in graph.inputs
    ]
    rows += [(f"output {name}", shape(graph.values[name])) for name in graph.outputs]
    taken = len(found.given.nodes) - len(graph.nodes)
    return [
        *rows,
        ("nodes", f"{len(graph.nodes)}: rewrites removed {taken} of {len(found.given.nodes)}"),
        *((f"layers on {facts.name}", str(len(facts.running))) for facts in found.on.values()),
        ("parameters", f"{units.count(found.parameters)}, {units.size(found.parameter_bytes)}"),
        ("FLOPs per pass", f"{units.number(found.flops / 1e9)} G (two per multiply-add)"),
        ("bytes per pass", f"{units.size(found.bytes)}, each tensor of each node counted once"),
        (
            "peak memory",
            f"{units.size(found.peak_bytes)} of activations on the CPU, "
            f"{units.size(found.alive_bytes)} of them alive at once",
        ),
    ]


def text(found: Inspection) -> str:
    """Returns the report."""
    lines = [found.graph.name, ""]
    lines += [f"  {label + ':':<23} {what}" for label, what in summary(found)]
    lines += ["", *_table(("operator", "nodes", "GFLOP"), [
        (kind, str(count), units.number(flops / 1e9)) for kind, count, flops in found.kinds()
    ])]  # fmt: skip
    head = (
        "node",
        "operator",
        "output",
        "parameters",
        "MFLOP",
        "bytes",
        "CPU",
        "CUDA",
        "attributes",
    )
    rows = [
        (
            node.name, node.kind, ", ".join(map(shape, node.outputs)),
            units.count(node.parameters), units.number(node.flops / 1e6), units.size(node.bytes),
            node.kernels["cpu"], node.kernels["cuda"], node.attributes,
        )
        for node in found.nodes
    ]  # fmt: skip
    lines += ["", *_table(head, rows)]
    for facts in found.on.values():
        lines += ["", f"on {facts.name}: {len(facts.running)} layers", ""]
        lines += _table(("layer", "operator", "output", "kernel", "nodes of the file"), [
            (node.name, node.kind, ", ".join(map(shape, node.outputs)), node.kernel, str(len(node.covers)))
            for node in facts.running
        ])  # fmt: skip
        lines += ["", *_table(("pass", "nodes before", "after", "why"), [
            (ran.name, str(ran.before), str(ran.after), ran.why) for ran in facts.passes
        ])]  # fmt: skip
        stays = [note for note in facts.refused if note.into.startswith("quantized_")]
        lines += ["", "quantized layers that stay float"] if stays else []
        lines += [f"  {note.what}: {note.why}" for note in stays]
        counts = Counter((note.into, note.why) for note in facts.refused if note not in stays)
        lines += ["", "nodes that no kernel runs as one"] if counts else []
        lines += [f"  {count} x {kind}: {why}" for (kind, why), count in counts.items()]
    lines += reasons(found)
    if found.notes:
        lines += ["", "rewritten"]
        lines += [f"  {note.what} -> {note.into}: {note.why}" for note in found.notes]
    return "\n".join(units.printable(line) for line in lines) + "\n"


def reasons(found: Inspection) -> list[str]:
    """Returns why kernels of ours do not run some nodes, once for all nodes of one reason."""
    counts = Counter(
        (device, node.kernels[device], node.kind, why)
        for node in found.nodes
        for device, why in node.reasons.items()
    )
    if not counts:
        return []
    lines = ["", "without a kernel of the device"]
    for (device, instead, kind, why), count in counts.items():
        lines.append(f"  {device}: {count} x {kind} by {instead}: {why}")
    return lines


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [min(40, max(len(row[i]) for row in (head, *rows))) for i in range(len(head))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def to_dict(found: Inspection) -> dict[str, Any]:
    """Returns the content of ``--json``."""
    graph = found.graph
    values = {
        value.name: {"shape": list(value.shape), "dtype": value.dtype}
        for value in (*graph.inputs, *(graph.values[name] for name in graph.outputs))
    }
    return {
        "schema": 1,
        "command": "inspect",
        "model": graph.name,
        "inputs": {value.name: values[value.name] for value in graph.inputs},
        "outputs": {name: values[name] for name in graph.outputs},
        "batched": list(graph.batched),
        "nodes_in_file": len(found.given.nodes),
        "parameters": found.parameters,
        "parameter_bytes": found.parameter_bytes,
        "flops": found.flops,
        "bytes": found.bytes,
        "peak_activation_bytes": found.peak_bytes,
        "most_alive_bytes": found.alive_bytes,
        "nodes": [
            {
                "name": node.name,
                "kind": node.kind,
                "attributes": node.attributes,
                "inputs": [value.name for value in node.inputs],
                "outputs": {value.name: list(value.shape) for value in node.outputs},
                "parameters": node.parameters,
                "flops": node.flops,
                "bytes": node.bytes,
                "covers": list(node.covers),
                "kernels": dict(node.kernels),
                "reasons": dict(node.reasons),
            }
            for node in found.nodes
        ],
        "devices": {
            kind: {
                "name": facts.name,
                "layers": [
                    {
                        "name": node.name,
                        "kind": node.kind,
                        "kernel": node.kernel,
                        "covers": list(node.covers),
                        "outputs": {value.name: list(value.shape) for value in node.outputs},
                        "reason": node.why,
                    }
                    for node in facts.running
                ],
                "passes": [
                    {
                        "name": ran.name,
                        "why": ran.why,
                        "nodes_before": ran.before,
                        "nodes_after": ran.after,
                    }
                    for ran in facts.passes
                ],
                "refused": [
                    {"name": note.what, "region": note.into, "why": note.why}
                    for note in facts.refused
                ],
            }
            for kind, facts in found.on.items()
        },
        "rewrites": [
            {"what": note.what, "into": note.into, "why": note.why} for note in found.notes
        ],
        "unsupported": [],
    }


def unsupported_dict(model: str, nodes: Sequence[UnsupportedNode]) -> dict[str, Any]:
    """Returns the content of ``--json`` for a model that the engine cannot run."""
    return {
        "schema": 1,
        "command": "inspect",
        "model": model,
        "unsupported": [
            {
                "name": node.name,
                "operator": node.operator,
                "attribute": node.attribute,
                "reason": node.reason,
            }
            for node in nodes
        ],
    }


def unsupported_text(nodes: Sequence[UnsupportedNode]) -> str:
    """Returns a table of all nodes that the engine cannot run."""
    rows = [(n.name, n.operator, n.attribute or "", n.reason) for n in nodes]
    lines = _table(("node", "operator", "attribute or input", "reason"), rows)
    return "\n".join(["not supported", *map(units.printable, lines)]) + "\n"


def dumps(content: dict[str, Any]) -> str:
    """Returns ``content`` as JSON."""
    return json.dumps(content, indent=1) + "\n"

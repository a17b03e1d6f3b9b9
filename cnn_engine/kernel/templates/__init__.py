"""Kernel files that work as they are, one an operator and kind of device: plain loops."""

from __future__ import annotations

from pathlib import Path

from ...errors import expected
from ...kernels.user import CONTRACTS, structs

_FOLDER = Path(__file__).parent

ENDINGS = {"cuda": "cu", "cpu": "cpp"}

LANGUAGES = {"cuda": "in CUDA C++", "cpu": "in C++"}

#: Functions of one or two numbers in C; those with a name of their own in <cmath> need no line here.
FORMULAS = {
    "relu": "v < 0 ? 0.0f : v",
    "affine": "shape.alpha * v + shape.beta",
    "leaky_relu": "v < 0 ? shape.alpha * v : v",
    "thresholded_relu": "v > shape.alpha || v != v ? v : 0.0f",
    "elu": "v < 0 ? shape.alpha * expm1f(v) : v",
    "selu": "shape.beta * (v < 0 ? shape.alpha * expm1f(v) : v)",
    "celu": "v < 0 ? shape.alpha * expm1f(v / shape.alpha) : v",
    "sigmoid": "1 / (1 + expf(-v))",
    "hard_sigmoid": "fminf(fmaxf(shape.alpha * v + shape.beta, 0.0f), 1.0f) + 0 * v",
    "hard_swish": "v * fminf(fmaxf(v / 6 + 0.5f, 0.0f), 1.0f)",
    "swish": "v / (1 + expf(-shape.alpha * v))",
    "mish": "v * tanhf(fmaxf(v, 0.0f) + log1pf(expf(-fabsf(v))))",
    "gelu": "0.5f * v * erfcf(v * -0.70710678f)",
    "clip": "v < shape.alpha ? shape.alpha : v > shape.beta ? shape.beta : v",
    "shrink": "v < -shape.alpha ? v + shape.beta : v > shape.alpha ? v - shape.beta : 0 * v",
    "softplus": "fmaxf(v, 0.0f) + log1pf(expf(-fabsf(v)))",
    "softsign": "v / (1 + fabsf(v))",
    "scaled_tanh": "shape.alpha * tanhf(shape.beta * v)",
    "abs": "fabsf(v)",
    "neg": "-v",
    "reciprocal": "1 / v",
    "round": "rintf(v)",
    "sign": "v > 0 ? 1.0f : v < 0 ? -1.0f : v",
    "add": "u + v",
    "sub": "u - v",
    "mul": "u * v",
    "div": "u / v",
    "min": "v < u || v != v ? v : u",
    "max": "v > u || v != v ? v : u",
    "softmax": "expf(x[i] - most) / sum",
    "log_softmax": "x[i] - most - logf(sum)",
}


def text(op: str, device: str, file: str) -> str:
    """Returns a kernel file that works.

    Args:
        op: the operator's kind.
        device: ``cuda`` or ``cpu``.
        file: the name that it will have, for the commands in its head.

    Raises:
        InputError: there is no such operator or device.
    """
    if op not in CONTRACTS:
        raise expected("operator", f"one of {', '.join(CONTRACTS)}", repr(op))
    if device not in ENDINGS:
        raise expected("--device", " or ".join(ENDINGS), repr(device))
    contract, ending = CONTRACTS[op], ENDINGS[device]
    struct = structs()[contract.struct]
    stem = {"Elements": "elements", "Rows": "softmax"}.get(contract.struct, op)
    body = (_FOLDER / f"{stem}.{ending}").read_text(encoding="utf-8")
    lines = [*struct.comment.splitlines(), *(f"//   {line}" for line in struct.text.splitlines())]
    formula = FORMULAS.get(op, f"{op}f(v)")
    if contract.struct == "Rows" and device == "cpu":
        formula = (
            formula.replace("x[i]", "row[i]")
            .replace("expf", "std::exp")
            .replace("logf", "std::log")
        )
    indent = "    " if device == "cpu" else "  "
    names = dict(
        zip(contract.inputs, ("u", "v") if len(contract.inputs) == 2 else ("v",), strict=False)
    )
    fills = {
        "DIRECTIVES": (_FOLDER / f"directives.{ending}.txt").read_text(encoding="utf-8").rstrip(),
        "CONTRACT": "\n".join(lines),
        "LANGUAGE": LANGUAGES[device],
        "FILE": file,
        "FORMULA": formula,
        "INPUTS": ", ".join(contract.inputs),
        "PARAMETERS": ", ".join(f"const float* {name}" for name in contract.inputs),
        "LOADS": f"{indent}const float "
        + ", ".join(f"{v} = {n}[i]" for n, v in names.items())
        + ";",
        "OP": op,
    }
    whole = (_FOLDER / "head.txt").read_text(encoding="utf-8") + body
    for name, value in fills.items():
        whole = whole.replace(f"@{name}@", value)
    return whole

"""No function of csrc takes a long list: what belongs together is a struct (csrc/ops/epilogue.h)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"

MOST = 8

#: Functions that have more, by their file; nothing is added here.
LEFT = {
    "cpu/blocked.h": {"multiply_edge", "multiply_panel", "multiply_tile"},
    "cpu/conv2d_blocked.cpp": {"conv2d_blocked"},
    "cpu/conv2d_depthwise.h": {"depthwise_rows", "depthwise_vectors"},
    "cpu/conv2d_nhwc.cpp": {"conv2d_nhwc"},
    "cpu/conv2d_nhwc_bfloat16.cpp": {"conv2d_nhwc_bfloat16"},
    "cpu/conv2d_nhwc_depthwise.h": {"depthwise"},
    "cpu/conv2d_nhwc_phases.h": {"write_phase_direct"},
    "cpu/conv2d_nhwc_winograd.h": {"multiply", "multiply_tiles"},
    "cpu/conv2d_nhwc_winograd_tiles.h": {"write_tiles"},
    "cpu/expand_depthwise.cpp": {"expand_and_convolve", "expand_depthwise"},
    "cpu/fused/bfloat16.cpp": {"fused_linear_bfloat16"},
    "cpu/fused/direct.cpp": {"fused_linear"},
    "cpu/fused/network.cpp": {"run_part"},
    "cpu/fused/pointwise.cpp": {"fused_linear"},
    "cpu/kernels.h": {"fused_linear_bfloat16"},
    "cpu/matmul.cpp": {"linear_blocked", "matmul_blocked", "multiply_blocked", "rows_by_panels"},
    "cpu/quantized_conv2d.cpp": {"quantized_conv2d"},
    "cpu/recurrent.cpp": {"recurrent"},
    "cuda/common/conv2d_blocked.cu": {"conv2d_blocked"},
    "cuda/common/matmul.cu": {"linear_blocked", "matmul_blocked"},
    "cuda/common/recurrent.cu": {"recurrent"},
    "cuda/sm75/quantized_conv2d.cu": {"quantized_conv2d"},
    "ops/conv2d_blocked.h": {"conv2d_blocked"},
    "ops/conv2d_nhwc.h": {"conv2d_nhwc", "conv2d_nhwc_bfloat16"},
    "ops/expand_depthwise.h": {"expand_depthwise"},
    "ops/linear_blocked.h": {"linear_blocked"},
    "ops/matmul.h": {"matmul_blocked"},
    "ops/quantized_conv2d.h": {"quantized_conv2d"},
    "ops/recurrent.h": {"recurrent"},
}

#: A parameter as it is declared: a type, then a name, or a pointer or reference without one.
_PARAMETER = re.compile(
    r"(const\s+)?(unsigned\s+|typename\s+)?[A-Za-z_][\w:]*(<.*>)?(::\w+)?"
    r"(\s*[*&]+\s*|\s+)(const\s+)?(__restrict__\s+)?(\(&\w+\)|\w+)?(\[\w*\])*(\s*=.*)?",
    re.DOTALL,
)
_NAME = re.compile(r"([A-Za-z_]\w*)\s*\(")


def parameters(text: str, begin: int) -> list[str]:
    """Returns what stands between a parenthesis that opens before ``begin`` and the one that closes it."""
    depth, angles, found = 1, 0, [""]
    for character in text[begin:]:
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            break
        angles += (character == "<") - (character == ">")
        if character == "," and depth == 1 and angles <= 0:
            found.append("")
        else:
            found[-1] += character
    return [one.strip() for one in found]


def long_signatures(text: str) -> Iterator[tuple[str, int]]:
    """Yields the host's functions that are declared with more than ``MOST`` parameters, and how many."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    for name in _NAME.finditer(text):
        found = parameters(text, name.end())
        if len(found) <= MOST or not all(_PARAMETER.fullmatch(one) for one in found):
            continue
        start = max(text.rfind(end, 0, name.start()) for end in ";}{")
        if not re.search(r"__(global|device)__", text[start + 1 : name.start()]):
            yield name[1], len(found)


def test_no_function_takes_a_long_list():
    found = {}
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            for name, _count in long_signatures(path.read_text()):
                found.setdefault(path.relative_to(CSRC).as_posix(), set()).add(name)
    assert found == LEFT


def test_long_lists_are_seen():
    nine = ", ".join(f"const float* x{i}" for i in range(9))
    assert list(long_signatures(f"void f({nine});\nvoid g(int a);")) == [("f", 9)]
    assert list(long_signatures(f"template <int n>\nvoid C::f({nine}) const {{}}")) == [("f", 9)]
    mixed = "int a, std::int64_t b, const Shape& c, T (&d)[4], float e = 1.0f, const std::array<int, 2>& f"
    assert list(long_signatures(f"int f({mixed}, unsigned g, int* __restrict__ h, Stream i)")) == [
        ("f", 9)
    ]
    assert not list(
        long_signatures("f(a, b, c, d, e, f, g, h, i, j); g(1, 2, 3, 4, 5, 6, 7, 8, 9);")
    )
    assert not list(long_signatures(f"__global__ void __launch_bounds__(128) kernel({nine}) {{}}"))

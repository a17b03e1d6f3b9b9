"""Generates honest convolutions of many styles, and shows that the judge of kernels refuses none of them.

``python -m benchmarks.honest_kernels --count 200`` has that many checked and timed. They differ in the
order of loops and sums, vectors, unrolling, threads and scratch memory. A seed makes the same kernels again.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cnn_engine import cli
from cnn_engine.kernel.cases import grid
from cnn_engine.kernel.expected import Series
from cnn_engine.kernel.process import Fault, Limits
from cnn_engine.kernel.sandbox import Trial

from . import result_file

#: Cases that each is checked on; the last one is timed.
CASES = ("no bias", "padding on one side", "groups", "stride")

#: Timed calls, threads and limits.
CALLS, THREADS = 3, 2
LIMITS = Limits(seconds=30.0)

#: Kernels in one file: it is compiled once for all of them.
GROUP = 20

HEAD = """// operator: conv2d
// call: honest(x, weight, bias, y, shape, threads, 0);
#include "cnn_engine/kernel.h"

#include <algorithm>
#include <cstdlib>
#include <future>
#include <memory>
#include <thread>
#include <vector>

namespace {

// Inputs of one output's window, zero where it lies in the padding.
void gather(const float* x, const Conv2d& s, int n, int group, int i, int j, float* patch) {
  const int channels = s.c / s.groups;
  for (int c = 0; c < channels; ++c)
    for (int p = 0; p < s.r; ++p)
      for (int q = 0; q < s.s; ++q) {
        const int row = i * s.stride_h - s.pad_top + p * s.dilation_h;
        const int column = j * s.stride_w - s.pad_left + q * s.dilation_w;
        const bool inside = row >= 0 && row < s.h && column >= 0 && column < s.w;
        *patch++ = inside ? x[((n * s.c + group * channels + c) * s.h + row) * s.w + column] : 0.0f;
      }
}
"""

#: Sums of products, by name: a[0] b[0] + ... + a[count - 1] b[count - 1].
SUMS = {
    "forwards": "float sum = 0;\n  for (int i = 0; i < count; ++i) sum += a[i] * b[i];\n  return sum;",
    "backwards": "float sum = 0;\n  for (int i = count; i-- > 0;) sum += a[i] * b[i];\n  return sum;",
    "in double": "double sum = 0;\n  for (int i = 0; i < count; ++i) sum += (double)a[i] * b[i];\n"
    "  return (float)sum;",
    "compensated": "float sum = 0, lost = 0;\n  for (int i = 0; i < count; ++i) {\n"
    "    const float v = a[i] * b[i] - lost, next = sum + v;\n"
    "    lost = (next - sum) - v;\n    sum = next;\n  }\n  return sum;",
    "pairwise": "if (count <= @UNROLL@) {\n    float sum = 0;\n"
    "    for (int i = 0; i < count; ++i) sum += a[i] * b[i];\n    return sum;\n  }\n"
    "  const int half = count / 2;\n"
    "  return dot(a, b, half) + dot(a + half, b + half, count - half);",
    "partial": "float part[@UNROLL@] = {};\n  int i = 0;\n"
    "  for (; i + @UNROLL@ <= count; i += @UNROLL@)\n"
    "#pragma GCC unroll @UNROLL@\n    for (int u = 0; u < @UNROLL@; ++u) part[u] += a[i + u] * b[i + u];\n"
    "  float sum = 0;\n  for (; i < count; ++i) sum += a[i] * b[i];\n"
    "  for (float each : part) sum += each;\n  return sum;",
    "vectors": "typedef float Vector __attribute__((vector_size(4 * @WIDTH@), aligned(4)));\n"
    "  Vector part = {};\n  int i = 0;\n"
    "  for (; i + @WIDTH@ <= count; i += @WIDTH@)\n"
    "    part += *(const Vector*)(a + i) * *(const Vector*)(b + i);\n"
    "  float sum = 0;\n  for (; i < count; ++i) sum += a[i] * b[i];\n"
    "  for (int u = 0; u < @WIDTH@; ++u) sum += part[u];\n  return sum;",
}  # fmt: skip

#: Scratch memory of ``size`` floats, by name.
SCRATCH = {
    "a vector per call": "std::vector<float> memory(size);\n  float* patch = memory.data();",
    "kept per thread": "static thread_local std::vector<float> memory;\n"
    "  if (memory.size() < size) memory.resize(size);\n  float* patch = memory.data();",
    "aligned": "std::unique_ptr<float, void (*)(void*)> memory(\n"
    "      (float*)std::aligned_alloc(@ALIGN@, (4 * size + @ALIGN@ - 1) / @ALIGN@ * @ALIGN@), std::free);\n"
    "  float* patch = memory.get();",
    "on the stack": "float stack[1024];\n  std::vector<float> memory(size > 1024 ? size : 0);\n"
    "  float* patch = size > 1024 ? memory.data() : stack;",
}  # fmt: skip

#: Positions n, i, j of output pixel ``p``, by name.
ORDERS = {
    "rows": "const int j = p % s.out_w, i = p / s.out_w % s.out_h, n = p / s.out_w / s.out_h;",
    "columns": "const int i = p % s.out_h, j = p / s.out_h % s.out_w, n = p / s.out_h / s.out_w;",
    "images last": "const int n = p % s.n, j = p / s.n % s.out_w, i = p / s.n / s.out_w;",
    "from the end": "const int q = s.n * s.out_h * s.out_w - 1 - p;\n"
    "    const int j = q % s.out_w, i = q / s.out_w % s.out_h, n = q / s.out_w / s.out_h;",
}  # fmt: skip

#: Sharing of all pixels among threads, by name; all have joined at the end.
THREADING = {
    "one thread": "range(c, 0, pixels);",
    "OpenMP": "#pragma omp parallel for schedule(@SCHEDULE@) num_threads(threads)\n"
    "  for (int p = 0; p < pixels; p += @TILE@) range(c, p, std::min(p + @TILE@, pixels));",
    "std::thread": "std::vector<std::thread> workers;\n  for (int t = 0; t < threads; ++t)\n"
    "    workers.emplace_back([&, t] {\n"
    "      range(c, (long)pixels * t / threads, (long)pixels * (t + 1) / threads);\n    });\n"
    "  for (std::thread& worker : workers) worker.join();",
    "std::async": "std::vector<std::future<void>> parts;\n"
    "  const int each = (pixels + threads - 1) / threads;\n"
    "  for (int p = 0; p < pixels; p += each)\n"
    "    parts.push_back(std::async(std::launch::async,\n"
    "                               [&, p] { range(c, p, std::min(p + each, pixels)); }));\n"
    "  for (auto& part : parts) part.get();",
    "tiles": "for (int p = 0; p < pixels; p += @TILE@) range(c, p, std::min(p + @TILE@, pixels));",
}  # fmt: skip

KERNEL = """
namespace kernel@NUMBER@ {  // @STYLE@

struct Call {
  const float *x, *weight, *bias;
  float* y;
  const Conv2d& s;
};

float dot(const float* a, const float* b, int count) {
  @SUM@
}

void range(const Call& c, int first, int last) {
  const Conv2d& s = c.s;
  const int filters = s.k / s.groups;
  const size_t size = (size_t)(s.c / s.groups) * s.r * s.s;
  @SCRATCH@
  for (int p = first; p < last; ++p) {
    @ORDER@
    for (int group = 0; group < s.groups; ++group) {
      gather(c.x, s, n, group, i, j, patch);
      for (int f = group * filters; f < (group + 1) * filters; ++f)
        c.y[((n * s.k + f) * s.out_h + i) * s.out_w + j] =
            dot(patch, c.weight + f * size, size) + (c.bias ? c.bias[f] : 0.0f);
    }
  }
}

void run(const Call& c, int threads) {
  const int pixels = c.s.n * c.s.out_h * c.s.out_w;
  (void)threads;
  @THREADING@
}

}  // namespace kernel@NUMBER@
"""


def kernel(number: int, seed: int) -> tuple[str, str]:
    """Returns the style of a kernel in words, and its code."""
    rng = np.random.default_rng([seed, number])

    def one_of(choices: Sequence) -> str:
        return str(choices[rng.integers(len(choices))])

    parts = [one_of(list(of)) for of in (SUMS, SCRATCH, ORDERS, THREADING)]
    fills = {
        "SUM": SUMS[parts[0]], "SCRATCH": SCRATCH[parts[1]], "ORDER": ORDERS[parts[2]],
        "THREADING": THREADING[parts[3]], "UNROLL": one_of((2, 4, 8, 16)), "WIDTH": one_of((4, 8, 16)),
        "ALIGN": one_of((64, 128, 4096)), "TILE": one_of((1, 7, 32, 100)),
        "SCHEDULE": one_of(("static", "dynamic", "guided")), "NUMBER": str(number),
    }  # fmt: skip
    style = ", ".join(parts)
    text = KERNEL.replace("@STYLE@", style)
    for name, value in fills.items():
        text = text.replace(f"@{name}@", value)
    return style, text


def submissions(folder: Path, count: int, seed: int) -> list[tuple[str, Path]]:
    """Writes ``count`` kernels; returns the style and the file of each.

    A file holds the code of :data:`GROUP` kernels. Those of a group differ in a comment, so that they are
    compiled once.
    """
    found = []
    for first in range(0, count, GROUP):
        numbers = range(first, min(first + GROUP, count))
        made = [kernel(number, seed) for number in numbers]
        calls = "".join(
            f"    case {n}: return kernel{n}::run({{x, weight, bias, y, s}}, threads);\n"
            for n in numbers
        )
        text = (
            HEAD + "".join(code for _, code in made) + "\n}  // namespace\n\n"
            'extern "C" void honest(const float* x, const float* weight, const float* bias, float* y,\n'
            "                       Conv2d s, int threads, int number) {\n  switch (number) {\n"
            f"{calls}  }}\n}}\n"
        )  # fmt: skip
        for number, (style, _) in zip(numbers, made, strict=True):
            path = folder / f"honest_{number}.cpp"
            path.write_text(
                text.replace("threads, 0);", f"threads, {number});", 1), encoding="utf-8"
            )
            found.append((style, path))
    return found


def fault(path: Path) -> str | None:
    """Returns what the judge finds wrong with a kernel, or None."""
    chosen = [case for case in grid("conv2d") if case.label in CASES]
    try:
        with Trial(str(path), "cpu", THREADS, LIMITS) as trial:
            for case in chosen:
                series = Series(case, CALLS).within("float32")
                if reason := trial.check(case, series[0]).refused:
                    return reason
            trial.time(series, CALLS)
    except Fault as found:
        return str(found)
    return None


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Has all kernels judged; returns 1 where one was refused."""
    parser = result_file.parser("honest_kernels", __doc__)
    parser.add_argument("--count", type=int, default=200, help="kernels")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        made = submissions(Path(folder), options.count, options.seed)[options.first :]
        for style, path in made:
            if found := fault(path):
                refused += 1
                print(f"{path.name}: {style}: {found}", flush=True)
        styles = len({style for style, _ in made})
        print(f"{len(made) - refused} of {len(made)} honest kernels accepted, of {styles} styles")
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())

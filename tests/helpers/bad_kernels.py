"""Kernels that are wrong, each in one way: ``kernel check`` and ``kernel rank`` must name it."""

from __future__ import annotations

from dataclasses import dataclass

from cnn_engine.kernel import templates


@dataclass(frozen=True)
class Bad:
    """A kernel made from the template by replacing text; ``says`` is part of the line that it must get."""

    old: str
    new: str
    says: str


_SUM = "float sum = bias ? bias[f] : 0.0f;"
_CPP_LOOP = "#pragma omp parallel for collapse(2) num_threads(threads)\n"
_STORE = "y[((n * shape.k + f) * shape.out_h + i) * shape.out_w + j] = sum;"

CPP = {
    "syntax": Bad(_SUM, "float sum = bias ? bias[f] : ;", "bad.cpp:{line}:"),
    "wrong shape": Bad("shape.out_w + j] = sum", "shape.w + j] = sum", ""),
    "out of bounds": Bad(
        _STORE,
        f"{_STORE}\n          y[shape.n * shape.k * shape.out_h * shape.out_w] = 0;",
        "out of bounds: it ",
    ),
    "reads out of bounds": Bad(
        "row >= 0 && row < shape.h && column >= 0 && column < shape.w",
        "true",
        "out of bounds: it touched",
    ),
    "reads before": Bad(
        _CPP_LOOP,
        "  volatile float before = x[-1];\n  (void)before;\n" + _CPP_LOOP,
        "out of bounds: it touched 4 bytes before x",
    ),
    "far out of bounds": Bad(
        _STORE,
        f"{_STORE}\n          y[shape.n * shape.k * shape.out_h * shape.out_w + (1 << 24)] = 0;",
        ", the nearest buffer",
    ),
    "null": Bad(
        _STORE,
        f"{_STORE}\n          *(volatile float*)16 = 0;",
        "SIGSEGV at address 0x10, which is no",
    ),
    "race": Bad(
        _CPP_LOOP,
        "  static volatile float total;\n#pragma omp parallel for collapse(2) num_threads(threads)\n",
        "",
    ),
    "infinite loop": Bad(
        _SUM,
        f"{_SUM}\n          for (volatile int wait = 1; wait;) continue;",
        "time: expected an end within",
    ),
    "NaN": Bad(_STORE, _STORE.replace("sum;", "sum / (sum - sum) * 0.0f;"), "found nan"),
    "too much memory": Bad(
        "// call:", "// workspace: 1000000 * 1000000\n// call:", "workspace: expected at most"
    ),
    "wrong stride": Bad("i * shape.stride_h", "i", "wrong: stride: y["),
    "off by one at the border": Bad(
        "sum += x",
        "if (!shape.pad_right || s || j < shape.out_w - 1) sum += x",
        "all of them at the image's border",
    ),
    "keeps state": Bad(
        _CPP_LOOP,
        "  static int calls = 0;\n  if (++calls % 3 == 0) return;\n" + _CPP_LOOP,
        "state kept between calls",
    ),
    "writes inputs": Bad(
        _CPP_LOOP, "  const_cast<float*>(x)[0] = 1.0f;\n" + _CPP_LOOP, "it wrote to its input x"
    ),
    "calls exit": Bad(_CPP_LOOP, "  std::exit(0);\n" + _CPP_LOOP, "it ended the process: exit(0)"),
    "aborts": Bad(_CPP_LOOP, "  std::abort();\n" + _CPP_LOOP, "crash: it was ended by SIGABRT"),
    "takes all memory": Bad(
        _CPP_LOOP,
        "  std::vector<char> all(1L << 33);\n  y[0] = all[5];\n" + _CPP_LOOP,
        "crash: it was ended by SIGABRT",
    ),
    "prints without end": Bad(
        _CPP_LOOP,
        '  for (;;) std::puts("still here");\n' + _CPP_LOOP,
        "output: expected at most 1 MiB",
    ),
    "writes nothing": Bad(_STORE, "(void)sum;", "found nothing written"),
    "stack": Bad(
        _CPP_LOOP,
        "  volatile char big[1 << 27];\n  for (int p = 0; p < 1 << 27; p += 4096) big[p] = 1;\n"
        + _CPP_LOOP,
        "crash: ",
    ),
}

_INCLUDES = (
    "#include <cstdio>\n#include <cstdlib>\n#include <cstring>\n#include <map>\n#include <thread>\n"
    "#include <unistd.h>\n#include <vector>\n"
)


def cpp(bad: Bad) -> str:
    """Returns the C++ file of a bad kernel."""
    text = templates.text("conv2d", "cpu", "bad.cpp")
    assert bad.old in text, bad.old
    text = text.replace(bad.old, bad.new, 1)
    if bad.new.startswith("  static volatile float total"):
        # Threads share one sum, and none waits for another.
        text = text.replace("float sum = bias ? bias[f] : 0.0f;", "total = bias ? bias[f] : 0.0f;")
        text = text.replace("sum += ", "total = total + ").replace("= sum;", "= total;")
        # Threads that wait in between meet for certain, on one core too.
        text = text.replace("          y[((", "          if (j == 0) usleep(100);\n          y[((")
    if "static" in bad.new or "std::" in bad.new:
        text = text.replace(
            '#include "cnn_engine/kernel.h"', f'{_INCLUDES}#include "cnn_engine/kernel.h"'
        )
    return text


CUDA = {
    "syntax": Bad(_SUM, "float sum = bias ? bias[f] : ;", "bad.cu:{line}: "),
    "wrong shape": Bad("shape.out_w + j] = sum", "shape.w + j] = sum", ""),
    "out of bounds": Bad(
        _STORE,
        f"{_STORE}\n  y[shape.n * shape.k * shape.out_h * shape.out_w] = 0;",
        "out of bounds: it wrote 0 bytes behind y",
    ),
    "race": Bad(
        _STORE, "y[((n * shape.k + f) * shape.out_h + i) * shape.out_w] += sum;", "wrong: "
    ),
    "infinite loop": Bad(
        _SUM,
        f"{_SUM}\n  while (*(const volatile float*)x != 1e30f) continue;",
        "time: expected an end within",
    ),
    "NaN": Bad(_STORE, _STORE.replace("sum;", "sum / (sum - sum) * 0.0f;"), "found nan"),
    "too much shared memory": Bad(
        "dim3(16, 16)>>>", "dim3(16, 16), 300000>>>", "bytes of shared memory, found 300000"
    ),
    "wrong stride": Bad("i * shape.stride_h", "i", "wrong: stride: y["),
    "off by one at the border": Bad(
        "sum += x",
        "if (!shape.pad_right || s || j < shape.out_w - 1) sum += x",
        "all of them at the image's border",
    ),
    "keeps state": Bad(
        'extern "C" __global__',
        '__device__ int calls;\n\nextern "C" __global__',
        "state kept between calls",
    ),
    "writes inputs": Bad(
        _SUM, f"{_SUM}\n  const_cast<float*>(x)[0] = 1.0f;", "it wrote to its input x"
    ),
    "calls exit": Bad(_SUM, f'{_SUM}\n  asm("exit;");', "found nothing written"),
    "traps": Bad(_SUM, f"{_SUM}\n  __trap();", "launch failure"),
    "far out of bounds": Bad(_STORE, "y[1ll << 40] = sum;", "illegal memory access"),
}


def cuda(bad: Bad) -> str:
    """Returns the CUDA file of a bad kernel."""
    text = templates.text("conv2d", "cuda", "bad.cu")
    assert bad.old in text, bad.old
    text = text.replace(bad.old, bad.new, 1)
    if "__device__ int calls" in bad.new:
        # Every third call, told by what the first block counts, writes nothing.
        text = text.replace(
            _STORE, f"if (calls / (int)(gridDim.x * gridDim.y * gridDim.z) < 2) {_STORE}"
        )
        text = text.replace(
            _SUM, f"{_SUM}\n  if (threadIdx.x == 0 && threadIdx.y == 0) atomicAdd(&calls, 1);"
        )
    return text

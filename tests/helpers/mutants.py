"""``python tests/helpers/mutants.py [NAME ...]``: faults of a line, each with the test that notices it.

Each is made in a copy of the tree, compiled where it is in C++, and its test is run there: with the fault it
has to fail, without it to pass. ``--list`` prints the list. Needs the package built in place; faults in CUDA
need a GPU. ``tests/docs/test_mutants.py`` holds that every line is still there to be changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: A test that runs longer than so many seconds with a fault (a child that waits for ever) has noticed it.
LIMIT_S = 100


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        path: of the file, in the tree.
        changes: what is there once, and what is put in its place.
        within: the beginning of a function, there once; changes are of the first places behind it.
        test: that fails, as pytest takes it.
        gpu: whether it needs one.
    """

    name: str
    path: str
    changes: tuple[tuple[str, str], ...]
    test: str
    gpu: bool = False
    within: str = ""

    @property
    def compiled(self) -> bool:
        return self.path.startswith("csrc/")

    def apply(self, root: Path) -> None:
        """Makes the fault in the tree ``root``."""
        path = root / self.path
        text = path.read_text(encoding="utf-8")
        for old, new in self.changes:
            if text.count(self.within or old) != 1:
                raise SystemExit(f"{self.name}: expected once in {self.path}: {self.within or old}")
            begin = text.find(self.within)
            if old not in text[begin:]:
                raise SystemExit(f"{self.name}: expected in {self.path} after {self.within}: {old}")
            text = text[:begin] + text[begin:].replace(old, new, 1)
        path.write_text(text, encoding="utf-8")


def mutant(name: str, path: str, old: str, new: str, test: str, gpu: bool = False) -> Mutant:
    file, _, case = test.partition("::")
    (found,) = (ROOT / "tests").glob(f"*/{file}")
    return Mutant(name, path, ((old, new),), f"{found.relative_to(ROOT)}::{case}", gpu)


MUTANTS = [
    # ---- plans that are used again ----
    mutant(
        "a plan used again after a failed pass", "cnn_engine/engine/plan_cache.py",
        "plan.abandon()", "self.give_back(plan)",
        "test_plan_cache.py::test_a_plan_is_not_used_again_after_a_pass_that_failed",
    ),
    # ---- figures of a report ----
    mutant(
        "throughput of one iteration", "cnn_engine/measure/measurement.py",
        "passes.images_total / passes.seconds_total", "passes.images_done / passes.seconds_total",
        "test_figures.py::test_throughput_is_of_all_iterations",
    ),
    mutant(
        "the median for the mean of the latency", "cnn_engine/measure/result.py",
        'result["mean"] = float(samples.mean())', 'result["mean"] = float(np.median(samples))',
        "test_figures.py::test_the_mean_of_the_latency_is_no_median",
    ),
    mutant(
        "a check of one image less", "cnn_engine/measure/measurement.py",
        "images[:CHECK_IMAGES]", "images[: CHECK_IMAGES - 1]",
        "test_figures.py::test_the_check_takes_as_many_images_as_it_says",
    ),
    mutant(
        "no delay ahead of events", "cnn_engine/measure/meters.py",
        "self.device.delay(LAUNCH_MARGIN_S * follow)", "pass",
        "test_step_times.py::test_events_wait_behind_a_delay_that_covers_the_launches",
    ),
    mutant(
        "a delay that is none", "csrc/cuda/common/delay.cu",
        "global_timer() + nanoseconds;", "global_timer() + nanoseconds / 2;",
        "test_fused_cuda.py::test_a_delay_occupies_its_stream_that_long", gpu=True,
    ),
    mutant(
        "all of a copy is hidden", "cnn_engine/measure/step_times.py",
        "self.hidden_s += copies_s + kernels_s - either_s", "self.hidden_s += copies_s",
        "test_figures.py::test_hidden_is_the_time_of_copies_in_which_a_kernel_runs",
    ),
    mutant(
        "FLOPs of a fused step's first layer alone", "cnn_engine/lower/fused_network.py",
        "sum(flops for _, _, flops in self.layers(inputs))", "self.layers(inputs)[0][2]",
        "test_figures.py::test_a_fused_step_counts_all_layers_and_moves_weights_once",
    ),
    mutant(
        "bytes of a step without its output", "cnn_engine/operators/operator.py",
        "if value is not None] + list(outputs)", "if value is not None]",
        "test_figures.py::test_a_fused_step_counts_all_layers_and_moves_weights_once",
    ),
    mutant(
        "bytes of a convolution without its weights", "csrc/ops/conv2d.h",
        "4 * (input_size() + weight_size() + k + output_size())",
        "4 * (input_size() + k + output_size())",
        "test_figures.py::test_a_convolution_moves_its_input_weights_bias_and_output",
    ),
    mutant(
        "a share of the kernels' time for one of the wall's", "cnn_engine/report/profile.py",
        "units.share(seconds, profile.wall_s)", "units.share(seconds, profile.kernel_s)",
        "test_figures.py::test_a_share_of_the_wall_time_is_of_the_wall_time",
    ),
    # ---- the measurement tools ----
    mutant(
        "another constant than Hansen's", "cnn_engine/transfer/regression.py",
        "HANSEN_95 = 7.35", "HANSEN_95 = 6.5",
        "test_figures.py::test_the_break_s_interval_has_what_the_likelihood_ratio_does_not_refuse",
    ),
    mutant(
        "ends that are held out", "cnn_engine/transfer/regression.py",
        "choice(len(batches) - 2, count, replace=False) + 1",
        "choice(len(batches), count, replace=False)",
        "test_figures.py::test_the_ends_are_never_held_out",
    ),
    mutant(
        "the peak of the slowest sample", "cnn_engine/transfer/analysis.py",
        'peak["bytes"] / min(peak["seconds"])', 'peak["bytes"] / max(peak["seconds"])',
        "test_figures.py::test_the_peak_is_the_fastest_copy",
    ),
    mutant(
        "utilisation of the passes without what is between", "cnn_engine/characterize/measure.py",
        "busy_s / passes.span_s", "busy_s / sum(passes.seconds)",
        "test_figures.py::test_profiled_utilisation_is_kernels_by_the_time_of_all_profiled_passes",
    ),
    mutant(
        "use of the CPU not divided by threads", "cnn_engine/characterize/measure.py",
        "cpu_s / (wall_s * load.threads)", "cpu_s / wall_s",
        "test_figures.py::test_cpu_use_is_of_the_threads_and_of_the_machine",
    ),
    mutant(
        "a peak of arithmetic that is doubled", "csrc/cpu/fused/pointwise.cpp",
        "return 2.0 * kWide * chains * static_cast<double>(iterations);",
        "return 4.0 * kWide * chains * static_cast<double>(iterations);",
        "test_fused_cpu.py::test_fma_peak_is_what_a_product_of_matrices_comes_near",
    ),
    mutant(
        "a peak of arithmetic that is doubled, CUDA", "csrc/cuda/common/fma_peak.cu",
        "1e3 * blocks", "2e3 * blocks", "test_fused_cuda.py::test_fma_peak", gpu=True,
    ),
    # ---- memory and files ----
    mutant(
        "a batch refused four bytes late", "cnn_engine/plan/arenas.py",
        "wanted > (free := owner.free_memory())", "wanted > 4 + (free := owner.free_memory())",
        "test_predict.py::test_a_batch_is_refused_from_the_first_byte_that_is_not_free",
    ),
    mutant(
        "ReLU over the caller's images", "cnn_engine/plan/memory.py",
        "dies = held.arena is not None and held.last == index",
        "dies = held.arena is None or held.last == index",
        "test_predict.py::test_nothing_is_written_but_the_rows_of_out",
    ),
    mutant(
        "an output over the images, after a call alike", "cnn_engine/engine/outputs.py",
        "and not np.may_share_memory(out, images)", "",
        "test_predict.py::test_an_out_inside_the_images_is_refused_by_a_call_like_the_last_one",
    ),
    Mutant(
        "files written without a temporary name", "cnn_engine/io/files.py",
        (("temporary = _beside(path)", "temporary = path"),
         ("_NEW, 0o666", "os.O_WRONLY | os.O_CREAT, 0o666")),
        "tests/measure/test_figures.py::test_until_a_file_is_whole_its_name_is_that_of_what_was_there",
        within="def atomic_write(",
    ),
    # ---- infer ----
    mutant(
        "a sample's second image is lost", "cnn_engine/infer/readers.py",
        "images.append(member)", "images[:] = images or [member]",
        "test_infer_columns.py::test_every_image_of_a_sample_has_its_row_and_label",
    ),
    mutant(
        "of equal numbers the highest classes are on top", "cnn_engine/infer/output.py",
        'np.argsort(-rows, axis=1, kind="stable")[:, :top]',
        'np.argsort(rows, axis=1, kind="stable")[:, ::-1][:, :top]',
        "test_infer_columns.py::test_of_equal_numbers_the_lowest_classes_are_on_top",
    ),
    mutant(
        "of equal numbers any class is on top", "cnn_engine/infer/output.py",
        'axis=1, kind="stable"', "axis=1",
        "test_infer_columns.py::test_of_equal_numbers_the_lowest_classes_are_on_top",
    ),
    mutant(
        "logits are called probabilities", "cnn_engine/infer/columns.py",
        "if engine.gives_probabilities else OUTPUTS", "",
        "test_infer_columns.py::test_columns_call_probabilities_what_a_softmax_gives_alone",
    ),
    mutant(
        "an input again by a symbolic link", "cnn_engine/infer/sources.py",
        "os.path.split(os.path.realpath(path))", "os.path.split(os.path.abspath(path))",
        "test_infer_hostile.py::test_inputs_that_are_one_file_by_links_are_refused[symbolic]",
    ),
    mutant(
        "an input again by a hard link", "cnn_engine/infer/sources.py",
        " or there.st_nlink > 1", "",
        "test_infer_hostile.py::test_inputs_that_are_one_file_by_links_are_refused[hard]",
    ),
    mutant(
        "row groups that overfill a shard", "cnn_engine/infer/shards.py",
        "if images and nbytes + size > shard_bytes:", "if images and nbytes > shard_bytes:",
        "test_infer_hostile.py::test_row_groups_never_overfill_a_shard",
    ),
    mutant(
        "a line glued to one that was cut off", "cnn_engine/infer/output_dir.py",
        'os.write(self._ledger, b"\\n")', "pass",
        "test_infer_resumed.py::test_a_line_behind_one_that_was_cut_off_is_read",
    ),
    mutant(
        "a shard of another run is done again", "cnn_engine/infer/output_dir.py",
        "if output.is_of_others(", "if False and output.is_of_others(",
        "test_infer_resumed.py::test_files_of_another_run_are_refused_and_kept",
    ),
    mutant(
        "bad images are throughput", "cnn_engine/infer/summary.py",
        "rate = (rows - errors) / self.working_s", "rate = rows / self.working_s",
        "test_infer_figures.py::test_throughput_is_of_good_images",
    ),
    # ---- threads and instructions of the CPU ----
    mutant(
        "a busy pool drops work", "csrc/runtime/parallel.cpp",
        "for (int i = 0; i < shared.ranges; ++i) {", "for (int i = 0; i < 1; ++i) {",
        "test_threads.py::test_a_busy_pool_drops_no_work",
    ),
    mutant(
        "threads that loops never use", "csrc/runtime/parallel.cpp",
        "if (turn.threads == 1) {", "if (turn.threads >= 1) {",
        "test_threads.py::test_two_threads_are_two_and_wake_up[layered]",
    ),
    mutant(
        "workers that are never woken", "csrc/runtime/thread_pool.cpp",
        "changed.notify_one();", ";",
        "test_threads.py::test_two_threads_are_two_and_wake_up[fused]",
    ),
    mutant(
        "a child has its parent's pool", "csrc/runtime/thread_pool.cpp",
        "void forget_pool() { pool.store(nullptr); }", "void forget_pool() {}",
        "test_threads.py::test_a_forked_child_has_its_own_threads",
    ),
    mutant(
        "AVX-512 switched off", "csrc/cpu/dispatch.cpp",
        'sets[count++] = {"avx512", &avx512::kernels, &avx512::fused_kernels};', ";",
        "test_fused_cpu.py::test_the_widest_instruction_set_of_this_cpu_is_used",
    ),
    mutant(
        "Winograd's sums for what is not finite", "csrc/cpu/fused/network.cpp",
        "pixels.is_uint8 || kernels.finite(", "true || kernels.finite(",
        "test_fused_cpu.py::test_without_layers_to_take_them_images_that_are_not_finite_are_refused",
    ),
    Mutant(
        "Python's lock is kept", "csrc/bindings/no_gil.h",
        (("state_(PyEval_SaveThread())", "state_(nullptr)"),
         ("PyEval_RestoreThread(state_);", "")),
        "tests/engine/test_threads.py::test_python_goes_on_while_a_pass_runs",
        within="class NoGil {",
    ),
    # ---- resizing ----
    mutant(
        "Resize's size in float64", "cnn_engine/graph/onnx/converters/normalising.py",
        "math.floor(np.float32(size) * scale)", "math.floor(size * float(scale))",
        "test_resize.py::test_sizes_and_nearest_places_by_scales_are_onnx_runtimes",
    ),
    mutant(
        "a place by sizes in float64", "cnn_engine/operators/resize.py",
        "return above // below, above % below / below",
        "at = above * (1 / below); return np.floor(at).astype(int), at % 1",
        "test_resize.py::test_the_nearest_place_by_sizes_is_exact",
    ),
    mutant(
        "an image resized to a side rounded up", "cnn_engine/io/preprocess.py",
        "int(self.resize * max(rows, columns) / min(rows, columns))",
        "-int(-self.resize * max(rows, columns) // min(rows, columns))",
        "test_images.py::test_the_longer_side_is_rounded_down",
    ),
    # ---- kernels of a user's own, and what is kept of them ----
    mutant(
        "a kernel never tried at its pages' start", "cnn_engine/kernel/sandbox.py",
        "for at_end in (True, True, False):", "for at_end in (True, True, True):",
        "test_kernel_bad.py::test_cpp_is_answered_in_one_line[reads before]",
    ),
    mutant(
        "shared memory that a kernel can cut off", "cnn_engine/kernel/memory.py",
        "fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL", "fcntl.F_SEAL_SEAL",
        "test_kernel_sandbox.py::test_a_kernel_that_ends_its_trial_gets_a_line[cuts the shared memory off]",
    ),
    mutant(
        "a cached file of another user", "cnn_engine/io/cache.py",
        "if found.st_uid != user:", "if found.st_uid == -1:",
        "test_cache.py::test_an_entry_of_another_user_is_absent",
    ),
    mutant(
        "a cached file without its digest", "cnn_engine/io/cache.py",
        "return data if content[:_HEAD_BYTES] == _head(data) else None", "return data",
        "test_cache.py::test_a_damaged_entry_is_absent_and_made_anew",
    ),
    mutant(
        "one level for all groups of equal kernels", "cnn_engine/kernel/rank.py",
        "(1 - statistics.CONFIDENCE) / (kernels // 2)", "1 - statistics.CONFIDENCE",
        "test_kernel_rank.py::test_the_test_is_students_of_pairs",
    ),
]  # fmt: skip


class Tree:
    """A copy of the project, whose modules are compiled again where a fault is in C++."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "--deduplicate"], cwd=ROOT,
            stdout=subprocess.PIPE, text=True, check=True,
        ).stdout.split("\n")  # fmt: skip
        modules = [str(path.relative_to(ROOT)) for path in ROOT.glob("cnn_engine/_*.so")]
        for name in filter(None, (*listed, *modules)):
            if (ROOT / name).is_file() and not name.startswith("benchmarks/results/"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        self._configured = False

    def build(self, gpu: bool) -> None:
        """Compiles what has changed."""
        build = self.root / "build-mutants"
        if not self._configured:
            subprocess.run(
                ["cmake", "-S", self.root, "-B", build, "-G", "Ninja",
                 f"-DPython_EXECUTABLE={sys.executable}", "-DCNN_ENGINE_OPENACC=off",
                 f"-DCNN_ENGINE_CUDA={'on' if gpu else 'off'}"],
                stdout=subprocess.DEVNULL, check=True,
            )  # fmt: skip
            self._configured = True
        subprocess.run(["cmake", "--build", build], stdout=subprocess.DEVNULL, check=True)

    def passes(self, test: str) -> bool:
        """Whether ``test`` passes here."""
        environment = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
        process = subprocess.Popen(
            command, cwd=self.root, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # with the children that wait
            process.communicate()
            return False
        if process.returncode == 0 and " passed" not in out:
            raise SystemExit(f"{test}: expected a test that runs here, found:\n{out}")
        if process.returncode not in (0, 1):
            raise SystemExit(f"{test}: expected a test, found:\n{out}")
        return process.returncode == 0


def survivors(chosen: list[Mutant], root: Path) -> list[str]:
    """Makes every fault of ``chosen`` in a copy of the tree, and returns the names of those not noticed."""
    tree, found = Tree(root), []
    if any(one.compiled for one in chosen):
        tree.build(any(one.gpu for one in chosen))
    for test in sorted({one.test for one in chosen}):
        if not tree.passes(test):
            raise SystemExit(f"{test}: expected to pass without a fault")
    for one in chosen:
        path = root / one.path
        text = path.read_text(encoding="utf-8")
        one.apply(root)
        if one.compiled:
            tree.build(one.gpu)
        killed = not tree.passes(one.test)
        print(f"{'killed  ' if killed else 'SURVIVED'}  {one.name}: {one.test}", flush=True)
        if not killed:
            found.append(one.name)
        path.write_text(text, encoding="utf-8")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help="default: all that this machine can run")
    parser.add_argument("--list", action="store_true", help="print them and end")
    parser.add_argument("--gpu", action="store_true", help="those in CUDA too")
    options = parser.parse_args()
    if unknown := set(options.name) - {one.name for one in MUTANTS}:
        parser.error(f"expected names that --list has, found {sorted(unknown)}")
    chosen = [
        one for one in MUTANTS
        if (one.name in options.name or not options.name)
        and (options.gpu or options.list or not one.gpu)
    ]  # fmt: skip
    if options.list:
        for one in chosen:
            print(f"{one.name} ({one.path}): {one.test}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = survivors(chosen, Path(folder))
    print(f"{len(chosen) - len(found)} of {len(chosen)} killed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

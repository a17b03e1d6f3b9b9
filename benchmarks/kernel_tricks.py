"""Tries the published ways to fool a judge of kernels, and writes the page that lists the judge's answers.

``python -m benchmarks.kernel_tricks`` runs every coding of ``kernel_tricks.cpp`` as a submission. A trick
succeeds where the judge finds no fault and reports less than the time of the honest work.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cnn_engine import cli
from cnn_engine.io.files import write_text
from cnn_engine.kernel.cases import Case
from cnn_engine.kernel.expected import Series
from cnn_engine.kernel.process import Fault, Limits
from cnn_engine.kernel.sandbox import Trial
from cnn_engine.operators import KINDS

from . import result_file

SOURCE = Path(__file__).with_suffix(".cpp")
PAGE = Path(__file__).resolve().parents[1] / "docs/explanation/judging_kernels.md"

#: Where the page's generated part is.
MARKS = ("<!-- tricks: made by python -m benchmarks.kernel_tricks -->", "<!-- end of tricks -->")

#: Seconds of CPU time of the honest work of one call: WORK_S of the source.
WORK_S = 4e-3

#: Timed calls of each submission.
CALLS = 6

#: The layer that all submissions compute.
CASE = Case("linear", KINDS["linear"](), ((16, 64), (32, 64), (32,)))

LIMITS = Limits(seconds=3.0, memory=2 << 30)


@dataclass(frozen=True)
class Trick:
    """A way to fool a judge.

    Attributes:
        name: what a reader looks for.
        codings: how each of three submissions does it.
        defence: what stops it.
    """

    name: str
    codings: tuple[str, str, str]
    defence: str


#: The trick whose submissions have a constructor.
AT_LOAD = "code that runs when it is loaded"

#: In the order of the source's numbers, from 1.
TRICKS = (
    Trick("more CPUs than granted", ("a thread per call", "a thread that waits spinning", "OpenMP"),
          "CPU time of all threads is shared among `--threads` CPUs, and counts where it is more"),
    Trick("works on after the call returned", ("a detached thread", "a thread that polls",
                                               "a timer's signal"),
          "the process is stopped before outputs are read; the judge's clock runs until then"),
    Trick("lazy results", ("each call does the last one's work", "every fourth does four", "when woken up"),
          "outputs are poisoned before a request and compared before the next one"),
    Trick("changed timers", ("the worker's function replaced", "the C library's clock overwritten",
                             "a clock a thousand times slower"),
          "time is counted by the judge's clock and by the system's CPU time too"),
    Trick("a report of its own", ("the worker's answer replaced", "printed", "written to the pipe"),
          "answers carry a number that the request had; their times are compared as above"),
    Trick("outputs of the last call", ("left in y", "copied from elsewhere", "all but one number left"),
          "every buffer of y is poisoned before every call; buffers rotate"),
    Trick("caching by pointer", ("x", "x and y", "x and the weight's page"),
          "buffers are used again with other inputs"),
    Trick("caching by input", ("all of x", "the first numbers", "inputs that are nearly the same"),
          "no inputs are used twice in timed calls"),
    Trick("reads the expected output", ("the judge's memory", "by process_vm_readv", "Python's objects"),
          "only the judge has it: another process, which cannot be read or traced"),
    Trick("lower precision than declared", ("bfloat16", "tf32", "8-bit integers"),
          "the tolerance follows from float32's rounding of this very case"),
    Trick("works only when checked", ("after the first calls", "one call in two", "one image in a batch"),
          "each timed call is compared: three in full, one unknown image of every other"),
    Trick("ends early", ("_exit(0)", "exit(0)", "SIGTERM to itself"),
          "an answer is missing: that is a fault, whatever the exit code"),
    Trick("writes past the output", ("behind", "before", "after it opened the guard page"),
          "pages around buffers cannot be touched; bytes around outputs are compared"),
    Trick("changes its inputs", ("writes", "makes them writable first", "through /proc/self/mem"),
          "inputs are mapped read-only and compared after the call"),
    Trick("slows the others down", ("a child that spins", "threads that spin", "stops or renices all"),
          "no processes, no signals, no priorities; kernels run one after another; all ends with the trial"),
    Trick("signal handlers", ("faults hidden", "work in a handler", "no signal ends it"),
          "the judge looks at memory, time and outputs; SIGKILL and SIGSTOP have no handlers"),
    Trick("works before it is asked", ("a thread that spins on x", "a thread that polls x",
                                       "the first call of a request works for all"),
          "inputs are written while the process is stopped; the mean of a request's calls counts"),
    Trick("works while it is stopped", ("a timer continues it", "a thread continues it",
                                        "threads continue its thread"),
          "SIGCONT is not its to send; CPU time between requests counts in the next one"),
    Trick(AT_LOAD, ("ends the process", "changes the clock", "starts a thread"),
          "it is loaded in the confined process, which is stopped and counted from then on"),
    Trick("floods", ("text", "processes and threads", "memory"),
          "output, memory, threads and time have limits; no processes"),
    Trick("other memory in the place of the judge's", ("zeros for x", "its own pages for y",
                                                       "all buffers, by their descriptor"),
          "the judge reads its own mapping of the memory, and compares the inputs in it"),
    Trick("a floating-point mode that stays", ("rounds toward zero", "rounds up", "flushes denormals"),
          "the judge computes in a process of its own; later calls in the worker are compared all the same"),
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What the judge made of a submission.

    Attributes:
        fault: the line that it gave, or None.
        seconds: of a call, or None.
    """

    fault: str | None
    seconds: float | None = None

    @property
    def fooled(self) -> bool:
        """Whether the submission got away with less than the honest work."""
        return self.fault is None and self.seconds < WORK_S / 2

    @property
    def text(self) -> str:
        """The verdict as the page has it."""
        if self.fault is None:
            return "FOOLED" if self.fooled else "its work is counted in full"
        return self.fault


def submission(folder: Path, number: int) -> Path:
    """Writes the submission of a number (10 * trick + coding; 0: honest); returns its path.

    They differ in a comment only, so that all are compiled once; but for :data:`AT_LOAD`.
    """
    path = folder / f"trick_{number}.cpp"
    text = SOURCE.read_text(encoding="utf-8")
    text = text.replace("shape, 0);", f"shape, {number});", 1)
    trick, coding = divmod(number, 10)
    if trick and TRICKS[trick - 1].name == AT_LOAD:
        text += f"""__attribute__((constructor)) static void at_load() {{ loaded({coding}); }}\n"""
    path.write_text(text, encoding="utf-8")
    return path


def judged(path: Path) -> Verdict:
    """Has a submission checked and timed."""
    series = Series(CASE, CALLS).within("float32")
    try:
        with Trial(str(path), "cpu", 1, LIMITS) as trial:
            trial.check(CASE, series[0])
            return Verdict(None, float(np.median(trial.time(series, CALLS))))
    except Fault as fault:
        return Verdict(str(fault))


def table(verdicts: dict[int, Verdict]) -> str:
    """Returns the page's table."""
    lines = ["| trick | coding | what stops it | the judge's answer |", "|---|---|---|---|"]
    for index, trick in enumerate(TRICKS, 1):
        for coding, name in enumerate(trick.codings):
            head = (trick.name, trick.defence) if coding == 0 else ("", "")
            answer = verdicts[10 * index + coding].text.replace("|", "\\|")
            lines.append(f"| {head[0]} | {name} | {head[1]} | {answer} |")
    return "\n".join(lines)


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs all codings; returns 1 where one succeeded."""
    parser = result_file.parser("kernel_tricks", __doc__)
    parser.add_argument("--page", action="store_true", help=f"write the table into {PAGE.name}")
    parser.add_argument("--only", type=int, nargs="*", help="numbers: 10 * trick + coding")
    options = parser.parse_args(arguments)
    numbers = options.only or [
        10 * index + coding for index in range(1, len(TRICKS) + 1) for coding in range(3)
    ]
    verdicts = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            verdicts[number] = judged(submission(Path(folder), number))
            trick = TRICKS[number // 10 - 1]
            print(f"{number}: {trick.name}, {trick.codings[number % 10]}: {verdicts[number].text}")
    if options.page:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        content = f"{MARKS[0]}\n\n{table(verdicts)}\n\n{MARKS[1]}"
        write_text(str(PAGE), before + content + after)
    return int(any(verdict.fooled for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Wall time and peak memory of commands, each in a process of its own.

    python benchmarks/examine.py [--full] [--large]

`--large` makes a random bfloat16 checkpoint of 1.5 billion parameters (3 GB on disk) and examines it too.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def measure(name, *command):
    """Run a command; print its seconds and its peak resident memory."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    scale = 1 if sys.platform == "darwin" else 1024
    print(
        f"{name:<46} {seconds:8.2f} s   {usage.ru_maxrss * scale / 2**30:6.2f} GiB   status {os.waitstatus_to_exitcode(status)}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the standard level with 8,192 tokens too")
    parser.add_argument("--large", action="store_true", help="a random model of 1.5 billion parameters too")
    args = parser.parse_args()
    assay = [sys.executable, "-c", "from assay.cli import main; main()"]
    with tempfile.TemporaryDirectory() as folder:
        for light in (["--help"], ["methods"], ["--version"]):
            measure("assay " + " ".join(light), *assay, *light)
        measure(
            "examine builtin:tiny-lm --quick", *assay, "examine", "builtin:tiny-lm", "--quick", "--out", f"{folder}/a"
        )
        measure(
            "examine builtin:smollm2 --quick", *assay, "examine", "builtin:smollm2", "--quick", "--out", f"{folder}/b"
        )
        if args.full:
            measure(
                "examine builtin:smollm2 (8,192 tokens)", *assay, "examine", "builtin:smollm2", "--out", f"{folder}/c"
            )
        if args.large:
            make = [sys.executable, str(SCRIPTS / "make_random_checkpoint.py"), "--out", f"{folder}/big"]
            measure("make a checkpoint of 1.5 B", *make)
            measure("examine it --quick", *assay, "examine", f"{folder}/big", "--quick", "--out", f"{folder}/d")


if __name__ == "__main__":
    main()

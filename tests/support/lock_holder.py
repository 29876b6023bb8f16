"""A process that runs a neuron, as far as its lock goes: `python -m tests.support.lock_holder HOME`.

It prints `held` when it has the lock, or the reason why not, and holds it until its input ends.
"""

import subprocess
import sys
from pathlib import Path

from templar.errors import PermanentError
from templar.neuron.lock import NeuronLock

ROOT = Path(__file__).parents[2]


def start(home):
    command = [sys.executable, "-m", "tests.support.lock_holder", str(home)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main():
    try:
        lock = NeuronLock(Path(sys.argv[1]))
    except PermanentError as error:
        print(error, flush=True)
        return
    print("held", flush=True)
    sys.stdin.read()
    lock.release()


if __name__ == "__main__":
    main()

"""The process that a network on an endpoint lives in: `python -m lab.gauntlet.host FOLDER`.

The order is one line of JSON on stdin. Lines of JSON on stdout report the progress; the last one has the judgements or
the error. The process and its children end on SIGTERM and at the end of stdin, when nobody waits for the answer.
"""

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from lab.gauntlet.network import run_network
from lab.gauntlet.order import JUDGEMENTS, Order
from templar import interrupt
from templar.errors import PermanentError, TemplarError

_saying = threading.Lock()


def main() -> int:
    """Run one network; 1 if it could not be run."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, _stop)
    try:
        return _run()
    finally:  # also a server that was just starting when the signal came
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


def _run() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    try:
        order = Order.from_json(sys.stdin.readline())
        threading.Thread(target=_stop_at_the_end, name="lifeline", daemon=True).start()
        judgements = run_network(order, Path(sys.argv[1]), lambda text, share: _say(said=text, share=share))
    except KeyboardInterrupt:
        return 130
    except TemplarError as error:
        _say(error=error.reason.value, message=error.message, permanent=isinstance(error, PermanentError))
        return 1
    _say(judgements=JUDGEMENTS.dump_python(judgements, mode="json"))
    return 0


def _say(**words: Any) -> None:
    with _saying:
        print(json.dumps(words), flush=True)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    interrupt.request_stop()  # the nodes' threads see it at their next wait
    raise KeyboardInterrupt


def _stop_at_the_end() -> None:
    """Stop at the end of stdin: the process that gave the order has closed it, or died."""
    while sys.stdin.readline():
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())

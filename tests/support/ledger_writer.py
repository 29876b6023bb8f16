"""A process that writes to a ledger: `python -m tests.support.ledger_writer PATH FIRST_SEED NUM_HOTKEYS ROUNDS`.

It registers its own hotkeys, then commits under each of them in turn, and prints every step that the ledger has
acknowledged.
"""

import sys
from pathlib import Path

from lab.hotkeys import hotkey_from_seed
from templar.chain.ledger import Ledger


def commitment(number, round_):
    return f"{number}:{round_}".ljust(128, ".")


def _say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main():
    path, first, count, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    ledgers = {
        number: Ledger(path, hotkey=hotkey_from_seed(number.to_bytes(32))) for number in range(first, first + count)
    }
    for number, ledger in ledgers.items():
        uid = ledger.register(hotkey_from_seed(number.to_bytes(32)).address, stake=float(number), validator_permit=True)
        _say("registered", number, uid)
    for round_ in range(rounds):
        for number, ledger in ledgers.items():
            ledger.set_commitment(commitment(number, round_))
            _say("committed", number, round_)


if __name__ == "__main__":
    main()

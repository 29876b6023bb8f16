"""How far behind a validator says that miners were, held against their proofs as they lie there afterwards."""

from templar.errors import Reason, TransientError
from templar.exchange.absence import may_have_expired
from templar.exchange.keys import Kind, window_key
from templar.neuron.hindsight import Hindsight
from templar.neuron.node import Node
from templar.scoring.differences import Difference, shown
from templar.scoring.evidence import MinerFacts, WindowFacts


def compare_proofs(
    node: Node, seen: Hindsight, published: WindowFacts, recomputed: WindowFacts, validator: int
) -> tuple[tuple[Difference, ...], dict[int, str]]:
    """Hold how far behind miners are said to have been against their proofs as they lie there now.

    A proof that came, or changed, after it was looked at tells nothing of that.

    Returns:
        What differs; and by uid, why it cannot be told of somebody.

    Raises:
        TransientError: A proof cannot be read now.
    """
    again = {miner.uid: miner for miner in recomputed.miners}
    differences: list[Difference] = []
    untold: dict[int, str] = {}
    for miner in published.miners:
        now = again.get(miner.uid)
        if now is None or None in (miner.payload_sha256, now.payload_sha256):
            continue
        if miner.windows_behind != now.windows_behind:
            found = _compare_proof(node, seen, miner, now, validator)
            if isinstance(found, str):
                untold[miner.uid] = found
            else:
                differences.append(found)
    return tuple(differences), untold


def _compare_proof(node: Node, seen: Hindsight, miner: MinerFacts, now: MinerFacts, validator: int) -> Difference | str:
    """The difference of one miner; why it cannot be told whether there is one, if so."""
    if miner.windows_behind is None:
        return "it is said that its proof could not be read then"
    if now.windows_behind is None:
        raise TransientError(Reason.STORE_UNREACHABLE, f"the proof of uid {miner.uid} cannot be read now")
    suspects = [validator]
    author, window = node.exchange.metagraph(seen.window).by_uid(miner.uid), seen.window - 1
    if author is not None and window != node.birth.mark.window:
        info = node.buckets.reader(author).head(window_key(Kind.PROOF, window, miner.uid))
        if info is not None and info.last_modified > seen.rules.times.settles:
            return f"{miner.windows_behind} windows behind then; its proof was stored after that"
        if info is None and may_have_expired(node.exchange, author, window):
            return f"{miner.windows_behind} windows behind then; its proof may have expired"
        suspects += [] if info is not None else [miner.uid]
    where = f"miners[uid {miner.uid}].facts.windows_behind"
    return Difference(where, shown(miner.windows_behind), shown(now.windows_behind), tuple(suspects))

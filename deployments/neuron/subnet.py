"""The doctor's lines on the subnet's settings and on backups that a swapped hotkey left (docs/subnet.md).

Each function returns what is good, or raises: `DoubtError` for what may be meant so, a `PermanentError` for what keeps
the neuron from working or earning.
"""

from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO

from templar.chain.base import Chain, SubnetRules
from templar.chain.extrinsics import LARGEST_U16
from templar.chain.hotkey import Signer
from templar.errors import PermanentError, Reason, RejectedError
from templar.exchange.encryption import CHUNK_BYTES, HEADER_BYTES, TAG_BYTES, Binding, decrypt
from templar.hparams import HParams
from templar.neuron.backup import list_backups
from templar.store.base import ObjectStore

TRIED_RUNTIMES = (435,)  # versions of the chain's runtime that this release's tests have the shapes and rules of
YUMA = "Yuma"


class DoubtError(Exception):
    """Something that is doubtful."""


def looks_at_subnet(chain: Chain, hparams: HParams) -> Iterator[tuple[str, Callable[[], str]]]:
    """Topics, and what looks at each; none on a chain that has no settings."""
    if (rules := chain.rules()) is None:
        return
    yield "runtime", partial(_runtime, rules)
    yield "consensus", partial(require_yuma, chain)
    yield "emission", partial(_emission, rules, chain.netuid)
    yield "epochs", partial(_epochs, chain)
    yield "rate limits", partial(_rates, chain, rules, hparams)
    yield "largest weight", partial(_largest_weight, rules, hparams)


def require_yuma(chain: Chain) -> str:
    """Refuse (`bad_environment`) a subnet that does not pay by Yuma consensus: it has room for one validator."""
    rules = chain.rules()
    if rules is None or rules.consensus == YUMA:
        return f"{YUMA}: each validator's weights count by its stake"
    reason = "where only the hotkey with the most stake has a validator permit"
    remedy = f"btcli hparams set --netuid {chain.netuid} --name epoch_consensus --value {YUMA}"
    problem = f"subnet {chain.netuid} pays by {rules.consensus} consensus, {reason}: its owner sets {YUMA} ({remedy})"
    raise PermanentError(Reason.BAD_ENVIRONMENT, f"{problem}, or choose another NETUID")


def _runtime(rules: SubnetRules) -> str:
    tried = ", ".join(map(str, TRIED_RUNTIMES))
    if rules.spec_version not in TRIED_RUNTIMES:
        remedy = "look for a newer release if the chain refuses extrinsics or an answer cannot be understood"
        raise DoubtError(f"version {rules.spec_version}, and this release was tried with {tried}: {remedy}")
    return f"version {rules.spec_version}, with which this release was tried"


def _emission(rules: SubnetRules, netuid: int) -> str:
    if not rules.started:
        raise DoubtError(
            f"the subnet is not started, nobody can stake on it: its owner runs btcli hparams start --netuid {netuid}"
        )
    if not rules.emission:
        raise DoubtError("the chain's root has not enabled emission for the subnet: it earns no TAO")
    return "the subnet is started, and root lets it earn"


def _epochs(chain: Chain) -> str:
    schedule, head = chain.weights_schedule(), chain.head()
    if schedule.next_epoch is None:
        raise DoubtError("the subnet's tempo is 0: it has no epochs, and weights never take effect")
    hidden = (
        f"hidden for {schedule.reveal_epochs} epochs (commit-reveal)" if schedule.reveal_epochs else "shown at once"
    )
    return (
        f"every {schedule.epoch_blocks} blocks, the next in {max(0, schedule.next_epoch - head)}; weights are {hidden}"
    )


def _rates(chain: Chain, rules: SubnetRules, hparams: HParams) -> str:
    interval = hparams.weights.windows_per_weights * hparams.windows.blocks_per_window
    interval = max(interval, chain.weights_schedule().epoch_blocks)
    text = (
        f"weights every {rules.weights_rate_limit} blocks, and validators send them every {interval}; a role every "
        f"{rules.serving_rate_limit}"
    )
    if rules.weights_rate_limit > interval:
        raise DoubtError(f"{text}: some are refused [{Reason.CHAIN_RATE_LIMITED}] and sent later")
    return text


def _largest_weight(rules: SubnetRules, hparams: HParams) -> str:
    """The burn uid gets `burn_rate`, and everything while nobody earns."""
    burn, share = hparams.weights.burn_uid, rules.largest_weight / LARGEST_U16
    if share >= 1:
        return "one uid may get everything"
    text = f"one uid may get {share:.4f} of all (max_weights_limit)"
    if burn is not None and hparams.weights.burn_rate > share:
        problem = f"{text}, and the preset gives uid {burn} {hparams.weights.burn_rate:g} (burn_rate)"
        remedy = "validators cannot set weights until the chain's root raises the limit"
        raise PermanentError(Reason.BAD_HPARAMS, f"{problem}: {remedy}")
    raise DoubtError(f"{text}: weights are refused while one miner, or the burn uid, has more")


def backups(store: ObjectStore, signer: Signer, *, netuid: int, genesis: str) -> str:
    """Whether this hotkey can read the backups in its bucket: one that it was swapped for another cannot."""
    found, foreign = list_backups(store), list[str]()
    for window, info in found:
        start = store.get_range(info.key, 0, min(info.size, HEADER_BYTES + CHUNK_BYTES + TAG_BYTES))
        binding = Binding(netuid, genesis, signer.address, window)
        try:
            next(decrypt(BytesIO(start), info.size, signer=signer, binding=binding))
        except RejectedError:
            foreign.append(info.key)
    if foreign:
        raise DoubtError(
            f"{', '.join(foreign)}: not readable with this hotkey. After a swap of the hotkey only the old key reads "
            "them, so keep it until the neuron has stored a new one; without a swap they are damaged"
        )
    return f"{len(found)} in the bucket, readable with this hotkey" if found else "none in the bucket yet"

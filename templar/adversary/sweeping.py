"""Cleaning every bucket of a network while it runs, by clocks that are wrong: the race with slow readers."""

from templar.adversary.chains import SkewedClock
from templar.adversary.observe import Watch
from templar.adversary.timing import SKEW_SECONDS
from templar.errors import TransientError
from templar.exchange.keys import Kind, parse_current_key
from templar.neuron.housekeeping import clean_bucket
from templar.simulate.stage import Member
from templar.simulate.world import START_WINDOW, World
from templar.windows import window_of


def sweep(world: World, watch: Watch, last: int) -> None:
    """Clean every bucket twice in every window, each by a clock half a minute ahead, right, or behind.

    Whatever goes before its time is written down: an object of one of the last `retention_windows` windows, or one
    that has no window.
    """
    rules = world.hparams.windows
    window_seconds = rules.blocks_per_window * rules.block_seconds
    for turn in range(2 * START_WINDOW, 2 * last + 1):
        world.clock.sleep_until(world.stage.genesis_time + (turn / 2 + 0.15) * window_seconds)
        for place, member in enumerate(world.members):
            if member.role != "burn":
                _clean(world, watch, member, (0.0, SKEW_SECONDS, -SKEW_SECONDS)[place % 3])


def _clean(world: World, watch: Watch, member: Member, skew_seconds: float) -> None:
    store = world.stage.open_store(member.account_id)
    before = {info.key for info in store.list()}
    oldest = window_of(world.chain.block(), world.hparams.windows) - world.hparams.storage.retention_windows
    try:
        clean_bucket(world.premises(member, SkewedClock(world.clock, skew_seconds)), dry_run=False)
    except TransientError:
        return  # by this clock the chain has not begun yet
    except Exception as error:  # noqa: BLE001 - however a clean-up ends, it is the verdict's to say so
        watch.crashes[f"clean-up of {member.name}"] = f"{type(error).__name__}: {error}"
    for name in sorted(before - {info.key for info in store.list()}):
        key = parse_current_key(name)
        if key is None or key.window is None or (key.window >= oldest and key.kind is not Kind.CHECKPOINT):
            watch.deleted.append(f"{member.name}/{name}")
        else:
            watch.swept += 1

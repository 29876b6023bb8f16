"""`gauntlet`: a network with attackers in it, and a verdict on each of them."""

from typing import Annotated

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import Field

from tasks.gauntlet import run_networks
from tasks.gauntlet_order import EndpointName, Order, Where
from templar.errors import Reason


@flow(name="gauntlet", flow_run_name="gauntlet on {where}, seed {seed}")
async def gauntlet(
    scenarios: list[str] | None = None,
    *,
    where: Where = "simulation",
    endpoint: EndpointName = "moto",
    miners: Annotated[int, Field(ge=1, le=64)] | None = None,
    attackers: Annotated[int, Field(ge=1, le=16)] = 1,
    windows: Annotated[int, Field(ge=1, le=100)] | None = None,
    seed: Annotated[int, Field(ge=0)] = 1,
) -> State[None]:
    """Run attacks and faults, and hold what came of them against what must come of them.

    Args:
        scenarios: Names of the catalogue; by default the named subset, one scenario for each kind of attack.
        where: `simulation`, on simulated time in this process; or `s3`, in real time on an S3 endpoint of its own,
            where every window of every node is a flow run.
        endpoint: Which S3 endpoint.
        miners: Miners of each network, attackers included; by default 11 on simulated time, and three honest ones
            beside the attackers on an endpoint.
        attackers: Attackers of each scenario.
        windows: Windows of each network at least; as many as the scenarios need by default.
        seed: Keys, blocks and assignments follow from it; on simulated time everything does.
    """
    judgements = run_networks(where, Order(tuple(scenarios or ()), miners, attackers, windows, seed, endpoint))
    failed = [judgement for judgement in judgements if not judgement.passed]
    if failed:
        first = failed[0]
        return Failed(
            message=f"[{Reason.NOT_AS_EXPECTED}] {len(failed)} of {len(judgements)} failed, the first: "
            f"{first.scenario}: {first.problems[0]}"
        )
    return Completed(message=f"{len(judgements)} of {len(judgements)} as expected: nothing honest was lost, one root")

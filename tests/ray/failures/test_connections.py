"""Cut connections to the mailbox, on a real Ray: calls are repeated, with their effect once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain_opt.pools.commands import Evaluate
from tests.support.echo import DRIVERS, TRAINED, Done
from tests.support.echo_pools import EchoPools, echo_pools
from tests.support.ray_leftovers import placement_groups

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]

# Ray's own fault injection: calls of actors fail before they are sent, while they are executed
# (as a cut connection, most often in a wait of hours), or with their answer lost; at least two of
# each kind in every worker.
CUTS = {
    "num_failures": 20,
    "req_failure_prob": 25,
    "in_flight_failure_prob": 25,
    "resp_failure_prob": 25,
    "num_lower_bound_req_failures": 2,
    "num_lower_bound_in_flight_failures": 2,
    "num_lower_bound_resp_failures": 2,
}


def test_workers_whose_connections_are_cut_execute_every_command_once(tmp_path: Path) -> None:
    cuts = json.dumps({"CoreWorkerService.grpc_client.PushTask": CUTS})
    environment = {"RAY_testing_rpc_failure": cuts}
    with echo_pools(tmp_path, workers=3, worker_environment=environment) as echo:
        execute_each_once(echo, range(10))
    assert placement_groups() == set()


def execute_each_once(echo: EchoPools, epochs: range) -> None:
    for epoch in epochs:
        if epoch % 2:
            replies = echo.workers.command(echo.main_train(epoch))
            assert echo.contents(replies) == dict.fromkeys(range(3), TRAINED)
        else:
            replies = echo.workers.command(Evaluate(echo.start))
            assert replies == dict.fromkeys(range(3), Done("evaluate", DRIVERS))
    assert echo.workers.new_events() == []

"""The two resident pools: processes that start once per run and then wait for commands.

Start with `commands` (the messages) and `interface` (what a run needs of its backend). On Ray:
`ray_pool` is the driver's side, `mailbox` the actor in between, `resident` the loop of a process.
`rounds` trains a round from the driver's side; `candidates` trains and scores candidates, on slots
and workers; `worker` does the rest of both; `programs` builds what runs in a process, `launcher`
starts both pools (`train_and_tune`), `state_store` keeps states. Without Ray: `in_process`. Ray
Tune gives slots placement, restarts and resources; they report no metrics to it. Of a slot that
died, `train_and_tune` starts another or reports it, `mailbox` repeats the command, `rounds` does
without.

May import train, cluster and what lies below. Ray stays out of `commands`, `interface`,
`rounds`, `in_process`, `candidates`, `worker` and `mailbox`.
"""

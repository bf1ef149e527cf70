"""One execution of a job, from its checks to its result.

Start reading at `driver.open_run`, which makes a run of these parts: `resume` (which run a job
continues), `workspace` (terminal, signals, run directory, lock), `backend` (where it computes:
`on_ray` with `start`, or `in_process`), `check` (problems, and facts of data and network),
`batch_size` (the search), `resolve` (the one value that everything below lives by) and `result`.
Then `training_run` has the moves that `driver.train` makes, with `progress`, `length`,
`checkpoint_schedule` and `callbacks`.

May import everything below: pools, async_training, report, cluster, recording, terminal, train,
search, data, models, optim, config; not `commands`, `cli`, `driver`; Ray in `on_ray` and `start`.
"""

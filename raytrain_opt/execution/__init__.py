"""One execution of a job, from preflight to result.

Start reading at `session` (what is opened, in which order), then `training_run` (the moves that
`driver.train` makes; `checkpoint_writer` saves them). `in_process` is the session without Ray.
Before the training: `preflight` (checks, and what a job resolves to), `resume`, `rescale` (rates
for a batch size), `batch_size` (the search). Around it: `progress`, `result`, `lock`, `signals`,
`log_markers`.

May import everything below: pools, async_training, report, cluster, recording, terminal, train,
search, data, models, optim, config. Nothing of `commands`, `cli` or `driver`.
"""

"""Pure decisions: results in, a decision with its reason out.

Start with `policy` (what a policy is), then `stpt` (the published rule) and `stpt_horizon` (the
default; `optimizer_race`, `peak_search`, `weight_decay` and `collapse` are parts).
`fixed_schedule` holds policies without candidates. `batch_size/` has the strategies of the
batch-size search; `factory` builds the policy and the strategy of a job.

May import config, optim's pure schedules, results and errors; no torch, Ray, files or clocks.
"""

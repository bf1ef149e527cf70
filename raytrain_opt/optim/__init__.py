"""Optimizers, schedules and scaling rules, each usable on its own in any training loop.

Start with `schedules` (learning rates as functions of the step, `scale_lr` for another batch) and
`epoch_steps` (updates of each epoch), which are free of torch; then `large_batch` (LARS,
RMSpropWarmup), `muon` and `averaging`. `factory` builds what the `optimizer` section of a job
names, with its parameter groups; `update` sets rate, momentum and weight decay, clips and takes
the step. May import config and errors.
"""

"""Asynchronous (stale-synchronous) data parallelism, all of it.

Start with `scheduler`: which worker computes which micro-batch, how old its weights may be, and
which gradients make an update (pure). `weight_shard` holds a part of the weights and applies
updates, `worker_loop` is what one worker does, `buffer_pooling` combines BatchNorm statistics
(torch, no Ray). On Ray: `actors` (coordinator and shards), `program`, `ray_backend` and `worker`
(worker processes), `main_training` (the driver's side).

May import pools and what lies below; only `execution.session` and
`execution.preflight` import this package.
"""

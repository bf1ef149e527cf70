"""Asynchronous data parallelism: every gradient is an update when it arrives. All of it.

Start with `scheduler`: which worker computes which micro-batch, and how old its weights may be
(pure). `weight_shard` holds a part of the weights, applies gradients, and lowers the rate for old
ones; `worker_loop` is what one worker does (torch, no Ray). On Ray: `actors` (coordinator, shards
and the workers' program), `worker` (worker processes), `main_training` (the driver's side).

May import pools and what lies below; only `execution.start` and `execution.check` import this
package.
"""

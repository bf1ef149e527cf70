"""What one process does in training: torch, without Ray.

Start with `learner`: model, optimizer, loss and data of one process, and the training loop
(`phase` and `evaluation` are parts of it). `kernels` chooses precision and compiling. A `state`
moves between processes, `checkpoint` writes it to disk. `data_parallel` connects the workers,
wraps the model for them and sums along `tree_sum`; `batch_norm` combines their running statistics.
`batch_size_probe` measures a batch size. It may import `monitoring`, `search`, `data`, `models`,
`optim` and everything below.
"""

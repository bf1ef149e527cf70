"""Batch-size strategies: measurements in, the next batch size to probe or the choice out.

Start with `strategy` (the protocol and its values). `throughput_knee` is ours, on the model of
`throughput_model`; `published` holds the two strategies of MBSO; `memory_bound` handles sizes
that do not fit into memory for all of them; `factory` builds a strategy from a job's section.

Everything here is pure: no Ray, processes, files or clocks. It may import `search.noise_scale`,
`config`, `results` and `errors`.
"""

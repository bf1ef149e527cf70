"""Batch-size strategies: measurements in, the next batch size to probe or the choice out.

Start with `strategy` (the protocol, its values, and the limits of memory). `throughput_knee` is
ours, with its model of speed; `published` holds the two strategies of MBSO;
`search.factory` builds a strategy from a job's section.

Everything here is pure: no Ray, processes, files or clocks. It may import `config`, `results`
and `errors`.
"""

"""Batch-size strategies: measurements in, the next batch size to probe or the choice out.

Start with `strategy` (the protocol, its values, and the limits of memory and updates).
`throughput_knee` is ours; `published` holds the two strategies of MBSO. May import what `search`
may.
"""

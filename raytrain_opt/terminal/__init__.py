"""Output for a user in the terminal.

Start with `progress`: the `Terminal` protocol, a progress bar for terminals, plain lines for logs,
and the summary at the end of a run. `probe_tables` prints the probes of a batch-size search.

May import `recording` and the foundations; neither torch nor Ray.
"""

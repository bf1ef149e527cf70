"""Output for a user in the terminal.

Start with `progress`: `Terminal` prints plain lines for logs, `Bar` shows a progress bar, and
`print_summary` ends a run.

May import `recording` and the foundations; neither torch nor Ray.
"""

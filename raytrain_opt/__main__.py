"""Run the command line: `python -m raytrain_opt` is the same as `raytrain-opt`."""

from __future__ import annotations

from raytrain_opt.cli import main

if __name__ == "__main__":
    main(prog_name="raytrain-opt")

"""Utilization of devices and of processes.

Start with `samplers`: the `Sampler` interface, CPU time, and a context manager that samples while
its block runs (the batch-size search uses it). `nvml` samples NVIDIA GPUs. `process_usage`
measures what a worker or slot uses during each command, for timeline.jsonl.

May import `config` and the foundations. torch, psutil and pynvml are imported only when needed.
"""

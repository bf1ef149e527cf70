"""Utilization of devices.

Start with `samplers`: the `Sampler` interface, CPU time, and a context manager that samples while
its block runs (the batch-size search uses it). `nvml` samples NVIDIA GPUs.

May import `config` and the foundations. torch, psutil and pynvml are imported only when needed.
"""

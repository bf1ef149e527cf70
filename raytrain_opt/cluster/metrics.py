"""Gauges in Ray's own metrics, for dashboards of a cluster (Prometheus, Grafana)."""

from __future__ import annotations

from ray.util.metrics import Gauge

from raytrain_opt.recording.records import EpochRecord

# Field of an epoch, and what the gauge shows. Ray puts "ray_" before the names.
_GAUGES = {
    "epoch": "Finished epochs.",
    "train_loss": "Mean training loss of the last epoch.",
    "test_metric": "The test metric that decides, such as the accuracy, 0..1.",
    "lr": "Learning rate of the last step.",
    "samples_per_s": "Samples per second of the last epoch, all workers together.",
}


class RayMetrics:
    """Sets the gauges raytrain_opt_NAME, with the tag `run`, after each epoch."""

    def __init__(self, run_id: str) -> None:
        self._gauges = {
            name: Gauge(f"raytrain_opt_{name}", text, tag_keys=("run",)).set_default_tags(
                {"run": run_id}
            )
            for name, text in _GAUGES.items()
        }

    def on_epoch(self, record: EpochRecord) -> None:
        for name, gauge in self._gauges.items():
            value = getattr(record, name)
            if value is not None:
                gauge.set(value)

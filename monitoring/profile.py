"""Trace some training steps, for Perfetto and chrome://tracing: `--profile STEPS`."""

from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from monitoring.attempts import Attempts

TRACE_NAME = "trace.json.gz"

# Steps before the traced ones, in which kernels are chosen and loaders start; in the last one the profiler warms up.
NUM_FIRST = 5

NUM_PRINTED = 10  # the longest operators


class StepProfile:
    """Traces steps of a run once, and then prints torch's table of the longest operators.

    Args:
        num_steps: number of steps to trace; 0 or None for none.
        folder: the folder for the trace.
        is_cuda: also trace the GPU.
    """

    def __init__(self, num_steps: int | None, folder: Path, *, is_cuda: bool) -> None:
        self.path, self._profiler, self._attempt = folder / TRACE_NAME, None, Attempts()
        self._is_cuda = is_cuda
        if num_steps:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
            steps = schedule(wait=NUM_FIRST - 1, warmup=1, active=num_steps, repeat=1)
            self._profiler = profile(activities=activities, schedule=steps, on_trace_ready=self._finish)

    def __enter__(self) -> "StepProfile":
        self._call("start")
        return self

    def __exit__(self, *_: Any) -> None:
        self._call("stop")
        if self._profiler is not None:
            print("warning: --profile: the run ended before there were steps to trace")

    def step(self) -> None:
        """Count a step."""
        self._call("step")

    def _call(self, method: str) -> None:
        """Call a method of the profiler if it is still needed; drop the profiler if the call fails."""
        if self._profiler is not None and not self._attempt("--profile", getattr(self._profiler, method)):
            self._profiler = None

    def _finish(self, profiler: profile) -> None:
        self._profiler = None
        profiler.export_chrome_trace(str(self.path))
        print(f"--profile: {self.path}, for https://ui.perfetto.dev or chrome://tracing")
        key = "self_device_time_total" if self._is_cuda else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=key, row_limit=NUM_PRINTED, max_name_column_width=80))

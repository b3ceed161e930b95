"""Trace some training steps, for Perfetto and chrome://tracing: `--profile STEPS`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from monitoring.attempts import Attempts

TRACE_NAME = "trace.json.gz"

# Steps before the traced ones, in which kernels are chosen and loaders start; in the last one the profiler warms up.
NUM_FIRST = 5

NUM_PRINTED = 10  # the longest operators


class StepProfile:
    """Traces steps of a run once, and then prints the longest operators and the share of idle time.

    Args:
        num_steps: number of steps to trace; 0 or None for none.
        folder: the folder for the trace.
        is_cuda: also trace the GPU.
    """

    def __init__(self, num_steps: int | None, folder: Path, *, is_cuda: bool) -> None:
        self.path, self._profiler, self._attempt = folder / TRACE_NAME, None, Attempts()
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
        print(_describe(profiler))


def _describe(profiler: profile) -> str:
    """Return lines about the traced steps: the share of time without an operator, and the longest operators."""
    events = profiler.events()
    steps = [event.time_range for event in events if _is_step(event) and event.device_type == DeviceType.CPU]
    begin, end = min(step.start for step in steps), max(step.end for step in steps)
    own = [event for event in events if not _is_step(event) and not event.is_user_annotation]
    on_device = [event for event in own if event.device_type != DeviceType.CPU]
    busy = _covered(((event.time_range.start, event.time_range.end) for event in on_device or own), begin, end)
    idle = f"{1 - busy / (end - begin):.0%}"
    where = f"the device was idle {idle} of the time" if on_device else f"{idle} of the time was outside operators"
    lines = [f"{len(steps)} steps of {(end - begin) / len(steps) / 1000:.1f} ms; {where}; the longest operators:"]
    name = "self_device_time_total" if on_device else "self_cpu_time_total"
    rows = [row for row in profiler.key_averages() if not _is_step(row) and not row.is_user_annotation]
    rows.sort(key=lambda row: getattr(row, name), reverse=True)
    for row in rows[:NUM_PRINTED]:
        spent = getattr(row, name)
        share, calls = spent / (end - begin), f"{row.count / len(steps):,.4g} calls"
        lines.append(f"  {share:6.1%}  {spent / len(steps) / 1000:9.2f} ms and {calls} a step  {row.key[:80]}")
    return "\n".join(lines)


def _is_step(event: Any) -> bool:
    return event.key.startswith("ProfilerStep")


def _covered(ranges: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Return the time between `begin` and `end` that at least one range covers."""
    covered, reached = 0.0, begin
    for start, stop in sorted(ranges):
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            covered, reached = covered + stop - start, stop
    return covered

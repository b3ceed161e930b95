"""Trace some training steps, for Perfetto and chrome://tracing: `--profile STEPS`."""

from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from errors import attempt

TRACE_NAME = "trace.json.gz"

# Steps before the traced ones, in which kernels are chosen and loaders start; in the last one the profiler warms up.
NUM_FIRST = 5

NUM_PRINTED = 10  # the longest operators


def build_profile(num_steps: int, folder: Path, *, is_cuda: bool) -> profile:
    """Return a profiler that traces so many steps into a folder, and then prints torch's table of the operators."""
    path = folder / TRACE_NAME

    def finish(profiler: profile) -> None:
        if attempt(f"--profile: {path} is not written", profiler.export_chrome_trace, str(path)):
            print(f"--profile: {path}, for https://ui.perfetto.dev or chrome://tracing")
        key = "self_device_time_total" if is_cuda else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=key, row_limit=NUM_PRINTED, max_name_column_width=80))

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    steps = schedule(wait=NUM_FIRST - 1, warmup=1, active=num_steps, repeat=1)
    return profile(activities=activities, schedule=steps, on_trace_ready=finish)

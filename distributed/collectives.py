"""Joining the process group, and collectives over gloo that wait for no device."""

import builtins
import datetime
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from distributed.joining import Meeting
from distributed.launch import Launch, read_launch
from distributed.lending import at_end
from distributed.watch import watchdog
from errors import UserError, counted, escaped

# Minutes that bookkeeping may wait, as while rank 0 saves to a slow disk. The stall watchdog ends a run that hangs.
PATIENCE_MIN = 24 * 60


class Joined:
    """This process among the others, as `join_processes` sets it."""

    rank = 0
    world_size = 1
    store: dist.Store | None = None  # to tell the other ranks of this one's end, once
    group: dist.ProcessGroup | None = None  # all ranks over gloo, with PATIENCE_MIN as timeout
    own: dist.ProcessGroup | None = None  # torch's default group, if this project has made it
    shared: tuple = ()  # another's default group that was joined, and what `world` is made for
    world: dist.ProcessGroup | None = None  # beside that: all ranks, for tensors of any device


joined = Joined()


def is_dist_avail_and_initialized() -> bool:
    """Tell whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def world_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks that carries CPU tensors and the device's; None for torch's default group."""
    return joined.world


def get_world_size() -> int:
    """Return the number of processes of the run."""
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1


def get_rank() -> int:
    """Return this process's number, from 0."""
    return dist.get_rank() if is_dist_avail_and_initialized() else 0


def is_main_process() -> bool:
    """Tell whether this is rank 0, the one that prints and writes."""
    return get_rank() == 0


def all_gather(rows: torch.Tensor, *, is_patient: bool = True) -> list[torch.Tensor]:
    """Return every rank's (n, ...) CPU tensor, of which n may differ. Collective: every rank must call it.

    They travel over gloo, so no device has to be waited for.

    Args:
        rows: this rank's tensor.
        is_patient: wait for other ranks for PATIENCE_MIN, and not only for as long as in a step.
    """
    if not is_dist_avail_and_initialized():
        return [rows]
    group = joined.group if is_patient else joined.world
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(get_world_size())]
    with watchdog.waiting():
        dist.all_gather(sizes, torch.tensor([len(rows)]), group=group)
        # gloo's all_gather takes tensors of one shape only.
        padded = rows.new_zeros(max(map(int, sizes)), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=group)
    return [tensor[: int(size)] for tensor, size in zip(gathered, sizes, strict=True)]


def interleave(parts: list[torch.Tensor], size: int = 1) -> torch.Tensor:
    """Merge parts to which rows were dealt in turn, `size` at a time; with 1, row j of part r is j * len(parts) + r."""
    order = sorted((row // size, part, row) for part, rows in enumerate(parts) for row in range(len(rows)))
    if not order:
        return parts[0]
    return torch.stack([parts[part][row] for _, part, row in order])


def broadcast_bytes(payload: bytes | None, src: int = 0, group: Any = None) -> bytes:
    """Give the bytes of rank `src` to every rank; what others pass is ignored. Collective: every rank must call it."""
    if not is_dist_avail_and_initialized():
        return payload
    is_source = get_rank() == src
    if group is None:
        group = joined.group
    # A process that does not know the size cannot receive; and one that was sent 0 bytes need not.
    size = torch.zeros(1, dtype=torch.int64)
    if is_source:
        size[0] = len(payload)
    with watchdog.waiting():
        dist.broadcast(size, src=src, group=group)
    if size == 0:
        return b""
    buffer = numpy.empty(int(size), numpy.uint8)
    if is_source:
        buffer[:] = numpy.frombuffer(payload, numpy.uint8)
    # In parts of 256 MiB: a slow network must show progress before the stall watchdog loses patience.
    for part in torch.from_numpy(buffer).split(1 << 28):
        with watchdog.waiting():
            dist.broadcast(part, src=src, group=group)
    return payload if is_source else buffer.tobytes()


def gather_plain(value: Any) -> list:
    """Return every rank's value, anything that JSON can hold. Collective: every rank must call it."""
    # torch's `all_gather_object` pickles: whoever reaches the port could run code in every process.
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(part.numpy().tobytes()) for part in all_gather(text)]


def call_on_master(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on rank 0, and give every rank its result, as JSON. Collective; errors as of `call_on`."""
    return gather_plain(call_on([0], function, *args))[0]


def call_on(ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on some ranks; return its result there, None elsewhere. Collective: every rank must call it.

    For work on files, which ranks on other machines may not even see.

    Raises:
        UserError: the function's own, or the text of its OSError, on every rank.
    """
    result = refusal = None
    if get_rank() in ranks:
        try:
            result = function(*args)
        # Raised here alone, it would leave the other ranks waiting in their next collective.
        except (UserError, OSError) as error:
            refusal = [str(error), getattr(error, "exit_code", UserError.exit_code)]
    for answer in gather_plain(refusal):
        if answer is not None:
            text, exit_code = answer
            raise UserError(text, exit_code=exit_code)
    return result


def setup_for_distributed(is_master: bool) -> None:
    """Let `print` print on the master only; `print(..., force=True)` prints anywhere. May be called again.

    A terminal obeys control characters, and names of classes, files and metrics may hold them: they become escapes.
    """
    # Not the print of an earlier call, within which this one would be silent too.
    original = getattr(builtins.print, "original", builtins.print)

    def print_on_master(*args: Any, force: bool = False, **kwargs: Any) -> None:
        if is_master or force:
            # A terminal that is gone, or cannot show a name, does not end the run.
            with suppress(OSError, ValueError):
                original(*map(escaped, args), **kwargs)

    vars(print_on_master)["original"] = original
    builtins.print = print_on_master


def read_rank(world_size: int, dist_url: str) -> Launch:
    """Return this process's rank among the others, by its launcher's variables, or by RANK and `--world-size`.

    Raises:
        UserError: the launcher's variables are incomplete.
    """
    launch = read_launch(world_size=world_size)
    if launch.rank >= launch.world_size:
        line = f"rank {launch.rank} of {counted(launch.world_size, 'process')}: ranks count from 0"
        raise UserError(f"{line}; set WORLD_SIZE, or start with torchrun", is_of_one_rank=True)
    if not launch.is_launched and world_size > 1:
        start = f"torchrun --nproc_per_node={world_size} train.py ..."
        raise UserError(f"--world-size {world_size}, but no launcher has set RANK; start with `{start}`")
    has_address = is_dist_avail_and_initialized() or launch.address.get("MASTER_ADDR")
    if launch.is_launched and dist_url == "env://" and not has_address:
        raise UserError("RANK is set but not MASTER_ADDR and MASTER_PORT; start with torchrun, or give --dist-url")
    return launch


def count_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use, which in a container or a job are fewer than the machine's.

    The smaller of those that it may run on, and of those whose time a control group grants it (`docker --cpus`,
    `limits.cpu` of Kubernetes), rounded up. `root` is where the system's files are.
    """
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    # A quota is no affinity: on 64 cores under `docker --cpus 2`, 16 loader processes and all threads shared two.
    groups = root / "proc/self/cgroup"  # of Linux
    text = groups.read_text() if groups.exists() else ""
    # Of version 1 the controllers are mounted apart, of version 2 together, and their names are empty.
    for controllers, path in re.findall(r"^\d+:((?:[^:]*,)?cpu(?:,[^:]*)?|):/(.*)", text, re.MULTILINE):
        mount, names = root / "sys/fs/cgroup", ["cpu.max"]
        if controllers:
            mount, names = mount / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        own = mount / path
        # In a container the path may be the host's, of which the end is here; a limit of any parent counts too.
        for folder in [own, *own.parents]:
            cores = min(cores, _granted_cores([folder / name for name in names]))
    return cores


def _granted_cores(paths: list[Path]) -> int:
    """Return the cores whose time a control group's files grant, rounded up; `sys.maxsize` where they set no limit."""
    try:
        quota, period = map(int, " ".join(path.read_text() for path in paths).split())
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return sys.maxsize
    return -(-quota // period) if quota > 0 else sys.maxsize


def has_fast_bfloat16() -> bool:
    """Tell whether this processor has instructions for products in bfloat16, and torch has kernels for them.

    A step of a ResNet-18 took, compared with float32, 0.65 times as long with AVX-512 BF16, 1.7 with AVX-512 alone, 10
    with AVX2 and 5 with SSE4.1.
    """
    # Of other processors torch's own answer counts, below.
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    has_instructions = torch.cpu._is_avx512_bf16_supported() or not is_x86
    return has_instructions and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def has_streams(device: torch.device) -> bool:
    """Tell whether a device has streams: it computes beside the host, and tells by events how far it is."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


def find_accelerator() -> str | None:
    """Return the kind of accelerator that this machine has and torch can use, or None."""
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator().type


def choose_gpu(launch: Launch, device: str) -> int:
    """Return the index of this process's accelerator; UserError if there are more processes than devices."""
    gpu = launch.local_rank
    if not launch.is_launched:
        gpu = torch.device(device).index or 0
    num_devices = torch.accelerator.device_count()
    if torch.device(device).type != "cpu" and 1 < num_devices < launch.num_local:
        found = f"{launch.num_local} processes were started on this machine, which shows them {num_devices} devices"
        raise UserError(f"{found}; start one process for each device")
    if num_devices == 0:
        return gpu
    # A launcher may show each process its own GPU only; then that one is number 0.
    return gpu % num_devices


def choose_backend(device: str) -> str:
    """Return the backends by which tensors travel: those of a GPU over nccl, all others over gloo."""
    return "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"


def raise_file_limit(world_size: int) -> None:
    """Let this process open a file for each of its connections; UserError if it may not.

    gloo connects each process with each other one, in two groups, and all of them use rank 0's store: 36 open files on
    2 processes, 126 on 32.
    """
    import resource  # not above: Windows, which lacks it, is told so later

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    least = 3 * world_size + 20
    if most < least:
        raise UserError(f"{world_size} processes need {least} open files each; `ulimit -Hn` allows {hard}: raise it")
    needed = min(least + 1000, most)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def join_processes(place: Any, stall_timeout: float = 0.0) -> None:
    """Join the process group, or run alone. One that is there already stays its owner's: `join_existing`.

    CPU tensors travel over gloo and CUDA tensors over nccl, so that bookkeeping never waits for a GPU.
    Collective: every rank must call it.

    Args:
        place: device, gpu, rank, world_size, dist_url, dist_timeout (minutes), and is_launched, whether a launcher
            started this process to compute with others: `DistributedOptions` in settings/, of which this package
            knows nothing.
        stall_timeout: minutes without a step after which the process counts as hung, from now on; 0 = never.
    """
    rank, world_size = place.rank, place.world_size
    # Before the join: bookkeeping of a start waits for a day, so nothing else would end a rank that hangs in it.
    watchdog.start(60 * stall_timeout, rank)
    at_end(watchdog.stop)
    if torch.device(place.device).type != "cpu":
        # Before any collective: torch's documentation leaves it to the caller that NCCL's ranks have a device each.
        torch.accelerator.set_device_index(place.gpu)
    if not place.is_launched:
        return
    raise_file_limit(world_size)
    timeout = datetime.timedelta(minutes=place.dist_timeout)
    if dist.is_initialized():
        join_existing(choose_backend(place.device), timeout)
        return
    print(f"joining {counted(world_size, 'process')} at {place.dist_url}", flush=True)
    watchdog.note_progress("joining")
    launch = read_launch(world_size=world_size)
    os.environ.update(launch.environment())
    # A launcher's address wins; --dist-url is for starts without one.
    url = "env://" if "MASTER_ADDR" in launch.address else place.dist_url
    store = Meeting(launch, url, timeout).open_store()
    joined.store, joined.rank, joined.world_size = store, rank, world_size
    store.delete_key(f"end/{rank}")  # of an earlier attempt
    # A connection of its own: the watchdog must hear while another thread waits in a call of the store.
    watchdog.connect(store.clone(), world_size)
    with watchdog.waiting():
        dist.init_process_group(
            choose_backend(place.device), store=store, timeout=timeout, world_size=world_size, rank=rank
        )
        joined.own = dist.group.WORLD
        joined.world = None
        # For bookkeeping: the timeout of a step must be short, and would end a run whose rank 0 saves to a slow disk.
        joined.group = _group_of_all("gloo", datetime.timedelta(minutes=PATIENCE_MIN))
        dist.barrier()


def _group_of_all(backend: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Return a new group of all ranks. Collective: every rank must call it."""
    group: Any = dist.new_group(None, timeout, backend)  # a number only on ranks that are not in it
    return group


def join_existing(backend: str, timeout: datetime.timedelta) -> None:
    """Make groups beside the default one, whose backend may carry no CPU tensors. Collective: every rank must call it.

    They are kept for the next run in these processes, and end with the default one.
    """
    shared = (dist.group.WORLD, backend, timeout)
    if joined.shared != shared:
        print(f"joining {counted(get_world_size(), 'process')} of a process group that is there already", flush=True)
        with watchdog.waiting():
            joined.world = _group_of_all(backend, timeout)
            joined.group = _group_of_all("gloo", datetime.timedelta(minutes=PATIENCE_MIN))
        joined.shared = shared
    store = dist.PrefixStore("touchstone", dist.distributed_c10d._get_default_store())
    watchdog.connect(store.clone(), get_world_size())

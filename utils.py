"""The process and meter words that users of torchvision's reference scripts know."""

import builtins
import datetime
import errno
import json
import os
import resource
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from errors import LimitError, UserError, one_line, say
from launch import Launch, read_launch

# Minutes that bookkeeping may wait, for rank 0 to save to a slow disk, say. The stall watchdog ends what hangs.
PATIENCE_MIN = 24 * 60

_patient_group = None  # all ranks, over gloo, with that patience; set by `init_distributed_mode`


class SmoothedValue:
    """Track a series of values: the last few of them, and the mean over all.

    A device tensor is kept as it is and read when somebody asks, because reading it makes the host wait for the device.

    Args:
        window_size: how many of the last values `value`, `median`, `avg` and `max` look at.
        fmt: how `str()` shows it; may name median, avg, global_avg, max and value.
    """

    def __init__(self, window_size: int = 20, fmt: str | None = None) -> None:
        self.fmt = fmt or "{median:.4f} ({global_avg:.4f})"
        self._window = deque(maxlen=window_size)
        self._unread = []
        self._sums = []  # (sum, count) of every update, in order
        self._total, self._count = 0.0, 0

    def update(self, value: float | torch.Tensor, n: int = 1) -> None:
        """Add the mean of `n` samples."""
        self._unread.append((value.detach() if isinstance(value, torch.Tensor) else value, n, False))

    def add(self, total: float | torch.Tensor, n: int) -> None:
        """Add the sum over `n` samples. Counts stay integers this way, where a mean would be rounded."""
        self._unread.append((total, n, True))

    def _read(self) -> None:
        for value, n, is_sum in self._unread:
            number = float(value)
            self._window.append(number / n if is_sum else number)
            self._accumulate(number if is_sum else number * n, n)
        self._unread.clear()

    def _accumulate(self, total: float, n: int) -> None:
        self._sums.append((total, n))
        self._total += total
        self._count += n

    def sums(self) -> torch.Tensor:
        """Return (updates, 2) float64: the sum and the count of each update, in order."""
        self._read()
        return torch.tensor(self._sums, dtype=torch.float64).reshape(-1, 2)

    def synchronize_between_processes(self) -> None:
        """Make `total`, `count` and `global_avg` those of all processes. Collective: every rank must call it."""
        rows = interleave(all_gather(self.sums())).tolist()
        self._sums, self._total, self._count = [], 0.0, 0
        for total, n in rows:
            self._accumulate(total, int(n))

    @property
    def deque(self) -> deque:
        """The last `window_size` values."""
        self._read()
        return self._window

    @property
    def total(self) -> float:
        """The sum over all samples, added up in float64 in the order of the updates."""
        self._read()
        return self._total

    @property
    def count(self) -> int:
        """The number of samples."""
        self._read()
        return self._count

    @property
    def median(self) -> float:
        """The (lower) median of the window."""
        return torch.tensor(list(self.deque), dtype=torch.float64).median().item() if self.deque else 0.0

    @property
    def avg(self) -> float:
        """The mean of the window."""
        return sum(self.deque) / len(self.deque) if self.deque else 0.0

    @property
    def global_avg(self) -> float:
        """The mean over all samples."""
        return self.total / self.count if self.count else 0.0

    @property
    def max(self) -> float:
        """The largest value of the window."""
        return max(self.deque, default=0.0)

    @property
    def value(self) -> float:
        """The last value."""
        return self.deque[-1] if self.deque else 0.0

    def __str__(self) -> str:
        names = ("median", "avg", "global_avg", "max", "value")
        # Only what the format asks for: a window may hold thousands of values.
        return self.fmt.format(**{name: getattr(self, name) for name in names if "{" + name in self.fmt})


class MetricLogger:
    """A set of named meters, and a loop that prints them."""

    def __init__(self, delimiter: str = "\t") -> None:
        self.meters = defaultdict(SmoothedValue)
        self.delimiter = delimiter
        self.wait_s = 0.0  # time that the loop has waited for data in all
        self.is_line_due = False  # whether a line will be printed after the item that is being worked on

    def update(self, **values: float | torch.Tensor) -> None:
        """Add one value to each of the named meters."""
        for name, value in values.items():
            self.meters[name].update(value)

    def __getattr__(self, name: str) -> SmoothedValue:
        if name in self.__dict__.get("meters", {}):
            return self.meters[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __str__(self) -> str:
        return self.delimiter.join(f"{name}: {meter}" for name, meter in self.meters.items())

    def synchronize_between_processes(self) -> None:
        """Make every meter's totals those of all processes. Collective: every rank must call it.

        Rank r's update j is taken to be number j W + r of the whole, as `EvalSampler` deals its batches, and sums are
        formed in that order: the same bits at any number of processes.
        """
        for meter in self.meters.values():
            meter.synchronize_between_processes()

    def add_meter(self, name: str, meter: SmoothedValue) -> None:
        """Show `meter` under `name`."""
        self.meters[name] = meter

    def timed(self, iterable: Iterable) -> Iterator:
        """Yield from `iterable`, counting the time that it makes us wait."""
        iterator = iter(iterable)
        while True:
            start = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.wait_s += time.perf_counter() - start
            yield item

    def log_every(self, iterable: Iterable, print_freq: int, header: str | None = None, start: int = 0) -> Iterator:
        """Yield from a sized `iterable` and print the meters after every `print_freq`-th item and the last.

        Args:
            iterable: what to loop over; has a length.
            print_freq: items between two lines.
            header: what each line begins with.
            start: the number of the first item, where a resumed epoch goes on.
        """
        header = header or ""
        num_items = start + len(iterable)
        width = len(str(num_items))
        iter_time, data_time = SmoothedValue(fmt="{avg:.4f}"), SmoothedValue(fmt="{avg:.4f}")
        begin = end = time.perf_counter()
        waited = self.wait_s
        for index, item in enumerate(self.timed(iterable), start):
            self.is_line_due = index % print_freq == 0 or index == num_items - 1
            yield item
            data_time.update(self.wait_s - waited)
            iter_time.update(time.perf_counter() - end)
            if self.is_line_due:
                eta_s = iter_time.global_avg * (num_items - 1 - index)
                fields = [
                    header,
                    f"[{index:{width}d}/{num_items}]",
                    f"eta: {datetime.timedelta(seconds=int(eta_s))}",
                    *([str(self)] if self.meters else []),
                    f"time: {iter_time}",
                    f"data: {data_time}",
                ]
                if torch.cuda.is_available():
                    fields.append(f"max mem: {torch.cuda.max_memory_allocated() / 2**20:.0f}")
                print(self.delimiter.join(fields))
            end, waited = time.perf_counter(), self.wait_s
        print(f"{header} Total time: {datetime.timedelta(seconds=int(time.perf_counter() - begin))}")


def count_correct(
    output: torch.Tensor | tuple[torch.Tensor, ...], target: torch.Tensor, topk: tuple[int, ...] = (1,)
) -> list[torch.Tensor]:
    """Count the images whose target is among the k highest scores, for each k.

    Args:
        output: (B, num_classes) scores, or a tuple that begins with them, as of a model with auxiliary classifiers.
        target: (B,) class indices, or (B, num_classes) soft targets, of which the highest counts.
        topk: each k; one above the number of classes counts as that number.

    Returns:
        A list of 0-d int64 tensors on the device; nothing is read.
    """
    with torch.inference_mode():
        output = output if isinstance(output, torch.Tensor) else output[0]
        if target.ndim == 2:
            target = target.argmax(dim=1)
        num_classes = output.size(1)
        ranked = output.topk(min(max(topk), num_classes), dim=1).indices
        hits = ranked.eq(target[:, None])
        return [hits[:, : min(k, num_classes)].sum() for k in topk]


def accuracy(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...] = (1,)) -> list[torch.Tensor]:
    """Give the percentage of images whose target is among the k highest scores, for each k; as `count_correct`."""
    return [hits * (100.0 / target.size(0)) for hits in count_correct(output, target, topk)]


def is_dist_avail_and_initialized() -> bool:
    """Tell whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def get_world_size() -> int:
    """Return the number of processes of the run."""
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1


def get_rank() -> int:
    """Return this process's number, from 0."""
    return dist.get_rank() if is_dist_avail_and_initialized() else 0


def is_main_process() -> bool:
    """Tell whether this is rank 0, the one that prints and writes."""
    return get_rank() == 0


def save_on_master(*args: Any, **kwargs: Any) -> None:
    """Call `torch.save` on rank 0. Checkpoints go through `store.CheckpointManager`, which can be killed."""
    if is_main_process():
        torch.save(*args, **kwargs)


def all_gather(rows: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's tensor, which may differ in its first dimension. Collective: every rank must call it.

    Args:
        rows: (n, ...) CPU tensor; travels over gloo, so no device has to be waited for.
    """
    if not is_dist_avail_and_initialized():
        return [rows]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(rows)]), group=_patient_group)
    longest = max(int(size) for size in sizes)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=_patient_group)
    return [tensor[: int(size)] for tensor, size in zip(gathered, sizes, strict=True)]


def interleave(parts: list[torch.Tensor]) -> torch.Tensor:
    """Put back in order what was dealt round-robin: row j of part r is row j * len(parts) + r of the result."""
    order = sorted((row, part) for part, rows in enumerate(parts) for row in range(len(rows)))
    return torch.stack([parts[part][row] for row, part in order]) if order else parts[0]


def broadcast_bytes(payload: bytes | None, src: int = 0, group: Any = None) -> bytes:
    """Give one rank's bytes to every rank; what others pass is ignored. Collective: every rank must call it.

    Args:
        payload: the bytes, on rank `src`.
        src: whose bytes.
        group: the process group whose members call it; None for all.
    """
    if not is_dist_avail_and_initialized():
        return payload
    is_source = get_rank() == src
    size = torch.tensor([len(payload) if is_source else 0])
    dist.broadcast(size, src=src, group=group or _patient_group)
    if size == 0:
        return b""
    buffer = torch.frombuffer(bytearray(payload if is_source else bytes(int(size))), dtype=torch.uint8)
    for chunk in buffer.split(1 << 28):  # gloo counts a message's bytes in 32 bits
        dist.broadcast(chunk, src=src, group=group or _patient_group)
    return buffer.numpy().tobytes()


def gather_plain(value: Any) -> list:
    """Return every rank's value, anything that JSON can hold. Collective: every rank must call it."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(part.numpy().tobytes()) for part in all_gather(text)]


def call_on_master(function: Callable[..., bytes | None], *args: Any) -> bytes | None:
    """Call a function on rank 0 alone and give what it returns to every rank. Collective: every rank must call it.

    For work on files, which ranks on other machines may not even see.

    Raises:
        UserError: what the function raised, or the text of its OSError, on every rank.
    """
    payload, error = None, None
    if is_main_process():
        try:
            payload = function(*args)
        except UserError as refusal:
            error = refusal
        except OSError as failure:  # the others must hear of it, or they would wait
            error = UserError(str(failure))
    verdict = {"is_none": payload is None, "error": error and str(error), "exit_code": error and error.exit_code}
    verdict = json.loads(broadcast_bytes(json.dumps(verdict).encode()))
    if verdict["error"] is not None:
        error = UserError(verdict["error"])
        error.exit_code = verdict["exit_code"]
        raise error
    return None if verdict["is_none"] else broadcast_bytes(payload)


def reduce_across_processes(value: Any) -> torch.Tensor:
    """Sum a number, a list of numbers or a tensor over all processes, on its own device and in its own type.

    Integers are summed as int64 and floats as float64, where torchvision rounds both to float32.
    Collective: every rank must call it.
    """
    if isinstance(value, torch.Tensor):
        total = value.detach().clone()
    else:
        total = torch.tensor(value, dtype=torch.float64 if torch.tensor(value).is_floating_point() else torch.int64)
    total = total.to(torch.float64 if total.is_floating_point() else torch.int64)
    if is_dist_avail_and_initialized():
        dist.barrier()
        dist.all_reduce(total)
    return total


def setup_for_distributed(is_master: bool) -> None:
    """Let `print` print on the master only; `print(..., force=True)` prints anywhere. May be called again."""
    original = getattr(builtins.print, "original", builtins.print)

    def print_on_master(*args: Any, force: bool = False, **kwargs: Any) -> None:
        if is_master or force:
            # A terminal that is gone, or cannot show a name, is no reason to lose a run.
            with suppress(OSError, ValueError):
                original(*args, **kwargs)

    print_on_master.original = original
    builtins.print = print_on_master


def init_distributed_mode(args: Any) -> None:
    """Join the processes that a launcher started, and set `args.rank`, `world_size`, `distributed` and `gpu`.

    For people's own scripts; `main` resolves its options first. Collective: every rank must call it.
    """
    launch = place(getattr(args, "world_size", 1), args.dist_url)
    args.rank, args.world_size, args.distributed = launch.rank, launch.world_size, launch.is_launched
    args.gpu = choose_gpu(launch, args.device)
    setup_for_distributed(args.rank == 0)
    join_processes(args)


def place(world_size: int, dist_url: str) -> Launch:
    """Return this process's place among others, as its launcher says or RANK and `--world-size`.

    Raises:
        UserError: there is half of what is needed.
    """
    launch = read_launch(world_size=world_size)
    if not launch.is_launched and world_size > 1:
        raise UserError(
            f"--world-size {world_size}, but no launcher set RANK; start the processes with "
            f"`torchrun --nproc_per_node={world_size} train.py ...`"
        )
    if launch.is_launched and dist_url == "env://" and "MASTER_ADDR" not in launch.address:
        raise UserError("RANK is set but not MASTER_ADDR and MASTER_PORT; start with torchrun, or give --dist-url")
    return launch


def count_cores() -> int:
    """Return the cores that this process may use, which in a container or a job are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def choose_gpu(launch: Launch, device: str) -> int:
    """Return the index of this process's accelerator."""
    gpu = launch.local_rank if launch.is_launched else torch.device(device).index or 0
    # A launcher may show each process its own GPU only; then that one is number 0.
    num_devices = torch.cuda.device_count() if torch.device(device).type == "cuda" else 0
    return gpu % num_devices if num_devices else gpu


def join_processes(args: Any) -> None:
    """Join the process group, or run alone.

    CPU tensors travel over gloo and CUDA tensors over nccl, so that bookkeeping never waits for a GPU.
    Collective: every rank must call it.

    Args:
        args: reads distributed, rank, world_size, gpu, device, dist_url and dist_timeout.
    """
    global _patient_group  # noqa: PLW0603
    is_cuda = torch.device(args.device).type == "cuda"
    if is_cuda:
        torch.cuda.set_device(args.gpu)
    if not args.distributed:
        return
    print(f"joining {args.world_size} processes at {args.dist_url}", flush=True)
    launch = read_launch(world_size=args.world_size)
    os.environ.update(launch.environment())
    timeout = datetime.timedelta(minutes=getattr(args, "dist_timeout", 30))
    # What a launcher has set up counts; --dist-url is for where there is none.
    url = "env://" if "MASTER_ADDR" in launch.address else args.dist_url
    store, _, _ = next(dist.rendezvous(url, args.rank, args.world_size, timeout=timeout))
    # torchrun's store outlives a restart, with the addresses of the dead in it: each attempt has keys of its own. On
    # several nodes each torchrun has a count of its own, and so they cannot.
    if launch.num_nodes == 1:
        store = dist.PrefixStore(f"attempt{launch.attempt}", store)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=store,
        world_size=args.world_size,
        rank=args.rank,
        timeout=timeout,
    )
    _patient_group = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=PATIENCE_MIN))
    dist.barrier()


def explain_limit(error: BaseException) -> LimitError | None:
    """Return a line about an error that means that the machine gives this process no more of something, or None."""
    if isinstance(error, MemoryError):
        return LimitError(f"out of memory ({error or 'no more is given'}); use fewer --workers, or raise `ulimit -v`")
    number = getattr(error, "errno", None)
    for limit, advice in {
        errno.EMFILE: f"raise `ulimit -n`, which is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}",
        errno.ENFILE: "the machine has as many files open as it can",
        errno.EAGAIN: "no more processes: raise `ulimit -u`, or use fewer --workers",
        errno.ENOMEM: "use fewer --workers, or raise `ulimit -v`",
    }.items():
        # Torch turns the system's errors into texts.
        if limit == number or (isinstance(error, RuntimeError) and os.strerror(limit) in str(error)):
            return LimitError(f"{os.strerror(limit)}; {advice}")
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return LimitError(f"{error}: raise `ulimit -u` or `ulimit -v`, or use fewer --workers")
    return None


def leave(error: Exception, exit_code: int, is_agreed: bool = True) -> None:
    """Print why the run was refused or stopped, once over all ranks, and end this process.

    A launcher ends the other processes as soon as one has left; so, where all ranks meet the same error, the others
    stay until rank 0 has printed it. Where some are still there after ten seconds, rank 0 may not have met it, or
    nobody ends them: then the first of each node says it too.

    Args:
        error: its text is printed.
        exit_code: what this process leaves with; torchrun turns any of them into 1.
        is_agreed: whether all ranks are expected to meet the error; if not, it is printed at once.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which a launcher ends this process now
    launch = read_launch()
    rank = launch.rank
    is_silent = False
    if rank != 0 and is_agreed:
        time.sleep(10)
        is_silent = launch.local_rank != 0 and not isinstance(error, LimitError)  # which one rank may meet alone
    where = f" on rank {rank}" if rank != 0 else ""
    # Not print, which is silent on this rank.
    if not is_silent:
        say(f"train.py: error{where}: {one_line(str(error))}")
    end_process(exit_code)


def end_process(exit_code: int) -> None:
    """End this process at once, and its loader processes with it.

    Not by sys.exit: tearing down a process group whose other members are gone can abort and hide the exit code, and
    Python would wait for loader processes that are in the middle of something.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # gone, closed or never there
            stream.flush()
    os._exit(exit_code)


def shut_down() -> None:
    """Leave the process group after the last collective. Collective: every rank must call it.

    Without the barrier some runs abort while they end: a rank tears down connections that another still uses
    (docs/research/RELIABILITY.md, 2.2).
    """
    if is_dist_avail_and_initialized():
        dist.barrier(group=_patient_group)
        dist.destroy_process_group()


# torchvision's helpers, for people's own scripts.
from checkpointing.weights import average_checkpoints, store_model_weights  # noqa: E402, F401
from models import ExponentialMovingAverage  # noqa: E402, F401
from optim import set_weight_decay  # noqa: E402, F401


def mkdir(path: str | os.PathLike) -> None:
    """Make a folder and those above it, where they are not there yet."""
    os.makedirs(path, exist_ok=True)

"""A rehearsal device: `far:0`, an accelerator made in Python whose kernels are the CPU's.

A test that passes on it shows that no tensor stayed on the host, that nothing between two points waited for the device,
and that each stream and the host waited for what they read. A tensor of the device holds a CPU tensor in `raw`. Each
memory has a mark: the stream that wrote it last, and when. A stream that reads what another one wrote, without having
waited for it, reads `POISON`, and so does the host after a copy that does not block.

It cannot carry, as torch 2.14 refuses it: pinned memory that C++ asks for, and with it the static graph of DDP;
`torch.Generator("far")`; `torch.accelerator.synchronize` and its memory statistics; streams of `torch.Stream`.
"""

import contextlib
import math
import traceback
import weakref
from pathlib import Path
from time import perf_counter

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

REPOSITORY = Path(__file__).parent.parent
POISON = -77  # and NaN where there is one

# Ops that tell the host a value, or a shape that depends on values.
READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}
# Ops whose indices may lie on the host, from where they are copied, so that the host waits.
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# As CUDA's autocast: products in the lower type, sums of many terms in float32.
LOWER = ("conv1d conv2d conv3d conv_transpose2d.input convolution linear matmul mm mv bmm addmm baddbmm "
         "scaled_dot_product_attention").split()  # fmt: skip
FLOAT32 = "cross_entropy_loss nll_loss softmax.int log_softmax.int layer_norm binary_cross_entropy".split()


def always(value):
    return lambda *_: value


class Stream:
    """A queue of work. `seen` holds, for each other stream, how much of its work this one has waited for."""

    def __init__(self, device=None, **_):
        self.now, self.seen = 0, {}

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        for stream, time in event.seen.items():
            self.seen[stream] = max(time, self.seen.get(stream, 0))

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def has_seen(self, stream, time):
        return stream is self or self.seen.get(stream, 0) >= time


class Event:
    def __init__(self, **_):
        self.seen, self.stream = {}, None

    def record(self, stream):
        self.stream = stream
        self.seen = {**stream.seen, stream: stream.now}
        self.time_s = perf_counter()  # a kernel is done when it is queued

    query = always(True)

    def elapsed_time(self, end):
        return 1000 * (end.time_s - self.time_s)

    def synchronize(self):
        # The host may wait here, but not the device while it has work behind the event.
        device.note_wait(f"Event.synchronize ({self.stream.now - self.seen[self.stream]} operations behind)")
        device.arrive(lambda stream, time: self.seen.get(stream, 0) >= time)


class DeviceModule:
    """`torch.far`, with what this project and torch ask of a device's module."""

    Stream, Event = Stream, Event

    def __init__(self):
        self.stream_now, self.copies, self.waits = Stream(), [], []
        self.rng_state = torch.Generator().manual_seed(0).get_state()

    is_available = is_initialized = always(True)
    _is_in_bad_fork = always(False)
    device_count = always(1)
    max_memory_allocated = always(0)
    get_amp_supported_dtype = always([torch.bfloat16, torch.float16])

    def current_stream(self, _=None):
        return self.stream_now

    def manual_seed(self, seed):
        self.rng_state = torch.Generator().manual_seed(seed).get_state()

    manual_seed_all = manual_seed

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.stream_now = self.stream_now, stream or self.stream_now
        try:
            yield
        finally:
            self.stream_now = before

    def synchronize(self, _=None):
        self.note_wait("synchronize")
        self.arrive(lambda *_: True)

    def note_wait(self, what):
        """Remember that the host waits for the device, and where: the innermost line of this project."""
        codes = [(frame.f_code, line) for frame, line in traceback.walk_stack(None)]
        ours = [each for each in codes if str(REPOSITORY) in each[0].co_filename and ".venv" not in each[0].co_filename]
        code, line = next((each for each in ours if each[0].co_filename != __file__), codes[-1])
        self.waits.append(f"{what} at {Path(code.co_filename).name}:{line} {code.co_name}")

    def arrive(self, is_done):
        """End the copies to the host that `is_done(stream, time)` says the host has waited for."""
        due = [copy for copy in self.copies if is_done(*copy[:2])]
        self.copies = [copy for copy in self.copies if copy not in due]
        for _, _, destination, values in due:
            destination.copy_(values)


device = DeviceModule()


class Far(torch.Tensor):
    @staticmethod
    def __new__(cls, raw, mark=None, requires_grad=False):
        shape = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        shape |= {"device": "far:0", "requires_grad": requires_grad}
        tensor = torch.Tensor._make_wrapper_subclass(cls, raw.shape, **shape)
        tensor.raw, tensor.mark = raw, mark or [device.stream_now, device.stream_now.now]
        return tensor

    def __reduce_ex__(self, protocol):
        # As torch saves tensors of devices without storages: loaded to where `map_location` says.
        arguments = self.detach().cpu(), self.dtype, str(self.device), self.requires_grad
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, arguments

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch.inference_mode(False), torch.no_grad():  # in inference mode a view could not share a version
            return call(func, args, kwargs or {})


def poison(raw):
    raw.fill_(math.nan if raw.is_floating_point() else POISON if raw.dtype.is_signed else raw.dtype == torch.bool or 77)


def call(func, args, kwargs):
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)  # which nobody has done yet in inference mode
    name, to = func._schema.name.removeprefix("aten::"), kwargs.get("device")
    if name == "copy_":
        return copy(*args[:2], is_blocking=not (kwargs.get("non_blocking") or (args[2:] and args[2])))
    if name == "_to_copy" and to is not None and torch.device(to).type != "far":
        shape = {"dtype": kwargs.get("dtype"), "memory_format": kwargs.get("memory_format", torch.preserve_format)}
        return copy(torch.empty_like(args[0].raw, **shape), args[0], is_blocking=not kwargs.get("non_blocking"))
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    far = [tensor for tensor in tensors if isinstance(tensor, Far)]
    check_places(name, far, tensors)
    kwargs = kwargs if to is None else {**kwargs, "device": "cpu"}
    plain_args, plain_kwargs = pytree.tree_map_only(Far, lambda tensor: tensor.raw, (args, kwargs))
    with own_random_numbers(func):
        result = func(*plain_args, **plain_kwargs)
    device.stream_now.now += 1
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info and argument.alias_info.is_write:
            for tensor in pytree.tree_leaves(given.get(argument.name)):
                tensor.mark[:] = [device.stream_now, device.stream_now.now]
    wrappers = {id(tensor.raw): tensor for tensor in far}
    marks = {tensor.raw.untyped_storage()._cdata: tensor.mark for tensor in far}

    def wrap(raw):
        return wrappers[id(raw)] if id(raw) in wrappers else Far(raw, marks.get(raw.untyped_storage()._cdata))

    return pytree.tree_map_only(torch.Tensor, wrap, result)


def check_places(name, far, tensors):
    """Refuse tensors of the host as CUDA does, note a wait, and poison what the stream has not waited for."""
    near = [tensor for tensor in tensors if not isinstance(tensor, Far) and tensor.dim() > 0]
    if near and name not in INDEXING:
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found far:0 and cpu")
    if near or name in READS:
        device.note_wait(name)
        device.arrive(device.stream_now.has_seen)
    for tensor in far:
        if not device.stream_now.has_seen(*tensor.mark):
            poison(tensor.raw)


@contextlib.contextmanager
def own_random_numbers(func):
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    with torch.random.fork_rng([]):
        torch.set_rng_state(device.rng_state)
        yield
        device.rng_state = torch.get_rng_state()


def copy(destination, source, *, is_blocking):
    """Copy within the device, to it or from it; a blocking copy between the host and the device is a wait."""
    stream = device.stream_now
    for tensor in (destination, source):
        if isinstance(tensor, Far) and not stream.has_seen(*tensor.mark):
            poison(tensor.raw)
    values = source.raw if isinstance(source, Far) else source
    stream.now += 1
    if isinstance(destination, Far):
        destination.raw.copy_(values)
        destination.mark[:] = [stream, stream.now]
        if not isinstance(source, Far) and is_blocking:
            device.note_wait("copy to the device")
    elif is_blocking:
        device.note_wait("copy to the host")
        device.arrive(stream.has_seen)
        destination.copy_(values)
    else:
        device.copies.append((stream, stream.now, destination, values.clone()))
        poison(destination)
    return destination


def _pin_memory(tensor, device=None):
    pinned = tensor.clone()
    _pinned[pinned.untyped_storage()._cdata] = pinned.untyped_storage()
    return pinned


def _cast(op, to):
    without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def kernel(*args, **kwargs):
        def cast(tensor):
            return tensor.to(to()) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

        args, kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(without):
            return op(*args, **kwargs)

    return kernel


_pinned = weakref.WeakValueDictionary()
_libraries = []  # which take their kernels with them when they are dropped


def register():
    """Make the device known to this process. It is this process's accelerator from now on."""
    if _libraries:
        return
    _setup_privateuseone_for_python_backend("far", device)
    aten, every = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _libraries.extend([aten, every])
    for name, kernel in {
        "empty.memory_format": lambda size, dtype=None, memory_format=torch.contiguous_format, **_: Far(
            torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
        ),
        "empty_strided": lambda size, stride, dtype=None, **_: Far(torch.empty_strided(size, stride, dtype=dtype)),
        "_copy_from": lambda source, to, non_blocking=False: copy(to, source, is_blocking=not non_blocking),
    }.items():
        aten.impl(name, kernel, "PrivateUse1")
    aten.impl("_pin_memory", _pin_memory, "CPU")
    aten.impl("is_pinned", lambda tensor, device=None: tensor.untyped_storage()._cdata in _pinned, "CPU")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, to in [(LOWER, lambda: torch.get_autocast_dtype("far")), (FLOAT32, lambda: torch.float32)]:
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(name, _cast(op, to), "AutocastPrivateUse1")

"""Build a model, wrap it for several processes, sum gradients in a fixed order, average weights."""

import copy
import importlib
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from errors import UserError, did_you_mean, in_one_line, require_timm
from randomness import FORWARD, seed_device
from sampler import VirtualShards

AMP_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

# What an auxiliary classifier's loss counts, beside the main one's 1: GoogLeNet (Szegedy et al., arXiv 1409.4842,
# section 5) and Inception v3 (the weight in PyTorch's own fine-tuning tutorial).
AUXILIARY_WEIGHTS = {"googlenet": 0.3, "inception_v3": 0.4}


def build_model(args: Any, num_classes: int, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Build `args.model` on the CPU, its first weights drawn from `args.seed` and then, if given, replaced.

    Args:
        args: the options.
        num_classes: outputs of the classifier.
        weights: a state dict to start from; a classifier of another size in it is left out, which is said.

    Raises:
        UserError: the weights belong to another model, an option is about layers that this one does not have, or its
            images have a size that it cannot take.
    """
    # The same first weights on every rank and at every start, whatever was drawn before.
    torch.manual_seed(args.seed)
    build = partial(_build_timm if args.model.startswith("timm/") else _build_torchvision, args)
    model = build(num_classes)
    if weights is not None:
        load_matching(model, weights, f"--weights {args.weights}", build, num_classes, needs_classifier=args.test_only)
    if args.freeze:
        freeze_all_but_classifier(model, num_classes)
    check_sizes(model, args)
    if args.grad_checkpointing:
        recompute_blocks(model, args.model, is_compiled=args.compile is not None)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if args.sync_bn and args.distributed else model


def _build_torchvision(args: Any, num_classes: int) -> nn.Module:
    options = {}
    if args.model in AUXILIARY_WEIGHTS:
        # Naming what is the default anyway avoids a FutureWarning. Published weights expect inputs scaled to [-1, 1].
        published = torchvision.models.get_model_weights(args.model).__members__
        is_published = bool(args.weights) and args.weights.rpartition(".")[2] in published
        options = {"init_weights": True, "aux_logits": True, "transform_input": is_published}
    elif args.model.startswith("vit_"):
        options = {"image_size": args.val_crop_size}
    try:
        model = torchvision.models.get_model(args.model, weights=None, num_classes=num_classes, **options)
    except AssertionError as error:  # of the ViTs
        raise UserError(f"--model {args.model} takes no --val-crop-size {args.val_crop_size}: {error}") from error
    if args.stochastic_depth is not None:
        _set_stochastic_depth(model, args)
    if args.dropout is not None:
        layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        if not layers:
            raise UserError(f"--dropout {args.dropout}: {args.model} has no dropout layer")
        for layer in layers:
            layer.p = args.dropout
    return model


def _set_stochastic_depth(model: nn.Module, args: Any) -> None:
    """Scale the odds of every layer so that the deepest one's are `--stochastic-depth`."""
    layers = [module for module in model.modules() if isinstance(module, torchvision.ops.StochasticDepth)]
    deepest = max((layer.p for layer in layers), default=0.0)
    if not deepest:
        raise UserError(f"--stochastic-depth {args.stochastic_depth}: {args.model} has none")
    for layer in layers:
        layer.p *= args.stochastic_depth / deepest


def _build_timm(args: Any, num_classes: int) -> nn.Module:
    timm = require_timm("--model", args.model)
    name = args.model.removeprefix("timm/")
    if name not in timm.list_models():
        hint = did_you_mean(name, timm.list_models(), prefix="timm/")
        raise UserError(f"--model {args.model}: timm has no such model{hint}")
    odds = {"drop_path_rate": args.stochastic_depth, "drop_rate": args.dropout}
    given = {option: value for option, value in odds.items() if value is not None}
    try:
        return timm.create_model(name, num_classes=num_classes, **given)
    except TypeError as error:
        raise UserError(f"--model {args.model} takes no such option: {error}") from error


def check_sizes(model: nn.Module, args: Any) -> None:
    """Check that a model takes images of the sizes that the options give, without computing anything.

    The model forgets nothing and moves no statistics: it is given tensors without memory in place of its own.

    Raises:
        UserError: it does not; names the option.
    """
    smallest = args.train_crop_size if args.train_crop_size_min is None else args.train_crop_size_min
    between = range(smallest // 32 * 32 + 32, args.train_crop_size, 32)
    training = [] if args.test_only else sorted({smallest, *between, args.train_crop_size})
    cases = [("train", size, args.batch_size) for size in training] + [("val", args.val_crop_size, 2)]
    for split, size, batch_size in cases:
        set_training_mode(model) if split == "train" else model.eval()
        obstacle = _find_obstacle(model, (min(batch_size, 2), 3, size, size))
        if obstacle is not None:
            images = f"a --batch-size of 1 and --{split}-crop-size" if batch_size == 1 else f"--{split}-crop-size"
            raise UserError(
                f"--model {args.model} cannot take {images} {size}: {obstacle}; give a size that it is made for"
            )
    model.train()


def _find_obstacle(model: nn.Module, shape: tuple[int, ...]) -> str | None:
    """Return why a model cannot take images of a shape, or None."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    obstacle = None
    for device in ("meta", "cpu"):  # what fails without memory may work with it, where a model is not made for that
        own = {name: tensor.detach().to(device) if device == "meta" else tensor.detach().clone()
               for name, tensor in state.items()}  # fmt: skip
        try:
            with torch.no_grad(), torch.random.fork_rng([]):
                torch.func.functional_call(model, own, torch.zeros(shape, device=device))
            return None
        except Exception as error:  # each layer has its own way to say so
            obstacle = obstacle or (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        if any(tensor.is_meta for tensor in state.values()) or shape[-1] > 1024:
            break
    return obstacle


def classifier_layers(model: nn.Module, num_classes: int) -> list[str]:
    """Return the names of the layers that end in class scores: the last one, and those of auxiliary classifiers."""
    sizes = [
        (name, module.out_features if isinstance(module, nn.Linear) else module.out_channels)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    ends = [name for name, size in sizes if size == num_classes]
    return [name for name in ends if name == ends[-1] or "aux" in name.lower()]


def freeze_all_but_classifier(model: nn.Module, num_classes: int) -> None:
    """Keep every parameter but the classifier's from being trained."""
    ends = classifier_layers(model, num_classes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.rsplit(".", 1)[0] in ends)


def set_training_mode(model: nn.Module) -> None:
    """Switch to training, but for modules all of whose parameters are frozen.

    Their BatchNorm would otherwise go on adapting its statistics, and their dropout would blur what is to stay.
    """
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()


def load_matching(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    source: str,
    build: Callable[[int], nn.Module],
    num_classes: int,
    *,
    needs_classifier: bool = False,
) -> None:
    """Load a state dict that fits the model, apart perhaps from a classifier for another number of classes.

    It is loaded into a model of its own number of classes first, so that modules can translate what older versions of
    them saved.

    Args:
        model: what to load into.
        weights: the state dict.
        source: what to call it in a message.
        build: makes a model of a number of classes.
        num_classes: that of `model`.
        needs_classifier: whether it must have one for that number of classes, since nothing is going to train one.

    Raises:
        UserError: it belongs to another model, or its classifier does not fit.
    """
    ends = classifier_layers(model, num_classes)
    head = weights.get(f"{ends[-1]}.weight")
    theirs = num_classes if head is None or not head.ndim else len(head)
    reader = model if theirs == num_classes else build(theirs)
    with in_one_line(f"{source} belongs to another model, check --model"):  # shapes differ
        missing, unexpected = reader.load_state_dict(weights, strict=False)
    if missing or unexpected:
        examples = [f"lacks {name}" for name in missing[:1]] + [f"has {name}" for name in unexpected[:1]]
        raise UserError(f"{source} belongs to another model, check --model: it {' and '.join(examples)}")
    if reader is model:
        return
    if needs_classifier:
        raise UserError(
            f"{source} holds a classifier of {theirs} classes and the images are of {num_classes}; --test-only needs "
            "images of the classes that it was trained on"
        )
    body = {name: tensor for name, tensor in reader.state_dict().items() if name.rsplit(".", 1)[0] not in ends}
    model.load_state_dict(body, strict=False)
    print(f"{source}: classifier of {theirs} classes left out, starting a new one of {num_classes} ({', '.join(ends)})")


def recompute_blocks(model: nn.Module, name: str, *, is_compiled: bool = False) -> None:
    """Let each block of a model keep its input alone, and compute its activations again in the backward pass.

    A block is a module with a forward pass of its own whose class occurs at least twice: a residual block, a
    transformer's encoder layer, an inception. Of nested ones the outermost counts.

    Args:
        model: whose blocks.
        name: what to call it in a message.
        is_compiled: whether the model is going to be compiled.

    Raises:
        UserError: it has none, or some that cannot be compiled this way.
    """
    blocks = list(_blocks(model, Counter(map(type, model.modules()))))
    if not blocks:
        raise UserError(f"--grad-checkpointing: {name} has no repeated blocks; leave it out")
    for block in blocks:
        if is_compiled and any(isinstance(module, nn.modules.batchnorm._NormBase) for module in block.modules()):
            raise UserError(
                f"--grad-checkpointing with --compile would move the running statistics of {name} twice a step; "
                "leave one of them out"
            )
        # torch restores the generators for the second pass; running statistics are ours to keep from moving twice.
        has_buffers = any(True for _ in block.buffers())
        keep = {"context_fn": partial(_recompute_contexts, block)} if has_buffers and not is_compiled else {}
        again = partial(checkpoint, block.forward, use_reentrant=False, **keep)
        block.forward = partial(_recomputed, block.forward, again)


def _blocks(module: nn.Module, counts: Mapping[type, int]) -> Iterator[nn.Module]:
    for child in module.children():
        # torch's own layers save little, and a row of modules is no block.
        is_own = not type(child).__module__.startswith(("torch.nn.", "torchvision.ops."))
        is_composite = is_own and not isinstance(child, nn.Sequential) and any(True for _ in child.children())
        if is_composite and counts[type(child)] > 1:
            yield child
        else:
            yield from _blocks(child, counts)


def _recomputed(forward: Callable[..., Any], again: Callable[..., Any], *args: Any) -> Any:
    return (again if torch.is_grad_enabled() else forward)(*args)


def _recompute_contexts(block: nn.Module) -> tuple[Any, Any]:
    return nullcontext(), _unmoved(block)


@contextmanager
def _unmoved(module: nn.Module) -> Iterator[None]:
    """Put a module's buffers back at the end, as they were."""
    buffers = list(module.buffers())
    saved = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:  # torch ends the second pass by an exception, once it has what it needs
        torch._foreach_copy_(buffers, saved)


def place_model(model: nn.Module, args: Any, device: torch.device) -> nn.Module:
    """Move a model to its device, in the memory order that the options ask for, compile it, and return it.

    Raises:
        UserError: `--compile` cannot be used with accumulation in this mode.
    """
    model.to(device, memory_format=torch.channels_last if args.channels_last else torch.preserve_format)
    return compile_model(model, args)


def compile_model(model: nn.Module, args: Any) -> nn.Module:
    """Compile a model in place where `--compile` says so, so that its state dict keeps its names; return it.

    Each size of image is compiled for itself. A kernel for any size would be slower, and torch would choose it by which
    sizes the process has met, so that a resumed run would compute with others.

    Raises:
        UserError: the mode cannot be used with accumulation.
    """
    if args.compile is None:
        return model
    is_graphed = args.compile in ("reduce-overhead", "max-autotune") and torch.device(args.device).type == "cuda"
    if is_graphed and not args.test_only and args.num_shards > args.world_size:
        raise UserError(
            f"--compile {args.compile} records CUDA graphs, which overwrite the gradients that accumulation keeps; "
            "use --compile default, or as many processes as shards"
        )
    smallest = args.train_crop_size if args.train_crop_size_min is None else args.train_crop_size_min
    # Sizes of a training crop, mostly 32 px apart; a full and a last batch of evaluation, by the model and its average.
    num_graphs = (args.train_crop_size - smallest) // 32 + 3 + 2 * 2
    dynamo = importlib.import_module("torch._dynamo.config")
    # What is done to a batch is compiled for each way of mixing too: mixup, cutmix or neither.
    dynamo.recompile_limit = max(dynamo.recompile_limit, 3 * num_graphs)
    # The masks of dropout and stochastic depth are those of an uncompiled model.
    importlib.import_module("torch._inductor.config").fallback_random = True
    model.compile(mode=args.compile, dynamic=False)
    return model


def wrap_model(model: nn.Module, args: Any) -> nn.Module:
    """Wrap a model on its device in DDP where gradients are to be summed by DDP's own all-reduce.

    With `--use-deterministic-algorithms`, `PairwiseGradientSum` sums them, and the bare model is returned, with rank
    0's weights. Collective: every rank must call it.
    """
    if args.grad_compression != "none" and args.world_size == 1:
        print(f"--grad-compression {args.grad_compression} has no effect: one process sends no gradients")
    if not args.distributed:
        return model
    if args.use_deterministic_algorithms:
        broadcast_from_master([*model.parameters(), *model.buffers()])
        return model
    # Nothing reads a buffer in training but what shard 0 writes, so no step needs them broadcast; `evaluate`
    # does it. torch 2.13 renamed the switch.
    parameters = inspect.signature(DistributedDataParallel).parameters
    no_buffers = {"forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": False}
    device_ids = [args.gpu] if torch.device(args.device).type == "cuda" else None
    # With accumulation torch fails at an assertion of its own.
    is_static = args.num_shards == args.world_size and args.compile is None
    wrapped = DistributedDataParallel(
        model, device_ids=device_ids, gradient_as_bucket_view=True, static_graph=is_static, **no_buffers
    )
    if args.grad_compression == "bf16":
        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


def broadcast_from_master(tensors: Sequence[Tensor]) -> None:
    """Overwrite every rank's tensors with rank 0's. Collective: every rank must call it."""
    if dist.is_initialized():
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


class PairwiseGradientSum:
    """Sum the shards' gradients in one fixed order, whatever process computed which shard.

    Floating-point addition is not associative: an all-reduce sums in another order at another world size, and training
    amplifies the difference from 1e-7 to 3e-2 in eight steps of a ResNet-18 (docs/research/RELIABILITY.md, 2.6). Here
    shards are summed pairwise, as a binary counter carries: push a sum; while the last two cover equally many shards,
    add them. A process does so with its consecutive shards; then each gradient travels through an all-to-all (every
    process gets its part of everyone's sum), is summed alike over the processes, and returns by an all-gather.
    Collectives only move bytes, so backend and topology cannot change a bit, and the volume is that of a ring
    all-reduce. The result is that of one process wherever a process holds a power of two of shards. One division by V
    comes last.

    At most log2(V / W) + 1 gradients are held at a time.
    """

    # Elements that travel at once, 64 MiB of float32, so that no second copy of all gradients is needed.
    PIECE = 1 << 24

    def __init__(self, parameters: Iterator[nn.Parameter], shards: VirtualShards) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.shards = shards
        self._sums = []  # (number of shards, their gradients' sum), as the digits of a binary counter

    def add_shard(self) -> None:
        """Take the gradients of the shard that has just been computed out of the parameters."""
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        _push(self._sums, gradients)

    def finish(self) -> None:
        """Set every parameter's gradient to the mean over all shards. Collective: every rank must call it."""
        gradients = _fold(self._sums)
        if self.shards.world_size > 1:
            present = [gradient for gradient in gradients if gradient is not None]
            for same_type in _group_by_type(present):
                for piece in _pieces(same_type, self.PIECE):
                    self._sum_over_processes(piece)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient if gradient is None else gradient.div_(self.shards.num_shards)

    def _sum_over_processes(self, gradients: list[Tensor]) -> None:
        world_size = self.shards.world_size
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        length = flat.numel()
        flat = nn.functional.pad(flat, (0, -length % world_size))
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat)
        sums = []
        for part in parts.chunk(world_size):
            _push(sums, [part])
        dist.all_gather_into_tensor(flat, _fold(sums)[0].contiguous())
        for gradient, total in zip(gradients, flat[:length].split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _push(sums: list[tuple[int, list]], addend: list[Tensor | None]) -> None:
    sums.append((1, addend))
    while len(sums) > 1 and sums[-1][0] == sums[-2][0]:
        (count, right), (_, left) = sums.pop(), sums.pop()
        sums.append((2 * count, _add(left, right)))


def _fold(sums: list[tuple[int, list]]) -> list[Tensor | None]:
    """Add what is left from the first to the last, and empty the counter."""
    total = sums[0][1]
    for _, addend in sums[1:]:
        total = _add(total, addend)
    sums.clear()
    return total


def _add(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    """Add in place; a parameter that a shard did not use has no gradient there."""
    return [a if b is None else b if a is None else a.add_(b) for a, b in zip(left, right, strict=True)]


def _group_by_type(tensors: list[Tensor]) -> list[list[Tensor]]:
    return [[tensor for tensor in tensors if tensor.dtype == dtype] for dtype in {t.dtype: None for t in tensors}]


def _pieces(tensors: list[Tensor], num_elements: int) -> Iterator[list[Tensor]]:
    """Cut a list into runs of at most `num_elements` elements, or of one tensor that is larger."""
    piece, size = [], 0
    for tensor in tensors:
        if piece and size + tensor.numel() > num_elements:
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += tensor.numel()
    if piece:
        yield piece


class ShardedStep:
    """The infrastructure around the forward and backward passes of one optimizer step.

    Args:
        model: what `wrap_model` returned.
        shards: this process's part of the step.
        device: where the model is.
        seed: the run's.
        is_deterministic: sum gradients pairwise, not as DDP does.
    """

    def __init__(
        self,
        model: nn.Module,
        shards: VirtualShards,
        *,
        device: torch.device,
        seed: int = 0,
        is_deterministic: bool = False,
    ) -> None:
        self.model = model
        self.shards = shards
        self.seed = seed
        self.device = device
        self.gradient_sum = PairwiseGradientSum(model.parameters(), shards) if is_deterministic else None
        # What DDP (a mean over processes) and accumulation (a sum over local shards) make of the shards' mean losses is
        # to be their mean; 1 in torchvision's case of one shard a process, and so nothing is rounded there.
        self.loss_scale = 1.0 if is_deterministic else 1.0 / shards.num_local
        self._buffers = list(model.buffers())

    @contextmanager
    def shard(self, step: int, shard: int) -> Iterator[None]:
        """Surround the forward and backward pass of one shard.

        Seeds dropout and stochastic depth by (step, shard), keeps DDP from reducing before the last local shard, and
        lets only shard 0 move the buffers, as torchvision's rank 0 does, so that running statistics are the same at
        any world size. The wrapped block must not keep the graph.
        """
        seed_device(self.device, FORWARD, self.seed, step, shard)
        is_last = shard == self.shards.local[-1]
        keeps_buffers = shard != 0 and bool(self._buffers)
        saved = [buffer.clone() for buffer in self._buffers] if keeps_buffers else None
        is_ddp = isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync() if is_ddp and not is_last else nullcontext():
            yield
        if keeps_buffers:
            torch._foreach_copy_(self._buffers, saved)
        if self.gradient_sum is not None:
            self.gradient_sum.add_shard()

    def finish_gradients(self) -> None:
        """Make every parameter's gradient the mean over all shards of the step. Collective."""
        if self.gradient_sum is not None:
            self.gradient_sum.finish()


def set_tf32(*, is_allowed: bool | None) -> None:
    """Let float32 convolutions and matrix products of NVIDIA GPUs round their inputs to TF32, or forbid both.

    Args:
        is_allowed: None leaves torch's own default, and so torchvision's numbers and speed: convolutions only.
    """
    if is_allowed is None:
        return
    # The newer `fp32_precision` would do, but inductor before torch 2.15 still reads these and then refuses to compile
    # (pytorch/pytorch#166387); writing these sets the newer ones too.
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    torch.backends.cudnn.allow_tf32 = is_allowed


def autocast(args: Any, device: torch.device) -> torch.amp.autocast:
    """Return a context, to be entered as often as wanted, that computes in `--amp-dtype` under `--amp`."""
    return torch.amp.autocast(device.type, dtype=AMP_DTYPES[args.amp_dtype or "float16"], enabled=args.amp)


def build_scaler(args: Any, device: torch.device) -> torch.amp.GradScaler:
    """Return what scales the loss under float16, whose gradients vanish without; elsewhere it does nothing."""
    return torch.amp.GradScaler(device.type, enabled=args.amp and args.amp_dtype != "bfloat16")


class FlipAverage(nn.Module):
    """A model that scores an image and its mirror image, and gives the mean: `--eval-flip`.

    Args:
        model: from (B, 3, H, W) to (B, num_classes) scores.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        """Return the mean of both scores."""
        # A copy, since a compiled model may put its second output where the first one is (CUDA graphs).
        return (self.model(image).clone() + self.model(image.flip(-1))) / 2


class ExponentialMovingAverage(nn.Module):
    """An exponential moving average of a model's weights and buffers.

    Its state dict is that of torch's `AveragedModel`, as torchvision's reference script saves it. The count stays on
    the CPU, where reading it makes nobody wait, and integer buffers are copied: an average of counts means nothing.

    Args:
        model: what to average; copied.
        decay: the weight of the average at each update.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.int64, device="cpu"))
        self._is_empty = True  # what n_averaged == 0 says, without a tensor to read
        self.register_load_state_dict_post_hook(lambda average, _: average._note_count())

    def forward(self, *args: Any) -> Any:
        """Call the averaged model."""
        return self.module(*args)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move the average towards `model`; the first time, onto it."""
        pairs = list(zip(_state(self.module), (value.detach() for value in _state(model)), strict=True))
        averaged = [pair for pair in pairs if pair[0].is_floating_point() and not self._is_empty]
        copied = [pair for pair in pairs if not pair[0].is_floating_point() or self._is_empty]
        if averaged:
            torch._foreach_lerp_(*map(list, zip(*averaged, strict=True)), 1.0 - self.decay)
        if copied:
            torch._foreach_copy_(*map(list, zip(*copied, strict=True)))
        self.n_averaged += 1
        self._is_empty = False

    def restart(self, model: nn.Module) -> None:
        """Begin as a copy of `model`."""
        self.reset()
        self.module.load_state_dict(model.state_dict())

    def reset(self) -> None:
        """Forget: the next update starts the average anew. torchvision does so throughout the warm-up."""
        self.n_averaged.zero_()
        self._is_empty = True

    def _note_count(self) -> None:
        self._is_empty = bool(self.n_averaged == 0)


def _state(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def build_ema(args: Any, model: nn.Module) -> ExponentialMovingAverage | None:
    """Return the average that `--model-ema` asks for, or None.

    torchvision's adjustment: the decay is that of a sample, made independent of batch size and of how often it is
    applied: alpha = (1 - decay) x (global batch x steps between updates / epochs), at most 1.
    """
    if not args.model_ema or args.test_only:
        return None
    adjust = args.global_batch_size * args.model_ema_steps / args.epochs
    model_ema = ExponentialMovingAverage(model, decay=1.0 - min(1.0, (1.0 - args.model_ema_decay) * adjust))
    compile_model(model_ema.module, args)
    return model_ema


def load_evaluated(args: Any, model: nn.Module, state: dict | None) -> ExponentialMovingAverage | None:
    """Load the weights of a checkpoint to evaluate, if there is one, and return the average that it holds, if any."""
    if state is None:
        return None
    with in_one_line(f"the checkpoint of --resume {args.resume} does not fit --model {args.model}"):
        model.load_state_dict(state["model"])
    if "model_ema" not in state:
        return None
    model_ema = ExponentialMovingAverage(model, decay=0.0)
    with in_one_line(f"the average in the checkpoint of --resume {args.resume} does not fit --model {args.model}"):
        model_ema.load_state_dict(state["model_ema"])
    compile_model(model_ema.module, args)
    return model_ema


def resolve_weights(args: Any) -> Any:
    """Return the member of torchvision's weights enumeration that `args.weights` names.

    Raises:
        UserError: there is none of that name for the model.
    """
    if args.model.startswith("timm/"):
        raise UserError(f"--weights {args.weights} is not a file; for {args.model}, give a file with a state dict")
    enum = torchvision.models.get_model_weights(args.model)
    owner, _, name = args.weights.rpartition(".")
    if owner not in ("", enum.__name__) or name not in enum.__members__:
        known = ", ".join(enum.__members__)
        hint = did_you_mean(name, enum.__members__)
        raise UserError(
            f"--weights {args.weights}: neither a file nor weights of {args.model}{hint} (there are {known})"
        )
    return enum[name]


def build_sharded_step(args: Any, model: nn.Module, shards: VirtualShards, device: torch.device) -> ShardedStep:
    """Return what surrounds the passes of each shard of a step."""
    is_deterministic = args.use_deterministic_algorithms
    return ShardedStep(model, shards, device=device, seed=args.seed, is_deterministic=is_deterministic)


def set_up_threads(args: Any) -> None:
    """Fix the order of sums on the CPU under `--use-deterministic-algorithms`, before anything is computed."""
    if args.use_deterministic_algorithms:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if "OMP_NUM_THREADS" not in os.environ:
            # What torchrun sets for several processes; another number of threads sums in another order.
            torch.set_num_threads(1)


def set_up_device(args: Any) -> torch.device:
    """Choose this process's device and its kinds of kernels; return the device."""
    torch.use_deterministic_algorithms(args.use_deterministic_algorithms)
    is_repeatable = args.use_deterministic_algorithms or args.test_only
    set_tf32(is_allowed=args.tf32)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = not is_repeatable, is_repeatable
    device = torch.device(args.device)
    return torch.device(device.type, args.gpu) if args.distributed and device.type != "cpu" else device

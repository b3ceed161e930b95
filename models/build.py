"""Build a model, check the sizes of its images, choose its precision, its threads and its device."""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distributed.collectives import count_cores
from distributed.watch import watchdog
from errors import UserError, did_you_mean, in_one_line
from models.classifier import AUXILIARY_WEIGHTS, classifier_layers
from settings.custom_code import check_code, parse_kwargs
from settings.options import split_custom


def check_name(name: str) -> None:
    """Raise UserError if torchvision lacks the model; timm's models and the user's own are looked up when built."""
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known and not name.startswith("timm/") and not split_custom(name):
        hint = did_you_mean(name, known) or f" (known: {', '.join(known)});"
        hint += " timm's are written timm/NAME, your own FILE.py:FUNCTION"
        raise UserError(f"--model {name}: not a torchvision classification model{hint}")


def check_model(args: Any) -> None:
    """Build the model and run it on the meta device, so that a wrong option ends the run before data is loaded.

    The model of a checkpoint to evaluate is checked when it is built, since its options are not known yet. Errors are
    those of `build_model` and `check_sizes`.
    """
    check_name(args.model)
    check_code(args)
    if args.test_only and args.resume:
        return
    model = build_without_memory(args, 1000)
    if split_custom(args.model) is None:
        check_sizes(model, args)


class _WeightsOnMeta(TorchFunctionMode):
    """Puts weights and statistics that layers allocate on the meta device; RegNet computes with other tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {} if kwargs is None else kwargs
        if function in (torch.empty, torch.zeros, torch.ones) and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def build_without_memory(args: Any, num_classes: int, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Return what `build_model` does, of weights on the meta device unless the model computes with its own."""
    # An error may be a user's mistake too, which the last line finds again.
    with suppress(Exception), _WeightsOnMeta(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")  # as is meant here
        return build_model(args, num_classes, weights)
    return build_model(args, num_classes, weights)


def build_model(
    args: Any, num_classes: int, weights: Mapping[str, Tensor] | None = None, source: str | None = None
) -> nn.Module:
    """Build `args.model` on the default device, its first weights drawn from `args.seed`, then replaced by `weights`.

    Args:
        args: the options.
        num_classes: outputs of the classifier.
        weights: a state dict to start from; a classifier of another size in it is left out, with a printed line.
        source: the name of the weights in a message; by default `--weights` and its value.

    Raises:
        UserError: the weights belong to another model, an option is about layers that this model lacks, or the model
            cannot take images of the given sizes.
    """
    watchdog.beat("building the model")
    # Every rank and every start draws the same first weights, whatever was drawn before.
    torch.manual_seed(args.seed)
    check_name(args.model)
    build = partial(_build_custom if split_custom(args.model) else _build_library, args)
    model = build(num_classes)
    if weights is not None:
        source = source or f"--weights {args.weights}"
        from models.matching import load_first

        load_first(model, weights, source, build, num_classes, args)
    if args.freeze or args.freeze_below:
        from models import freezing

        if args.freeze:
            freezing.freeze_below_classifier(model, classifier_layers(model, num_classes))
        else:
            freezing.freeze_below(model, args.freeze_below)
    if split_custom(args.model):
        check_sizes(model, args, num_classes)
    elif args.test_only and args.resume:
        check_sizes(model, args)
    if args.grad_checkpointing:
        set_grad_checkpointing(model, args.model)
    if args.sync_bn and args.distributed:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.freeze_batchnorm:
        from models.freezing import freeze_batchnorm

        freeze_batchnorm(model)
    return model


def begin_training(model: nn.Module) -> None:
    """Switch a model to training mode, but for layers that do not train: see `freezing.set_training_mode`."""
    keeps_statistics = any(getattr(module, "keeps_statistics", False) for module in model.modules())
    if all(parameter.requires_grad for parameter in model.parameters()) and not keeps_statistics:
        model.train()
        return
    from models.freezing import set_training_mode

    set_training_mode(model)


# Keyword arguments that the data or other options set; some would fetch weights.
_NOT_FOR_KWARGS = {
    "weights", "weights_backbone", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path",
    "cache_dir", "num_classes", "model_name", "img_size", "image_size", "drop_rate", "drop_path_rate", "in_chans",
}  # fmt: skip


def _build_library(args: Any, num_classes: int) -> nn.Module:
    """Build a model of torchvision's or timm's from our options and the keyword arguments of `--model-kwargs`."""
    given = parse_kwargs(args.model_kwargs)
    for key in given.keys() & _NOT_FOR_KWARGS:
        raise UserError(f"--model-kwargs {key}: set by another option or by the data; remove it")
    is_timms = args.model.startswith("timm/")
    if is_timms:
        from models.from_timm import find_timm

        build, options = find_timm(args)
    else:
        build, options = _find_torchvision(args)
    try:
        model = build(num_classes=num_classes, **{**options, **given})
    except Exception as error:
        if isinstance(error, RuntimeError) and not given:  # such as one of memory
            raise
        words = f" --model-kwargs {' '.join(args.model_kwargs)}" if given else ""
        with in_one_line(f"--model {args.model} cannot be built with --val-crop-size {args.val_crop_size}{words}"):
            raise
    if not is_timms:
        _set_rates(model, args)
        if args.in_chans != 3:
            from models.channels import widen

            widen(model, args)
    return model


def _find_torchvision(args: Any) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """Return the function that builds a model of torchvision's, and its keyword arguments by our options."""
    options = {}
    if args.model in AUXILIARY_WEIGHTS:
        # Naming the default avoids a FutureWarning. Published weights expect inputs scaled to [-1, 1].
        published = torchvision.models.get_model_weights(args.model).__members__
        is_published = bool(args.weights) and args.weights.rpartition(".")[2] in published
        options = {"init_weights": True, "aux_logits": True, "transform_input": is_published}
    elif args.model.startswith("vit_"):
        options = {"image_size": args.val_crop_size}
    return partial(torchvision.models.get_model, args.model, weights=None), options


def _build_custom(args: Any, num_classes: int) -> nn.Module:
    """Build a model of the user's own; an error in it keeps its traceback, for the user to read."""
    from models.own_model import call_own

    model = call_own(args, num_classes)
    _set_rates(model, args)
    return model


def _set_rates(model: nn.Module, args: Any) -> None:
    """Set `--dropout` in all dropout layers; scale stochastic depth so that the deepest layer has the given rate."""
    if args.stochastic_depth is not None:
        layers = [module for module in model.modules() if isinstance(module, torchvision.ops.StochasticDepth)]
        deepest = max((layer.p for layer in layers), default=0.0)
        if not deepest:
            raise UserError(f"--stochastic-depth {args.stochastic_depth}: {args.model} does not support it")
        for layer in layers:
            layer.p *= args.stochastic_depth / deepest
    if args.dropout is not None:
        layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        if not layers:
            raise UserError(f"--dropout {args.dropout}: {args.model} has no dropout layer")
        for layer in layers:
            layer.p = args.dropout


def check_sizes(model: nn.Module, args: Any, num_classes: int | None = None) -> None:
    """Check that a model takes images of the sizes that the options give and, for a number of classes, its scores.

    Its weights and running statistics stay as they are.

    Raises:
        UserError: it does not take a size, or returns no scores; the message names the option.
    """
    smallest = args.train_crop_size_min or args.train_crop_size
    between = range(smallest // 32 * 32 + 32, args.train_crop_size, 32)
    training = [] if args.test_only else sorted({smallest, *between, args.train_crop_size})
    for split, side in [*(("train", side) for side in training), ("val", args.val_crop_size)]:
        if split == "train":
            begin_training(model)
        else:
            model.eval()
        num_images = min(args.batch_size, 2) if split == "train" else 2
        size = f"--{split}-crop-size {side} at --batch-size {args.batch_size}"
        with in_one_line(f"--model {args.model} cannot take {size}"):
            output = _score_zeros(model, (num_images, args.in_chans, side, side))
            if num_classes is not None:
                from models.own_model import check_scores

                check_scores(output, (num_images, num_classes), args)
            if split == "val" and not isinstance(output, Tensor):
                model.register_forward_hook(_leave_scores)
    model.train()


def _leave_scores(model: nn.Module, _: tuple, output: Any) -> Any:
    """Reduce the output of a model in evaluation mode to its scores: a hook of models that return a tuple there."""
    return output if model.training or isinstance(output, Tensor) else output[0]


def further_outputs(model: nn.Module, args: Any, num_images: int) -> tuple:
    """Return what a model returns beside the scores in training, for black images; its state stays as it is."""
    begin_training(model)
    side = args.train_crop_size
    output = _score_zeros_on(next(model.parameters()).device, model, (num_images, args.in_chans, side, side))
    return () if isinstance(output, Tensor) else tuple(output[1:])


def _score_zeros(model: nn.Module, shape: tuple[int, ...]) -> Any:
    """Return a model's output for black images, without memory where it can run so; its state stays as it is."""
    try:
        return _score_zeros_on("meta", model, shape)
    except Exception:  # each kind of layer raises another error
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise
        return _score_zeros_on("cpu", model, shape)  # a few models can only run with memory


def _score_zeros_on(device: torch.device | str, model: nn.Module, shape: tuple[int, ...]) -> Any:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {name: tensor.detach().to(device, copy=True) for name, tensor in state.items()}
    with torch.no_grad(), torch.random.fork_rng([]):
        return torch.func.functional_call(model, own, torch.zeros(shape, device=device))


def set_grad_checkpointing(model: nn.Module, name: str) -> None:
    """Let a model recompute its blocks' activations in the backward pass; UserError if it cannot do so exactly."""
    if not hasattr(model, "set_grad_checkpointing"):
        raise UserError(f"--grad-checkpointing: {name} has no set_grad_checkpointing, as timm's models have; remove it")
    if any("running_" in buffer for buffer, _ in model.named_buffers()):
        raise UserError(f"--grad-checkpointing would update the running statistics of {name} twice per step; remove it")
    with in_one_line(f"--grad-checkpointing: {name}"):
        model.set_grad_checkpointing(True)


def move_to_device(model: nn.Module, args: Any, device: torch.device) -> nn.Module:
    """Move a model to its device, in the memory order that the options ask for, compile it if asked, and return it."""
    model.to(device, memory_format=torch.channels_last if args.channels_last else torch.preserve_format)
    return compile_model(model, args)


def compile_model(model: nn.Module, args: Any) -> nn.Module:
    """Compile a model if `--compile` asks for it, in place so that its state dict keeps its names; return it."""
    if args.compile is not None:
        from models.compiling import compile_in_place

        compile_in_place(model, args)
    return model


def autocast(args: Any, device: torch.device) -> torch.amp.autocast:
    """Return a reusable context that computes in `--amp-dtype` under `--amp`, and has no effect otherwise."""
    dtype = getattr(torch, args.amp_dtype or "float16")
    return torch.amp.autocast(device.type, dtype=dtype, enabled=args.amp and dtype != torch.float32)


def build_scaler(args: Any, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler, without which float16 gradients vanish; disabled for other types and without `--amp`."""
    return torch.amp.GradScaler(device.type, enabled=args.amp and args.amp_dtype in (None, "float16"))


class FlipAverage(nn.Module):
    """A model that returns the mean of a model's scores for an image and its mirror image: `--eval-flip`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        """Return (B, num_classes): the mean of both scores."""
        # Clone, since a compiled model may overwrite its first output by the second one (CUDA graphs).
        return (self.model(image).clone() + self.model(image.flip(-1))) / 2


def set_up_threads(args: Any) -> None:
    """Fix the order of sums on the CPU under `--use-deterministic-algorithms`, before anything is computed.

    Without it there are as many threads as cores, of which torch does not know the quota of a container.
    """
    threads = min(torch.get_num_threads(), count_cores())
    if args.use_deterministic_algorithms:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        threads = 1  # torchrun's value for several processes; another number of threads sums in another order
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)


def set_up_device(args: Any) -> torch.device:
    """Choose deterministic kernels, TF32 and cuDNN's autotuning by the options; return this process's device."""
    torch.use_deterministic_algorithms(args.use_deterministic_algorithms)
    is_repeatable = args.use_deterministic_algorithms or args.test_only
    if args.tf32 is not None:  # else torch's default: in convolutions alone
        # Not the newer `fp32_precision`: inductor before torch 2.15 still reads these flags, and refuses to compile
        # after the newer ones were set (pytorch/pytorch#166387); setting these sets the newer ones too.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = not is_repeatable, is_repeatable
    device = torch.device(args.device)
    return torch.device(device.type, args.gpu) if args.distributed and device.type != "cpu" else device

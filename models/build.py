"""Build a model, check the sizes of its images, choose its precision, its threads and its device."""

import importlib
import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distributed.collectives import count_cores
from distributed.watch import watchdog
from errors import UserError, as_user_error, did_you_mean
from settings.custom_code import check_code, parse_kwargs
from settings.options import AugmentationOptions, DistributedOptions, ModelOptions, PrecisionOptions
from settings.rules import split_custom
from settings.stages import Parsed

# Weight of an auxiliary classifier's loss; the main loss has 1: GoogLeNet (Szegedy et al., arXiv 1409.4842,
# section 5) and Inception v3 (the weight in PyTorch's own fine-tuning tutorial).
AUXILIARY_WEIGHTS = {"googlenet": 0.3, "inception_v3": 0.4}


def check_name(name: str) -> None:
    """Raise UserError if torchvision lacks the model; timm's models and the user's own are looked up when built."""
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known and not name.startswith("timm/") and not split_custom(name):
        hint = did_you_mean(name, known) or f" (known: {', '.join(known)});"
        hint += " timm's are written timm/NAME, your own FILE.py:FUNCTION"
        if find_spec("timm") and importlib.import_module("timm").is_model(name.partition(".")[0]):
            hint = f"; did you mean timm/{name}?"
        raise UserError(f"--model {name}: not a torchvision classification model{hint}")


def check_model(args: Parsed) -> None:
    """Build the model and run it on the meta device, so that a wrong option ends the run before data is loaded.

    The model of a checkpoint to evaluate is checked when it is built, since its options are not known yet. Errors are
    those of `build_model` and `check_sizes`.
    """
    check_name(args.model.model)
    check_code(args)
    if args.checkpoint.test_only and args.checkpoint.resume:
        return
    model = build_without_memory(args, 1000)
    if split_custom(args.model.model) is None:
        check_sizes(model, args)


class _WeightsOnMeta(TorchFunctionMode):
    """Puts weights and statistics that layers allocate on the meta device; RegNet computes with other tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # RegNet cannot be built on the meta device as a whole; in memory regnet_y_32gf takes 1.56 s, this way 0.35.
        if function in (torch.empty, torch.zeros, torch.ones) and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def build_without_memory(args: Parsed, num_classes: int, weights: dict[str, Tensor] | None = None) -> nn.Module:
    """Return what `build_model` does, of weights on the meta device unless the model computes with its own."""
    try:
        with _WeightsOnMeta(), warnings.catch_warnings():
            # torch warns that `load_state_dict` copies nothing into tensors without memory: names and shapes are
            # checked all the same, for which it is called here.
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
            return build_model(args, num_classes, weights)
    except Exception:
        # Swin computes with its own tensors as it is built. Another error is a user's mistake, which the next line
        # finds again: outside this block, so that its traceback does not tell of this one.
        pass
    return build_model(args, num_classes, weights)


def build_model(
    args: Parsed, num_classes: int, weights: dict[str, Tensor] | None = None, source: str | None = None
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
    watchdog.note_progress("building the model")
    # Every rank and every start draws the same first weights, whatever was drawn before.
    torch.manual_seed(args.optimization.seed)
    check_name(args.model.model)
    if split_custom(args.model.model):
        build = partial(_build_custom, args.model, args.data.in_chans)
    else:
        build = partial(_build_library, args.model, args.data.in_chans, args.augmentation.val_crop_size)
    model = build(num_classes)
    if weights is not None:
        from models import matching
        from models.channels import fit_channels

        source = source or f"--weights {args.model.weights}"
        if args.model.model in AUXILIARY_WEIGHTS:
            matching.check_rescaling(model, weights, args.model, source)
        weights = fit_channels(model, weights, args.data.in_chans, args.checkpoint.test_only, source)
        # A new classifier that is not trained scores at chance: an evaluation is refused.
        fill = None if args.checkpoint.test_only else args.model.classifier_init
        matching.load_matching(model, weights, source, build, num_classes, classifier_init=fill)
    if args.model.freeze or args.model.freeze_below:
        _freeze(model, args.model, num_classes)
    if split_custom(args.model.model):
        check_sizes(model, args, num_classes)
    elif args.checkpoint.test_only and args.checkpoint.resume:
        check_sizes(model, args)
    if args.precision.grad_checkpointing:
        set_grad_checkpointing(model, args.model.model)
    # After a model of one's own is tried: once several processes have joined, these layers train on GPUs alone.
    if args.model.sync_bn and args.distributed.is_launched:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.model.freeze_batchnorm:
        from models.freezing import freeze_batchnorm

        freeze_batchnorm(model)
    return model


def _freeze(model: nn.Module, model_options: ModelOptions, num_classes: int) -> None:
    """Freeze the layers that `--freeze` or `--freeze-below` names."""
    from models import freezing

    if model_options.freeze:
        freezing.freeze_below_classifier(model, num_classes)
    else:
        freezing.freeze_below(model, model_options.freeze_below)


def begin_training(model: nn.Module) -> None:
    """Switch a model to training mode, but for layers that do not train: see `freezing.set_training_mode`."""
    is_all_trained = all(parameter.requires_grad for parameter in model.parameters())
    keeps_statistics = any(getattr(module, "keeps_statistics", False) for module in model.modules())
    if is_all_trained and not keeps_statistics:
        model.train()
        return
    from models.freezing import set_training_mode

    set_training_mode(model)


# Keyword arguments that the data or other options set; some would fetch weights.
_NOT_FOR_KWARGS = {
    "weights", "weights_backbone", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path",
    "cache_dir", "num_classes", "model_name", "img_size", "image_size", "drop_rate", "drop_path_rate", "in_chans",
}  # fmt: skip


def _build_library(model_options: ModelOptions, in_chans: int, val_crop_size: int, num_classes: int) -> nn.Module:
    """Build a model of torchvision's or timm's from our options and the keyword arguments of `--model-kwargs`."""
    given = parse_kwargs(model_options.model_kwargs)
    for key in given.keys() & _NOT_FOR_KWARGS:
        raise UserError(f"--model-kwargs {key}: set by another option or by the data; remove it")
    is_timms = model_options.model.startswith("timm/")
    if is_timms:
        from models.from_timm import find_timm

        build, options = find_timm(model_options, in_chans, val_crop_size)
    else:
        build, options = _find_torchvision(model_options, val_crop_size)
    try:
        model = build(num_classes=num_classes, **{**options, **given})
    except Exception as error:
        # Without arguments of the user's it is no mistake of theirs, but a lack of memory or the like.
        if isinstance(error, RuntimeError) and not given:
            raise
        words = f" --model-kwargs {' '.join(model_options.model_kwargs)}" if given else ""
        with as_user_error(
            f"--model {model_options.model} cannot be built with --val-crop-size {val_crop_size}{words}"
        ):
            raise
    if not is_timms:
        _set_rates(model, model_options)
        if in_chans != 3:
            from models.channels import widen

            widen(model, model_options.model, in_chans)
    return model


def _find_torchvision(
    model_options: ModelOptions, val_crop_size: int
) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """Return the function that builds a model of torchvision's, and its keyword arguments by our options."""
    options: dict[str, Any] = {}
    if model_options.model in AUXILIARY_WEIGHTS:
        # Naming the default of init_weights avoids a FutureWarning. Published weights are those of the papers, and
        # expect inputs scaled to [-1, 1]: these models can rescale theirs from the usual mean and deviation.
        published = torchvision.models.get_model_weights(model_options.model).__members__
        is_published = bool(model_options.weights) and model_options.weights.rpartition(".")[2] in published
        options = {"init_weights": True, "aux_logits": True, "transform_input": is_published}
    elif model_options.model.startswith("vit_"):
        options = {"image_size": val_crop_size}
    return partial(torchvision.models.get_model, model_options.model, weights=None), options


def _build_custom(model_options: ModelOptions, in_chans: int, num_classes: int) -> nn.Module:
    """Build a model of the user's own; an error in it keeps its traceback, for the user to read."""
    from models.own_model import call_own

    model = call_own(model_options, in_chans, num_classes)
    _set_rates(model, model_options)
    return model


def _set_rates(model: nn.Module, model_options: ModelOptions) -> None:
    """Set the rates of `--dropout` and `--stochastic-depth` in a model that has not been built with them."""
    if model_options.dropout is not None or model_options.stochastic_depth is not None:
        from models.drop_rates import set_rates

        set_rates(model, model_options)


def check_sizes(model: nn.Module, args: Parsed, num_classes: int | None = None) -> None:
    """Check that a model takes images of the sizes that the options give and, for a number of classes, its scores.

    Its weights and running statistics stay as they are.

    Raises:
        UserError: it does not take a size, or returns no scores; the message names the option.
    """
    sizes = [("val", args.augmentation.val_crop_size)]
    if not args.checkpoint.test_only:
        # All sizes of a ramp, `--crop-ramp-epochs`: one that fails would otherwise end the run after hours.
        smallest = args.augmentation.train_crop_size_min or args.augmentation.train_crop_size
        between = range(smallest // 32 * 32 + 32, args.augmentation.train_crop_size, 32)
        training = {smallest, *between, args.augmentation.train_crop_size}
        sizes = [*(("train", side) for side in sorted(training)), *sizes]
    for split, side in sizes:
        num_images = 2
        if split == "train":
            begin_training(model)
            # BatchNorm refuses to train on one value per channel, as after a global pooling of a single image.
            num_images = min(args.optimization.batch_size, 2)
        else:
            model.eval()
        size = f"--{split}-crop-size {side} at --batch-size {args.optimization.batch_size}"
        with as_user_error(f"--model {args.model.model} cannot take {size}"):
            output = _score_zeros(model, (num_images, args.data.in_chans, side, side))
            if num_classes is not None:
                from models.own_model import check_scores

                check_scores(output, (num_images, num_classes), args.optimization.criterion, args.checkpoint.test_only)
            if split == "val" and not isinstance(output, Tensor):
                model.register_forward_hook(_leave_scores)
    model.train()


def _leave_scores(model: nn.Module, _: tuple, output: Any) -> Any:
    """Reduce the output of a model in evaluation mode to its scores: a hook of models that return a tuple there."""
    if model.training or isinstance(output, Tensor):
        return output
    return output[0]


def _score_zeros(model: nn.Module, shape: tuple[int, ...]) -> Any:
    """Return a model's output for black images, without memory where it can run so; its state stays as it is."""
    try:
        return score_zeros_on("meta", model, shape)
    except Exception:
        # Each kind of layer raises another error. A few models can only run with memory.
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise
        return score_zeros_on("cpu", model, shape)


def score_zeros_on(device: torch.device | str, model: nn.Module, shape: tuple[int, ...]) -> Any:
    """Return a model's output for black images on a device; its state and the CPU's draws stay as they are."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {name: tensor.detach().to(device, copy=True) for name, tensor in state.items()}
    # Without the empty list torch saves the generators of all GPUs, for which it initialises each of them.
    with torch.no_grad(), torch.random.fork_rng([]):
        return torch.func.functional_call(model, own, torch.zeros(shape, device=device))


def set_grad_checkpointing(model: nn.Module, name: str) -> None:
    """Let a model recompute its blocks' activations in the backward pass; UserError if it cannot do so exactly."""
    switch = getattr(model, "set_grad_checkpointing", None)
    if switch is None:
        raise UserError(f"--grad-checkpointing: {name} has no set_grad_checkpointing, as timm's models have; remove it")
    if any("running_" in buffer for buffer, _ in model.named_buffers()):
        raise UserError(f"--grad-checkpointing would update the running statistics of {name} twice per step; remove it")
    with as_user_error(f"--grad-checkpointing: {name}"):
        switch(True)


def move_to_device(model: nn.Module, precision: PrecisionOptions, device: torch.device) -> nn.Module:
    """Move a model to its device, in the memory order that the options ask for, and return it."""
    order: dict[str, Any] = {"memory_format": torch.preserve_format}
    if precision.channels_last:
        order["memory_format"] = torch.channels_last
    return model.to(device, **order)


def compile_model(model: nn.Module, precision: PrecisionOptions, augmentation: AugmentationOptions) -> nn.Module:
    """Compile a model if `--compile` asks for it, in place so that its state dict keeps its names; return it."""
    if precision.compile is not None:
        from models.compiling import compile_in_place

        compile_in_place(model, precision, augmentation)
    return model


def build_ema(args: Parsed, model: nn.Module) -> torch.optim.swa_utils.AveragedModel | None:
    """Return the average that `--model-ema` asks for, or None."""
    if not args.model.model_ema or args.checkpoint.test_only:
        return None
    from models.ema import ExponentialMovingAverage, describe_ema, ema_decay

    batch = args.optimization.global_batch_size
    # The decay is printed after its adjustment: timm's option of the same name means another average.
    print(describe_ema(args.model, args.schedule, batch))
    model_ema = ExponentialMovingAverage(model, ema_decay(args.model, args.schedule, batch), device=None)
    # The copy of a compiled module is not compiled: torch leaves that out of a module's state (`__getstate__`).
    compile_model(model_ema.module, args.precision, args.augmentation)
    return model_ema


def autocast(precision: PrecisionOptions, device: torch.device) -> torch.amp.autocast:
    """Return a reusable context that computes in `--amp-dtype` under `--amp`, and has no effect otherwise."""
    # float32 replaces a recipe's bfloat16 on a CPU without its instructions, which would be 2 to 12 times slower.
    dtype = getattr(torch, precision.amp_dtype or "float16")
    return torch.amp.autocast(device.type, dtype=dtype, enabled=precision.amp and dtype != torch.float32)


def build_scaler(precision: PrecisionOptions, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler, without which float16 gradients vanish; disabled for other types and without `--amp`."""
    # The least float16 above zero is 6e-8. bfloat16 has the exponents of float32, so its gradients need no scale.
    return torch.amp.GradScaler(device.type, enabled=precision.amp and precision.amp_dtype in (None, "float16"))


class FlipAverage(nn.Module):
    """A model that returns the mean of a model's scores for an image and its mirror image: `--eval-flip`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        """Return (B, num_classes): the mean of both scores."""
        # Clone, since a compiled model may overwrite its first output by the second one (CUDA graphs).
        return (self.model(image).clone() + self.model(image.flip(-1))) / 2


def set_up_threads(precision: PrecisionOptions) -> None:
    """Fix the order of sums on the CPU under `--use-deterministic-algorithms`, before anything is computed.

    Without it there are as many threads as cores, of which torch does not know the quota of a container.
    """
    threads = min(torch.get_num_threads(), count_cores())
    if precision.use_deterministic_algorithms:
        # cuBLAS reads it once, when it starts; without it torch refuses its products of matrices as not deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Each thread sums a part, so one thread and two gave a ResNet-18 different bits within two steps. torchrun
        # gives one to each of several processes, but python alone one for each core: so all get one.
        threads = 1
    # Whoever sets OMP_NUM_THREADS has chosen; torchrun sets it too.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)


def set_up_device(precision: PrecisionOptions, distributed: DistributedOptions, test_only: bool) -> torch.device:
    """Choose deterministic kernels, TF32 and cuDNN's autotuning by the options; return this process's device."""
    torch.use_deterministic_algorithms(precision.use_deterministic_algorithms)
    # In evaluation as in torchvision's script, which says that autotuning can noticeably affect the accuracy.
    is_repeatable = precision.use_deterministic_algorithms or test_only
    if precision.tf32 is not None:  # else torch's default: in convolutions alone
        # Not the newer `fp32_precision`: inductor before torch 2.15 still reads these flags, and refuses to compile
        # after the newer ones were set (pytorch/pytorch#166387); setting these sets the newer ones too.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision.tf32
    # Autotuning keeps the kernel that was fastest in this process, so that the next start may round differently.
    torch.backends.cudnn.benchmark = not is_repeatable
    torch.backends.cudnn.deterministic = is_repeatable
    device = torch.device(distributed.device)
    if distributed.is_launched and device.type != "cpu":
        return torch.device(device.type, distributed.gpu)
    return device

"""Build a model, load weights into it, compile it, average its weights, choose its precision and its device."""

import copy
import importlib
import importlib.util
import inspect
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distributed.collectives import count_cores
from distributed.signals import at_end
from distributed.watch import watchdog
from errors import UserError, counted, did_you_mean, find_timm_config, in_one_line, require_timm
from files import own_temporary_folder
from models.freezing import freeze_batchnorm, freeze_below, freeze_below_classifier, set_training_mode
from settings.custom_code import check_code, load_function, parse_kwargs
from settings.options import BY_NAME, split_custom

# Weight of an auxiliary classifier's loss; the main loss has 1: GoogLeNet (Szegedy et al., arXiv 1409.4842,
# section 5) and Inception v3 (the weight in PyTorch's own fine-tuning tutorial).
AUXILIARY_WEIGHTS = {"googlenet": 0.3, "inception_v3": 0.4}


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
        check_rescaling(model, weights, args, source)
        weights = fit_channels(model, weights, args, source)
        fill = None if args.test_only else args.classifier_init
        load_matching(model, weights, source, build, num_classes, classifier_init=fill)
    if args.freeze:
        freeze_below_classifier(model, classifier_layers(model, num_classes))
    elif args.freeze_below:
        freeze_below(model, args.freeze_below)
    if split_custom(args.model):
        check_sizes(model, args, num_classes)
    elif args.test_only and args.resume:
        check_sizes(model, args)
    if args.grad_checkpointing:
        set_grad_checkpointing(model, args.model)
    if args.sync_bn and args.distributed:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.freeze_batchnorm:
        freeze_batchnorm(model)
    return model


def check_rescaling(model: nn.Module, weights: Mapping[str, Tensor], args: Any, source: str) -> None:
    """Refuse weights of GoogLeNet or Inception v3 unless their inputs were rescaled as the model rescales its own.

    torchvision rescales them for published weights, and training from these keeps it.
    """
    if args.model not in AUXILIARY_WEIGHTS or not hasattr(weights, "options"):  # published ones, by their name
        return
    options, own = weights.options, model.transform_input
    kwargs = options.get("model_kwargs")
    given = parse_kwargs(kwargs) if BY_NAME["model_kwargs"].is_value(kwargs) else {}
    if "transform_input" in given:
        found = bool(given["transform_input"])
    elif "weights" in options:
        published = torchvision.models.get_model_weights(args.model).__members__
        found = str(options["weights"]).rpartition(".")[2] in published
    else:
        found = options.get("pretrained")  # of torchvision's script before 0.12
    if found is None and "transform_input" not in parse_kwargs(args.model_kwargs):
        raise UserError(
            f"{source} does not say whether its inputs were rescaled to [-1, 1], as those of torchvision's published "
            "weights are; give train.py --model-kwargs transform_input=True or transform_input=False"
        )
    if found not in (None, own):
        raise UserError(
            f"{source} was trained with inputs {'' if found else 'not '}rescaled to [-1, 1]; give --model-kwargs "
            f"transform_input={found}"
        )


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
    build, options = _find_timm(args) if is_timms else _find_torchvision(args)
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
        _widen(model, args)
    return model


def _widen(model: nn.Module, args: Any) -> None:
    """Let a model of torchvision's take `--in-chans`: its first weights are those for three channels, adapted."""
    if args.in_chans == 3:
        return
    if getattr(model, "transform_input", False):
        raise UserError(
            f"--in-chans {args.in_chans}: {args.model} rescales the three channels of its published weights; remove "
            "--in-chans, or the weights and transform_input"
        )
    first = next(each for each in model.modules() if isinstance(each, nn.Conv2d) and each.in_channels == 3)
    first.in_channels, first.weight = args.in_chans, nn.Parameter(adapt_channels(first.weight.detach(), args.in_chans))


def adapt_channels(weight: Tensor, in_chans: int) -> Tensor:
    """Return weights (O, I, h, w) of a first layer for another number of channels, in timm's way.

    They are summed for one channel, else repeated, cut and scaled, so that the sum over the channels stays about equal.
    """
    if in_chans == 1:
        return weight.float().sum(dim=1, keepdim=True).to(weight.dtype)
    repeated = weight.float().repeat(1, -(-in_chans // weight.shape[1]), 1, 1)[:, :in_chans]
    return (repeated * (weight.shape[1] / in_chans)).to(weight.dtype)


def fit_channels(model: nn.Module, weights: Mapping[str, Tensor], args: Any, source: str) -> Mapping[str, Tensor]:
    """Return weights for `--in-chans`, and print a line if they change; UserError if they may not (`--test-only`)."""
    fitted = copy.copy(weights)  # with its notes
    for layer, module in model.named_modules():
        name = f"{layer}.weight"
        weight = weights.get(name) if isinstance(module, nn.Conv2d) and module.in_channels == args.in_chans else None
        theirs = 0 if weight is None or weight.ndim != 4 else weight.shape[1]
        if theirs not in BY_NAME["in_chans"].choices or theirs == module.weight.shape[1]:
            continue
        if args.test_only:
            raise UserError(
                f"{source} is for {counted(theirs, 'channel')}, but --in-chans is {args.in_chans}; evaluation does "
                f"not adapt weights: give --in-chans {theirs}, or to a tool --mean and --std with as many values"
            )
        fitted[name] = adapt_channels(weight, args.in_chans)
        words = "summed" if args.in_chans == 1 else f"repeated and scaled by {theirs} / {args.in_chans}"
        print(f"{source}: {name} of {counted(theirs, 'channel')} is {words} for --in-chans {args.in_chans}, as in timm")
    return fitted


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


def _find_timm(args: Any) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """Return the function that builds a model of timm's, and its keyword arguments by our options."""
    timm = require_timm("--model", args.model)
    name = args.model.removeprefix("timm/")
    if "." in name or not timm.is_model(name):
        # A name may end in the tag of its weights, whose config then gives mean and size.
        known = timm.list_models() + (timm.list_pretrained(f"{name.partition('.')[0]}.*") if "." in name else [])
        if name not in known:
            hint = did_you_mean(name, known, prefix="timm/")
            raise UserError(f"--model {args.model}: timm has no such model{hint}")
    options = {"drop_path_rate": args.stochastic_depth, "drop_rate": args.dropout}
    options["in_chans"] = None if args.in_chans == 3 else args.in_chans
    config = find_timm_config(args.model)
    if config is not None and config.fixed_input_size and config.input_size[-1] != args.val_crop_size:
        options["img_size"] = args.val_crop_size
    given = {option: value for option, value in options.items() if value is not None}
    return partial(timm.create_model, name), given


def _build_custom(args: Any, num_classes: int) -> nn.Module:
    """Call the user's own function; an error in it keeps its traceback, for the user to read."""
    function = load_function("model", args)
    given = parse_kwargs(args.model_kwargs)
    given |= {} if args.in_chans == 3 else {"in_chans": args.in_chans}
    signature, names = inspect.signature(function), ", ".join(["num_classes", *given])
    with in_one_line(f"--model {args.model} takes {signature}, but is called with {names}"):
        signature.bind(num_classes=num_classes, **given)
    model = function(num_classes=num_classes, **given)
    if not isinstance(model, nn.Module):
        raise UserError(f"--model {args.model} returned a {type(model).__name__}, expected a torch.nn.Module")
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
        set_training_mode(model) if split == "train" else model.eval()
        num_images = min(args.batch_size, 2) if split == "train" else 2
        size = f"--{split}-crop-size {side} at --batch-size {args.batch_size}"
        with in_one_line(f"--model {args.model} cannot take {size}"):
            output = _score_zeros(model, (num_images, args.in_chans, side, side))
            if num_classes is not None:
                _check_scores(output, (num_images, num_classes), args)
            if split == "val" and not isinstance(output, Tensor):
                model.register_forward_hook(_leave_scores)
    model.train()


def _leave_scores(model: nn.Module, _: tuple, output: Any) -> Any:
    """Reduce the output of a model in evaluation mode to its scores: a hook of models that return a tuple there."""
    return output if model.training or isinstance(output, Tensor) else output[0]


def further_outputs(model: nn.Module, args: Any, num_images: int) -> tuple:
    """Return what a model returns beside the scores in training, for black images; its state stays as it is."""
    set_training_mode(model)
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


def _check_scores(output: Any, shape: tuple[int, int], args: Any) -> None:
    """Raise UserError if a model's output is neither float32 scores of a shape nor a tuple that begins with them."""
    if isinstance(output, tuple | list) and output:
        if not args.test_only and not split_custom(args.criterion or ""):
            raise UserError(
                f"its output is a {type(output).__name__} of {len(output)}, which needs a loss of your own: give "
                "--criterion FILE.py:FUNCTION"
            )
        output = output[0]
    is_tensor = isinstance(output, Tensor)
    if not is_tensor or output.dtype != torch.float32 or output.shape != shape:
        found = f"{output.dtype} of shape {tuple(output.shape)}" if is_tensor else f"a {type(output).__name__}"
        raise UserError(
            f"its output for {counted(shape[0], 'image')}, built with num_classes={shape[1]} to try it, is {found}; "
            f"expected float32 scores of {shape}, or a tuple that begins with them"
        )


def classifier_layers(model: nn.Module, num_classes: int) -> list[str]:
    """Return the names of the layers that give the class scores; UserError if there are none.

    timm's models know their one or two heads. In other models these are the last layer, and the last one of each
    auxiliary classifier.
    """
    layers = (pair for pair in model.named_modules() if isinstance(pair[1], nn.Linear | nn.Conv2d))
    sizes = {name: len(layer.weight) for name, layer in layers}
    if hasattr(model, "get_classifier"):
        found = model.get_classifier()
        heads = found if isinstance(found, tuple | list | nn.ModuleList) else [found]
        inside = {id(module) for head in heads for module in head.modules()}
        lasts = [name for name in sizes if id(model.get_submodule(name)) in inside]
    else:
        parts = {name.split(".")[0] if "aux" in name.lower() else "": name for name in sizes}
        lasts = [name for name in sizes if name in parts.values()]
    ends = [name for name in lasts if sizes[name] == num_classes]
    if not ends:
        raise UserError(f"the model {type(model).__name__} has no final layer with {num_classes} outputs")
    return ends


def count_classes(model: nn.Module, weights: Mapping[str, Tensor], num_classes: int) -> int:
    """Return the number of classes of a state dict's classifier; `num_classes`, the model's, if it has none."""
    head = weights.get(f"{classifier_layers(model, num_classes)[-1]}.weight")
    return num_classes if head is None or not head.ndim else len(head)


def load_matching(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    source: str,
    build: Callable[[int], nn.Module],
    num_classes: int,
    *,
    classifier_init: str | None = "zero",
) -> None:
    """Load a state dict into a model; where its classifier is missing or of other classes, a new one starts.

    A model by `build` with the state dict's number of classes loads it first, so that modules can translate older
    versions. `classifier_init` is `zero` for a new classifier of zeros, `model` for the one that the model has drawn,
    or None where no training follows: then the classifier must be for the model's `num_classes`. Messages call the
    weights `source`.

    Raises:
        UserError: the state dict belongs to another model, or its classifier does not fit.
    """
    state = model.state_dict()
    for name, tensor in state.items():
        found = weights.get(name)
        if found is not None and tensor.is_floating_point() and (not found.is_floating_point() or found.itemsize < 2):
            raise UserError(f"{source} is quantized: {name} is {found.dtype}; give weights of 16 bits or more")
    ends = classifier_layers(model, num_classes)
    own = {name: tensor for name, tensor in state.items() if name.rpartition(".")[0] in ends}
    is_headless = not own.keys() & weights.keys()
    if is_headless and classifier_init is not None:
        weights = copy.copy(weights)  # with its notes
        weights.update(own)
    check_names(weights, {name: tensor for name, tensor in state.items() if name not in own}, source)
    theirs = count_classes(model, weights, num_classes)
    reader = model if theirs == num_classes else build(theirs)
    kind = getattr(weights, "kind", "a state dict")
    with in_one_line(f"{source} belongs to another model, check --model: it holds {kind}"):
        load_resized(reader, weights, source)
    if reader is model and not is_headless:
        if found := getattr(weights, "disorder", None):
            raise UserError(f"{source}: {found[0]}; to continue anyway, give --allow-change data")
        return
    if classifier_init is None:
        raise UserError(
            f"{source} has a classifier for {theirs} classes, but the data has {num_classes}; --test-only needs data "
            "with the classes that it was trained on"
        )
    if reader is not model:
        body = {name: tensor for name, tensor in reader.state_dict().items() if name not in own}
        model.load_state_dict(body, strict=False)
    # SqueezeNet's convolution has a ReLU behind it, through which no gradient reaches zeros.
    is_zero = classifier_init == "zero" and all(isinstance(model.get_submodule(end), nn.Linear) for end in ends)
    if is_zero:
        for tensor in own.values():
            tensor.zero_()
    found = "no classifier" if is_headless else f"classifier of {counted(theirs, 'class')} left out"
    values = "of zeros" if is_zero else "as the model draws it"
    print(f"{source}: {found}, starting a new one of {num_classes} {values} ({', '.join(ends)})")


def check_names(weights: Mapping[str, Tensor], state: Mapping[str, Tensor], source: str) -> None:
    """Raise UserError for weights none of whose names are the model's, `state`."""
    if not weights.keys() & state.keys():
        found, expected = (next(iter(names), "nothing") for names in (weights, state))
        raise UserError(
            f"{source} belongs to another model, check --model, or another library wrote it: its names begin with "
            f"{found}, the model's with {expected}; docs/runs.md tells how to rename tensors"
        )


def load_resized(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict, perhaps for images of another size, and print a line if it is.

    torchvision's and timm's own functions resize its position embeddings and relative position biases.

    Raises:
        RuntimeError: names or shapes are not the model's.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    words = ("pos_embed", "relative_position", "rel_pos")
    positions = [name for name in weights if name in shapes and any(word in name for word in words)]
    others = [name for name in positions if weights[name].shape != shapes[name]]
    home, found = importlib.import_module(type(model).__module__), weights
    if others and home.__name__.startswith("timm.") and hasattr(home, "checkpoint_filter_fn"):
        found = OrderedDict(home.checkpoint_filter_fn(dict(weights), model))
    elif others and isinstance(model, torchvision.models.VisionTransformer):
        resize = torchvision.models.vision_transformer.interpolate_embeddings
        found = resize(model.image_size, model.patch_size, OrderedDict(weights))
    if found is not weights:
        found._metadata = getattr(weights, "_metadata", {})
    model.load_state_dict(found)
    if others := [name for name in others if name in found]:
        more = f" and {len(others) - 1} more" if others[1:] else ""
        sizes = f"{tuple(weights[others[0]].shape)} to {tuple(shapes[others[0]])}"
        print(f"{source}: trained at another image size; resized {others[0]}{more} from {sizes}")


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
    """Compile a model if `--compile` asks for it, in place so that its state dict keeps its names; return it.

    Each size of image is compiled separately. Kernels for any size would be slower, and torch would choose them by the
    sizes that the process has met, so a resumed run would compute with other kernels.

    Raises:
        UserError: the mode cannot be used with gradient accumulation.
    """
    if args.compile is None:
        return model
    is_graphed = args.compile in ("reduce-overhead", "max-autotune") and torch.device(args.device).type == "cuda"
    if is_graphed and not args.test_only and args.num_shards > args.world_size:
        raise UserError(
            f"--compile {args.compile} records CUDA graphs, which overwrite accumulated gradients; use --compile "
            "default, or as many processes as micro-batches"
        )
    smallest = args.train_crop_size if args.train_crop_size_min is None else args.train_crop_size_min
    # Sizes of training crops, mostly 32 px apart; full and last batches of evaluation, by the model and its average.
    num_graphs = (args.train_crop_size - smallest) // 32 + 3 + 2 * 2
    dynamo = importlib.import_module("torch._dynamo.config")
    dynamo.recompile_limit = max(dynamo.recompile_limit, num_graphs)
    at_end(torch.compiler.reset)  # graphs of this run would count against the limit in the next one
    # The masks of dropout and stochastic depth are those of an uncompiled model.
    importlib.import_module("torch._inductor.config").fallback_random = True
    caches = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    if torch.device(args.device).type == "cpu" and caches.cache_dir() == os.path.abspath(caches.default_cache_dir()):
        # A process that is killed while the linker writes leaves half a library in a folder that others use.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = own_temporary_folder("touchstone-compiled")
    model.compile(mode=args.compile, dynamic=False)
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

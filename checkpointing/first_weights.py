"""The weights of `--weights`, and the preprocessing that belongs to them or to a model of timm's."""

from functools import cache
from pathlib import Path
from typing import Any

import torchvision
from torch import Tensor

from checkpointing.class_order import check_classes
from checkpointing.preprocessing import choose_preprocessing, preprocessing_line, text_of, usable_preprocessing
from checkpointing.published import (
    describe_published,
    fetch_published,
    options_of_timm,
    published_preprocessing,
    resolve_weights,
)
from checkpointing.weights import BARE, HUB, Weights, fetch_from_hub, load_weights
from distributed.watch import watchdog
from errors import UserError
from settings.options import BY_NAME, NEEDED, STATISTICS, fit_statistics, is_same_model
from settings.packages import find_timm_config, require_timm
from settings.rules import split_custom
from settings.stages import Options, Parsed


def start_weights(args: Parsed, val: Any) -> dict[str, Tensor]:
    """Return the state dict that `--weights` names.

    Raises:
        UserError: it names no weights, or weights that cannot be evaluated on the classes of the validation set `val`.
    """
    watchdog.note_progress("reading the first weights")
    if not is_stored(args.model.weights):
        return fetch_published(resolve_weights(args.model), f"--weights {args.model.weights}")
    weights = read_weights(args.model.weights, is_average=args.model.ema)
    # An evaluation has read them for their options before; they need not stay in memory beside the model.
    read_weights.cache_clear()
    print(f"--weights {args.model.weights}: {weights.kind}")
    known = {**usable_preprocessing(weights.options), "model_kwargs": weights.options.get("model_kwargs")}
    known |= {name: fit_statistics(known[name], args.data.in_chans) for name in STATISTICS if name in known}
    values = args.flat()
    for name in (*STATISTICS, "model_kwargs"):
        # A line and no refusal: fine-tuning at another size or with other statistics may be meant.
        if known.get(name) and known[name] != values[name] and name not in args.origin.given:
            another = f"another {BY_NAME[name].flag}: {text_of(known[name])}"
            print(f"--weights {args.model.weights} was trained with {another}; give it to keep it")
    check_classes(weights, args, val)
    return weights


def is_stored(name: str) -> bool:
    """Tell whether `--weights` names a file, here or on the Hugging Face hub, rather than torchvision's weights."""
    return name.startswith(HUB) or Path(name).is_file()


@cache
def read_weights(name: str, *, is_average: bool) -> Weights:
    """Return the state dict of a file of `--weights`; it stays in memory until `cache_clear`."""
    if not name.startswith(HUB):
        return load_weights(Path(name), is_average=is_average, name=f"--weights {name}")
    weights = load_weights(fetch_from_hub(name), is_average=is_average, name=f"--weights {name}")
    # All files there are called alike: the repository tells which weights they are.
    weights.file = name
    return weights


def choose_published_options(args: Options) -> tuple[Options, list[str]]:
    """Return the options with the preprocessing that belongs to the model or to its weights, and a line about it.

    Training takes that of timm's configuration for timm's models, with the size of training crops, and the options'
    own for all others, as torchvision's script does. Evaluation takes that of the weights, as `choose_preprocessing`
    does; that of a checkpoint to `--resume` is not known yet.

    Raises:
        UserError: `--weights` names neither a file nor published weights of the model, or nothing is known of the
            preprocessing of a model to evaluate.
    """
    if args.checkpoint.test_only and args.checkpoint.resume:
        return args, []
    is_timms = args.model.model.startswith("timm/")
    is_torchvisions = args.model.model in torchvision.models.list_models(module=torchvision.models)
    if not (is_timms or is_torchvisions or split_custom(args.model.model)):
        return args, []  # `models.check_model` refuses it, and knows the names that are alike
    source = f"--weights {args.model.weights}"
    published = None
    if args.model.weights and not is_stored(args.model.weights):
        published = resolve_weights(args.model)
    if args.checkpoint.test_only and published:
        args, origin = choose_preprocessing(args, source, *describe_published(published))
    elif args.checkpoint.test_only:
        weights = read_weights(args.model.weights, is_average=args.model.ema)
        add_published_options(weights, args.model.model)
        args = _with_model_options(args, weights, source)
        args, origin = choose_preprocessing(args, source, weights.options, weights.origin)
    elif {*NEEDED, "crop_mode"} <= {*args.origin.given} or not is_timms or find_timm_config(args.model.model) is None:
        return args, []
    else:
        args, origin = choose_preprocessing(args, f"--model {args.model.model}")
        if not {"train_crop_size", "val_crop_size"} & {*args.origin.given}:
            args = args.replaced(train_crop_size=args.augmentation.val_crop_size)
            origin += f"; --train-crop-size {args.augmentation.train_crop_size} likewise"
    return args, [preprocessing_line(args, origin)]


def _with_model_options(args: Options, weights: Weights, source: str) -> Options:
    """Return the options with the channels and keyword arguments that the model of weights has; refuse another model.

    Models of other names, or with another activation, may have weights of the same names and shapes.
    """
    saved = weights.options.get("model")
    if saved and not is_same_model(_without_tag(saved), _without_tag(args.model.model)):
        raise UserError(f"{source} is of {saved}, and --model is {args.model.model}; give --model {saved}")
    known = {name: weights.options.get(name) for name in ("in_chans", "model_kwargs", "multi_label", "bce_loss")}
    known = {name: value for name, value in known.items() if value and BY_NAME[name].is_value(value)}
    return args.replaced(**{name: value for name, value in known.items() if name not in args.origin.given})


def _without_tag(model: str) -> str:
    """Return a model's name without the tag of timm's that names its weights: timm/NAME.TAG."""
    return model.partition(".")[0] if model.startswith("timm/") else model


def add_published_options(weights: Weights, model: str) -> None:
    """Add to the options of weights those that timm's script implies, or that are published with a bare state dict.

    A bare state dict is known by the name of its file, or of its repository on the Hugging Face hub.
    """
    is_timms = model.startswith("timm/")
    if weights.script == "timm" and is_timms:
        own = usable_preprocessing(weights.options)
        weights.options |= options_of_timm(model, weights.options)
        # Complete ones are ours, of a checkpoint that was converted.
        if {*NEEDED} <= own.keys():
            weights.options |= own
    elif weights.kind == BARE and is_timms:
        name = model.removeprefix("timm/").partition(".")[0]
        for tagged in require_timm("--model", model).list_pretrained(f"{name}.*"):
            config = find_timm_config(f"timm/{tagged}")
            # A bare state dict says nothing of its images: only the name under which it is published does.
            if weights.file in (Path(config.url or "").name, f"{HUB}{config.hf_hub_id}"):
                options, weights.origin = published_preprocessing(f"timm/{tagged}")
                weights.options |= options
                break
    elif weights.kind == BARE and split_custom(model) is None:
        for published in torchvision.models.get_model_weights(model):
            if Path(published.url).name == weights.file:
                options, weights.origin = describe_published(published)
                weights.options |= options
                break

"""Published weights, the weights of `--weights`, and the preprocessing that weights are evaluated with."""

import importlib
import math
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torchvision
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.models import WeightsEnum

from checkpointing.guard import check_classes
from checkpointing.weights import BARE, HUB, Weights, fetch_from_hub, load_weights
from distributed import collectives
from distributed.watch import watchdog
from errors import UserError, counted, did_you_mean, find_timm_config, in_one_line, require_timm
from settings.options import (
    BY_NAME,
    NEEDED,
    PREPROCESSING,
    STATISTICS,
    fit_statistics,
    is_same_model,
    split_custom,
    with_defaults,
)


def start_weights(args: Any, val: Dataset) -> dict[str, Tensor] | None:
    """Return the state dict that `--weights` names, or None without the option.

    Raises:
        UserError: it names no weights, or weights that cannot be evaluated on the classes of the validation set `val`.
    """
    if args.weights is None:
        return None
    watchdog.beat("reading the first weights")
    if not is_stored(args.weights):
        return fetch_published(resolve_weights(args), f"--weights {args.weights}")
    weights = read_weights(args.weights, is_average=args.ema)
    read_weights.cache_clear()
    print(f"--weights {args.weights}: {weights.kind}")
    known = {**usable_preprocessing(weights.options), "model_kwargs": weights.options.get("model_kwargs")}
    known |= {name: fit_statistics(known[name], args.in_chans) for name in STATISTICS if name in known}
    for name in (*STATISTICS, "model_kwargs"):
        if known.get(name) and known[name] != getattr(args, name) and name not in args.given:
            flag = BY_NAME[name].flag
            print(f"--weights {args.weights} was trained with another {flag}: {_text(known[name])}; give it to keep it")
    check_classes(weights, args, val)
    return weights


def is_stored(name: str) -> bool:
    """Tell whether `--weights` names a file, here or on the Hugging Face hub, rather than torchvision's weights."""
    return name.startswith(HUB) or Path(name).is_file()


@cache
def read_weights(name: str, *, is_average: bool) -> Weights:
    """Return the state dict of a file of `--weights`; it stays in memory until `cache_clear`."""
    path = fetch_from_hub(name) if name.startswith(HUB) else Path(name)
    weights = load_weights(path, is_average=is_average, name=f"--weights {name}")
    weights.file = name if name.startswith(HUB) else weights.file
    return weights


def choose_published_options(args: Any) -> tuple[Any, list[str]]:
    """Return the options with the preprocessing that belongs to the model or to its weights, and a line about it.

    Training takes that of timm's configuration for timm's models, with the size of training crops, and the options'
    own for all others, as torchvision's script does. Evaluation takes that of the weights, as `choose_preprocessing`
    does; that of a checkpoint to `--resume` is not known yet.

    Raises:
        UserError: `--weights` names neither a file nor published weights of the model, or nothing is known of the
            preprocessing of a model to evaluate.
    """
    is_timms, source = args.model.startswith("timm/"), f"--weights {args.weights}"
    is_known = is_timms or args.model in torchvision.models.list_models(module=torchvision.models)
    if (args.test_only and args.resume) or not (is_known or split_custom(args.model)):  # for `models.check_model`
        return args, []
    published = resolve_weights(args) if args.weights and not is_stored(args.weights) else None
    if args.test_only and published:
        args, origin = choose_preprocessing(args, source, *describe_published(published))
    elif args.test_only:
        weights = read_weights(args.weights, is_average=args.ema)
        add_published_options(weights, args.model)
        args = _with_model_options(args, weights, source)
        args, origin = choose_preprocessing(args, source, weights.options, weights.origin)
    elif {*NEEDED, "crop_mode"} <= {*args.given} or not is_timms or find_timm_config(args.model) is None:
        return args, []
    else:
        args, origin = choose_preprocessing(args, f"--model {args.model}")
        if not {"train_crop_size", "val_crop_size"} & {*args.given}:
            args = args.replaced(train_crop_size=args.val_crop_size)
            origin += f"; --train-crop-size {args.train_crop_size} likewise"
    return args, [preprocessing_line(args, origin)]


def _with_model_options(args: Any, weights: Weights, source: str) -> Any:
    """Return the options with the channels and keyword arguments that the model of weights has; refuse another model.

    Models of other names, or with another activation, may have weights of the same names and shapes.
    """
    theirs = weights.options.get("model")
    pair = theirs or args.model, args.model
    names = [name.partition(".")[0] if name.startswith("timm/") else name for name in pair]  # without their tags
    if not is_same_model(*names):
        raise UserError(f"{source} is of {theirs}, and --model is {args.model}; give --model {theirs}")
    known = {name: weights.options.get(name) for name in ("in_chans", "model_kwargs", "multi_label", "bce_loss")}
    known = {name: value for name, value in known.items() if value and BY_NAME[name].is_value(value)}
    return args.replaced(**{name: value for name, value in known.items() if name not in args.given})


def add_published_options(weights: Weights, model: str) -> None:
    """Add to the options of weights those that timm's script implies, or that are published with a bare state dict.

    A bare state dict is known by the name of its file, or of its repository on the Hugging Face hub.
    """
    is_timms = model.startswith("timm/")
    if weights.script == "timm" and is_timms:
        own = usable_preprocessing(weights.options)
        if not {*NEEDED} <= own.keys():  # else they are ours, of a converted checkpoint
            own = {}
        weights.options |= {**options_of_timm(model, weights.options), **own}
    elif weights.kind == BARE and is_timms:
        name = model.removeprefix("timm/").partition(".")[0]
        for tagged in require_timm("--model", model).list_pretrained(f"{name}.*"):
            config = find_timm_config(f"timm/{tagged}")
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


def choose_preprocessing(
    args: Any,
    source: str,
    options: Mapping[str, Any] = MappingProxyType({}),
    origin: str = "as in the checkpoint",
) -> tuple[Any, str]:
    """Return the options of an evaluation with the preprocessing that belongs to its weights, and where it comes from.

    Each of `PREPROCESSING` is the one that was given, else that of the weights' own options, else that of the model's
    published configuration, else for `WITH_DEFAULT` its default.

    Args:
        args: the options; `given` lists those that a user set.
        source: the name of the weights in a message.
        options: those that the weights were trained or published with, as far as they are known.
        origin: words about where `options` come from.

    Raises:
        UserError: one of them is not known from anywhere.
    """
    given = {name: getattr(args, name) for name in PREPROCESSING if name in args.given}
    known = usable_preprocessing(options)
    for name in PREPROCESSING:
        value = options.get(name)
        if value is not None and value != "" and name not in known and name not in given:
            flag = BY_NAME[name].flag
            raise UserError(f"{source} holds {flag} {str(value)[:40]}, which cannot be used; give {flag}")
    found = [(known, origin), (given, "as given")]
    if not {*NEEDED} <= {*known, *given}:
        published, words = published_preprocessing(args.model, given.get("val_crop_size"))
        fitted = {name: fit_statistics(published[name], args.in_chans) for name in STATISTICS if name in published}
        found = [({**published, **fitted}, words), *found]
    values, origins = with_defaults({}), {}
    for part, words in found:
        values |= part
        origins |= dict.fromkeys(part, words)
    if missing := [BY_NAME[name].flag for name in PREPROCESSING if name not in values]:
        raise UserError(
            f"{source} does not say how its images are prepared, and nothing is published about {args.model}; give "
            f"{', '.join(missing)}"
        )
    for name in STATISTICS:
        if (number := len(values[name])) != args.in_chans:
            raise UserError(
                f"{source} is for {counted(number, 'channel')} (--{name} {_text(values[name])}), and --in-chans is "
                f"{args.in_chans}; give --in-chans {number}"
            )
    groups = {}
    for name in filter(origins.get, PREPROCESSING):
        groups.setdefault(origins[name], []).append(BY_NAME[name].flag)
    words = [f"{each} ({', '.join(flags)})" if len(groups) > 1 else each for each, flags in groups.items()]
    return args.replaced(**{name: values[name] for name in PREPROCESSING}), "; ".join(words)


def preprocessing_line(values: Any, origin: str) -> str:
    """Return the line about how images are prepared, and why; its options can be given to train.py and to the tools."""
    shown = {name: getattr(values, name) for name in PREPROCESSING}
    shown = {name: value for name, value in shown.items() if name in NEEDED or value != BY_NAME[name].default}
    words = " ".join(f"{BY_NAME[name].flag} {_text(value)}".strip() for name, value in shown.items())
    return f"preprocessing: {words}: {origin}"


def usable_preprocessing(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessing among the options of a checkpoint, perhaps another script's, in the order of the list.

    Values of other types are left out; `Option.check` refuses impossible ones.
    """
    found = {name: options.get(name) for name in PREPROCESSING}
    for name in STATISTICS:
        if isinstance(found[name], list | tuple) and all(type(value) in (int, float) for value in found[name]):
            found[name] = [float(value) for value in found[name]]
    return {name: value for name, value in found.items() if value is not None and BY_NAME[name].is_value(value)}


def _text(value: Any) -> str:
    items = [] if value is True else value if isinstance(value, list) else [value]
    return " ".join(f"{item:.6g}" if isinstance(item, float) else str(item) for item in items)


def published_preprocessing(model: str, crop: int | None = None) -> tuple[dict[str, Any], str]:
    """Return the options that torchvision or timm publish with a model, and words about them; {} where none are.

    Of torchvision's weights the first ones count, mostly IMAGENET1K_V1. Another `crop` scales timm's resize.
    """
    if split_custom(model) is not None:
        return {}, ""
    if not model.startswith("timm/"):
        return describe_published(next(iter(torchvision.models.get_model_weights(model))))
    config = find_timm_config(model)
    if config is None:
        return {}, ""
    return options_of_timm(model, {"img_size": crop}), f"as timm configures {model}"


def options_of_timm(name: str, trained: Mapping[str, Any]) -> dict[str, Any]:
    """Return our options for timm/NAME with timm's options `trained`; UserError if sizes of images cannot be used."""
    known = find_timm_config(name)
    names = ("img_size", "input_size", "crop_pct", "crop_mode", "interpolation", "mean", "std")
    with in_one_line(f"{name}: the sizes of its images cannot be used"):
        resolve = importlib.import_module("timm.data").resolve_data_config
        found = resolve({each: trained.get(each) for each in names}, known.to_dict() if known else {})
        channels, height, crop = map(int, found["input_size"])
        channels = trained.get("in_chans") or channels
        if not BY_NAME["in_chans"].is_value(channels) or height != crop:
            raise ValueError(f"it takes {channels} channels of {height} x {crop} px, expected 1, 3 or 4 of a square")
        options = {"val_crop_size": crop, "val_resize_size": math.floor(crop / float(found["crop_pct"]))}
        options |= {each: fit_statistics([*map(float, found[each])], channels) for each in STATISTICS}
        options["in_chans"] = channels
    for each in ("interpolation", "crop_mode"):
        if BY_NAME[each].is_value(found[each]):
            options[each] = found[each]
    kwargs = trained.get("model_kwargs")
    if not isinstance(kwargs, list):  # a list is in our form already
        flags = {"global_pool": trained.get("gp"), **{each: trained.get(each) for each in ("bn_eps", "bn_momentum")}}
        kwargs = (kwargs or {}) | {key: value for key, value in flags.items() if value is not None}
        options["model_kwargs"] = sorted(f"{key}={value!r}" for key, value in kwargs.items()) or None
    return options


def describe_published(weights: WeightsEnum) -> tuple[dict[str, Any], str]:
    """Return the options that torchvision's weights are evaluated with, and words about them."""
    preset = weights.transforms()
    options = {"mean": list(preset.mean), "std": list(preset.std), "interpolation": preset.interpolation.value}
    options |= {"val_resize_size": preset.resize_size[0], "val_crop_size": preset.crop_size[0]}
    return {**options, "weights": str(weights)}, f"as torchvision publishes {weights}"


def find_published(name: str, source: str) -> tuple[str, WeightsEnum]:
    """Return the model and the weights of torchvision's that a name means; UserError, about `source`, if none are.

    Names are `resnet50`, for its default weights, `resnet50.IMAGENET1K_V1` and `ResNet50_Weights.IMAGENET1K_V1`.
    """
    names = torchvision.models.list_models(module=torchvision.models)
    enums = {name: torchvision.models.get_model_weights(name) for name in names}
    owner, _, member = name.partition(".")
    for model, enum in enums.items():
        if owner in (model, enum.__name__) and (member or "DEFAULT") in enum.__members__:
            return model, enum[member or "DEFAULT"]
    known = [f"{model}.{each}" for model, enum in enums.items() for each in enum.__members__] if member else enums
    raise UserError(
        f"{source}: no such file, and no weights of torchvision's{did_you_mean(name, known) or ';'} give a checkpoint, "
        "or a name such as resnet50.IMAGENET1K_V2"
    )


def resolve_weights(args: Any) -> WeightsEnum:
    """Return the torchvision weights that `args.weights` names; UserError if the model has none of that name."""
    if args.model.startswith("timm/") or split_custom(args.model) is not None:
        raise UserError(f"--weights {args.weights} is not a file; for {args.model}, give a file with a state dict")
    source, name = f"--weights {args.weights}", args.weights if "." in args.weights else f"{args.model}.{args.weights}"
    model, published = find_published(name, source)
    if model != args.model:
        raise UserError(f"{source} is of {model}, and --model is {args.model}")
    return published


def fetch_by_name(source: str) -> Weights:
    """Return published weights by a name as of `find_published`; their options hold the model's name."""
    name, published = find_published(source, source)
    weights = Weights(fetch_published(published, source))
    weights.kind, weights.classes = f"the published weights {published}", published.meta["categories"]
    weights.options, weights.origin = describe_published(published)
    weights.options["model"] = name
    return weights


def fetch_published(weights: WeightsEnum, source: str) -> dict[str, Tensor]:
    """Return torchvision's weights, from torch's cache or the network; UserError if they are damaged or not there."""
    is_shown = collectives.is_main_process() and sys.stderr.isatty()  # a bar would fill a log
    try:
        # Torch's hub would unpickle any file in its cache: its default is weights_only=False.
        return weights.get_state_dict(progress=is_shown, check_hash=True, weights_only=True)
    except OSError as error:
        raise UserError(f"{source}: cannot download {weights.url} ({error})") from error
    except Exception as error:  # as of any bad file: see load_checkpoint
        raise UserError(
            f"{source}: the copy of {weights.url} in torch's cache is damaged or contains code and was refused; remove "
            "it, so that it is downloaded again"
        ) from error

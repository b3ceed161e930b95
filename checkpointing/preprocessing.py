"""How images are prepared for an evaluation: as given, as the weights' own options say, or as is published."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from errors import UserError, counted
from settings.options import BY_NAME, NEEDED, PREPROCESSING, STATISTICS, fit_statistics, with_defaults
from settings.stages import Options, Parsed


def choose_preprocessing(
    args: Options, source: str, options: Mapping[str, Any] = MappingProxyType({}), origin: str = "as in the checkpoint"
) -> tuple[Options, str]:
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
    given = {name: value for name, value in preprocessing_of(args).items() if name in args.origin.given}
    known = usable_preprocessing(options)
    for name in PREPROCESSING:
        # What is there and of no use is no reason for a default: the accuracy would be wrong without a word.
        value = options.get(name)
        if value is not None and value != "" and name not in known and name not in given:
            flag = BY_NAME[name].flag
            raise UserError(f"{source} holds {flag} {str(value)[:40]}, which cannot be used; give {flag}")
    # No defaults of training: by these EfficientNet-Lite0 lost six points of accuracy without a word.
    found = [(known, origin), (given, "as given")]
    if not {*NEEDED} <= {*known, *given}:
        from checkpointing.published import published_preprocessing

        published, words = published_preprocessing(args.model.model, given.get("val_crop_size"))
        fitted = {name: fit_statistics(published[name], args.data.in_chans) for name in STATISTICS if name in published}
        found = [({**published, **fitted}, words), *found]
    values, origins = with_defaults({}), {}
    # The last one wins: what was typed, before what the weights were trained with, before what is published.
    for part, words in found:
        values |= part
        origins |= dict.fromkeys(part, words)
    missing = [BY_NAME[name].flag for name in PREPROCESSING if name not in values]
    if missing:
        unknown = f"how its images are prepared, and nothing is published about {args.model.model}"
        raise UserError(f"{source} does not say {unknown}; give {', '.join(missing)}")
    # A mean for each channel tells how many the weights take; the model's own error would be one about shapes.
    for name in STATISTICS:
        number = len(values[name])
        if number != args.data.in_chans:
            raise UserError(
                f"{source} is for {counted(number, 'channel')} (--{name} {text_of(values[name])}), and --in-chans is "
                f"{args.data.in_chans}; give --in-chans {number}"
            )
    groups = {}
    for name in PREPROCESSING:
        if origins.get(name):
            groups.setdefault(origins[name], []).append(BY_NAME[name].flag)
    texts = [f"{each} ({', '.join(flags)})" if len(groups) > 1 else each for each, flags in groups.items()]
    return args.replaced(**{name: values[name] for name in PREPROCESSING}), "; ".join(texts)


def preprocessing_of(args: Parsed) -> dict[str, Any]:
    """Return how images are prepared for an evaluation: the values of `PREPROCESSING`."""
    values = args.flat()
    return {name: values[name] for name in PREPROCESSING}


def preprocessing_line(args: Parsed, origin: str) -> str:
    """Return the line about how images are prepared, and why; its options can be given to train.py and to the tools."""
    shown = preprocessing_of(args)
    shown = {name: value for name, value in shown.items() if name in NEEDED or value != BY_NAME[name].default}
    words = " ".join(f"{BY_NAME[name].flag} {text_of(value)}".strip() for name, value in shown.items())
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


def text_of(value: Any) -> str:
    """Return an option's value as it is typed."""
    if value is True:  # a flag alone
        return ""
    items = value if isinstance(value, list) else [value]
    return " ".join(f"{item:.6g}" if isinstance(item, float) else str(item) for item in items)

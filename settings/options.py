"""The table of options, from which the parser, recipes, checks and the rules of resuming are made.

Nothing here imports torch, so that help and errors need not wait for it.
"""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from errors import UserError, did_you_mean
from settings import __version__
from settings.choices import LOGGERS, LOSSES, METRICS, OPTIMIZERS, POLICIES, SCHEDULES, TABLES

# How a resumed run treats an option that differs from the checkpoint's: FREE options change no result, and the change
# is printed; SILENT ones differ at every restart; --allow-change must name ON_REQUEST ones. Any other text says why
# the option cannot be changed.
FREE, SILENT, ON_REQUEST = "free", "silent", "on request"

# Whether the processes of a run may have different values: SAME in none; of OWN options each machine has its own; of
# AS_TYPED ones rank 0's counts where the command lines give none.
SAME, OWN, AS_TYPED = "same", "own", "as typed"

# Whether the recipe that a run writes holds an option: NEVER for one that says where the run is or how it was started,
# IF_GIVEN for one whose default depends on the machine.
ALWAYS, NEVER, IF_GIVEN = "always", "never", "if given"

# Largest number of steps, epochs and the like: a float counts no further in ones.
MOST_COUNT = 1 << 53

# Names that torchvision and torch know, listed so that neither has to be imported.
INTERPOLATIONS = ["nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos"]
COMPILE_MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
# Options with a value for each channel; the preprocessing of an evaluation.
STATISTICS = ("mean", "std")
# Weights that do not tell the last ones, as those of other scripts, have their defaults.
NEEDED = ("val_resize_size", "val_crop_size", "interpolation", *STATISTICS)
WITH_DEFAULT = ("crop_mode", "exif", "grey_range")
PREPROCESSING = (*NEEDED, *WITH_DEFAULT)

# Options that may begin with an address, such as s3://bucket, and what is said of all others.
TAKES_ADDRESS = ("data_path", "eval_data", "dist_url", "model_kwargs", "multi_label")
NO_ADDRESS = "expected a local path, not an address; mount the bucket, or copy by aws s3 sync to or from a local path"


def _which_take(option: str, chooser: str = "lr_scheduler") -> str:
    """Return `needs` of an option that only some rows take of the table by which another option chooses."""
    _, table = TABLES[chooser]
    return f"{chooser}={'|'.join(name for name, choice in table.items() if option in choice.options)}"


def split_custom(name: str) -> tuple[str, str] | None:
    """Return the file and the function of FILE.py:FUNCTION, or None for a library's name."""
    path, colon, function = name.rpartition(":")
    return (path, function) if colon and path.endswith(".py") else None


def expand_home(dest: str, value: Any) -> Any:
    """Return the value of an option with ~ and ~USER replaced where a path, or that of NAME=PATH, begins with it.

    Shells leave `--output-dir=~/runs` as it is. A path that is there as it is written stays: an older run may be in it.
    UserError if there is no such user.
    """
    if isinstance(value, list):
        return [expand_home(dest, each) for each in value]
    is_path = isinstance(value, str) and "~" in value and dest != "multi_label"  # where it separates labels
    begin = re.match(r"(?:\w[\w.-]*=)?(?=~[\w.-]*(?:/|$))", value) if is_path and not os.path.lexists(value) else None
    if begin is None:
        return value
    path = os.path.expanduser(value[begin.end() :])
    if path.startswith("~"):
        raise UserError(f"{value}: {path.partition('/')[0]} is nobody's home folder here; give a whole path")
    return begin[0] + path


def lower(text: str) -> str:
    """Return a name in lower case, and FILE.py:FUNCTION as it is."""
    return text if split_custom(text) else text.lower()


@dataclass(frozen=True)
class Option:
    """One option, and how resumed runs, recipes and evaluations treat it; `--help` shows its default."""

    flag: str  # its long name
    _: KW_ONLY
    help: str  # meaning and unit
    aliases: Sequence[str] = ()
    default: Any = None
    type: Callable[[str], Any] | None = None  # parses a value; bool makes a switch; by default the default's, else str
    at_least: float = -MOST_COUNT
    at_most: float = MOST_COUNT
    above: float = -math.inf
    below: float = math.inf
    resume: str = ON_REQUEST  # FREE, SILENT, ON_REQUEST, or the reason why a resumed run cannot change it
    recipe: str = ALWAYS  # ALWAYS, NEVER or IF_GIVEN
    ranks: str = SAME  # SAME, OWN or AS_TYPED
    is_of_checkpoint: bool = False  # an evaluation takes it from the checkpoint's run unless it is given
    needs: str = ""  # options without one of which it has no effect: `mixup_alpha|cutmix_alpha`, `opt=adamw|timm/`
    not_with: str = ""  # options beside any of which it has no effect
    is_range: bool = False  # two numbers, the lower first
    is_strict: bool = False  # refused where the command line gives it without `needs`; for options of ours
    metavar: str | tuple[str, ...] | None = None  # this and the rest are argparse's; by default N for an integer
    choices: Sequence[Any] | None = None
    nargs: int | str | None = None
    const: Any = None

    def __post_init__(self) -> None:
        if self.type is None:
            object.__setattr__(self, "type", str if self.default is None else type(self.default))
        if self.metavar is None and self.type is int:
            object.__setattr__(self, "metavar", "N")

    @property
    def name(self) -> str:
        """The flag without its dashes."""
        return self.flag[2:]

    @property
    def dest(self) -> str:
        """The attribute of `args` that holds it."""
        return self.name.replace("-", "_")

    @property
    def keys(self) -> list[str]:
        """The names that a recipe may use."""
        return [flag[2:] for flag in (self.flag, *self.aliases) if flag.startswith("--")]

    @property
    def why_fixed(self) -> str | None:
        """Reason why a resumed run cannot change it, or None."""
        return None if self.resume in (FREE, SILENT, ON_REQUEST) else self.resume

    def add_to(self, group: Any) -> None:
        """Add it to a group of a parser; its help shows the default, unless that is empty or off."""
        is_empty = self.default is None or self.default is False or self.default == ""
        default = " ".join(self.default) if isinstance(self.default, list) else self.default
        text = self.help if is_empty else f"{self.help} (default: {default})"
        settings = {"default": argparse.SUPPRESS, "help": text}
        if self.type is bool:
            group.add_argument(self.flag, action=argparse.BooleanOptionalAction, **settings)
            return
        given = {"choices": self.choices, "nargs": self.nargs, "const": self.const, "metavar": self.metavar}
        is_more = self.default is None and self.type not in (int, float)  # what is given again is added
        given["action"] = "extend" if is_more and self.nargs in ("*", "+") else None
        given = {name: value for name, value in given.items() if value is not None}
        group.add_argument(*self.aliases, self.flag, dest=self.dest, type=self.type, **settings, **given)

    def check(self, value: Any) -> None:
        """Raise UserError if a number lies outside the bounds, or is not finite."""
        for number in value if isinstance(value, list | tuple) else [value]:
            if type(number) in (int, float) and (expected := self._misses(number)):
                given = number if abs(number) < 1 << 63 or type(number) is float else "of that many digits"
                raise UserError(f"{self.flag} {given}: expected {expected}")
        if self.is_range and isinstance(value, list | tuple) and value[0] >= value[1]:
            raise UserError(f"{self.flag} {value[0]} {value[1]}: expected two numbers, the lower first")

    def _misses(self, number: float) -> str:
        """Return the bound that a number lies beyond, in words, or an empty string."""
        tests = [
            (type(number) is int or math.isfinite(number), "a finite number"),
            ((self.at_least, self.at_most) != (0, 1) or 0 <= number <= 1, "a number from 0 to 1"),
            (number >= self.at_least, f"{self.at_least} or more"),
            (number > self.above, f"a number above {self.above}"),
            (number < self.below, f"a number below {self.below}"),
            (number <= self.at_most, f"{max(self.at_least, 0)} to {self.at_most:.10g}"),
        ]
        return next((expected for is_inside, expected in tests if not is_inside), "")

    def why_idle(self, args: Any) -> str:
        """Return why it has no effect beside the other options, or an empty string."""
        for name in self.not_with.split("|") if self.not_with else ():
            if getattr(args, name):
                return f"with {BY_NAME[name].flag}"
        names, _, values = self.needs.partition("=")
        if not names or any(_is_on(getattr(args, name), values) for name in names.split("|")):
            return ""
        flags = " or ".join(BY_NAME[name].flag for name in names.split("|"))
        return f"without {flags} {values.replace('|', ', ')}".rstrip()

    def is_value(self, value: Any) -> bool:
        """Tell whether a plain value has the type and is among the choices of this option."""
        if value is None or (type(value) is type(self.default) and value == self.default):
            return value == self.default
        kind = self.type if isinstance(self.type, type) else str
        if self.nargs in (None, "?"):
            return type(value) is kind and (self.choices is None or value in self.choices)
        is_right = isinstance(value, list) and all(type(item) is kind for item in value)
        return is_right and (len(value) == self.nargs or (self.nargs == "+" and bool(value)) or self.nargs == "*")

    def from_toml(self, value: Any) -> Any:
        """Return a recipe's value as the command line would give it; UserError if this option takes no such value."""
        values = value if isinstance(value, list) else [value]
        if self.type is float:
            values = [float(item) if type(item) is int and abs(item) < MOST_COUNT else item for item in values]
        elif self.type in (str.lower, lower):
            values = [lower(item) if isinstance(item, str) else item for item in values]
        given = values if isinstance(value, list) else values[0]
        if not self.is_value(given):
            kind = f"one of {', '.join(map(str, self.choices))}" if self.choices else _KINDS[self.type.__name__]
            many = {None: "", "?": "", 2: "two in a list, each "}.get(self.nargs, "a list, each ")
            raise UserError(f"{self.name} = {json.dumps(value, default=str)}, but {self.name} takes {many}{kind}")
        return given


_KINDS = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "a string", "lower": "a string"}


def _is_on(value: Any, wanted: str) -> bool:
    """Tell whether an option is on, or has one of the wanted values; those that end with / are beginnings."""
    if not wanted:
        return bool(value)
    return any(value == each or (each[-1] == "/" and value.startswith(each)) for each in wanted.split("|"))


# By group, in the order of --help; a recipe's tables have the groups' names.
OPTIONS = {
    "options": [
        Option("--recipe", metavar="NAME", resume=SILENT, ranks=OWN, recipe=NEVER,
               help="options to start from: a name in recipes/, or a TOML file"),
        Option("--list-recipes", metavar="WORD", nargs="?", const="", resume=FREE, recipe=NEVER,
               help="print the recipes, or those that mention WORD, or one whole recipe by its name, and exit"),
        Option("--dry-run", default=False, resume=FREE,
               help="print the data, model, batches, steps and learning rates of the run and its whole recipe, "
                    "and exit"),
    ],
    "data": [
        Option("--data-path", metavar="DIR", resume=FREE, ranks=OWN, not_with="synthetic",
               help="folder that holds train/ and val/ with one folder for each class, or train.csv and val.csv, or "
                    "train.tar and val.tar, or their shards, train-000000.tar, train-000001.tar ...; or the URL of a "
                    "pack, https://, s3://, gs:// or az://; or FILE.py:FUNCTION"),
        Option("--multi-label", metavar="SEPARATOR", nargs="?", const=",", is_of_checkpoint=True,
               help="each image has any number of labels, separated by this character in the column label of a list; "
                    "needs --criterion bce; map, the mean average precision, chooses best.pth"),
        Option("--minival", metavar="FRACTION", type=float, resume="a position counts steps of the images that train",
               above=0, at_most=0.5, not_with="synthetic",
               help="hold out this fraction of the training images of each class, always the same ones, and evaluate "
                    "on them; val/ is not read and may be missing; above 0, at most 0.5"),
        Option("--minival-fold", metavar="K", default=0, at_least=0, needs="minival", is_strict=True,
               resume="a position counts steps of the images that train",
               help="cross-validation: hold out the K-th of the disjoint parts of --minival, from 0; folds 0 to 4 of "
                    "--minival 0.2 hold out each image once"),
        Option("--limit-train-images", type=int, at_least=1, not_with="synthetic",
               resume="a position counts steps of the images that train",
               help="for a trial: train on N images only, the first of each class in turn"),
        Option("--limit-val-images", type=int, at_least=1, not_with="synthetic",
               help="for a trial: evaluate on N images of val only, the first of each class in turn"),
        Option("--eval-data", metavar="NAME=DIR", nargs="+", resume=FREE, ranks=OWN, not_with="synthetic",
               help="evaluate on these sets too, of the same classes and in any form that val/ may have; log lines, "
                    "records and curves are labelled NAME; val/ alone chooses best.pth"),
        Option("--synthetic", metavar="IMAGES", type=int, nargs="?", const=12_800, at_least=1, at_most=1 << 40,
               resume="a position is counted in steps of its images",
               help="train on this many made-up images of 1000 classes (default: 12800)"),
        Option("--cache", metavar="DIR", resume=FREE, ranks=OWN, recipe=NEVER,
               help="local cache for a remote --data-path (default: touchstone in the user's cache folder)"),
        Option("--cache-gib", metavar="GIB", type=float, at_least=0, at_most=1e9, resume=FREE, ranks=OWN, recipe=NEVER,
               help="largest size of --cache for each split, in GiB (default: nine tenths of the free disk)"),
        Option("--io-timeout", metavar="MIN", default=10.0, above=0, at_most=1e6, resume=FREE, recipe=NEVER,
               help="minutes to keep retrying a failed request to a remote --data-path"),
        Option("--workers", aliases=["-j"], type=int, at_least=0, at_most=1024, resume=FREE, ranks=OWN, recipe=IF_GIVEN,
               help="data loading processes per training process (default: its share of the cores, up to 16)"),
        Option("--cache-dataset", default=False, resume=FREE,
               help="no effect, accepted for torchvision's commands: the index is always cached"),
        Option("--backend", type=str.lower, choices=["pil", "tensor"], is_of_checkpoint=True, not_with="synthetic",
               help="pil: exactly the pixels of Pillow's resize, torchvision's default; tensor: exactly those of "
                    "torchvision's tensor resize (default: a fast decoder, usually within one grey level of pil)"),
        Option("--extensions", metavar=".EXT", type=str.lower, nargs="+", is_of_checkpoint=True, not_with="synthetic",
               help="further extensions of the images in folders and tars, such as .avif .heic (default: those of "
                    "torchvision's ImageFolder); lists and predictions take .avif and .heic anyway"),
        Option("--exif", default=False, is_of_checkpoint=True, not_with="synthetic",
               help="turn images as their EXIF orientation says, in training, evaluation and all tools; phones store "
                    "many sideways (default: as stored, as torchvision reads them)"),
        Option("--grey-range", metavar=("LOW", "HIGH"), type=int, nargs=2, at_least=0, at_most=(1 << 16) - 1,
               is_range=True, is_of_checkpoint=True, not_with="synthetic",
               help="samples of grey images of more than 8 bits that become black and white, such as 0 4095 for 12 "
                    "bits (default: the full range of their format)"),
        Option("--in-chans", metavar="N", default=3, choices=[1, 3, 4], is_of_checkpoint=True,
               resume="it is the width of the model's first layer",
               help="channels of an image: 1 grey, 3 colour, 4 with alpha (255 where a file has none); weights for "
                    "another number are summed or repeated in the first layer, as in timm; a model function of your "
                    "own gets it as in_chans"),
        Option("--use-v2", default=False, resume=FREE, help="no effect, accepted for torchvision's commands"),
    ],
    "augmentation": [
        Option("--train-crop-size", metavar="PX", default=224, at_least=1, at_most=16384,
               help="side of a training image after random cropping, in pixels"),
        Option("--train-crop-size-min", metavar="PX", type=int, at_least=1, not_with="synthetic",
               help="progressive resizing: crop size of the first epochs, which grows to --train-crop-size during "
                    "--crop-ramp-epochs"),
        Option("--crop-ramp-epochs", metavar=("FIRST", "LAST"), type=int, nargs=2, needs="train_crop_size_min",
               is_strict=True,
               help="epochs between which the crop size grows from --train-crop-size-min, in steps of 32 pixels"),
        Option("--val-resize-size", metavar="PX", default=256, at_least=1, at_most=16384, is_of_checkpoint=True,
               help="shorter side of a resized image in evaluation, before the centre crop, in pixels"),
        Option("--val-crop-size", metavar="PX", default=224, at_least=1, at_most=16384, is_of_checkpoint=True,
               help="side of the centre crop in evaluation, in pixels"),
        Option("--crop-mode", default="center", choices=["center", "squash", "border"], is_of_checkpoint=True,
               not_with="synthetic", help="evaluation: center crops, and hides the ends of long images; squash resizes "
                    "both sides to --val-resize-size; border the longer one, and fills the rest with the mean colour; "
                    "all then cut the centre (timm's crop modes; timm models have their own by default)"),
        Option("--train-crop-mode", default="random", choices=["random", "whole"], not_with="synthetic",
               needs="augment",
               help="whole: training shows the whole image, squashed or with the border of --crop-mode border"),
        Option("--interpolation", default="bilinear", choices=INTERPOLATIONS, is_of_checkpoint=True,
               help="interpolation of every resize, in training and evaluation"),
        Option("--mean", metavar="F", type=float, nargs="+", at_least=0, at_most=1, is_of_checkpoint=True,
               help="mean of each channel, for normalisation of values from 0 to 1 (default: ImageNet's, 0.485 0.456 "
                    "0.406, and their average for other --in-chans, as in timm; for timm/ models this, the sizes and "
                    "the interpolation above are those that timm configures)"),
        Option("--std", metavar="F", type=float, nargs="+", at_least=0.001, at_most=1, is_of_checkpoint=True,
               help="standard deviation of each channel (default: as for --mean; ImageNet's are 0.229 0.224 0.225)"),
        Option("--augment", default=True,
               help="--no-augment: resize and centre-crop training images as in evaluation, to --train-crop-size; only "
                    "mixing is left"),
        Option("--crop-scale", metavar="SHARE", default=0.08, at_least=0, at_most=1, not_with="synthetic",
               needs="augment", help="smallest area of a training crop, as a share of the image's"),
        Option("--hflip-prob", metavar="P", default=0.5, at_least=0, at_most=1, not_with="synthetic", needs="augment",
               help="probability of flipping a training image horizontally"),
        Option("--hflip-mode", default="random", choices=["random", "alternating"], needs="augment", is_strict=True,
               not_with="synthetic",
               help="alternating: flip a random half of the training images in the first epoch, the others in the "
                    "second, and so on, in place of --hflip-prob (Jordan, arXiv 2404.00498)"),
        Option("--auto-augment", metavar="POLICY", not_with="synthetic", needs="augment",
               help=f"augmentation policy: {', '.join(POLICIES)}, timm/SPECIFICATION such as "
                    "timm/rand-m7-mstd0.5-inc1, or FILE.py:FUNCTION (default: none)"),
        Option("--ra-magnitude", metavar="M", default=9, at_least=0, at_most=30,
               needs=_which_take("ra_magnitude", "auto_augment"),
               help="magnitude of --auto-augment ra, from 0 to 30"),
        Option("--augmix-severity", metavar="S", default=3, at_least=1, at_most=10,
               needs=_which_take("augmix_severity", "auto_augment"),
               help="severity of --auto-augment augmix, from 1 to 10"),
        Option("--color-jitter", metavar="F", default=0.0, at_least=0, at_most=1, not_with="synthetic", needs="augment",
               help="change brightness, contrast and saturation of a training image by factors from 1 - F to 1 + F, "
                    "after --auto-augment"),
        Option("--grayscale-prob", metavar="P", default=0.0, at_least=0, at_most=1, not_with="synthetic",
               needs="augment", help="probability that a training image is turned grey, after --color-jitter"),
        Option("--blur-prob", metavar="P", default=0.0, at_least=0, at_most=1, not_with="synthetic", needs="augment",
               help="probability of blurring a training image, after --grayscale-prob, by a Gaussian with a standard "
                    "deviation of 0.1 to 2 pixels"),
        Option("--random-erase", metavar="P", default=0.0, at_least=0, at_most=1, needs="augment",
               help="probability of erasing a random rectangle of a training image"),
        Option("--random-erase-fill", default="zero", choices=["pixel", "zero"], needs="random_erase",
               help="fill the rectangle of --random-erase with zero, which is the mean colour, or each of its values "
                    "with normal noise (timm's mode pixel)"),
        Option("--mixup-alpha", metavar="A", default=0.0, at_least=0, at_most=1e9,
               help="mixup, with shares drawn from Beta(A, A); 0 = off"),
        Option("--cutmix-alpha", metavar="A", default=0.0, at_least=0, at_most=1e9,
               help="CutMix, with shares drawn from Beta(A, A); 0 = off"),
        Option("--mixup-mode", default="batch", choices=["batch", "elem"], needs="mixup_alpha|cutmix_alpha",
               help="draw mixup or cutmix and its share once for a batch (batch) or for each image (elem, as in timm)"),
        Option("--mixup-prob", metavar="P", default=1.0, at_least=0, at_most=1, needs="mixup_alpha|cutmix_alpha",
               help="probability that a batch, or with --mixup-mode elem an image, is mixed"),
        Option("--mixup-switch-prob", metavar="P", default=0.5, at_least=0, at_most=1,
               needs="mixup_alpha|cutmix_alpha", help="probability of CutMix rather than mixup, if both are on"),
        Option("--mixup-off-epoch", default=0, at_least=0, needs="mixup_alpha|cutmix_alpha",
               help="stop mixup and CutMix at epoch N; 0 = never"),
        Option("--ra-sampler", default=False,
               help="repeated augmentation: train on each image --ra-reps times per step, in different micro-batches"),
        Option("--balanced-sampler", default=False,
               help="sample every class equally often: an epoch has as many images as the set, repeats those of small "
                    "classes with other random crops, and leaves out some of large classes"),
        Option("--ra-reps", default=3, at_least=1, needs="ra_sampler",
               help="number of times that --ra-sampler repeats each image"),
    ],
    "model": [
        Option("--model", metavar="NAME", default="resnet18", resume="its weights fit no other", is_of_checkpoint=True,
               help="model to train: any of torchvision's classifiers, timm/NAME, or FILE.py:FUNCTION, a function of "
                    "your own that takes num_classes and returns the model"),
        Option("--model-kwargs", metavar="KEY=VALUE", nargs="*", resume="they are the model's", is_of_checkpoint=True,
               help="keyword arguments of the function that builds the model, such as width=8 or act_layer=gelu; "
                    "values are Python literals, or else text"),
        Option("--weights", metavar="NAME|FILE", resume=FREE, is_of_checkpoint=True,
               help="weights to start from: a name of torchvision's such as IMAGENET1K_V2, a file with a state dict "
                    "or a checkpoint, a safetensors file, or hf-hub:ORG/NAME or hf-hub:ORG/NAME/FILE of the Hugging "
                    "Face hub"),
        Option("--classifier-init", default="zero", choices=["zero", "model"], resume=FREE, needs="weights",
               help="a new classifier on --weights of other classes starts at zero, so that its first gradients do not "
                    "spoil the features, as in BiT and ViT (zero), or as the model draws it (model)"),
        Option("--ema", default=False, resume=FREE,
               help="load the averaged weights (model_ema) of --weights FILE instead of the raw ones"),
        Option("--freeze", default=False, resume="the optimizer's state is that of the parameters that train",
               help="train only the classifier; the layers below it are frozen, in evaluation mode"),
        Option("--freeze-below", metavar="LAYER", not_with="freeze",
               resume="the optimizer's state is that of the parameters that train",
               help="freeze all layers before this one, in evaluation mode: the name of a module, such as layer3, "
                    "blocks.5 or encoder.layers.encoder_layer_6, in the order of the model's parameters"),
        Option("--freeze-epochs", default=0, at_least=0, not_with="freeze|freeze_below",
               help="train only the classifier for N epochs, with all layers below it frozen and in evaluation mode, "
                    "then the whole model"),
        Option("--freeze-batchnorm", default=False, needs="weights", is_strict=True, not_with="freeze",
               resume="the optimizer's state is that of the parameters that train",
               help="keep BatchNorm layers as --weights have them, in evaluation mode, while all else trains: with a "
                    "few hundred images their statistics would move to those of a few batches"),
        Option("--stochastic-depth", metavar="P", type=float, at_least=0, at_most=1, not_with="freeze",
               help="stochastic depth: drop probability of the deepest block (default: the model's)"),
        Option("--dropout", metavar="P", type=float, at_least=0, at_most=1,
               help="probability of every dropout layer (default: the model's)"),
        Option("--eval-flip", default=False, is_of_checkpoint=True,
               help="evaluate each image and its mirror image, and average the two outputs"),
        Option("--sync-bn", default=False, not_with="freeze",
               help="synchronise BatchNorm over all processes; needs --global-batch-size / --batch-size processes"),
        Option("--model-ema", default=False, help="keep and evaluate an exponential moving average of the weights"),
        Option("--model-ema-steps", default=32, at_least=1, needs="model_ema",
               help="update the average of --model-ema every N steps"),
        Option("--model-ema-decay", metavar="D", default=0.99998, at_least=0, below=1, needs="model_ema",
               help="decay of the average, adjusted as in torchvision for global batch, --model-ema-steps and epochs"),
        Option("--model-ema-adjust", default=True, needs="model_ema",
               help="adjust --model-ema-decay as torchvision does; else it is the decay of each update, as in timm"),
    ],
    "optimization": [
        Option("--batch-size", aliases=["-b"], default=32, at_least=1, at_most=1 << 24,
               resume="it is the size of a micro-batch",
               help="images of a micro-batch: what one process passes through the model at once"),
        Option("--global-batch-size", type=int, at_least=1, at_most=1 << 31,
               resume="the saved position counts steps of this size",
               help="images per step over all processes, a multiple of --batch-size; fewer processes accumulate "
                    "gradients (default: --batch-size x processes of the first start)"),
        Option("--eval-batch-size", type=int, at_least=1, at_most=1 << 24,
               help="images that a process evaluates at once; results differ by rounding (default: --batch-size)"),
        Option("--seed", default=0, at_least=0, at_most=(1 << 32) - 1,
               help="seed of every random number: weights, order, augmentation, mixing, dropout"),
        Option("--opt", metavar="NAME", default="sgd", type=lower,
               resume="the checkpoint's state fits no other optimizer",
               help=f"optimizer: {', '.join(OPTIMIZERS)}, timm/NAME such as timm/lamb, or FILE.py:FUNCTION"),
        Option("--opt-betas", metavar=("B1", "B2"), type=float, nargs=2, at_least=0, below=1,
               help="betas of the optimizers that have them (default: 0.9 0.999 of --opt adamw)"),
        Option("--opt-eps", metavar="EPS", type=float, at_least=0, at_most=1e12,
               help="epsilon of the optimizers that have one (default: 1e-8, 0.0316 of --opt rmsprop)"),
        Option("--lr", default=0.1, at_least=0, at_most=1e30,
               help="peak learning rate; independent of the batch size unless --lr-scaling is given"),
        Option("--lr-scaling", default="none", choices=["none", "linear", "sqrt"],
               help="multiply --lr by global batch / --lr-scaling-batch (linear), or by its square root"),
        # Recipes have the fact reference-global-batch for it, which is what resumed runs compare.
        Option("--lr-scaling-batch", type=int, at_least=1, at_most=1 << 31, resume=FREE, recipe=NEVER,
               needs="lr_scaling=linear|sqrt", is_strict=True,
               help="global batch size that --lr is meant for (default: the recipe's reference-global-batch)"),
        Option("--layer-decay", metavar="F", type=float, at_least=0, at_most=1, not_with="freeze",
               help="layer-wise learning rate decay: factor from each layer to the one below it (default: off)"),
        Option("--momentum", metavar="M", default=0.9, at_least=0, below=1,
               help="momentum of the optimizers that have one"),
        Option("--weight-decay", aliases=["--wd"], metavar="W", default=0.0001, at_least=0, at_most=1e6,
               help="weight decay of all parameters that the options below leave"),
        Option("--norm-weight-decay", metavar="W", type=float, at_least=0, at_most=1e6, needs="decay_1d",
               not_with="freeze", help="weight decay of normalisation layers (default: --weight-decay)"),
        Option("--bias-weight-decay", metavar="W", type=float, at_least=0, at_most=1e6, needs="decay_1d",
               help="weight decay of biases (default: --weight-decay)"),
        Option("--transformer-embedding-decay", metavar="W", type=float, at_least=0, at_most=1e6, needs="decay_1d",
               not_with="freeze",
               help="weight decay of the class and position embeddings named in torchvision's script, which exclude "
                    "a ViT's pos_embedding (default: --weight-decay)"),
        Option("--decay-1d", default=True,
               help="--no-decay-1d: timm's rule instead of the three options above: no decay for biases, other "
                    "one-dimensional parameters, and those that the model exempts, such as embeddings"),
        Option("--label-smoothing", metavar="P", default=0.0, at_least=0, below=1, is_of_checkpoint=True,
               help="label smoothing: the share of each target that is spread evenly over all classes"),
        Option("--criterion", metavar="NAME|FILE.py:FUNCTION", is_of_checkpoint=True,
               help=f"loss: {', '.join(LOSSES)}, or your own function, which returns a loss: (output, target) -> mean "
                    "of the batch (default: cross_entropy)"),
        Option("--focal-gamma", metavar="GAMMA", default=2.0, at_least=0, at_most=100, is_of_checkpoint=True,
               needs="criterion=focal", is_strict=True,
               help="exponent of --criterion focal: the larger, the less well-classified images count"),
        Option("--bce-loss", default=False, is_of_checkpoint=True,
               help="same as --criterion bce: binary cross-entropy for each class"),
        Option("--bce-target-thresh", metavar="T", type=float, at_least=0, below=1, is_of_checkpoint=True,
               needs="bce_loss", is_strict=True,
               help="with --bce-loss: a target above this becomes 1, any other 0"),
        Option("--class-weights", metavar="balanced|FILE",
               help="class weights in the training loss: balanced, in inverse proportion to the classes' numbers of "
                    "images, 1 on average over the images; or a .csv, .tsv or .jsonl file with the columns class and "
                    "weight"),
        Option("--teacher", metavar="NAME|FILE",
               help="distil from this model: a checkpoint, weights of torchvision's such as "
                    "regnet_y_16gf.IMAGENET1K_V2, or timm/NAME.TAG from the Hugging Face hub"),
        Option("--distillation", default="hard", choices=["hard", "soft"], needs="teacher",
               help="learn the class that --teacher scores highest (hard), or its probabilities (soft)"),
        Option("--distillation-temperature", metavar="T", default=3.0, at_least=0.01, at_most=1000,
               needs="distillation=soft",
               help="temperature of --distillation soft: divides both models' scores; its square multiplies the term"),
        Option("--distillation-alpha", metavar="A", default=0.5, above=0, at_most=1, needs="teacher",
               help="weight of the --teacher term in the loss; the targets have the rest"),
        Option("--clip-grad-norm", metavar="NORM", type=float, above=0, at_most=1e12,
               help="clip the norm of the gradients to this (default: off)"),
        Option("--clip-grad-value", metavar="V", type=float, above=0, at_most=1e12,
               help="clip each value of the gradients to [-V, V] (default: off)"),
        Option("--clip-agc", metavar="F", type=float, above=0, at_most=1e12, not_with="freeze",
               help="adaptive gradient clipping, as timm's: clip the norm of the gradient of each unit's weights to F "
                    "times the norm of the weights, except in the last layer (default: off)"),
    ],
    "schedule": [
        Option("--epochs", default=90, at_least=1, at_most=10**9, help="number of epochs"),
        Option("--eval-every", default=1, at_least=0, resume=FREE,
               help="evaluate after every N epochs, and after the last one; 0 = after the last one only"),
        Option("--stop-epoch", type=int, at_least=1, resume=FREE, recipe=NEVER,
               help="stop after N epochs, with the learning rates of --epochs; to continue, give --resume auto with a "
                    "larger N or without this option"),
        Option("--patience", metavar="N", type=int, at_least=1, resume=FREE,
               help="early stopping: end the run after N evaluations without a new best by --best-metric, neither of "
                    "the weights nor of their average"),
        Option("--start-epoch", default=0, at_least=0, resume=SILENT, recipe=NEVER,
               help="start at this epoch without a checkpoint"),
        Option("--lr-scheduler", metavar="NAME", default="steplr", type=lower,
               help=f"learning rate schedule after the warm-up: {', '.join(SCHEDULES)}, or FILE.py:FUNCTION; linearlr "
                    "falls to --lr-min at the end, polylr by a power of the epochs left, wsd stays at --lr until the "
                    "last --lr-cooldown-epochs"),
        Option("--lr-warmup-epochs", default=0, at_least=0,
               help="epochs of learning rate warm-up"),
        Option("--lr-warmup-method", default="constant", type=str.lower, choices=["constant", "linear"],
               needs="lr_warmup_epochs",
               help="warm up at a constant low learning rate, or linearly up to --lr"),
        Option("--lr-warmup-decay", metavar="F", default=0.01, at_least=0, at_most=1, needs="lr_warmup_epochs",
               help="the warm-up starts at F times --lr"),
        Option("--lr-warmup-prefix", default=True, needs="lr_warmup_epochs",
               help="start the schedule after the warm-up, as torchvision does; else at epoch 0, with the warm-up in "
                    "place of its beginning, as in timm"),
        Option("--lr-step-size", default=30, at_least=1, needs=_which_take("lr_step_size"),
               help="multiply the learning rate by --lr-gamma every N epochs"),
        Option("--lr-milestones", type=int, nargs="+", at_least=0, needs=_which_take("lr_milestones"),
               help="multiply the learning rate by --lr-gamma at these epochs"),
        Option("--lr-cooldown-epochs", type=int, at_least=1, needs=_which_take("lr_cooldown_epochs"),
               help="final epochs, in which --lr-scheduler wsd lowers the learning rate to --lr-min; a run saved "
                    "before the cool-down can resume with other --epochs"),
        Option("--lr-gamma", metavar="F", default=0.1, above=0, at_most=1e9, needs=_which_take("lr_gamma"),
               help="decay factor of steplr, multisteplr and exponentiallr"),
        Option("--lr-power", metavar="F", default=1.0, above=0, at_most=1000, needs=_which_take("lr_power"),
               help="power of polylr; 1 is a straight line"),
        Option("--lr-min", metavar="LR", default=0.0, at_least=0, at_most=1e30, needs=_which_take("lr_min"),
               help="final learning rate of cosineannealinglr, linearlr, polylr and wsd; --layer-decay scales it too"),
        Option("--lr-per-step", default=False,
               help="update the learning rate at every step, not once an epoch as torchvision does"),
    ],
    "precision": [
        Option("--amp", default=False, is_of_checkpoint=True,
               help="automatic mixed precision, in training and evaluation"),
        Option("--amp-dtype", choices=["bfloat16", "float16", "float32"], is_of_checkpoint=True, needs="amp",
               is_strict=True, ranks=AS_TYPED,
               help="dtype of --amp; float16 scales the loss; float32, which timm's Muon follows too, is for a CPU "
                    "that is slow in a recipe's bfloat16 (default: float16)"),
        Option("--tf32", type=bool, is_of_checkpoint=True,
               help="use TF32 for float32 matrix products and convolutions on NVIDIA GPUs: faster, less exact "
                    "(default: convolutions only, as in torch)"),
        Option("--channels-last", default=False,
               help="NHWC memory format for images and weights, the fastest for tensor cores"),
        Option("--compile", metavar="MODE", choices=COMPILE_MODES, nargs="?", const="default",
               help="compile the model with torch.compile in this mode (--compile alone: default); delays the first "
                    "step by a minute; results are bit-identical only on the same number of processes"),
        Option("--grad-checkpointing", default=False, resume=FREE,
               help="recompute the blocks' activations in the backward pass: less memory, a third more compute; for "
                    "timm models without BatchNorm"),
        Option("--use-deterministic-algorithms", default=False,
               help="bit-identical weights after any restart and on 1, 2, 4, 8 ... processes: deterministic kernels "
                    "and order of sums"),
    ],
    "checkpoint": [
        Option("--output-dir", metavar="DIR", resume=FREE, ranks=OWN, recipe=NEVER,
               help="folder for checkpoints, logs and TensorBoard's events (default: runs/MODEL)"),
        Option("--overwrite", default=False, resume=SILENT, recipe=NEVER,
               help="remove the files of an earlier run from the output folder and start over"),
        Option("--resume", metavar="PATH|auto", default="", resume=SILENT, recipe=NEVER,
               help="resume from this checkpoint; auto: from the newest intact one in the output folder; without "
                    "any, start a new run"),
        Option("--allow-change", metavar="NAMES", resume=SILENT, recipe=NEVER, needs="resume|test_only",
               is_strict=True,
               help="options that may differ from the checkpoint's although they change results: names separated by "
                    "commas, such as lr,epochs; data allows other images"),
        Option("--checkpoint-steps", type=int, at_least=1, resume=FREE,
               help="save a checkpoint every N steps too, besides those at the end of each epoch"),
        Option("--checkpoint-minutes", metavar="MIN", default=10.0, at_least=0, at_most=1e9, resume=FREE,
               help="save a checkpoint when the last one is this many minutes old; 0 = never"),
        Option("--keep-last", default=3, at_least=2, resume=FREE, help="keep the newest N numbered checkpoints"),
        Option("--best-metric", metavar="NAME", default="acc1", resume=FREE,
               help="validation metric that chooses best.pth, and best_ema.pth for the average of --model-ema: acc1, "
                    "acc5, loss, or one of --metrics; a tie goes to the lower loss, then to the earlier epoch"),
        Option("--save-per-node", default=False, resume=FREE,
               help="for nodes without a shared disk: write each checkpoint to the output folder of every node; "
                    "--resume auto takes the newest of all"),
        Option("--test-only", default=False, resume=SILENT, recipe=NEVER,
               help="evaluate the model of --weights or --resume, and exit"),
    ],
    "monitoring": [
        Option("--metrics", metavar="NAME", nargs="+", resume=FREE,
               help=f"further metrics for records, curves and the Test: line: {', '.join(METRICS)}, or "
                    "FILE.py:FUNCTION"),
        Option("--logger", metavar="NAME", default=["tensorboard"], type=lower, nargs="+", resume=FREE, recipe=NEVER,
               not_with="test_only",
               help=f"where records go besides metrics.jsonl: {', '.join(LOGGERS)}, or FILE.py:FUNCTION"),
        Option("--print-freq", default=10, at_least=1, resume=FREE, help="print a log line every N steps"),
        Option("--stall-timeout", metavar="MIN", default=20, type=float, at_least=0, at_most=1e6, resume=FREE,
               recipe=NEVER,
               help="minutes without a step after which the run counts as hung: every process prints its stack, and "
                    "the run ends; 0 = never"),
    ],
    "distributed": [
        Option("--device", resume=FREE, ranks=OWN, recipe=IF_GIVEN,
               help="device to train on: cuda, cpu, mps ... (default: the available accelerator, else cpu)"),
        Option("--world-size", default=1, at_least=1, at_most=1 << 20, resume=SILENT, ranks=OWN, recipe=NEVER,
               help="number of processes, if the launcher sets RANK but not WORLD_SIZE"),
        Option("--dist-url", metavar="URL", default="env://", resume=FREE, ranks=OWN, recipe=NEVER,
               help="URL of the rendezvous; torchrun and srun set it up themselves"),
        Option("--dist-timeout", metavar="MIN", default=30, type=float, at_least=0.001, at_most=1e6, resume=FREE,
               recipe=NEVER,
               help="minutes that a process waits for the others in a step or evaluation batch before it gives up"),
    ],
}  # fmt: skip

GROUPS = [group for group in OPTIONS if group != "options"]
BY_NAME = {option.dest: option for options in OPTIONS.values() for option in options}


def defaults() -> dict[str, Any]:
    """Return the default of every option by its name."""
    return {name: option.default for name, option in BY_NAME.items()}


def with_defaults(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return preprocessing that is known, with the defaults of `WITH_DEFAULT` for what it does not tell."""
    return {**{name: BY_NAME[name].default for name in WITH_DEFAULT}, **known}


# The end of every message that refuses code which a file names.
WHY_TYPED = "a Python file, which runs only if the command line names it: give --model FILE.py:FUNCTION"


def is_filled_in(name: str, args: Any) -> bool:
    """Tell whether the model's configuration sets an option, which neither the command line nor the recipe gives."""
    is_timms = args.model.startswith("timm/") and name in (*PREPROCESSING, "train_crop_size")
    return (is_timms or name in ("mean", "std")) and name not in args.given


def fit_statistics(values: Sequence[float], in_chans: int) -> list[float]:
    """Return a mean or deviation of each channel: for another number of channels the average in each, as in timm."""
    return list(values) if len(values) == in_chans else [sum(values) / len(values)] * in_chans


def short_name(model: str) -> str:
    """Return a model's name without the file that a custom one is in."""
    custom = split_custom(model)
    return model if custom is None else custom[1]


def is_same_model(one: str, other: str) -> bool:
    """Tell whether two names mean the same model; the folder of a custom one does not matter, since files move."""
    names = {os.path.basename(model) if split_custom(model) else model for model in (one, other)}
    return len(names) == 1


def parse_allowed(text: str | None) -> set[str]:
    """Return the names in `--allow-change`: options, `code`, `data`, `threads`; UserError for others and fixed ones."""
    aliases = {key.replace("-", "_"): name for name, option in BY_NAME.items() for key in option.keys}
    known = {name: name for name in ("code", "data", "threads")} | aliases
    names = {word.strip().removeprefix("--").replace("-", "_") for word in (text or "").split(",")} - {""}
    for name in sorted(names):
        if name not in known:
            raise UserError(f"--allow-change {name}: there is no such option{did_you_mean(name, known)}")
        if known[name] in BY_NAME and (reason := BY_NAME[known[name]].why_fixed):
            raise UserError(
                f"--allow-change {name}: a resumed run cannot change it: {reason}; start a new run from its --weights"
            )
    return {known[name] for name in names}


class HelpOnWord(argparse.Action):
    """`--help`, and `--help WORD` for the options that mention it."""

    def __call__(self, parser: "OneLineParser", _: Any, word: str, __: str | None = None) -> None:
        """Print the help, and exit."""
        if word:
            found = [action for action in parser._actions if word in f"{action.option_strings} {action.help}".lower()]
            lines = [] if found or parser.lines_about is None else parser.lines_about(word)
            if not found and not lines:
                raise UserError(f"--help {word}: no option mentions it")
            formatter = parser.formatter_class(parser.prog)
            formatter.add_arguments(found)
            print(formatter.format_help() if found else "\n".join([*lines, ""]), end="")
        else:
            parser.print_help()
        parser.exit()


class PrintVersion(argparse.Action):
    """`--version`: this repository's version, and those of torch and torchvision, which are not imported for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print the versions, and exit."""
        found = [f"{name} {version(name)}" for name in ("torch", "torchvision") if find_spec(name)]
        print(", ".join([f"touchstone {__version__}", *found]))
        parser.exit()


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the word that was probably meant."""

    explain: Callable[..., UserError] | None = None  # from (words, parser), of unknown flags
    lines_about: Callable[[str], list[str]] | None = None  # what other scripts' flags with a word are here

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuse --, and expand ~."""
        if "--" in arg_strings:
            raise argparse.ArgumentError(action, "expected a value, not --")
        return super()._get_values(action, expand_home(action.dest, arg_strings))

    def error(self, message: str) -> None:
        """Raise the error instead of printing two pages of usage first, on every rank."""
        message = message.replace("ignored explicit argument", "it is a switch and takes no value, but was given")
        raise UserError(f"{message} (--help lists the options)")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        """Parse all of `args`; refuse an unknown option, and a locale in which names such as Käfer cannot be found."""
        if (encoding := sys.getfilesystemencoding()) != "utf-8":
            raise UserError(f"file names are {encoding} in this locale; set PYTHONUTF8=1 or LC_ALL=C.UTF-8")
        parsed, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return parsed
        if self.explain is not None:
            raise self.explain(sys.argv[1:] if args is None else args, self)
        hint = did_you_mean(unknown[0].split("=")[0], self._option_string_actions)
        raise UserError(f"unrecognized argument {unknown[0]}{hint} (--help lists the options)")


EPILOG = """\
most used: --recipe, --data-path, --model, --epochs, --batch-size, --lr, --amp,
  --output-dir, --resume auto, --test-only, --dry-run
  # a recipe on eight GPUs, resumed from its newest checkpoint; command-line options override it
  torchrun --nproc_per_node=8 train.py --recipe resnet50-v1 --data-path DIR --resume auto
  # one GPU or none, and no data
  python train.py --model resnet18 --synthetic 640 --epochs 1
  # the accuracy of a finished run
  python train.py --data-path DIR --test-only --resume runs/resnet50/best.pth"""


def get_args_parser(add_help: bool = True) -> argparse.ArgumentParser:
    """Return the parser of all options, torchvision's among them, in nine groups."""
    parser = build_parser(add_help=add_help)
    parser.set_defaults(**defaults())
    return parser


def build_parser(*, add_help: bool = True) -> argparse.ArgumentParser:
    """Return the parser of all options, whose result holds only those that were given."""
    parser = OneLineParser(
        prog="train.py",
        usage="train.py [--recipe NAME] [--data-path DIR] [options]",
        description="Train and evaluate image classification models: torchvision's flags, reproducible and robust.",
        epilog=EPILOG,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if add_help:
        text = "show all options, or only those that mention WORD, and exit"
        nothing = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        parser.add_argument(
            "-h", "--help", metavar="WORD", nargs="?", const="", type=str.lower, action=HelpOnWord, help=text, **nothing
        )
        text = "print the versions of this repository, torch and torchvision, and exit"
        parser.add_argument("--version", nargs=0, action=PrintVersion, help=text, **nothing)
    for title, options in OPTIONS.items():
        group = parser if title == "options" else parser.add_argument_group(title)
        for option in options:
            option.add_to(group)
    return parser

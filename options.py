"""Every option, declared once: parser, recipes, checks and what a resumed run may change are made of this table.

Nothing here imports torch, since help and errors come before that.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from errors import UserError, did_you_mean

# What a resumed run may do with an option. Where no number depends on it, change it, and have that said; or not said,
# since it is another one at any restart. Else, change it if --allow-change names it. Anything else is the reason why
# it cannot be changed.
FREE, SILENT, ON_REQUEST = "free", "silent", "on request"

# Whether the recipe that a run writes holds an option: always; never, as it says where the run is and how it was
# started, and not what it computes; or if it was given, as it is derived from the machine otherwise.
ALWAYS, NEVER, IF_GIVEN = "always", "never", "if given"

# No run has more steps, epochs and the like: a float no longer counts them.
MOST_COUNT = 1 << 53

# Those of torchvision and torch, named here so that neither has to be imported.
INTERPOLATIONS = ["nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos"]
POLICIES = ["ra", "ta_wide", "augmix", "cifar10", "imagenet", "svhn"]
OPTIMIZERS = ["adamw", "rmsprop", "sgd", "sgd_nesterov"]
COMPILE_MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
MEASURED_MODES = {"max-autotune", "max-autotune-no-cudagraphs"}  # choose kernels by measuring them


@dataclass(frozen=True)
class Option:
    """All that is known of an option.

    Args:
        flag: its long name.
        aliases: other spellings of it.
        help: meaning and unit; the default is put behind it.
        default: where it is not given. A bool makes the option a switch, which has a --no-NAME too.
        is_switch: it is one without a default.
        is_action: it is asked for, and has no --no-NAME.
        type: of its value, or of each of `nargs` values.
        at_least: smallest value.
        at_most: largest value.
        resume: FREE, SILENT, ON_REQUEST, or why a resumed run cannot change it.
        recipe: ALWAYS, NEVER or IF_GIVEN.
        is_of_checkpoint: an evaluation takes it from the checkpoint, unless it is given.
        metavar: as of argparse; as are choices, nargs and const.
    """

    flag: str
    _: KW_ONLY
    help: str
    aliases: Sequence[str] = ()
    default: Any = None
    is_switch: bool = False
    is_action: bool = False
    type: Callable[[str], Any] = str
    at_least: float | None = None
    at_most: float | None = None
    resume: str = ON_REQUEST
    recipe: str = ALWAYS
    is_of_checkpoint: bool = False
    metavar: str | tuple[str, ...] | None = None
    choices: Sequence[str] | None = None
    nargs: int | str | None = None
    const: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.default, bool):
            object.__setattr__(self, "is_switch", True)
        if self.is_action:
            object.__setattr__(self, "default", False)

    @property
    def name(self) -> str:
        """Its name as it is written after the two dashes."""
        return self.flag[2:]

    @property
    def dest(self) -> str:
        """Its name in the record of the options."""
        return self.name.replace("-", "_")

    @property
    def keys(self) -> list[str]:
        """Its names in a recipe."""
        return [flag[2:] for flag in (self.flag, *self.aliases) if flag.startswith("--")]

    @property
    def why_fixed(self) -> str | None:
        """Why a resumed run cannot change it; None where it can."""
        return None if self.resume in (FREE, SILENT, ON_REQUEST) else self.resume

    def add_to(self, group: Any, *, has_default: bool) -> None:
        """Add it to a group of a parser.

        Args:
            group: of `argparse`.
            has_default: whether the default is filled in where it is not given, or nothing is.
        """
        settings = {"default": self.default if has_default else argparse.SUPPRESS, "help": self.help}
        if self.is_action:
            settings["default"] = False if has_default else argparse.SUPPRESS
            group.add_argument(self.flag, action="store_true", **settings)
            return
        if self.is_switch:
            group.add_argument(self.flag, action=argparse.BooleanOptionalAction, **settings)
            return
        given = {"choices": self.choices, "nargs": self.nargs, "const": self.const, "metavar": self.metavar}
        given = {name: value for name, value in given.items() if value is not None}
        group.add_argument(*self.aliases, self.flag, dest=self.dest, type=self.type, **settings, **given)

    def check(self, value: Any) -> None:
        """Check a value against its bounds.

        Raises:
            UserError: it lies beyond them, or is no finite number.
        """
        for number in value if isinstance(value, list | tuple) else [value]:
            if type(number) in (int, float):
                self._check_number(number)

    def _check_number(self, number: float) -> None:
        if type(number) is float and not math.isfinite(number):
            raise UserError(f"{self.flag} {number}: expected a finite number")
        least = -MOST_COUNT if self.at_least is None else self.at_least
        most = MOST_COUNT if self.at_most is None else self.at_most
        if (least, most) == (0, 1) and not 0 <= number <= 1:
            raise UserError(f"{self.flag} {number}: expected a number from 0 to 1")
        if number < least:
            raise UserError(f"{self.flag} {number}: expected {least} or more")
        if number > most:
            given = number if type(number) is float or number < 1 << 63 else "of that many digits"
            raise UserError(f"{self.flag} {given}: expected {self.at_least or 0} to {most:.10g}")

    def is_value(self, value: Any) -> bool:
        """Tell whether a plain value is one that this option can have."""
        if value is None or (value == self.default and type(value) is type(self.default)):
            return value == self.default
        kind = bool if self.is_switch else self.type if isinstance(self.type, type) else str
        return type(value) is kind and (self.choices is None or value in self.choices)


# By group, in the order of --help; a recipe's tables bear the groups' names.
OPTIONS = {
    "options": [
        Option(
            "--recipe", metavar="NAME", resume=SILENT, recipe=NEVER,
            help="options to start from: a name in recipes/, or a TOML file",
        ),
        Option(
            "--list-recipes", is_action=True, resume=FREE, help="print the recipes with what they promise, and exit",
        ),
        Option(
            "--dry-run", is_action=True, resume=FREE,
            help="print what the options resolve to, the batch arithmetic and the learning rates, and exit",
        ),
    ],
    "data": [
        Option(
            "--data-path", metavar="DIR", resume=FREE,
            help="folder that holds train/ and val/, one folder a class, or train.tar and val.tar, or shards of them",
        ),
        Option(
            "--bad-images", default="error", choices=["error", "skip"], resume=FREE,
            help="what to do about a training image that cannot be read: stop, or take the next one and say so after "
            "each epoch; in evaluation it always stops",
        ),
        Option(
            "--synthetic", metavar="IMAGES", type=int, nargs="?", const=12_800, at_least=1, at_most=1 << 40,
            resume="a position is counted in steps of its images",
            help="train on this many made-up images (12800 if no number is given) of 1000 classes; needs no data",
        ),
        Option(
            "--workers", aliases=["-j"], metavar="N", type=int, at_least=0, at_most=1024, resume=FREE, recipe=IF_GIVEN,
            help="loader processes for each training process (default: 16, or fewer if there are fewer cores)",
        ),
        Option(
            "--worker-type", default="process", choices=["process", "thread"], resume=FREE,
            help="what the workers are; threads copy no batch between processes, and take no --auto-augment or "
            "--backend",
        ),
        Option(
            "--prefetch-factor", metavar="N", default=2, type=int, at_least=1, at_most=4096, resume=FREE,
            help="batches each worker is ahead",
        ),
        Option(
            "--cache-dataset", default=False, resume=FREE,
            help="accepted as torchvision's; the index of the images is cached anyway",
        ),
        Option(
            "--backend", type=str.lower, choices=["pil", "tensor"], is_of_checkpoint=True,
            help="exact pixels: pil = Pillow's, torchvision's default; tensor = torchvision's tensor resize "
            "(default: a faster way, within one grey level of pil)",
        ),
        Option(
            "--decoder", default="pillow", choices=["pillow", "torchcodec"], is_of_checkpoint=True,
            help="what decodes JPEGs: torchcodec is an optional extra, faster, and may differ by a grey level",
        ),
        Option(
            "--decode-device", default="cpu", choices=["cpu", "cuda"], is_of_checkpoint=True,
            help="cuda = the GPU decodes, crops and resizes JPEGs (TorchCodec's nvJPEG), or it is said why it "
            "cannot; its pixels differ from the CPU's by some grey levels; what it cannot decode, the CPU does",
        ),
        Option("--use-v2", default=False, resume=FREE, help="accepted as torchvision's; changes no number here"),
    ],
    "augmentation": [
        Option(
            "--train-crop-size", metavar="PX", default=224, type=int, at_least=1, at_most=16384,
            help="side of a training crop",
        ),
        Option(
            "--train-crop-size-min", metavar="PX", type=int, at_least=1,
            help="progressive resolution: train at this size until --crop-ramp-epochs begin, growing to "
            "--train-crop-size",
        ),
        Option(
            "--crop-ramp-epochs", metavar=("FIRST", "LAST"), type=int, nargs=2,
            help="when the crops grow, in steps of 32 px",
        ),
        Option(
            "--val-resize-size", metavar="PX", default=256, type=int, at_least=1, at_most=16384, is_of_checkpoint=True,
            help="shorter side in evaluation",
        ),
        Option(
            "--val-crop-size", metavar="PX", default=224, type=int, at_least=1, at_most=16384, is_of_checkpoint=True,
            help="side of the central crop",
        ),
        Option(
            "--interpolation", default="bilinear",
            choices=INTERPOLATIONS,
            is_of_checkpoint=True, help="of a resize",
        ),
        Option(
            "--crop-scale", metavar="SHARE", default=0.08, type=float, at_least=0, at_most=1,
            help="smallest share of an image's area that a training crop shows",
        ),
        Option(
            "--hflip-prob", metavar="P", default=0.5, type=float, at_least=0, at_most=1,
            help="odds of a mirrored image",
        ),
        Option(
            "--auto-augment", metavar="POLICY",
            help="augmentation policy: ra, ta_wide, augmix, cifar10, imagenet, svhn, or timm/SPECIFICATION such as "
            "timm/rand-m7-mstd0.5-inc1 (default: none)",
        ),
        Option(
            "--ra-magnitude", metavar="M", default=9, type=int, at_least=0, at_most=30,
            help="magnitude of --auto-augment ra",
        ),
        Option(
            "--augmix-severity", metavar="S", default=3, type=int, at_least=1, at_most=10,
            help="severity of --auto-augment augmix",
        ),
        Option(
            "--random-erase", metavar="P", default=0.0, type=float, at_least=0, at_most=1,
            help="odds of an erased rectangle",
        ),
        Option(
            "--mixup-alpha", metavar="A", default=0.0, type=float, at_least=0, at_most=1e9,
            help="mixup: the alpha of its Beta distribution; 0 = off",
        ),
        Option(
            "--cutmix-alpha", metavar="A", default=0.0, type=float, at_least=0, at_most=1e9,
            help="cutmix: likewise",
        ),
        Option(
            "--mixup-prob", metavar="P", default=1.0, type=float, at_least=0, at_most=1,
            help="odds of a batch that is mixed at all",
        ),
        Option(
            "--mixup-switch-prob", metavar="P", default=0.5, type=float, at_least=0, at_most=1,
            help="odds of cutmix, where mixup is on as well",
        ),
        Option(
            "--mixup-off-epoch", metavar="N", type=int, at_least=0, help="first epoch without mixing (default: never)",
        ),
        Option(
            "--ra-sampler", default=False,
            help="repeated augmentation: each image --ra-reps times, in different shards",
        ),
        Option("--ra-reps", metavar="N", default=3, type=int, at_least=1, help="repetitions of --ra-sampler"),
    ],
    "model": [
        Option(
            "--model", metavar="NAME", default="resnet18", resume="its weights fit no other", is_of_checkpoint=True,
            help="any of torchvision's classifiers, or timm/NAME",
        ),
        Option(
            "--weights", metavar="NAME|FILE", resume=FREE, is_of_checkpoint=True,
            help="weights to start from: torchvision's name of them, a state dict, or a checkpoint of this script",
        ),
        Option(
            "--ema", default=False, resume=FREE,
            help="take the average of the weights (model_ema) out of --weights FILE, not the raw ones",
        ),
        Option(
            "--freeze", default=False, resume="the optimizer's state is that of the parameters that train",
            help="train the classifier alone; the layers below stay as they are, in evaluation mode",
        ),
        Option(
            "--stochastic-depth", metavar="P", type=float, at_least=0, at_most=1,
            help="of the deepest layer (default: the model's)",
        ),
        Option(
            "--dropout", metavar="P", type=float, at_least=0, at_most=1,
            help="of every dropout layer (default: the model's)",
        ),
        Option(
            "--eval-flip", default=False, is_of_checkpoint=True,
            help="evaluate each image and its mirror image, and average the two outputs",
        ),
        Option(
            "--sync-bn", default=False, help="BatchNorm over the whole global batch; needs as many processes as shards",
        ),
        Option("--model-ema", default=False, help="keep and evaluate an exponential moving average of the weights"),
        Option("--model-ema-steps", metavar="N", default=32, type=int, at_least=1, help="steps between two averagings"),
        Option(
            "--model-ema-decay", metavar="D", default=0.99998, type=float, at_least=0, at_most=1,
            help="decay of the average a sample, of which the decay a step is derived",
        ),
    ],
    "optimization": [
        Option(
            "--batch-size", aliases=["-b"], metavar="N", default=32, type=int, at_least=1, at_most=1 << 24,
            resume="a step is made of its shards", help="images a process and step",
        ),
        Option(
            "--global-batch-size", metavar="N", type=int, at_least=1, at_most=1 << 31,
            resume="a position is counted in its steps",
            help="images a step over all processes, a multiple of --batch-size; what the processes are too few for, "
            "they accumulate (default: --batch-size x processes of the first start)",
        ),
        Option("--seed", metavar="N", default=0, type=int, at_least=0, at_most=(1 << 32) - 1, help="of all draws"),
        Option(
            "--opt", metavar="NAME", default="sgd", type=str.lower, resume="its state fits no other",
            help="the optimizer: adamw, rmsprop, sgd, sgd_nesterov, or timm/NAME such as timm/lamb",
        ),
        Option("--opt-betas", metavar=("B1", "B2"), type=float, nargs=2, help="of adamw (default: 0.9 0.999)"),
        Option(
            "--opt-eps", metavar="EPS", type=float, at_least=0, at_most=1e12,
            help="of adamw and rmsprop (default: 1e-8, 0.0316)",
        ),
        Option(
            "--lr", default=0.1, type=float, at_least=0, at_most=1e30,
            help="peak learning rate; scaled only if --lr-scaling says so",
        ),
        Option(
            "--lr-scaling", default="none", choices=["none", "linear", "sqrt"],
            help="how the rate follows the global batch, from the recipe's reference-global-batch",
        ),
        Option(
            "--layer-decay", metavar="F", type=float, at_least=0, at_most=1,
            help="factor of the rate from each layer to the one below it",
        ),
        Option(
            "--momentum", metavar="M", default=0.9, type=float, at_least=0, at_most=1e12,
            help="of sgd and rmsprop",
        ),
        Option(
            "--weight-decay", aliases=["--wd"], metavar="W", default=0.0001, type=float, at_least=0, at_most=1e6,
            help="L2",
        ),
        Option(
            "--norm-weight-decay", metavar="W", type=float, at_least=0, at_most=1e6,
            help="of normalisation layers (default: --wd)",
        ),
        Option(
            "--bias-weight-decay", metavar="W", type=float, at_least=0, at_most=1e6,
            help="of biases (default: --wd)",
        ),
        Option(
            "--transformer-embedding-decay", metavar="W", type=float, at_least=0, at_most=1e6,
            help="of class and position embeddings (default: --wd)",
        ),
        Option(
            "--label-smoothing", metavar="P", default=0.0, type=float, at_least=0, at_most=1, is_of_checkpoint=True,
            help="of the cross-entropy",
        ),
        Option(
            "--bce-loss", default=False, is_of_checkpoint=True,
            help="one binary cross-entropy a class in place of the softmax's",
        ),
        Option(
            "--bce-target-thresh", metavar="T", type=float, at_least=0, at_most=1, is_of_checkpoint=True,
            help="count a class as there above this target",
        ),
        Option(
            "--clip-grad-norm", metavar="NORM", type=float, at_least=0, at_most=1e12,
            help="largest gradient norm (default: no limit)",
        ),
    ],
    "schedule": [
        Option("--epochs", metavar="N", default=90, type=int, at_least=1, at_most=10**9, help="epochs to train"),
        Option(
            "--start-epoch", metavar="N", default=0, type=int, at_least=0, resume=SILENT, recipe=NEVER,
            help="first epoch, without a checkpoint",
        ),
        Option(
            "--lr-scheduler", default="steplr", type=str.lower,
            choices=["cosineannealinglr", "exponentiallr", "linearlr", "steplr"],
            help="schedule after the warm-up; linearlr falls to --lr-min at the end",
        ),
        Option("--lr-warmup-epochs", metavar="N", default=0, type=int, at_least=0, help="epochs of warm-up"),
        Option(
            "--lr-warmup-method", default="constant", type=str.lower, choices=["constant", "linear"], help="its shape",
        ),
        Option(
            "--lr-warmup-decay", metavar="F", default=0.01, type=float, at_least=0, at_most=1,
            help="factor that it begins with",
        ),
        Option(
            "--lr-step-size", metavar="N", default=30, type=int, at_least=1, help="epochs between two steps of steplr",
        ),
        Option(
            "--lr-gamma", metavar="F", default=0.1, type=float, at_least=0, at_most=1e9,
            help="factor of steplr and exponentiallr",
        ),
        Option(
            "--lr-min", metavar="LR", default=0.0, type=float, at_least=0, at_most=1e30,
            help="where cosineannealinglr and linearlr end",
        ),
        Option(
            "--lr-per-step", default=False, help="change the rate at each step, not at each epoch as torchvision does",
        ),
    ],
    "precision": [
        Option(
            "--amp", default=False, is_of_checkpoint=True, help="automatic mixed precision, in training and evaluation",
        ),
        Option(
            "--amp-dtype", choices=["bfloat16", "float16"], is_of_checkpoint=True,
            help="what --amp computes in; float16 scales the loss, bfloat16 need not (default: float16)",
        ),
        Option(
            "--tf32", is_switch=True, is_of_checkpoint=True,
            help="float32 matrix products and convolutions of NVIDIA GPUs with inputs rounded to TF32, or neither "
            "(default: convolutions only, as torch has it)",
        ),
        Option(
            "--channels-last", default=False,
            help="keep images and weights in NHWC order, which tensor cores are fastest with",
        ),
        Option(
            "--compile", metavar="MODE",
            choices=COMPILE_MODES, nargs="?",
            const="default",
            help="compile the model, for training and evaluation: default, reduce-overhead, max-autotune, "
            "max-autotune-no-cudagraphs (default: no; alone: default). The same bits then need the same number "
            "of processes",
        ),
        Option(
            "--grad-checkpointing", default=False, resume=FREE,
            help="keep no activations inside the model's blocks and compute them again: less memory, a third more work",
        ),
        Option(
            "--use-deterministic-algorithms", default=False,
            help="the same bits after any restart and on 1, 2, 4, 8 ... processes: deterministic kernels and order "
            "of sums",
        ),
    ],
    "checkpoint": [
        Option(
            "--output-dir", metavar="DIR", resume=FREE, recipe=NEVER,
            help="where everything goes (default: runs/MODEL)",
        ),
        Option(
            "--overwrite", default=False, resume=SILENT, recipe=NEVER,
            help="remove what an earlier run left in the output folder, and start over",
        ),
        Option(
            "--resume", metavar="PATH|auto", default="", resume=SILENT, recipe=NEVER,
            help="go on from this checkpoint; auto: from the newest good one in the output folder, if there is one",
        ),
        Option(
            "--allow-change", metavar="NAMES", resume=SILENT, recipe=NEVER,
            help="resume although these options, which change the numbers of the run, are others than the "
            "checkpoint's: names with commas between them, such as lr,epochs; data: names, labels or sizes of "
            "files",
        ),
        Option(
            "--checkpoint-steps", metavar="N", type=int, at_least=1, resume=FREE,
            help="save every N steps too, not only around each evaluation",
        ),
        Option(
            "--checkpoint-minutes", metavar="MIN", default=10.0, type=float, at_least=0, at_most=1e9,
            resume=FREE, help="save when the last checkpoint is this old; 0 = never for that reason",
        ),
        Option("--keep-last", metavar="N", default=3, type=int, resume=FREE, help="numbered checkpoints to keep"),
        Option(
            "--keep-every", metavar="K", type=int, at_least=1, resume=FREE,
            help="keep for good what is saved at the end of every K-th epoch",
        ),
        Option(
            "--best-metric", default="acc1", choices=["acc1", "acc5", "loss"], resume=FREE,
            help="what best.pth is best in, on the validation set, and best_ema.pth with the average of --model-ema",
        ),
        Option(
            "--save-per-node", default=False, resume=FREE,
            help="keep a copy of each checkpoint in the output folder of every node, where they share no disk; "
            "--resume auto takes the newest of all nodes",
        ),
        Option(
            "--test-only", default=False, resume=SILENT, recipe=NEVER,
            help="evaluate and exit; takes --weights or --resume",
        ),
    ],
    "monitoring": [
        Option(
            "--print-freq", metavar="N", default=10, type=int, at_least=1, resume=FREE,
            help="steps between two log lines",
        ),
        Option(
            "--stall-timeout", metavar="MIN", default=20, type=float, at_least=0, at_most=1e6, resume=FREE,
            recipe=NEVER,
            help="minutes without a step after which a run counts as hung: every process says where, and the run "
            "ends; 0 = never",
        ),
    ],
    "distributed": [
        Option(
            "--device", resume=FREE, recipe=IF_GIVEN,
            help="cuda, cpu, mps ... (default: the accelerator that is there, else cpu)",
        ),
        Option(
            "--world-size", metavar="N", default=1, type=int, at_least=1, at_most=1 << 20, resume=SILENT, recipe=NEVER,
            help="processes, where a launcher sets RANK but not this",
        ),
        Option(
            "--dist-url", metavar="URL", default="env://", resume=FREE, recipe=NEVER, help="where the processes meet",
        ),
        Option(
            "--grad-compression", default="none", choices=["bf16", "none"],
            help="what gradients are rounded to on their way between processes",
        ),
        Option(
            "--dist-timeout", metavar="MIN", default=30, type=float, at_least=0.001, at_most=1e6, resume=FREE,
            recipe=NEVER, help="minutes that the processes wait for each other in a step",
        ),
    ],
}  # fmt: skip

GROUPS = [group for group in OPTIONS if group != "options"]
BY_NAME = {option.dest: option for options in OPTIONS.values() for option in options}


# Facts that change numbers as options do, by the names that `--allow-change` has for them.
FACTS = {"data", "threads"}


def parse_allowed(text: str | None) -> set[str]:
    """Return the names in `--allow-change`.

    Args:
        text: option names with commas between them, with or without their dashes, or None.

    Raises:
        UserError: one of them is no option, or may not be changed.
    """
    aliases = {key.replace("-", "_"): name for name, option in BY_NAME.items() for key in option.keys}
    known = {fact: fact for fact in FACTS} | aliases
    names = {word.strip().removeprefix("--").replace("-", "_") for word in (text or "").split(",")} - {""}
    for name in sorted(names):
        shown = name.replace("_", "-")
        if name not in known:
            hint = did_you_mean(shown, (word.replace("_", "-") for word in known))
            raise UserError(f"--allow-change {shown}: there is no such option{hint}")
        if known[name] in BY_NAME and (reason := BY_NAME[known[name]].why_fixed):
            raise UserError(
                f"--allow-change {shown}: it cannot be changed, since {reason}; "
                "another run can start from the weights: pass the checkpoint to --weights"
            )
    if text is not None and not names:
        raise UserError("--allow-change is empty; give names of options with commas between them, such as lr,epochs")
    return {known[name] for name in names}


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the word that was probably meant."""

    def error(self, message: str) -> None:
        """Raise the error instead of printing two pages of usage first, on every rank."""
        raise UserError(f"{message} (--help lists the options)")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        """Parse all of `args`; an unknown option is an error that names the nearest one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return parsed
        word = unknown[0].split("=")[0]
        known = [option for action in self._actions for option in action.option_strings]
        longer = [option for option in known if option.startswith(word)] if word.startswith("--") else []
        hint = f"; write {longer[0]} in full" if longer else did_you_mean(word, known)
        raise UserError(f"unrecognized argument {unknown[0]}{hint} (--help lists the options)")


class HelpFormatter(argparse.HelpFormatter):
    """Show each option's default, where it has one to speak of."""

    def _get_help_string(self, action: argparse.Action) -> str:
        default = BY_NAME[action.dest].default if action.dest in BY_NAME else None
        has_default = not (default is None or default is False or default == "")
        return f"{action.help} (default: {default})" if has_default else action.help


def get_args_parser(add_help: bool = True) -> argparse.ArgumentParser:
    """Return the parser of all options, torchvision's among them, in nine groups."""
    return build_parser(add_help=add_help, has_defaults=True)


def build_parser(*, add_help: bool, has_defaults: bool) -> argparse.ArgumentParser:
    """Return the parser of all options.

    Args:
        add_help: whether it knows --help.
        has_defaults: whether it fills in the defaults; else only what is given comes out.
    """
    parser = OneLineParser(
        prog="train.py",
        usage="train.py [--recipe NAME] [--data-path DIR] [options]",
        description="Train and evaluate image classification models: torchvision's commands, exact and hard to kill.",
        epilog="A recipe (recipes/*.toml) is a command line written down; the real command line wins over it.",
        add_help=add_help,
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    for title, options in OPTIONS.items():
        group = parser if title == "options" else parser.add_argument_group(title)
        for option in options:
            option.add_to(group, has_default=has_defaults)
    return parser

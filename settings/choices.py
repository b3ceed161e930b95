"""Every name that an option chooses by: where its code is, which options it takes, and what it is called on pages.

Plain data, which imports nothing of torch. A row adds a choice; `custom_code.load_function` turns a name of a table, or
FILE.py:FUNCTION, into the function. A row's options are names of `args`, which have their own rows in `options.py`.
"""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Choice:
    """One name that an option takes."""

    target: str  # module:function
    options: tuple[str, ...] = ()  # those that the function is called with
    constants: Mapping[str, Any] = field(default_factory=dict)  # more arguments

    def load(self) -> Any:
        """Import the module and return the function."""
        # On use: of 130 modules a run on class folders with a torchvision model imports 70 (CHANGELOG.md).
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Schedule(Choice):
    """A schedule of `--lr-scheduler`: a function of peak, epoch, begin and end, which returns the learning rate."""

    uses_epochs: bool = False  # whether the rate depends on --epochs


@dataclass(frozen=True)
class Optimizer(Choice):
    """An optimizer of `--opt`, with `options` of momentum, opt_betas and opt_eps."""

    # State of each parameter: step is a number, others have the parameter's shape, momentum_buffer is there with
    # --momentum. Empty if it is not checked, as timm's, which may be means of a matrix's rows.
    moments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Curve(Choice):
    """A value of a metric, as the pages and charts of a run show it and as `--best-metric` ranks it."""

    target: str = ""
    title: str = ""
    is_lower_better: bool = False


@dataclass(frozen=True)
class Logger(Choice):
    """A logger of `--logger`, as `monitoring.loggers` describes them."""

    package: str = ""  # which pip installs, if this project does not


@dataclass(frozen=True)
class Form(Choice):
    """A form of data, whose class finds its files in a folder."""

    endings: tuple[str, ...] = ()  # of names without which there is none of it; its module is then not imported

    def may_be_among(self, names: Iterable[str]) -> bool:
        """Tell whether files of these names may be of this form."""
        return not self.endings or any(name.endswith(self.endings) for name in names)


SCHEDULES = {
    "cosineannealinglr": Schedule("models.other_schedules:cosine", ("lr_min",), uses_epochs=True),
    "exponentiallr": Schedule("models.other_schedules:decay", ("lr_gamma",)),
    "linearlr": Schedule("models.other_schedules:line", ("lr_min",), uses_epochs=True),
    "multisteplr": Schedule("models.other_schedules:drop_at", ("lr_milestones", "lr_gamma")),
    "polylr": Schedule("models.other_schedules:power", ("lr_power", "lr_min"), uses_epochs=True),
    "steplr": Schedule("models.optim:drop", ("lr_step_size", "lr_gamma")),
    "wsd": Schedule("models.other_schedules:cool_down", ("lr_cooldown_epochs", "lr_min"), uses_epochs=True),
}

OPTIMIZERS = {
    "adamw": Optimizer("torch.optim:AdamW", ("opt_betas", "opt_eps"), moments=("step", "exp_avg", "exp_avg_sq")),
    # With the constants of the MobileNetV3 recipe.
    "rmsprop": Optimizer(
        "torch.optim:RMSprop", ("momentum", "opt_eps"), {"eps": 0.0316, "alpha": 0.9},
        moments=("step", "square_avg", "momentum_buffer"),
    ),
    "sgd": Optimizer("torch.optim:SGD", ("momentum",), moments=("momentum_buffer",)),
    "sgd_nesterov": Optimizer("torch.optim:SGD", ("momentum",), {"nesterov": True}, moments=("momentum_buffer",)),
}  # fmt: skip

# Each is called with the interpolation too, and returns a function of a PIL image.
POLICIES = {
    "augmix": Choice("loading.augmentations:augmix", ("augmix_severity",)),
    "cifar10": Choice("loading.augmentations:auto_augment", constants={"dataset": "cifar10"}),
    "imagenet": Choice("loading.augmentations:auto_augment", constants={"dataset": "imagenet"}),
    "ra": Choice("loading.augmentations:rand_augment", ("ra_magnitude",)),
    "svhn": Choice("loading.augmentations:auto_augment", constants={"dataset": "svhn"}),
    "ta_wide": Choice("torchvision.transforms.autoaugment:TrivialAugmentWide"),
}

# Each is called with the weights of the classes too, or None, and returns a function of scores and targets.
LOSSES = {
    "cross_entropy": Choice("models.losses:CrossEntropy", ("label_smoothing",)),
    "bce": Choice("models.other_losses:BinaryCrossEntropy", ("label_smoothing", "bce_target_thresh")),
    "focal": Choice("models.other_losses:FocalLoss", ("label_smoothing", "focal_gamma")),
}

# Classes of metrics by the curves that they compute; those of your own are added when a run builds them.
CURVES = {
    "loss": Curve("metrics:Loss", title="loss", is_lower_better=True),
    "acc1": Curve("metrics:Accuracy", title="Acc@1, %"),
    "acc5": Curve("metrics:Accuracy", title="Acc@5, %"),
    "balanced_acc": Curve("metrics.per_class:BalancedAccuracy", title="balanced accuracy, %"),
    "f1": Curve("metrics.per_class:F1", title="F1, mean over classes, %"),
    "f1_micro": Curve("metrics.per_class:F1", title="F1 of all labels, %"),
    "map": Curve("metrics.ranking:MeanAveragePrecision", title="mean average precision, %"),
}
METRICS = {name: curve for name, curve in CURVES.items() if name not in ("loss", "acc1", "acc5")}  # of --metrics

LOGGERS = {
    "tensorboard": Logger("monitoring.events:EventFile"),
    "wandb": Logger("monitoring.services:Wandb", package="wandb"),
    "mlflow": Logger("monitoring.services:MLflow", package="mlflow"),
    "none": Logger("monitoring.loggers:no_logger"),
}

# Forms of data, in order of preference; each is a subclass of `loading.source.Source`.
FORMS = {
    "list": Form("loading.lists:ListIndex", endings=(".csv", ".tsv", ".jsonl")),
    "folder": Form("loading.index:FolderIndex"),
    "tar": Form("loading.tars:TarIndex", endings=(".tar",)),
}

# The options that take a name of a table or FILE.py:FUNCTION, and what the names are of.
TABLES: dict[str, tuple[str, Mapping[str, Choice]]] = {
    "model": ("model", {}),  # those of torchvision and timm are looked up when they are built
    "opt": ("optimizer", OPTIMIZERS),
    "criterion": ("loss", LOSSES),
    "auto_augment": ("augmentation policy", POLICIES),
    "lr_scheduler": ("schedule", SCHEDULES),
    "metrics": ("metric", METRICS),
    "logger": ("logger", LOGGERS),
    "data_path": ("data", {}),
}


def curves_of(metric: str) -> dict[str, Curve]:
    """Return the curves of a metric, module:class, by their names."""
    return {name: curve for name, curve in CURVES.items() if curve.target == metric}

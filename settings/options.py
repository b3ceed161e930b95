"""The options: each is a field of a group, from which parser, recipes, checks and rules of resuming are made.

Nothing here imports torch, so that help and errors need not wait for it.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from errors import UserError, did_you_mean
from settings.choices import LOGGERS, LOSSES, METRICS, OPTIMIZERS, POLICIES, SCHEDULES, TABLES
from settings.rules import AS_TYPED, FREE, IF_GIVEN, NEVER, OWN, SILENT, lower, option, read_group, split_custom

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
NO_ADDRESS = "expected a local path, not an address; download it (curl -O, aws s3 sync), or mount the bucket"


def _which_take(option: str, chooser: str = "lr_scheduler") -> str:
    """Return `needs` of an option that only some rows take of the table by which another option chooses."""
    _, table = TABLES[chooser]
    return f"{chooser}={'|'.join(name for name, choice in table.items() if option in choice.options)}"


# fmt: off

@dataclass(frozen=True)
class StartOptions:
    """How the script starts: the recipe, lists and a dry run."""

    recipe: str | None = option(metavar="NAME", resume=SILENT, ranks=OWN, recipe=NEVER,
        help="options to start from: a name in recipes/, or a TOML file")
    list_recipes: str | None = option(metavar="WORD", nargs="?", const="", resume=FREE, recipe=NEVER,
        help="print the recipes, or those that mention WORD, or one whole recipe by its name, and exit")
    dry_run: bool = option(False, resume=FREE,
        help="print the data, model, batches, steps and learning rates of the run and its whole recipe, and exit")


@dataclass(frozen=True)
class DataOptions:
    """Images and how they are read."""

    data_path: str | None = option(metavar="DIR", resume=FREE, ranks=OWN, not_with="synthetic",
        help="folder that holds train/ and val/ with one folder for each class, or train.csv and val.csv, or train.tar "
             "and val.tar, or their shards, train-000000.tar, train-000001.tar ...; or the URL of a pack, https://, "
             "s3://, gs:// or az://; or FILE.py:FUNCTION")
    multi_label: str | None = option(metavar="SEPARATOR", nargs="?", const=",", is_of_checkpoint=True,
        help="each image has any number of labels, separated by this character in the column label of a list; needs "
             "--criterion bce; map, the mean average precision, chooses best.pth")
    minival: float | None = option(metavar="FRACTION", resume="a position counts steps of the images that train",
        above=0, at_most=0.5, not_with="synthetic",
        help="hold out this fraction of the training images of each class, always the same ones, and evaluate on them; "
             "val/ is not read and may be missing, and the class folders may lie in --data-path itself; above 0, at "
             "most 0.5")
    minival_fold: int = option(0, metavar="K", at_least=0, needs="minival", is_strict=True,
        resume="a position counts steps of the images that train",
        help="cross-validation: hold out the K-th of the disjoint parts of --minival, from 0; folds 0 to 4 of "
             "--minival 0.2 hold out each image once")
    limit_train_images: int | None = option(at_least=1, not_with="synthetic",
        resume="a position counts steps of the images that train",
        help="for a trial: train on N images only, the first of each class in turn")
    limit_val_images: int | None = option(at_least=1, not_with="synthetic",
        help="for a trial: evaluate on N images of val only, the first of each class in turn")
    eval_data: list[str] | None = option(metavar="NAME=DIR", nargs="+", resume=FREE, ranks=OWN, not_with="synthetic",
        help="evaluate on these sets too, of the same classes and in any form that val/ may have; log lines, records "
             "and curves are labelled NAME; val/ alone chooses best.pth")
    synthetic: int | None = option(metavar="IMAGES", nargs="?", const=12_800, at_least=1, at_most=1 << 40,
        resume="a position is counted in steps of its images",
        help="train on this many made-up images of 1000 classes (default: 12800)")
    cache: str | None = option(metavar="DIR", resume=FREE, ranks=OWN, recipe=NEVER,
        help="local cache for a remote --data-path (default: touchstone in the user's cache folder)")
    cache_gib: float | None = option(metavar="GIB", at_least=0, at_most=1e9, resume=FREE, ranks=OWN, recipe=NEVER,
        help="largest size of --cache for each split, in GiB (default: nine tenths of the free disk)")
    io_timeout: float = option(10.0, metavar="MIN", above=0, at_most=1e6, resume=FREE, recipe=NEVER,
        help="minutes to keep retrying a failed request to a remote --data-path")
    workers: int = option(aliases=["-j"], at_least=0, at_most=1024, resume=FREE, ranks=OWN, recipe=IF_GIVEN,
        help="data loading processes per training process (default: its share of the cores, up to 16)")
    cache_dataset: bool = option(False, resume=FREE,
        help="no effect, accepted for torchvision's commands: the index is always cached")
    backend: str | None = option(type=str.lower, choices=["pil", "tensor"], is_of_checkpoint=True,
        not_with="synthetic",
        help="pil: exactly the pixels of Pillow's resize, torchvision's default; tensor: exactly those of "
             "torchvision's tensor resize (default: a fast decoder, usually within one grey level of pil)")
    extensions: list[str] | None = option(metavar=".EXT", type=str.lower, nargs="+", is_of_checkpoint=True,
        not_with="synthetic",
        help="further extensions of the images in folders and tars, such as .avif .heic (default: those of "
             "torchvision's ImageFolder); lists and predictions take .avif and .heic anyway")
    exif: bool = option(False, is_of_checkpoint=True, not_with="synthetic",
        help="turn images as their EXIF orientation says, in training, evaluation and all tools; phones store many "
             "sideways (default: as stored, as torchvision reads them)")
    grey_range: list[int] | None = option(metavar=("LOW", "HIGH"), nargs=2, at_least=0, at_most=(1 << 16) - 1,
        is_range=True, is_of_checkpoint=True, not_with="synthetic",
        help="samples of grey images of more than 8 bits that become black and white, such as 0 4095 for 12 bits "
             "(default: the full range of their format)")
    in_chans: int = option(3, choices=[1, 3, 4], is_of_checkpoint=True,
        resume="it is the width of the model's first layer",
        help="channels of an image: 1 grey, 3 colour, 4 with alpha (255 where a file has none); weights for another "
             "number are summed or repeated in the first layer, as in timm; a model function of your own gets it as "
             "in_chans")
    use_v2: bool = option(False, resume=FREE, help="no effect, accepted for torchvision's commands")


@dataclass(frozen=True)
class AugmentationOptions:
    """Sizes, crops, normalisation, augmentation and mixing."""

    train_crop_size: int = option(224, metavar="PX", at_least=1, at_most=16384,
        help="side of a training image after random cropping, in pixels")
    train_crop_size_min: int | None = option(metavar="PX", at_least=1, not_with="synthetic",
        help="progressive resizing: crop size of the first epochs, which grows to --train-crop-size during "
             "--crop-ramp-epochs")
    crop_ramp_epochs: list[int] | None = option(metavar=("FIRST", "LAST"), nargs=2, needs="train_crop_size_min",
        is_strict=True,
        help="epochs between which the crop size grows from --train-crop-size-min, in steps of 32 pixels")
    val_resize_size: int = option(256, metavar="PX", at_least=1, at_most=16384, is_of_checkpoint=True,
        help="shorter side of a resized image in evaluation, before the centre crop, in pixels")
    val_crop_size: int = option(224, metavar="PX", at_least=1, at_most=16384, is_of_checkpoint=True,
        help="side of the centre crop in evaluation, in pixels")
    crop_mode: str = option("center", choices=["center", "squash", "border"], is_of_checkpoint=True,
        not_with="synthetic",
        help="evaluation: center crops, and hides the ends of long images; squash resizes both sides to "
             "--val-resize-size; border the longer one, and fills the rest with the mean colour; all then cut the "
             "centre (timm's crop modes; timm models have their own by default)")
    train_crop_mode: str = option("random", choices=["random", "whole"], not_with="synthetic", needs="augment",
        help="whole: training shows the whole image, squashed or with the border of --crop-mode border")
    interpolation: str = option("bilinear", choices=INTERPOLATIONS, is_of_checkpoint=True,
        help="interpolation of every resize, in training and evaluation")
    mean: list[float] = option(metavar="F", nargs="+", at_least=0, at_most=1, is_of_checkpoint=True,
        help="mean of each channel, for normalisation of values from 0 to 1 (default: ImageNet's, 0.485 0.456 0.406, "
             "and their average for other --in-chans, as in timm; for timm/ models this, the sizes and the "
             "interpolation above are those that timm configures)")
    std: list[float] = option(metavar="F", nargs="+", at_least=0.001, at_most=1, is_of_checkpoint=True,
        help="standard deviation of each channel (default: as for --mean; ImageNet's are 0.229 0.224 0.225)")
    augment: bool = option(True,
        help="--no-augment: resize and centre-crop training images as in evaluation, to --train-crop-size; only mixing "
             "is left")
    crop_scale: float = option(0.08, metavar="SHARE", at_least=0, at_most=1, not_with="synthetic", needs="augment",
        help="smallest area of a training crop, as a share of the image's")
    hflip_prob: float = option(0.5, metavar="P", at_least=0, at_most=1, not_with="synthetic", needs="augment",
        help="probability of flipping a training image horizontally")
    hflip_mode: str = option("random", choices=["random", "alternating"], needs="augment", is_strict=True,
        not_with="synthetic",
        help="alternating: flip a random half of the training images in the first epoch, the others in the second, and "
             "so on, in place of --hflip-prob (Jordan, arXiv 2404.00498)")
    auto_augment: str | None = option(metavar="POLICY", not_with="synthetic", needs="augment",
        help=f"augmentation policy: {', '.join(POLICIES)}, timm/SPECIFICATION such as timm/rand-m7-mstd0.5-inc1, or "
             "FILE.py:FUNCTION (default: none)")
    ra_magnitude: int = option(9, metavar="M", at_least=0, at_most=30,
        needs=_which_take("ra_magnitude", "auto_augment"), help="magnitude of --auto-augment ra, from 0 to 30")
    augmix_severity: int = option(3, metavar="S", at_least=1, at_most=10,
        needs=_which_take("augmix_severity", "auto_augment"), help="severity of --auto-augment augmix, from 1 to 10")
    color_jitter: float = option(0.0, metavar="F", at_least=0, at_most=1, not_with="synthetic", needs="augment",
        help="change brightness, contrast and saturation of a training image by factors from 1 - F to 1 + F, after "
             "--auto-augment")
    grayscale_prob: float = option(0.0, metavar="P", at_least=0, at_most=1, not_with="synthetic", needs="augment",
        help="probability that a training image is turned grey, after --color-jitter")
    blur_prob: float = option(0.0, metavar="P", at_least=0, at_most=1, not_with="synthetic", needs="augment",
        help="probability of blurring a training image, after --grayscale-prob, by a Gaussian with a standard "
             "deviation of 0.1 to 2 pixels")
    random_erase: float = option(0.0, metavar="P", at_least=0, at_most=1, needs="augment",
        help="probability of erasing a random rectangle of a training image")
    random_erase_fill: str = option("zero", choices=["pixel", "zero"], needs="random_erase",
        help="fill the rectangle of --random-erase with zero, which is the mean colour, or each of its values with "
             "normal noise (timm's mode pixel)")
    mixup_alpha: float = option(0.0, metavar="A", at_least=0, at_most=1e9,
        help="mixup, with shares drawn from Beta(A, A); 0 = off")
    cutmix_alpha: float = option(0.0, metavar="A", at_least=0, at_most=1e9,
        help="CutMix, with shares drawn from Beta(A, A); 0 = off")
    mixup_mode: str = option("batch", choices=["batch", "elem"], needs="mixup_alpha|cutmix_alpha",
        help="draw mixup or cutmix and its share once for a batch (batch) or for each image (elem, as in timm)")
    mixup_prob: float = option(1.0, metavar="P", at_least=0, at_most=1, needs="mixup_alpha|cutmix_alpha",
        help="probability that a batch, or with --mixup-mode elem an image, is mixed")
    mixup_switch_prob: float = option(0.5, metavar="P", at_least=0, at_most=1, needs="mixup_alpha|cutmix_alpha",
        help="probability of CutMix rather than mixup, if both are on")
    mixup_off_epoch: int = option(0, at_least=0, needs="mixup_alpha|cutmix_alpha",
        help="stop mixup and CutMix at epoch N; 0 = never")
    ra_sampler: bool = option(False,
        help="repeated augmentation: train on each image --ra-reps times per step, in different micro-batches")
    balanced_sampler: bool = option(False,
        help="sample every class equally often: an epoch has as many images as the set, repeats those of small classes "
             "with other random crops, and leaves out some of large classes")
    ra_reps: int = option(3, at_least=1, needs="ra_sampler",
        help="number of times that --ra-sampler repeats each image")


@dataclass(frozen=True)
class ModelOptions:
    """The model, its first weights, frozen layers and its average."""

    model: str = option("resnet18", metavar="NAME", resume="its weights fit no other", is_of_checkpoint=True,
        help="model to train: any of torchvision's classifiers, timm/NAME, or FILE.py:FUNCTION, a function of your own "
             "that takes num_classes and returns the model")
    model_kwargs: list[str] | None = option(metavar="KEY=VALUE", nargs="*", resume="they are the model's",
        is_of_checkpoint=True,
        help="keyword arguments of the function that builds the model, such as width=8 or act_layer=gelu; values are "
             "Python literals, or else text")
    weights: str | None = option(metavar="NAME|FILE", resume=FREE, is_of_checkpoint=True,
        help="weights to start from: a name of torchvision's such as IMAGENET1K_V2, a file with a state dict or a "
             "checkpoint, a safetensors file, or hf-hub:ORG/NAME or hf-hub:ORG/NAME/FILE of the Hugging Face hub")
    classifier_init: str = option("zero", choices=["zero", "model"], resume=FREE, needs="weights",
        help="a new classifier on --weights of other classes starts at zero, so that its first gradients do not spoil "
             "the features, as in BiT and ViT (zero), or as the model draws it (model)")
    ema: bool = option(False, resume=FREE,
        help="load the averaged weights (model_ema) of --weights FILE instead of the raw ones")
    freeze: bool = option(False, resume="the optimizer's state is that of the parameters that train",
        help="train only the classifier; the layers below it are frozen, in evaluation mode")
    freeze_below: str | None = option(metavar="LAYER", not_with="freeze",
        resume="the optimizer's state is that of the parameters that train",
        help="freeze all layers before this one, in evaluation mode: the name of a module, such as layer3, blocks.5 or "
             "encoder.layers.encoder_layer_6, in the order of the model's parameters")
    freeze_epochs: int = option(0, at_least=0, not_with="freeze|freeze_below",
        help="train only the classifier for N epochs, with all layers below it frozen and in evaluation mode, then the "
             "whole model")
    freeze_batchnorm: bool = option(False, needs="weights", is_strict=True, not_with="freeze",
        resume="the optimizer's state is that of the parameters that train",
        help="keep BatchNorm layers as --weights have them, in evaluation mode, while all else trains: with a few "
             "hundred images their statistics would move to those of a few batches")
    stochastic_depth: float | None = option(metavar="P", at_least=0, at_most=1, not_with="freeze",
        help="stochastic depth: drop probability of the deepest block (default: the model's)")
    dropout: float | None = option(metavar="P", at_least=0, at_most=1,
        help="probability of every dropout layer (default: the model's)")
    eval_flip: bool = option(False, is_of_checkpoint=True,
        help="evaluate each image and its mirror image, and average the two outputs")
    sync_bn: bool = option(False, not_with="freeze",
        help="synchronise BatchNorm over all processes; needs --global-batch-size / --batch-size processes")
    model_ema: bool = option(False, help="keep and evaluate an exponential moving average of the weights")
    model_ema_steps: int = option(32, at_least=1, needs="model_ema",
        help="update the average of --model-ema every N steps")
    model_ema_decay: float = option(0.99998, metavar="D", at_least=0, below=1, needs="model_ema",
        help="decay of the average, adjusted as in torchvision for global batch, --model-ema-steps and epochs")
    model_ema_adjust: bool = option(True, needs="model_ema",
        help="adjust --model-ema-decay as torchvision does; else it is the decay of each update, as in timm")


@dataclass(frozen=True)
class OptimizationOptions:
    """Batch sizes, optimizer, weight decay, loss and clipping."""

    batch_size: int = option(32, aliases=["-b"], at_least=1, at_most=1 << 24, resume="it is the size of a micro-batch",
        help="images of a micro-batch: what one process passes through the model at once")
    global_batch_size: int = option(at_least=1, at_most=1 << 31, resume="the saved position counts steps of this size",
        help="images per step over all processes, a multiple of --batch-size; fewer processes accumulate gradients "
             "(default: --batch-size x processes of the first start)")
    eval_batch_size: int | None = option(at_least=1, at_most=1 << 24,
        help="images that a process evaluates at once; results differ by rounding (default: --batch-size)")
    # torch's CPU generator reads the low 32 bits of a seed alone: s + 2**32 would shuffle the images as s does.
    seed: int = option(0, at_least=0, at_most=(1 << 32) - 1,
        help="seed of every random number: weights, order, augmentation, mixing, dropout")
    opt: str = option("sgd", metavar="NAME", type=lower, resume="the checkpoint's state fits no other optimizer",
        help=f"optimizer: {', '.join(OPTIMIZERS)}, timm/NAME such as timm/lamb, or FILE.py:FUNCTION")
    opt_betas: list[float] | None = option(metavar=("B1", "B2"), nargs=2, at_least=0, below=1,
        help="betas of the optimizers that have them (default: 0.9 0.999 of --opt adamw)")
    opt_eps: float | None = option(metavar="EPS", at_least=0, at_most=1e12,
        help="epsilon of the optimizers that have one (default: 1e-8, 0.0316 of --opt rmsprop)")
    lr: float = option(0.1, at_least=0, at_most=1e30,
        help="peak learning rate; independent of the batch size unless --lr-scaling is given")
    lr_scaling: str = option("none", choices=["none", "linear", "sqrt"],
        help="multiply --lr by global batch / --lr-scaling-batch (linear), or by its square root")
    # Recipes have the fact reference-global-batch for it, which is what resumed runs compare.
    lr_scaling_batch: int | None = option(at_least=1, at_most=1 << 31, resume=FREE, recipe=NEVER,
        needs="lr_scaling=linear|sqrt", is_strict=True,
        help="global batch size that --lr is meant for (default: the recipe's reference-global-batch)")
    layer_decay: float | None = option(metavar="F", at_least=0, at_most=1, not_with="freeze",
        help="layer-wise learning rate decay: factor from each layer to the one below it (default: off)")
    momentum: float = option(0.9, metavar="M", at_least=0, below=1, help="momentum of the optimizers that have one")
    weight_decay: float = option(0.0001, aliases=["--wd"], metavar="W", at_least=0, at_most=1e6,
        help="weight decay of all parameters that the options below leave")
    norm_weight_decay: float | None = option(metavar="W", at_least=0, at_most=1e6, needs="decay_1d", not_with="freeze",
        help="weight decay of normalisation layers (default: --weight-decay)")
    bias_weight_decay: float | None = option(metavar="W", at_least=0, at_most=1e6, needs="decay_1d",
        help="weight decay of biases (default: --weight-decay)")
    transformer_embedding_decay: float | None = option(metavar="W", at_least=0, at_most=1e6, needs="decay_1d",
        not_with="freeze",
        help="weight decay of the class and position embeddings named in torchvision's script, which exclude a ViT's "
             "pos_embedding (default: --weight-decay)")
    decay_1d: bool = option(True,
        help="--no-decay-1d: timm's rule instead of the three options above: no decay for biases, other "
             "one-dimensional parameters, and those that the model exempts, such as embeddings")
    label_smoothing: float = option(0.0, metavar="P", at_least=0, below=1, is_of_checkpoint=True,
        help="label smoothing: the share of each target that is spread evenly over all classes")
    criterion: str | None = option(metavar="NAME|FILE.py:FUNCTION", is_of_checkpoint=True,
        help=f"loss: {', '.join(LOSSES)}, or your own function, which returns a loss: (output, target) -> mean of the "
             "batch (default: cross_entropy)")
    focal_gamma: float = option(2.0, metavar="GAMMA", at_least=0, at_most=100, is_of_checkpoint=True,
        needs="criterion=focal", is_strict=True,
        help="exponent of --criterion focal: the larger, the less well-classified images count")
    bce_loss: bool = option(False, is_of_checkpoint=True,
        help="same as --criterion bce: binary cross-entropy for each class")
    bce_target_thresh: float | None = option(metavar="T", at_least=0, below=1, is_of_checkpoint=True, needs="bce_loss",
        is_strict=True, help="with --bce-loss: a target above this becomes 1, any other 0")
    class_weights: str | None = option(metavar="balanced|FILE",
        help="class weights in the training loss: balanced, in inverse proportion to the classes' numbers of images, 1 "
             "on average over the images; or a .csv, .tsv or .jsonl file with the columns class and weight")
    teacher: str | None = option(metavar="NAME|FILE",
        help="distil from this model: a checkpoint, weights of torchvision's such as regnet_y_16gf.IMAGENET1K_V2, or "
             "timm/NAME.TAG from the Hugging Face hub")
    distillation: str = option("hard", choices=["hard", "soft"], needs="teacher",
        help="learn the class that --teacher scores highest (hard), or its probabilities (soft)")
    distillation_temperature: float = option(3.0, metavar="T", at_least=0.01, at_most=1000, needs="distillation=soft",
        help="temperature of --distillation soft: divides both models' scores; its square multiplies the term")
    distillation_alpha: float = option(0.5, metavar="A", above=0, at_most=1, needs="teacher",
        help="weight of the --teacher term in the loss; the targets have the rest")
    clip_grad_norm: float | None = option(metavar="NORM", above=0, at_most=1e12,
        help="clip the norm of the gradients to this (default: off)")
    clip_grad_value: float | None = option(metavar="V", above=0, at_most=1e12,
        help="clip each value of the gradients to [-V, V] (default: off)")
    clip_agc: float | None = option(metavar="F", above=0, at_most=1e12, not_with="freeze",
        help="adaptive gradient clipping, as timm's: clip the norm of the gradient of each unit's weights to F times "
             "the norm of the weights, except in the last layer (default: off)")

    # The global batch that --lr is meant for: that of --lr-scaling-batch, else the recipe's fact.
    reference_global_batch: int | None = None


@dataclass(frozen=True)
class ScheduleOptions:
    """Epochs and the learning rate over them."""

    epochs: int = option(90, at_least=1, at_most=10**9, help="number of epochs")
    eval_every: int = option(1, at_least=0, resume=FREE,
        help="evaluate after every N epochs, and after the last one; 0 = after the last one only")
    stop_epoch: int | None = option(at_least=1, resume=FREE, recipe=NEVER,
        help="stop after N epochs, with the learning rates of --epochs; to continue, give --resume auto with a larger "
             "N or without this option")
    patience: int | None = option(at_least=1, resume=FREE,
        help="early stopping: end the run after N evaluations without a new best by --best-metric, neither of the "
             "weights nor of their average")
    start_epoch: int = option(0, at_least=0, resume=SILENT, recipe=NEVER,
        help="start at this epoch without a checkpoint")
    lr_scheduler: str = option("steplr", metavar="NAME", type=lower,
        help=f"learning rate schedule after the warm-up: {', '.join(SCHEDULES)}, or FILE.py:FUNCTION; linearlr falls "
             "to --lr-min at the end, polylr by a power of the epochs left, wsd stays at --lr until the last "
             "--lr-cooldown-epochs")
    lr_warmup_epochs: int = option(0, at_least=0, help="epochs of learning rate warm-up")
    lr_warmup_method: str = option("constant", type=str.lower, choices=["constant", "linear"],
        needs="lr_warmup_epochs", help="warm up at a constant low learning rate, or linearly up to --lr")
    lr_warmup_decay: float = option(0.01, metavar="F", at_least=0, at_most=1, needs="lr_warmup_epochs",
        help="the warm-up starts at F times --lr")
    lr_warmup_prefix: bool = option(True, needs="lr_warmup_epochs",
        help="start the schedule after the warm-up, as torchvision does; else at epoch 0, with the warm-up in place of "
             "its beginning, as in timm")
    lr_step_size: int = option(30, at_least=1, needs=_which_take("lr_step_size"),
        help="multiply the learning rate by --lr-gamma every N epochs")
    lr_milestones: list[int] | None = option(nargs="+", at_least=0, needs=_which_take("lr_milestones"),
        help="multiply the learning rate by --lr-gamma at these epochs")
    lr_cooldown_epochs: int | None = option(at_least=1, needs=_which_take("lr_cooldown_epochs"),
        help="final epochs, in which --lr-scheduler wsd lowers the learning rate to --lr-min; a run saved before the "
             "cool-down can resume with other --epochs")
    lr_gamma: float = option(0.1, metavar="F", above=0, at_most=1e9, needs=_which_take("lr_gamma"),
        help="decay factor of steplr, multisteplr and exponentiallr")
    lr_power: float = option(1.0, metavar="F", above=0, at_most=1000, needs=_which_take("lr_power"),
        help="power of polylr; 1 is a straight line")
    lr_min: float = option(0.0, metavar="LR", at_least=0, at_most=1e30, needs=_which_take("lr_min"),
        help="final learning rate of cosineannealinglr, linearlr, polylr and wsd; --layer-decay scales it too")
    lr_per_step: bool = option(False,
        help="update the learning rate at every step, not once an epoch as torchvision does")


@dataclass(frozen=True)
class PrecisionOptions:
    """Data types, memory format, compilation and determinism."""

    amp: bool = option(False, is_of_checkpoint=True, help="automatic mixed precision, in training and evaluation")
    amp_dtype: str | None = option(choices=["bfloat16", "float16", "float32"], is_of_checkpoint=True, needs="amp",
        is_strict=True, ranks=AS_TYPED,
        help="dtype of --amp; float16 scales the loss; float32, which timm's Muon follows too, is for a CPU that is "
             "slow in a recipe's bfloat16 (default: float16)")
    tf32: bool | None = option(is_of_checkpoint=True,
        help="use TF32 for float32 matrix products and convolutions on NVIDIA GPUs: faster, less exact (default: "
             "convolutions only, as in torch)")
    channels_last: bool = option(False, help="NHWC memory format for images and weights, the fastest for tensor cores")
    compile: str | None = option(metavar="MODE", choices=COMPILE_MODES, nargs="?", const="default",
        help="compile the model with torch.compile in this mode (--compile alone: default); delays the first step by a "
             "minute; results are bit-identical only on the same number of processes")
    grad_checkpointing: bool = option(False, resume=FREE,
        help="recompute the blocks' activations in the backward pass: less memory, a third more compute; for timm "
             "models without BatchNorm")
    use_deterministic_algorithms: bool = option(False,
        help="bit-identical weights after any restart and on 1, 2, 4, 8 ... processes: deterministic kernels and order "
             "of sums")


@dataclass(frozen=True)
class CheckpointOptions:
    """The output folder, saving and resuming."""

    output_dir: str = option(metavar="DIR", resume=FREE, ranks=OWN, recipe=NEVER,
        help="folder for checkpoints, logs and TensorBoard's events (default: runs/MODEL)")
    overwrite: bool = option(False, resume=SILENT, recipe=NEVER,
        help="remove the files of an earlier run from the output folder and start over")
    resume: str = option("", metavar="PATH|auto", resume=SILENT, recipe=NEVER,
        help="resume from this checkpoint; auto: from the newest intact one in the output folder; without any, start a "
             "new run")
    allow_change: str | None = option(metavar="NAMES", resume=SILENT, recipe=NEVER, needs="resume|test_only",
        is_strict=True,
        help="options that may differ from the checkpoint's although they change results: names separated by commas, "
             "such as lr,epochs; data allows other images")
    checkpoint_steps: int | None = option(at_least=1, resume=FREE,
        help="save a checkpoint every N steps too, besides those at the end of each epoch")
    checkpoint_minutes: float = option(10.0, metavar="MIN", at_least=0, at_most=1e9, resume=FREE,
        help="save a checkpoint when the last one is this many minutes old; 0 = never")
    keep_last: int = option(3, at_least=2, resume=FREE, help="keep the newest N numbered checkpoints")
    best_metric: str = option("acc1", metavar="NAME", resume=FREE,
        help="validation metric that chooses best.pth, and best_ema.pth for the average of --model-ema: acc1, acc5, "
             "loss, or one of --metrics; a tie goes to the lower loss, then to the earlier epoch")
    save_per_node: bool = option(False, resume=FREE,
        help="for nodes without a shared disk: write each checkpoint to the output folder of every node; --resume auto "
             "takes the newest of all")
    test_only: bool = option(False, resume=SILENT, recipe=NEVER,
        help="evaluate the model of --weights or --resume, and exit")


@dataclass(frozen=True)
class MonitoringOptions:
    """Metrics, loggers and log lines."""

    metrics: list[str] | None = option(metavar="NAME", nargs="+", resume=FREE,
        help=f"further metrics for records, curves and the Test: line: {', '.join(METRICS)}, or FILE.py:FUNCTION")
    logger: list[str] = option(["tensorboard"], metavar="NAME", type=lower, nargs="+", resume=FREE, recipe=NEVER,
        not_with="test_only", help=f"where records go besides metrics.jsonl: {', '.join(LOGGERS)}, or FILE.py:FUNCTION")
    print_freq: int = option(10, at_least=1, resume=FREE, help="print a log line every N steps")
    stall_timeout: float = option(20, metavar="MIN", at_least=0, at_most=1e6, resume=FREE, recipe=NEVER,
        help="minutes without a step after which the run counts as hung: every process prints its stack, and the run "
             "ends; 0 = never")


@dataclass(frozen=True)
class DistributedOptions:
    """Devices and processes."""

    device: str = option(resume=FREE, ranks=OWN, recipe=IF_GIVEN,
        help="device to train on: cuda, cpu, mps ... (default: the available accelerator, else cpu)")
    world_size: int = option(1, at_least=1, at_most=1 << 20, resume=SILENT, ranks=OWN, recipe=NEVER,
        help="number of processes, if the launcher sets RANK but not WORLD_SIZE")
    dist_url: str = option("env://", metavar="URL", resume=FREE, ranks=OWN, recipe=NEVER,
        help="URL of the rendezvous; torchrun and srun set it up themselves")
    dist_timeout: float = option(30, metavar="MIN", at_least=0.001, at_most=1e6, resume=FREE, recipe=NEVER,
        help="minutes that a process waits for the others in a step or evaluation batch before it gives up")

    # Not options: `config.on_machine` sets them by the launcher, and `config.assign` the last one.
    rank: int = 0
    is_launched: bool = False
    gpu: int | None = None
    num_shards: int = 1


# fmt: on

# By the names of the fields of a stage, in the order of --help.
CLASSES = {
    "start": StartOptions,
    "data": DataOptions,
    "augmentation": AugmentationOptions,
    "model": ModelOptions,
    "optimization": OptimizationOptions,
    "schedule": ScheduleOptions,
    "precision": PrecisionOptions,
    "checkpoint": CheckpointOptions,
    "monitoring": MonitoringOptions,
    "distributed": DistributedOptions,
}
# By the title of each group, in the order of --help; a recipe's tables have the groups' names.
OPTIONS = {name: read_group(group) for name, group in CLASSES.items()}
GROUPS = [name for name in OPTIONS if name != "start"]
BY_NAME = {option.dest: option for options in OPTIONS.values() for option in options}


def defaults() -> dict[str, Any]:
    """Return the default of every option by its name."""
    return {name: option.default for name, option in BY_NAME.items()}


def with_defaults(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return preprocessing that is known, with the defaults of `WITH_DEFAULT` for what it does not tell."""
    return {**{name: BY_NAME[name].default for name in WITH_DEFAULT}, **known}


# The end of every message that refuses code which a file names.
WHY_TYPED = "a Python file, which runs only if the command line names it: give --model FILE.py:FUNCTION"


def is_filled_in(name: str, model: str, given: Collection[str]) -> bool:
    """Tell whether the model's configuration sets an option, which neither the command line nor the recipe gives."""
    is_timms = model.startswith("timm/") and name in (*PREPROCESSING, "train_crop_size")
    return (is_timms or name in ("mean", "std")) and name not in given


def fit_statistics(values: Sequence[float], in_chans: int) -> list[float]:
    """Return a mean or deviation of each channel: for another number of channels the average in each, as in timm."""
    return list(values) if len(values) == in_chans else [sum(values) / len(values)] * in_chans


def short_name(model: str) -> str:
    """Return a model's name without the file that a custom one is in."""
    _, name = split_custom(model) or ("", model)
    return name


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

"""A script written for torchvision's references/classification runs on our folder, and means the same there.

Every step uses the folder's modules the way such scripts do and prints `step NAME: RESULT`, as JSON, or `failed: ...`.
torchvision_steps.json was recorded from torchvision's own folder (release 0.21). Where the environment variable
TORCHVISION_REFERENCES names such a folder, the script runs there as well and is compared with it step by step. On two
processes it cannot: torchvision's folder needs a GPU for each.
"""

import argparse
import builtins
import contextlib
import copy
import hashlib
import importlib
import io
import json
import os
import re
import sys
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, WeightedRandomSampler
from torch.utils.data.dataloader import default_collate
from torch.utils.data.distributed import DistributedSampler

from tests.endings import flatten
from tests.images import write_images
from tests.ranks import REPOSITORY, run_ranks

NUM_CLASSES = 6  # at least five, of which torchvision's accuracy takes the best
MODEL = "shufflenet_v2_x0_5"  # with BatchNorm, and of few weights
OWN = f"--model {MODEL} --device cpu --batch-size 4 --epochs 1 --workers 1 --lr 0.01 --train-crop-size 32 "
OWN += "--val-crop-size 32 --val-resize-size 36"
EXPECTED = json.loads(Path(__file__).with_name("torchvision_steps.json").read_text())

# The folder's modules, imported once it is known which folder.
presets = sampler = train = transforms = utils = None


def import_folder(folder):
    sys.path.insert(0, str(folder))
    for name in ("presets", "sampler", "train", "transforms", "utils"):
        if not Path(sys.modules[name].__file__).is_relative_to(folder):
            del sys.modules[name]
        globals()[name] = importlib.import_module(name)


class Place:
    def __init__(self, images, out):
        self.images, self.out = Path(images), Path(out)

    def argv(self, name, *more):
        words = ["--data-path", self.images, "--output-dir", self.out / name, *OWN.split(), *more]
        return list(map(str, words))

    def args(self, name="own", *more):
        args = train.get_args_parser().parse_args(self.argv(name, *more))
        args.distributed = False
        return args

    def load(self, **changes):
        args = argparse.Namespace(**{**vars(self.args()), **changes})
        return train.load_data(str(self.images / "train"), str(self.images / "val"), args)


def shown(tensor):
    """Type, shape, mean, and mean weighted from left to right of a tensor."""
    means = tensor.double().mean(), (tensor.double() * torch.linspace(0, 1, tensor.shape[-1])).mean()
    return [str(tensor.dtype), list(tensor.shape), *(round(float(mean), 3) for mean in means)]


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__
    return None


def captured(function, *args, **kwargs):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = function(*args, **kwargs)
    return result, printed.getvalue()


def small_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(8, NUM_CLASSES))  # fmt: skip


def noise_loader():
    images = torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(images, torch.arange(12) % NUM_CLASSES), batch_size=4)


def sum_of(model):
    return round(sum(float(p.detach().double().abs().sum()) for p in model.parameters()), 4)


def own_parser():
    parser = argparse.ArgumentParser(parents=[train.get_args_parser(add_help=False)])
    parser.add_argument("--note", default="")
    return parser


def parser(place):
    args = vars(train.get_args_parser().parse_args(["--data-path", "images"]))
    own = own_parser().parse_args([*place.argv("parent"), "--note", "mine", "-b", "7", "-j", "0", "--wd", "0.5"])
    theirs = {name: args[name] for name in EXPECTED["parser"][0]}
    return [theirs, own.note, own.batch_size, own.workers, own.weight_decay, own.opt]


def checkpoint_of(folder):
    checkpoint = torch.load(folder / "checkpoint.pth", map_location="cpu", weights_only=True)
    names = ("model", "optimizer", "epoch", "args", "lr_scheduler", "model_ema")
    model = torchvision.models.get_model(MODEL, num_classes=NUM_CLASSES)
    model.load_state_dict(checkpoint["model"])
    result = {"keys": " ".join(name for name in names if name in checkpoint), "epoch": checkpoint["epoch"]}
    if "model_ema" in checkpoint:
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        average.load_state_dict(checkpoint["model_ema"])
        result["n_averaged"] = int(average.n_averaged)
    return result


def results_of(printed):
    found = re.findall(r"^Test: *(\w*) Acc@1 (\d+\.\d{3}) Acc@5 (\d+\.\d{3})", printed, flags=re.M)
    return [[suffix, 0 <= float(acc1) <= float(acc5) <= 100] for suffix, acc1, acc5 in found]


def run_main(place, name, *more):
    returned, printed = captured(train.main, own_parser().parse_args(place.argv(name, *more)))
    epochs = re.findall(r"^Epoch: \[(\d+)\] +\[ *(\d+)/(\d+)\]", printed, flags=re.M)
    return [returned, results_of(printed), sorted({epoch for epoch, *_ in epochs}), epochs[:1]]


def main_trains(place):
    return [run_main(place, "run"), checkpoint_of(place.out / "run")]


def main_resumes_and_tests_only(place):
    last = ["--resume", place.out / "run" / "checkpoint.pth"]
    resumed = [run_main(place, "run", "--epochs", 2, *last), checkpoint_of(place.out / "run")]
    return [*resumed, run_main(place, "run", "--test-only", *last)]


def main_with_much(place):
    argv = "--model-ema --model-ema-steps 2 --mixup-alpha 0.2 --cutmix-alpha 1.0 --label-smoothing 0.1 --opt adamw "
    argv += "--norm-weight-decay 0 --lr-scheduler cosineannealinglr --lr-warmup-epochs 1 --lr-warmup-method linear "
    argv += "--auto-augment ta_wide --random-erase 0.1 --clip-grad-norm 1 --epochs 2 --note mine"
    return [run_main(place, "much", *argv.split()), checkpoint_of(place.out / "much")]


def datasets(place):
    dataset, dataset_test, train_sampler, test_sampler = place.load()
    is_set = [isinstance(each, torch.utils.data.Dataset) for each in (dataset, dataset_test)]
    is_sampler = [isinstance(each, torch.utils.data.Sampler) for each in (train_sampler, test_sampler)]
    path, label = dataset.samples[-1]
    image, target = dataset[5]
    result = {
        "kinds": [is_set, is_sampler, type(dataset.samples).__name__, type(dataset.samples[0]).__name__],
        "lengths": [len(each) for each in (dataset, dataset_test, train_sampler, test_sampler)],
        "classes": [dataset.classes, dataset.class_to_idx],
        "last": [Path(path).relative_to(place.images / "train").as_posix(), label, dataset.imgs == dataset.samples],
        "targets": [list(dataset.targets), list(dataset_test.targets)],
        "root": str(dataset.root) == str(place.images / "train"),
        "transform": [*(type(each.transform).__name__ for each in (dataset, dataset_test)), dataset.target_transform],
        "train": [str(image.dtype), list(image.shape), bool(image.min() < 0 and image.abs().max() < 3), target],
        "test": [shown(dataset_test[3][0]), dataset_test[3][1]],
    }
    dataset_test.transform = torchvision.transforms.ToTensor()
    return {**result, "another transform": shown(dataset_test[3][0])}


def plain_loaders(place):
    results = []
    for num_workers in (0, 2):
        dataset, dataset_test, train_sampler, test_sampler = place.load()
        data_loader = DataLoader(dataset, batch_size=4, sampler=train_sampler, num_workers=num_workers, pin_memory=True)
        data_loader_test = DataLoader(dataset_test, batch_size=5, sampler=test_sampler, num_workers=num_workers)
        image, target = (torch.cat(parts) for parts in zip(*data_loader, strict=True))
        test = list(data_loader_test)
        results.append({
            "train": [len(data_loader), str(image.dtype), list(image[:4].shape), str(target.dtype)],
            "labels": sorted(Counter(target.tolist()).items()),
            "test": [len(data_loader_test), [list(image.shape) for image, _ in test]],
            "test_labels": torch.cat([target for _, target in test]).tolist(),
            "test_mean": round(float(torch.cat([image for image, _ in test]).mean()), 3),
        })  # fmt: skip
    return results


def loaders_of_other_kinds(place):
    """And orders without `set_epoch`, which such scripts call on several processes only."""
    dataset, dataset_test, train_sampler, _ = place.load()
    orders = [[int(key) for key in train_sampler] for _ in range(2)]
    weights = [1.0 / dataset.targets.count(label) for label in dataset.targets]
    loaders = [
        DataLoader(dataset, batch_size=4, shuffle=True),
        DataLoader(dataset, batch_size=4, sampler=WeightedRandomSampler(weights, 8)),
        DataLoader(Subset(dataset, range(6)), batch_size=4),
        DataLoader(ConcatDataset([dataset_test, dataset]), batch_size=16),
    ]
    is_all = sorted(orders[0]) == sorted(orders[1]) == list(range(len(dataset)))
    return [is_all, orders[0] != orders[1], [[list(image.shape) for image, _ in loader][-1] for loader in loaders]]


def load_data_with_published_weights(place):
    """With which an evaluation takes the weights' own transform."""
    dataset, dataset_test, *_ = place.load(model="resnet18", weights="ResNet18_Weights.IMAGENET1K_V1", test_only=True)
    return [len(dataset), shown(dataset_test[3][0])]


def evaluate(place):
    model, criterion, device = small_model(), nn.CrossEntropyLoss(), torch.device("cpu")
    acc1, printed = captured(train.evaluate, model, criterion, noise_loader(), device)
    again = train.evaluate(model, criterion, noise_loader(), device=device, print_freq=1, log_suffix="EMA")
    dataset = torchvision.datasets.ImageFolder(place.images / "val", presets.ClassificationPresetEval(crop_size=32))
    loader = DataLoader(dataset, batch_size=5)
    with torch.inference_mode():
        of_folder = train.evaluate(model, criterion, loader, device, 1, "own")
        right = sum(int((model(image).argmax(1) == target).sum()) for image, target in loader)
    is_counted = of_folder == 100 * right / len(dataset)
    return [type(acc1).__name__, round(acc1, 3), acc1 == again, results_of(printed), model.training, is_counted]


def one_epoch(**options):
    model = small_model()
    args = argparse.Namespace(print_freq=1, clip_grad_norm=None)
    ema, scaler = None, options.pop("scaler", None) and torch.amp.GradScaler("cpu", enabled=False)
    if options.pop("model_ema", False):
        ema = utils.ExponentialMovingAverage(model, decay=0.9, device="cpu")
        args.model_ema_steps, args.lr_warmup_epochs = 2, 0
    vars(args).update(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    call = (model, nn.CrossEntropyLoss(), optimizer, noise_loader(), torch.device("cpu"), 3, args, ema, scaler)
    returned, printed = captured(train.train_one_epoch, *call)
    lines = re.findall(r"^Epoch: \[3\]  \[(\d)/3\] .*", printed, flags=re.M)
    words = [word for word in ("eta", "lr", "loss", "acc1", "acc5", "time", "data") if f"  {word}: " in printed]
    return [returned, sum_of(model), model.training, lines, words, ema and [int(ema.n_averaged), sum_of(ema.module)]]


def train_one_epoch(place):
    """In the warm-up the average is a copy of the weights."""
    warmup = {"model_ema": True, "model_ema_steps": 1, "lr_warmup_epochs": 5}
    return [one_epoch(**each) for each in ({}, {"clip_grad_norm": 0.1}, {"model_ema": True}, {"scaler": 1}, warmup)]


def loop(args, loaded, model, wrapped, collate_fn=None):
    """Train for two epochs the way most people's scripts do; return what the evaluations give, and the rates."""
    dataset, dataset_test, train_sampler, test_sampler = loaded
    data_loader = DataLoader(dataset, batch_size=args.batch_size, sampler=train_sampler, num_workers=2,
                             collate_fn=collate_fn)  # fmt: skip
    data_loader_test = DataLoader(dataset_test, batch_size=args.batch_size, sampler=test_sampler)
    device, criterion = torch.device(args.device), nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    parameters = utils.set_weight_decay(model, args.weight_decay, norm_weight_decay=0.0)
    optimizer = torch.optim.SGD(parameters, lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    model_ema = utils.ExponentialMovingAverage(model, device=device, decay=0.5)
    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "model_ema": model_ema}
    results = []
    for epoch in range(args.start_epoch, 2):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train.train_one_epoch(wrapped, criterion, optimizer, data_loader, device, epoch, args, model_ema, None)
        lr_scheduler.step()
        results.append(train.evaluate(wrapped, criterion, data_loader_test, device=device))
        results.append(train.evaluate(model_ema, criterion, data_loader_test, device=device, log_suffix="EMA"))
        checkpoint = {name: part.state_dict() for name, part in parts.items()}
        utils.save_on_master({**checkpoint, "epoch": epoch, "args": args}, Path(args.output_dir) / "checkpoint.pth")
    return results, [group["lr"] for group in optimizer.param_groups]


def mixed(mix, batch):  # Python 3.14, which starts loader processes anew, can send it to them
    return mix(*default_collate(batch))


def own_loop(place):
    args = place.args()
    utils.mkdir(args.output_dir)
    loaded = place.load()
    mix = transforms.get_mixup_cutmix(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=NUM_CLASSES, use_v2=False)
    model = torchvision.models.get_model(args.model, weights=None, num_classes=len(loaded[0].classes))
    results, rates = loop(args, loaded, model, model, partial(mixed, mix))
    return [[type(result).__name__ for result in results], rates, checkpoint_of(Path(args.output_dir))]


def meters(place):
    meter, short = utils.SmoothedValue(), utils.SmoothedValue(window_size=2, fmt="{value:.1f} {avg:.2f} {max:.0f}")
    for value, n in [(1.0, 1), (4.0, 3), (2.0, 1), (8.0, 2)]:
        meter.update(value, n=n)
        short.update(value)
    meter.synchronize_between_processes()
    names = ("median", "avg", "global_avg", "max", "value", "total", "count")
    return [{name: getattr(meter, name) for name in names}, list(meter.deque), str(meter), str(short), accuracies()]


def metric_logger(place):
    logger = utils.MetricLogger(delimiter="  ")
    logger.add_meter("lr", utils.SmoothedValue(window_size=1, fmt="{value}"))

    def loop():
        for value in logger.log_every([1, 2, 3, 4, 5], 2, "Part:"):
            logger.update(loss=torch.tensor(float(value)), lr=0.1)
            logger.meters["acc1"].update(10.0 * value, n=value)

    lines = captured(loop)[1].splitlines()
    logger.synchronize_between_processes()
    return [
        [re.sub(r"\d+\.\d{4}", "N", re.sub(r"\d:\d\d:\d\d", "T", line)) for line in lines],
        [logger.acc1.global_avg, error_of(lambda: logger.nothing), str(logger)],
    ]


def accuracies():
    output = torch.eye(6)[[0, 1, 2, 3]] + torch.arange(6) * 0.01
    target = torch.tensor([0, 1, 5, 0])
    soft = nn.functional.one_hot(target, 6).float()
    results = utils.accuracy(output, target, topk=(1, 5)) + utils.accuracy(output, soft)
    return [type(results).__name__, [result.item() for result in results], [str(results[0].dtype), results[0].ndim]]


def talk(is_master):
    utils.setup_for_distributed(is_master)
    print("plain", end=" ")
    print("forced", force=True, end=" ")


def processes(place):
    original, args, small = builtins.print, place.args(), argparse.Namespace()
    del args.distributed
    for each in (args, small):
        captured(utils.init_distributed_mode, each)
    words = [utils.is_dist_avail_and_initialized(), utils.get_world_size(), utils.get_rank(), utils.is_main_process()]
    words += [captured(talk, is_master)[1] for is_master in (True, False)]
    builtins.print = original
    return [args.distributed, args.world_size, small.distributed, words]


def files_and_sums(place):
    folder = place.out / "a" / "b"
    utils.mkdir(str(folder))
    utils.mkdir(folder)
    utils.save_on_master({"epoch": 3}, folder / "positional.pth")
    utils.save_on_master({"epoch": 4}, f=folder / "named.pth")
    epochs = [torch.load(folder / f"{name}.pth")["epoch"] for name in ("positional", "named")]
    return [epochs, [utils.reduce_across_processes(each).tolist() for each in (3, 2.5, [1, 2], [0.5, 4.0])]]


def groups(model, *args, **kwargs):
    """How many parameters each group has, its first and last ones by name, and its weight decay."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = utils.set_weight_decay(model, *args, **kwargs)
    keys = sorted({key for group in found for key in group})
    optimizer = torch.optim.SGD(found, lr=0.1, weight_decay=0.25)
    ends = [[names[id(group["params"][end])] for end in (0, -1)] for group in found]
    groups = zip(optimizer.param_groups, ends, strict=True)
    return [keys, *([len(group["params"]), *names, group["weight_decay"]] for group, names in groups)]


def weight_decays(place):
    resnet = torchvision.models.resnet18(num_classes=NUM_CLASSES)
    vit = torchvision.models.VisionTransformer(32, 16, 2, 2, 16, 32, num_classes=NUM_CLASSES)
    vit.conv_proj.weight.requires_grad_(False)
    embedding = [(key, 0.0) for key in ("class_token", "position_embedding", "relative_position_bias_table")]
    return [
        groups(resnet, 1e-4),
        groups(resnet, 1e-4, 0.5),
        groups(resnet, 1e-4, norm_weight_decay=0.2, custom_keys_weight_decay=[("bias", 0.1)]),
        groups(resnet, 1e-4, custom_keys_weight_decay=[("layer1.0.conv1.weight", 0.3)]),
        groups(resnet, 1e-4, norm_weight_decay=0.0, norm_classes=[nn.Linear]),
        groups(vit, 0.3, norm_weight_decay=0.0, custom_keys_weight_decay=embedding),
    ]


def moving_average(place):
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    ema, values = utils.ExponentialMovingAverage(model, decay=0.75, device="cpu"), []
    for value in (1.0, 2.0, 6.0):
        nn.init.constant_(model[0].weight, value)
        model[1].running_mean.fill_(value)
        ema.update_parameters(model)
        values.append([ema.module[0].weight[0, 0].item(), ema.module[1].running_mean.item(), int(ema.n_averaged)])
    fresh = utils.ExponentialMovingAverage(model, 0.75)
    fresh.load_state_dict(ema.state_dict())
    loaded, output = fresh.module[0].weight[0, 0].item(), ema.eval()(torch.zeros(3, 2))
    is_torchs = isinstance(ema, torch.optim.swa_utils.AveragedModel)
    return [values, is_torchs, list(ema.state_dict()), loaded, list(output.shape)]


def averages(place):
    paths = []
    for number, count in [(1.0, 5), (2.0, 8), (6.0, 9)]:
        state = {"weight": torch.full((2,), number), "count": torch.tensor(count), "half": torch.ones(1).half()}
        paths.append(str(place.out / f"model_{count}.pth"))
        torch.save({"model": state, "epoch": count}, paths[-1])
    averaged = utils.average_checkpoints(paths)
    return [averaged["epoch"], {name: [str(each.dtype), each.tolist()] for name, each in averaged["model"].items()}]


def stored_weights(place):
    path = str(place.out / "checkpoint.pth")
    source = small_model()
    ema = utils.ExponentialMovingAverage(source, decay=0.5)
    ema.update_parameters(source)
    source[0].weight.data.add_(1.0)
    unneeded = {**source.state_dict(), "aux.weight": torch.ones(1)}
    torch.save({"model": source.state_dict(), "model_ema": ema.state_dict(), "aux": unneeded, "epoch": 3}, path)
    results = [error_of(utils.store_model_weights, small_model(), path, "aux")]
    for options in ({}, {"checkpoint_key": "model_ema"}, {"checkpoint_key": "aux", "strict": False}):
        output = utils.store_model_weights(small_model(), path, **options)
        digest = hashlib.sha256(Path(output).read_bytes()).hexdigest()[:8]
        target = small_model()
        target.load_state_dict(torch.load(output, weights_only=True))
        results.append([Path(output).name == f"weights-{digest}.pth", sum_of(target)])
    return results


def presets_on_an_image(place):
    image = Image.open(place.images / "val" / "class0" / "image000.jpg").convert("RGB")
    evaluations = {"crop_size": 224}, {"crop_size": 32, "resize_size": 36, "use_v2": True}
    results = [shown(presets.ClassificationPresetEval(**options)(image)) for options in evaluations]
    bicubic, half = torchvision.transforms.InterpolationMode.BICUBIC, (0.5, 0.5, 0.5)
    others = {"hflip_prob": 0.0}, {"interpolation": bicubic}, {"backend": "PIL"}, {"backend": "tensor"}
    for options in ({}, {"mean": half, "std": half}, *others):
        torch.manual_seed(5)
        results.append(shown(presets.ClassificationPresetTrain(crop_size=24, **options)(image)))
    errors = [error_of(presets.ClassificationPresetEval, *size, crop_size=32, backend="other") for size in ((), (32,))]
    return [results, errors, [presets.get_module(use_v2).__name__ for use_v2 in (False, True)]]


def presets_augment(place):
    image, results = Image.effect_noise((40, 32), 60).convert("RGB"), []
    for policy in ("ra", "ta_wide", "augmix", "imagenet", "cifar10"):
        options = {"auto_augment_policy": policy, "ra_magnitude": 5, "augmix_severity": 2}
        results.append(shown(presets.ClassificationPresetTrain(crop_size=24, **options)(image))[:2])
    erased = presets.ClassificationPresetTrain(crop_size=24, random_erase_prob=1.0)(image)
    return [results, bool((erased == 0).all(0).float().mean() > 0.01)]


def presets_in_an_image_folder(place):
    folder = torchvision.datasets.ImageFolder
    train_set = folder(place.images / "train", presets.ClassificationPresetTrain(crop_size=24))
    val_set = folder(place.images / "val", transform=presets.ClassificationPresetEval(crop_size=32, resize_size=36))
    image, target = next(iter(DataLoader(train_set, batch_size=4, shuffle=True, num_workers=2)))
    means = [round(float(image.mean()), 3) for image, _ in val_set]
    return [str(image.dtype), list(image.shape), bool(image.min() < 0), str(target.dtype), means[:4]]


def mixed_batch(mix):
    """What became of a batch, whatever was drawn."""
    image, target = torch.randn(4, 3, 16, 16), torch.tensor([0, 3, 3, 5])
    given = image.clone()
    mixed, soft = mix(image, target)
    neighbour, own = given.roll(1, 0), nn.functional.one_hot(target, NUM_CLASSES).float()
    share = float(soft[0, 0])
    is_own, is_other = (mixed == given).all(1), (mixed == neighbour).all(1)
    is_cut = bool((is_own | is_other).all()) and abs(float(is_own.float().mean()) - share) < 1e-4
    is_blended = torch.allclose(mixed, share * given + (1 - share) * neighbour, atol=1e-5)
    is_soft = torch.allclose(soft, share * own + (1 - share) * own.roll(1, 0), atol=1e-5)
    kind = is_soft and ("cut" if is_cut else "blended" if is_blended else "neither")
    return [kind, shown(mixed)[:2], shown(soft)[:2], bool((image == given).all()), mixed is image]


def mixing(place):
    results, image, target = [], torch.randn(3, 3, 4, 4), torch.tensor([0, 2, 5])
    for kind in (transforms.RandomMixUp, transforms.RandomCutMix):
        mix, sometimes = kind(NUM_CLASSES, p=1.0, alpha=0.8), kind(NUM_CLASSES)
        kept, soft = kind(num_classes=NUM_CLASSES, p=0.0)(image, target)
        share = sum(bool((sometimes(image, target)[0] != image).any()) for _ in range(400)) / 400
        refusals = [
            error_of(kind, 0), error_of(kind, NUM_CLASSES, alpha=0.0), error_of(mix, image[0], target),
            error_of(mix, image, target[None]), error_of(mix, image.byte(), target),
            error_of(mix, image, target.float()),
        ]  # fmt: skip
        results += [
            mixed_batch(mix), isinstance(mix, nn.Module), repr(mix), bool((kept == image).all()), soft.tolist(),
            0.2 < share < 0.6, refusals, mixed_batch(kind(NUM_CLASSES, p=1.0, alpha=0.8, inplace=True))[-1],
        ]  # fmt: skip
    return results


def mixup_or_cutmix(place):
    results = []
    for use_v2 in (False, True):
        build = partial(transforms.get_mixup_cutmix, num_classes=NUM_CLASSES, use_v2=use_v2)
        one, other = build(mixup_alpha=0.4, cutmix_alpha=0.0), build(mixup_alpha=0.0, cutmix_alpha=1.0)
        results.append([mixed_batch(each)[0] for each in (one, other)])
        both, num_cut = build(mixup_alpha=0.4, cutmix_alpha=1.0), 0
        for _ in range(40):
            image = torch.randn(4, 3, 16, 16)
            mixed, _ = both(image, torch.tensor([0, 1, 2, 3]))
            num_cut += bool(((mixed == image) | (mixed == image.roll(1, 0))).all())
        results.append([5 < num_cut < 35, build(mixup_alpha=0.0, cutmix_alpha=0.0)])
    return results


def repeated(num_images, **options):
    sampled = sampler.RASampler(range(num_images), **options)
    first = [int(index) for index in sampled]
    sampled.set_epoch(2)
    second = [int(index) for index in sampled]
    hashes = [hashlib.sha256(str(order[:256]).encode()).hexdigest()[:8] for order in (first, second)]
    return [len(sampled), len(first), first[:8], hashes]


def repeated_augmentation(place):
    dataset = TensorDataset(torch.arange(512))
    sampled = sampler.RASampler(dataset, num_replicas=2, rank=0, shuffle=False)
    batches = [batch.tolist() for (batch,) in DataLoader(dataset, batch_size=100, sampler=sampled)]
    return {
        "rank 0": repeated(512, num_replicas=2, rank=0),
        "rank 1": repeated(512, num_replicas=2, rank=1),
        "twice": repeated(768, num_replicas=3, rank=2, shuffle=True, seed=1, repetitions=2),
        # Of a set whose size is no multiple of 256 torchvision leaves the rest out.
        "cut": repeated(600, num_replicas=2, rank=1),
        "in a loader": [[len(batch) for batch in batches], batches[0][:9]],
        "kind": isinstance(sampled, torch.utils.data.Sampler),
    }


def quantization(place):
    """The calls of torchvision's own train_quantization.py, whose options are fewer."""
    names = (
        "data_path device batch_size workers epochs lr momentum weight_decay lr_step_size lr_gamma print_freq resume "
        "start_epoch cache_dataset sync_bn test_only world_size dist_url interpolation val_resize_size val_crop_size "
        "train_crop_size clip_grad_norm weights backend use_v2 output_dir"
    )
    args = argparse.Namespace(**{name: value for name, value in vars(place.args()).items() if name in names.split()})
    vars(args).update(model="small", qbackend="fbgemm", eval_batch_size=5, num_calibration_batches=2)
    utils.init_distributed_mode(args)
    dataset, dataset_test, train_sampler, test_sampler = train.load_data(
        *(os.path.join(args.data_path, split) for split in ("train", "val")), args
    )
    data_loader = DataLoader(dataset, batch_size=4, sampler=train_sampler)
    data_loader_test = DataLoader(dataset_test, batch_size=args.eval_batch_size, sampler=test_sampler)
    device, criterion, model = torch.device(args.device), nn.CrossEntropyLoss(), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    train.train_one_epoch(model, criterion, optimizer, data_loader, device, args.start_epoch, args)
    with torch.inference_mode():
        result = train.evaluate(model, criterion, data_loader_test, device=device, log_suffix="QAT")
        evaluated = copy.deepcopy(model).eval()
        again = train.evaluate(evaluated, criterion, data_loader_test, device=torch.device("cpu"))
    calibration = DataLoader(Subset(dataset, list(range(4 * args.num_calibration_batches))), batch_size=4)
    calibrated = train.evaluate(model, criterion, calibration, device=device, print_freq=1)
    return [result == again, type(calibrated).__name__]


def ranks_join(place):
    args = argparse.Namespace(device="cpu", world_size=1, dist_url="env://")
    captured(utils.init_distributed_mode, args)
    rank = utils.get_rank()
    is_consistent = args.rank == rank == args.gpu == int(os.environ["RANK"]) and utils.is_main_process() == (rank == 0)
    return [args.distributed, args.world_size, is_consistent, utils.get_world_size()]


def ranks_print(place):
    return captured(talk, utils.is_main_process())[1]


def ranks_reduce(place):
    rank = utils.get_rank()
    values = [rank + 1, [rank, 10], 0.5 * rank, [1.5, float(rank)]]
    meter, logger = utils.SmoothedValue(), utils.MetricLogger()
    meter.update(4.0 * rank, n=1 + 2 * rank)
    meter.synchronize_between_processes()
    logger.meters["acc1"].update(10.0 + 10 * rank, n=4)
    logger.synchronize_between_processes()
    reduced = [utils.reduce_across_processes(value).tolist() for value in values]
    return [reduced, [meter.count, meter.total, meter.global_avg], logger.acc1.global_avg]


def ranks_save(place):
    utils.save_on_master({"rank": utils.get_rank()}, place.out / "one.pth")
    torch.distributed.barrier()
    return torch.load(place.out / "one.pth")["rank"]


def ranks_load(place):
    rank = utils.get_rank()
    more = {"distributed": True, "rank": rank, "gpu": rank, "world_size": 2}
    return argparse.Namespace(**{**vars(place.args()), **more}), place.load(**more)


def ranks_sample(place):
    args, (dataset, dataset_test, train_sampler, test_sampler) = ranks_load(place)
    epochs = []
    for epoch in (0, 1):
        train_sampler.set_epoch(epoch)
        epochs.append([int(key) for key in train_sampler])
    data_loader = DataLoader(dataset, batch_size=args.batch_size, sampler=train_sampler, num_workers=1)
    shapes = [list(image.shape) for image, _ in data_loader]
    batches = [target.tolist() for _, target in DataLoader(dataset_test, batch_size=4, sampler=test_sampler)]
    labels = [dataset.targets[index] for index in epochs[1]]
    test = [int(key) for key in test_sampler]
    return {"epochs": epochs, "shapes": shapes, "labels": labels, "test": test, "test_labels": batches}


def ranks_repeat(place):
    sampled = sampler.RASampler(range(512))
    return [sampled.num_replicas, sampled.rank == utils.get_rank(), [int(index) for index in sampled][:8]]


def ranks_train(place):
    args, loaded = ranks_load(place)
    utils.mkdir(args.output_dir)
    model, before = small_model(), sum_of(small_model())
    results, _ = loop(args, loaded, model, nn.parallel.DistributedDataParallel(model))
    parts = [torch.tensor([sum_of(model), *results], dtype=torch.float64) for _ in range(2)]
    torch.distributed.all_gather(parts, parts[0].clone())
    return [bool(torch.equal(*parts)), before != sum_of(model), sorted({type(result).__name__ for result in results})]


PARTS = {"one": EXPECTED, "ranks": [name for name in globals() if re.fullmatch("ranks_(?!load).*", name)]}


def run_step(step, place):
    original = builtins.print
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            text, is_done = json.dumps(step(place)), True
    except (Exception, SystemExit):
        text, is_done = f"failed: {' '.join(traceback.format_exc().split())}", False
    if "RANK" not in os.environ:
        builtins.print = original
    # Not print, which torchvision's folder silences on other ranks than 0.
    sys.stdout.write(f"step {step.__name__}: {text}\n")
    sys.stdout.flush()
    return is_done


def main(folder, images, out, part="one"):
    import_folder(folder)
    # As a checkpoint of torchvision's, whose `args` is a Namespace, needs since weights_only is the default.
    torch.serialization.add_safe_globals([argparse.Namespace])
    torch.set_num_threads(1)
    Path(out).mkdir(parents=True, exist_ok=True)
    place = Place(images, out)
    results = []
    for name in PARTS[part]:
        results.append(run_step(globals()[name], place))
        if part != "one" and not results[-1]:  # others would wait for this process
            break
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(not all(results))


# Where our result is meant to be another one.
STATED = {
    "parser": {
        "/0/device": None,  # the accelerator that is there, else the CPU
        "/0/workers": None,  # 16, but no more than cores
        "/0/output_dir": None,  # runs/<model>, not the current folder
        "/0/backend": None,  # a faster way, within one grey level
    },
    # Schedules are functions of the position: nothing of them is saved.
    "main_trains": {"/1/keys": "model optimizer epoch args"},
    "main_resumes_and_tests_only": {"/1/keys": "model optimizer epoch args"},
    "main_with_much": {"/1/keys": "model optimizer epoch args model_ema"},
    # An epoch has as many samples as the set has images: no multiple of 256.
    "repeated_augmentation": {"/cut/0": 300, "/cut/1": 300},
}


def check_steps(results, stated):
    assert list(results) == list(EXPECTED), "a step is missing"
    for step, recorded in EXPECTED.items():
        ours, expected = flatten({step: results[step]}), flatten({step: recorded})
        changes = {f"/{step}{name}": value for name, value in stated.get(step, {}).items()}
        assert all(expected[name] != value for name, value in changes.items()), "there is no difference to state"
        expected |= changes
        assert list(ours) == list(expected), results[step]
        is_of_pixels = step.startswith(("datasets", "load_data", "plain_loaders", "presets_"))
        tolerance = 0.018 if is_of_pixels else 0.0  # one grey level is 1 / 255 / 0.224
        for name, value in expected.items():
            is_float = isinstance(value, float)
            assert type(ours[name]) is type(value), name
            assert ours[name] == (pytest.approx(value, rel=1e-4, abs=tolerance) if is_float else value), name


def read_steps(text):
    lines = [line.removeprefix("step ").split(": ", 1) for line in text.splitlines() if line.startswith("step ")]
    return {name: json.loads(result) for name, result in lines}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """28 training images, seven batches of four, and 12 of validation, of six classes."""
    return write_images(tmp_path_factory.mktemp("six"), {"train": [6, 5, 5, 4, 4, 4], "val": [2] * 6})


def run_script(folder, images, out):
    outcome = run_ranks(main, 1, str(folder), str(images), str(out), log_folder=out, timeout_s=240)
    assert outcome.codes == [0], outcome.output  # where a step fails, its line says why
    return read_steps(outcome.output)


def test_script_means_the_same(images, tmp_path):
    check_steps(run_script(REPOSITORY, images, tmp_path), STATED)


def test_expected_is_torchvisions(images, tmp_path):
    folder = os.environ.get("TORCHVISION_REFERENCES")
    if not folder:
        pytest.skip("TORCHVISION_REFERENCES names no folder references/classification of torchvision")
    check_steps(run_script(Path(folder), images, tmp_path), {})


def test_two_processes_work_as_there(images, tmp_path):
    arguments = (str(REPOSITORY), str(images), str(tmp_path / "out"), "ranks")
    outcome = run_ranks(main, 2, *arguments, log_folder=tmp_path)
    two = [read_steps(text) for text in outcome.check().outputs]
    for rank, results in enumerate(two):
        assert results["ranks_join"] == [True, 2, True, 2]
        assert results["ranks_print"] == ("plain forced ", "forced ")[rank]
        assert results["ranks_reduce"] == [[3, [1, 20], 0.5, [3.0, 1.0]], [4, 12.0, 3.0], 15.0]
        assert results["ranks_save"] == 0
        assert results["ranks_train"] == [True, True, ["float"]]  # one model
        # They share an epoch as torch's sampler deals it.
        sampled = results["ranks_sample"]
        for epoch, order in enumerate(sampled["epochs"]):
            sampler = DistributedSampler(range(28), num_replicas=2, rank=rank)
            sampler.set_epoch(epoch)
            # Stated: whole steps of 2 x 4, where torchvision's last batch has two images.
            assert order == list(sampler)[:12]
        assert sampled["shapes"] == [[4, 3, 32, 32]] * 3
        folders = [label for label, count in enumerate([6, 5, 5, 4, 4, 4]) for _ in range(count)]
        assert sampled["labels"] == [folders[image] for image in sampled["epochs"][1]]
        assert results["ranks_repeat"][:2] == [2, True]
        assert results["ranks_repeat"][2] == EXPECTED["repeated_augmentation"][f"rank {rank}"][2]
    # Each image is evaluated once. Stated: batch k is rank k mod W's, and so the same as on one process; torchvision
    # deals single images.
    assert [results["ranks_sample"]["test"] for results in two] == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]
    assert [results["ranks_sample"]["test_labels"] for results in two] == [[[0, 0, 1, 1], [4, 4, 5, 5]], [[2, 2, 3, 3]]]

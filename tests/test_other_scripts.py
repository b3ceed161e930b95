"""Command lines of timm, pytorch/examples and older torchvision: every flag is answered, the line rewritten."""

import json
import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest
import timm.data
import timm.scheduler
import torch
import torchvision

from checkpointing.published import resolve_weights
from errors import UserError, find_timm_config
from models.optim import lr_at
from settings import config, options, other_scripts

# All flags of timm's train.py, of 2022 and of 2026, with a value each.
TIMMS = """
    --aa rand-m9|--amp|--amp-dtype bfloat16|--amp-impl native|--apex-amp|--aug-repeats 3|--aug-splits 3
    --batch-size 8|--bce-loss|--bce-pos-weight 1|--bce-sum|--bce-target-thresh 0.2|--bn-eps 1|--bn-momentum 1
    --channels-last|--checkpoint-hist 3|--class-map f|--clip-grad 1|--clip-mode norm|--color-jitter 0.4
    --color-jitter-prob 1|--config f|--cooldown-epochs 3|--crop-pct 0.9|--cutmix 1|--cutmix-minmax 0 1
    --data-dir d|--dataset n|--dataset-download|--dataset-trust-remote-code|--decay-epochs 3
    --decay-milestones 3 4|--decay-rate 0.1|--device cpu|--device-modules m|--dist-bn reduce|--dr 0.1
    --drop 0.1|--drop-block 0.1|--drop-connect 0.1|--drop-path 0.1|--epoch-repeats 2|--epochs 9
    --eval-metric top1|--experiment n|--fast-norm|--fuser n|--gaussian-blur-prob 1|--gp avg
    --grad-accum-steps 2|--grad-checkpointing|--grayscale-prob 1|--head-init-bias 1|--head-init-scale 1
    --hflip 0.5|--img-size 160|--in-chans 1|--initial-checkpoint f|--input-img-mode L|--input-key k
    --input-size 3 160 160|--interpolation bicubic|--jsd-loss|--layer-decay 0.7|--layer-decay-min-scale 0
    --layer-decay-no-opt-scale 0|--local-rank 0|--local_rank 0|--log-interval 3|--log-wandb|--lr 0.1
    --lr-base 0.1|--lr-base-scale sqrt|--lr-base-size 256|--lr-cycle-decay 1|--lr-cycle-limit 1
    --lr-cycle-mul 1|--lr-k-decay 1|--lr-noise 0.1 0.2|--lr-noise-pct 1|--lr-noise-std 1|--mean 0 0 0
    --min-lr 1e-6|--mixup 0.1|--mixup-mode batch|--mixup-off-epoch 3|--mixup-prob 1|--mixup-switch-prob 1
    --model resnet50|--model-dtype float16|--model-ema|--model-ema-decay 0.9|--model-ema-force-cpu
    --model-ema-warmup|--model-kwargs a=1|--momentum 0.9|--native-amp|--no-aug|--no-ddp-bb|--no-prefetcher
    --no-resume-opt|--num-classes 3|--opt lamb|--opt-betas 0.9 0.99|--opt-eps 1e-8|--opt-kwargs a=1|--output d
    --patience-epochs 3|--pin-mem|--pretrained|--pretrained-path f|--ratio 0.7 1.3|--recount 1
    --recovery-interval 3|--remode pixel|--reprob 0.1|--resplit|--resume f|--save-images|--scale 0.3 1
    --sched cosine|--sched-on-updates|--seed 3|--smoothing 0.1|--split-bn|--start-epoch 0|--std 1 1 1|--sync-bn
    --synchronize-step|--target-key k|--torchcompile|--torchcompile-mode default|--torchscript
    --train-crop-mode m|--train-interpolation random|--train-num-samples 3|--train-split train|--tta 2
    --use-multi-epochs-loader|--val-interval 2|--val-num-samples 3|--val-split val|--validation-batch-size 8
    --vflip 0.1|--wandb-project n|--wandb-resume-id n|--wandb-tags a b|--warmup-epochs 5|--warmup-lr 1e-5
    --warmup-prefix|--weight-decay 0.1|--worker-seeding all|--workers 3|-b 8|-c f|-j 3|-vb 8
"""
KNOWN = {*options.build_parser()._option_string_actions}


def translated(line):
    """Return what is said of each unknown flag of a command line, and the command here, or None."""
    with pytest.raises(UserError, match="unrecognized") as caught:
        config.parse_args(shlex.split(line))
    end = r"(?:the command here(?: \(.*\))?: python train\.py ?(.*)|.*--help lists the options\)?)"
    found = re.fullmatch(rf"unrecognized arguments?:(.*)(?:\n|; |\? ){end}", str(caught.value), re.DOTALL)
    return found[1].removeprefix("\n").strip().split("\n  "), found[2]


def test_every_flag_of_timms_is_known_or_answered():
    for flag in re.split(r"[|\n] *", TIMMS.strip()):
        if flag.split()[0] not in KNOWN:
            phrases, line = translated(f"{flag} --data-path d")
            assert ["unknown" in phrase for phrase in phrases] == [False], flag
            assert "--data-path" in line, flag
            assert {word for word in line.split() if word.startswith("--")} <= KNOWN, flag


@pytest.mark.parametrize(("line", "expected"), [
    ("--decay-epochs 2.4 --decay-rate .97 --sched step", "--lr-scheduler exponentiallr --lr-gamma 0.987389"),
    ("--lr-base 0.1 --opt adamw", "--lr 0.1 --opt timm/adamw --lr-scaling sqrt --lr-scaling-batch 256"),
    ("-a resnet18 --dist-backend nccl --multiprocessing-distributed --rank 0",
     "--model resnet18 --batch-size 256 --global-batch-size 256"),
    ("-a vgg11 -b 64 --world-size 2", "--model vgg11 --batch-size 64 --global-batch-size 128"),
    ("--recipe digits -a vgg11 -b 8", "--recipe digits --model vgg11 -b 8"), ("--apex --apex-opt-level O0", ""),
    ("-p 1 --batch_size 8", "--print-freq 1 --batch-size 8 --global-batch-size 8"),
    ("--gp max --model-kwargs a=1 --model-kwargs b=2", "--model-kwargs a=1 b=2 global_pool=max"),
    ("--lr-base 0.1 --lr-base-size 512", "--lr 0.1 --lr-scaling-batch 512 --lr-scaling linear"),
    ("--tta 2", "--eval-flip"), ("--torchcompile inductor", "--compile"), ("--torchcompile", "--compile"),
    ("--apex --apex-opt-level O1", "--amp"), ("--gaussian-blur-prob 0.2", "--blur-prob 0.2"),
    ("--clip-grad 0.02 --clip-mode agc", "--clip-agc 0.02"),
    # torchvision's parser takes unique beginnings; forks name a file.
    ("--batch 64 --epoch 3 --tes", "--batch-size 64 --epochs 3 --test-only"),
    ("--pretrained best.pth.tar", "--weights best.pth.tar"),
    ("--sched poly --decay-rate 0.9", "--lr-scheduler polylr --lr-power 0.9"),
    ("--amp-dtype bfloat16 --native-amp", "--amp-dtype bfloat16 --amp"),
    ("--gpu 1 --fp16", "--device cuda:1 --amp --batch-size 256 --global-batch-size 256"),
    ("--reprob 0.2", "--random-erase 0.2 --random-erase-fill pixel"),
    ("--clip-grad 2 --clip-mode value", "--clip-grad-value 2"), ("--aa v0 --color-jitter 1", "--auto-augment timm/v0"),
    ("--sched cosine --dr 0.2", "--lr-scheduler cosineannealinglr"), ("--decay-milestones 3 4", "--lr-milestones 2 3"),
    ("--pin-mem --model-ema", "--model-ema --model-ema-steps 1 --no-model-ema-adjust --model-ema-decay 0.9998"),
    ("--epochs 10 --warmup-epochs 5 --warmup-prefix", "--epochs 15 --lr-warmup-epochs 5 --lr-warmup-method linear "
     "--lr-warmup-prefix --lr-warmup-decay 0.0001"),
    ("--input-size 3 8 8 --crop-pct 0.5", "--in-chans 3 --train-crop-size 8 --val-crop-size 8 --val-resize-size 16"),
    ("--lr-base 0.5 --warmup-lr 1e-4 -b 64 --opt lamb --grad-accum-steps 16", "--lr 0.5 -b 64 --opt timm/lamb "
     "--lr-scaling sqrt --lr-scaling-batch 256 --lr-warmup-epochs 5 --lr-warmup-method linear --no-lr-warmup-prefix "
     "--global-batch-size 1024 --lr-warmup-decay 0.0001"),
    # A whole command; timm resizes 160 / 0.95 to 168.
    ("--model resnet50 --aa rand-m7-mstd0.5-inc1 --smoothing 0.1 --mixup 0.1 --cutmix 1.0 --warmup-epochs 5 "
     "--warmup-lr 1e-4 --min-lr 1e-6 --sched cosine --lr 5e-3 --opt lamb --weight-decay .02 --bce-loss --crop-pct 0.95 "
     "--img-size 160 --native-amp --recount 1 --reprob 0.25 --remode const --model-ema -b 256 --grad-accum-steps 2 "
     "--log-interval 10 --output /runs --experiment a --drop-path 0.1 --scale 0.35 1.0",
     "--model timm/resnet50 --auto-augment timm/rand-m7-mstd0.5-inc1 --label-smoothing 0.1 --mixup-alpha 0.1 "
     "--cutmix-alpha 1.0 --lr-warmup-epochs 5 --lr-warmup-method linear --lr-min 1e-6 --lr-scheduler cosineannealinglr "
     "--lr 5e-3 --opt timm/lamb --weight-decay .02 --bce-loss --train-crop-size 160 --val-crop-size 160 --amp "
     "--random-erase 0.25 --random-erase-fill zero --model-ema -b 256 --print-freq 10 --output-dir /runs/a "
     "--stochastic-depth 0.1 --crop-scale 0.35 --no-lr-warmup-prefix --model-ema-steps 1 --no-model-ema-adjust "
     "--model-ema-decay 0.9998 --val-resize-size 168 --global-batch-size 512 --lr-warmup-decay 0.02"),
])  # fmt: skip
def test_lines(line, expected):
    assert translated(f"d {line}")[1].replace(" --no-decay-1d", "") == f"--data-path d {expected}".rstrip()


@pytest.mark.parametrize("line", [
    "--batchsize 32", "--modle x", "--torchcompile eager", "--mod x",
    "--lr-w 3", "--sched cosin --dr 0.2", "--sched plateau", "--output",
    "--remode rand", "--drop-path 0.2 --dropout 0.1 --drop 0.3", "e --batch_size 64 -j8", "--batch_size x",
    "--recipe resnet50-v1 --crop-pct 0.9", "--input-size 3 96 64", "--arch", "--data-dir d --modell vgg11",
    "--smoothing 0.1 --epoch", "--xyzzy", "--batch_size 1 --modell",
])  # fmt: skip
def test_no_command_is_proposed_where_a_word_is_not_understood(line):
    assert translated(f"d {line}")[1] is None


@pytest.mark.parametrize("flag", ["--epoch 5", "--epo 5", "--dataset_dir d", "--wandb-proj x", "--scale-lr 1"])
def test_no_typo_is_taken_for_a_flag_that_is_not_here(flag):
    meant = re.findall(r"did you mean (--[\w-]+)", " ".join(translated(f"--data-path d {flag}")[0]))
    assert all(name in KNOWN or other_scripts.FLAGS[name].here.startswith("--") for name in meant)


def test_the_page_shows_the_rows():
    page = (Path(__file__).parents[1] / "docs" / "other-scripts.md").read_text()
    assert page.endswith(f"\n\n{other_scripts.table_of()}\n"), "python -m settings.other_scripts prints the table"


@pytest.mark.parametrize(("line", "expected"), [
    ("--drop-path 0.1 --drop-connect 0.2", "--drop-connect 0.2 conflicts with other flags over --stochastic-depth;"),
    ("--pretrained --pretrained-path f", "is not needed with --pretrained-path'"),
    ("--jsd", "--jsd is not supported here'"),
    ("--aa v0 --color-jitter 0.4", "--color-jitter 0.4 is not needed with --aa'"), ("--xyzzy", "--xyzzy is unknown'"),
    ("--sched cosin", "--sched cosin is not supported here; did you mean cosine?"),
    ("--dr 0.1", "--dr 0.1 is --lr-gamma 0.1'"),
    ("--data-dir 'my photos'", "my photos is --data-path 'my photos'"), ("--recount 2", "(one rectangle)'"),
    ("--recovery-interval 0", "is not needed here'"),
    ("--bach-size 8", "is unknown; did you mean --batch-size'"), ("--policy-magnitude 15", "is --ra-magnitude 15'"),
    ("--vflip 0. --no-aug", "--vflip 0. is not needed here'"), ("--warmup-epochs 5", "5 --lr-warmup-method linear'"),
    ("--recovery-interval 9", "is --checkpoint-steps 9'"), ("--remode rand", "rand is nearer pixel)'"),
    ("--clip-mode x", "not supported here'"), ("--decay-epochs 40.0", "is --lr-step-size 40'"),
    ("--batch_size 8", "is --batch-size'"), ("--opt-foo 3", "is unknown'"), ("--vflip 0.5", "not supported here'"),
])  # fmt: skip
def test_what_is_said_of_a_flag(line, expected):
    assert expected in str(translated(line)[0])


@pytest.mark.parametrize("flags", ["step", "poly", "multistep", "cosine --warmup-epochs 5"])
def test_learning_rates_are_timms(flags):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    args = config.parse_args(shlex.split(translated(f"--data-path d --epochs 300 --lr 0.4 --sched {flags}")[1]))
    warmup = 5 * ("warmup" in flags)
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, flags.split()[0], num_epochs=300, warmup_epochs=warmup)
    for epoch in (0, 4, 5, 39, 40, 88, 89, 90, 180, 269, 270, 299):
        scheduler.step(epoch)
        assert lr_at(args, epoch, 0.4) == pytest.approx(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("model", "share"), [("efficientnet_b2", 0.9), ("vit_base_patch16_384", 1), ("resnet18", 0.9)])
def test_the_resized_side_is_timms_for_the_models_own_size(model, share):
    theirs = timm.data.resolve_data_config({"crop_pct": share}, find_timm_config(f"timm/{model}").to_dict())
    args = config.parse_args(translated(f"--data-path d --model {model} --crop-pct {share}")[1].split())
    assert timm.data.create_transform(**theirs).transforms[0].size == args.val_resize_size


# pytorch/examples: args.batch_size = int(args.batch_size / ngpus_per_node), 256 by default; --world-size is of nodes.
@pytest.mark.parametrize(("line", "expected"), [
    ("--data-path d --grad-accum-steps 4 -b 8", "--data-path d -b 8 --no-decay-1d --global-batch-size 64"),
    ("-a vgg11 --world-size 1 D", "--model vgg11 --data-path D --batch-size 128 --global-batch-size 256"),
    ("-a vgg11 -b 65 D", "--model vgg11 --batch-size 32 --global-batch-size 64 --data-path D"),
])  # fmt: skip
def test_under_torchrun_the_command_begins_with_it_and_counts_its_processes(monkeypatch, line, expected):
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in {**place, "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(f"torchrun --nproc_per_node=2 train.py {expected}") + "(\n|$)"):
        config.parse_args(line.split())


@pytest.mark.filterwarnings("error:Arguments other than a weight enum")
def test_pretrained_is_what_torchvisions_own_pretrained_loads():
    for name in torchvision.models.list_models(module=torchvision.models):
        with pytest.raises((UserWarning, ValueError)) as caught:  # before anything is loaded
            torchvision.models.get_model_builder(name)(pretrained=True)
        expected = re.search(r"passing `weights=(\w+\.\w+)`|No weights available", str(caught.value))[1]
        args = config.parse_args(translated(f"-a {name} --pretrained -e D")[1].split())
        with nullcontext() if expected else pytest.raises(UserError, match="no weights of torchvision's"):
            assert str(resolve_weights(args)) == expected


def test_help_on_a_word(capsys):
    for word, expected in (("cutmix", "--cutmix-alpha"), ("drop-path", "--stochastic-depth P")):
        with pytest.raises(SystemExit):
            config.parse_args(["--help", word])
        shown = capsys.readouterr().out
        assert expected in shown
        assert "--epochs" not in shown
    with pytest.raises(UserError, match="--help xyzzy"):
        config.parse_args(["--help", "xyzzy"])


PUBLISHED = json.loads(Path(__file__).with_name("published_lines.json").read_text())


def answer_to(line):
    """Return the command that a published one is here, or the flags that have no meaning here."""
    words, parser = shlex.split(line), options.build_parser()
    try:
        _, unknown = parser.parse_known_args(words)
    except UserError as error:
        return [str(error)]
    command = other_scripts.OtherCommand(words, parser._option_string_actions)
    if not unknown:
        return line
    strangers = [phrase.partition(" is unknown")[0] for phrase in command.phrases if " is unknown" in phrase]
    if strangers or not command.is_understood:
        return strangers
    assert not parser.parse_known_args(command.words)[1]
    return shlex.join(command.words)


def test_a_published_command_is_answered_as_it_was_judged():
    """From READMEs, scripts and documentation of public repositories; each answer was read by a person."""
    assert {line: answer_to(line) for line in PUBLISHED} == PUBLISHED

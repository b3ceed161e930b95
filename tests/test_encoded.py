"""encoded.py: what a device makes of JPEGs is what the loader would have; the CPU stands for the device here."""

import importlib.util
import shutil

import pytest
import torch
from torchvision.transforms import InterpolationMode

import config
import data
from checkpointing.archive import load_checkpoint
from errors import ImageError, UserError
from loading import encoded
from loading.encoded import EncodedBatch, EncodedCrop, UndecodableError, find_obstacle
from presets import ClassificationPresetEval, ClassificationPresetTrain
from sampler import EvalSampler, TrainSampler, VirtualShards
from tests.images import FILES, ROWS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchcodec") is None, reason="needs torchcodec")

CPU = torch.device("cpu")
ONLY_PILLOW = {"CMYK", "PNG", "palette", "transparent", "one bit", "WebP"}
PRESETS = [
    (ClassificationPresetTrain, {"crop_size": 24}),
    (ClassificationPresetEval, {"crop_size": 24, "resize_size": 32}),
    (ClassificationPresetEval, {"crop_size": 40, "resize_size": 44}),
]


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("build", "size"), PRESETS)
def test_what_is_left_to_the_device_has_the_loaders_pixels(build, size, mode):
    common = {**size, "interpolation": InterpolationMode(mode)}
    preset, oracle = build(**common, leaves_decoding=True), build(**common, decoder="torchcodec")
    images, expected = [], []
    for kind, payload in {**FILES, **ROWS}.items():
        for seed in range(4):
            torch.manual_seed(seed)
            images.append(preset.load(payload))
            torch.manual_seed(seed)
            expected.append(oracle.load(payload))
            assert isinstance(images[-1], EncodedCrop) == (kind not in ONLY_PILLOW)
    found = EncodedBatch(images).decode(CPU)
    assert found.shape == (len(images), 3, size["crop_size"], size["crop_size"])
    assert found.dtype == torch.uint8
    assert found.is_contiguous(memory_format=torch.channels_last)
    difference = (found.int() - torch.stack(expected).int()).abs()
    # The loader's weights have 16 bits: a pixel of some 10,000 is rounded otherwise twice.
    assert difference.max() <= 2
    assert (difference > 1).float().mean() < 1e-4
    assert difference.float().mean() < 0.02
    assert any(image.is_mirrored for image in images if isinstance(image, EncodedCrop)) == hasattr(preset, "box")


def test_no_more_rows_are_handed_over_than_a_crop_needs():
    payload = ROWS["4:2:0 96 x 208"]
    preset = ClassificationPresetTrain(crop_size=24, leaves_decoding=True)
    lengths = []
    for seed in range(20):
        torch.manual_seed(seed)
        lengths.append(len(preset.load(payload).payload))
    assert min(lengths) < len(payload) / 2


def test_an_augmentation_policy_keeps_decoding_to_the_loader():
    preset = ClassificationPresetTrain(crop_size=24, auto_augment_policy="ra", leaves_decoding=True)
    assert isinstance(preset.load(FILES["4:2:0"]), torch.Tensor)


def arguments(folder, *argv):
    args = config.parse_args(
        ["--data-path", str(folder), "--device", "cpu", "--train-crop-size", "24", "--batch-size", "4", *argv]
    )
    args.decode_device = "cuda"  # for the loader; the device that it goes to is the CPU all the same
    return args


def batches(folder, *argv, device_decodes=True, is_training=True, start_step=0):
    args = arguments(folder, "--random-erase", "0.5", "--mixup-alpha", "0.2", *argv)
    args.decode_device = "cuda" if device_decodes else "cpu"
    dataset, dataset_test = data.build_datasets(str(folder / "train"), str(folder / "val"), args)
    if not is_training:
        return list(data.build_device_loader(args, dataset_test, EvalSampler(len(dataset_test), 4), CPU, 3))
    sampler = TrainSampler(len(dataset), VirtualShards(8, 2), seed=3)
    sampler.set_epoch(1, start_step)
    return list(data.build_device_loader(args, dataset, sampler, CPU, 3))


@pytest.mark.parametrize("is_training", [True, False])
def test_batches_are_the_loaders_whoever_reads_the_files(image_folder, is_training):
    expected = batches(image_folder, "--workers", "0", device_decodes=False, is_training=is_training)
    first = batches(image_folder, "--workers", "0", is_training=is_training)
    assert len(first) == len(expected) == (6 if is_training else 2)
    for (image, target), (their_image, their_target) in zip(first, expected, strict=True):
        assert (image - their_image).abs().max() < 2.5 / 255 / 0.224  # levels, as the batch is normalised
        assert torch.equal(target, their_target)
        assert image.stride() == their_image.stride()
    for ours, theirs in zip(batches(image_folder, "--workers", "2", is_training=is_training), first, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    if is_training:
        resumed = batches(image_folder, "--workers", "2", start_step=2)
        assert torch.equal(resumed[0][0], first[4][0])
        assert len(resumed) == 2


def test_epochs_follow_one_another_also_one_that_was_left(image_folder):
    args = arguments(image_folder, "--workers", "2")
    dataset, _ = data.build_datasets(str(image_folder / "train"), str(image_folder / "val"), args)
    sampler = TrainSampler(len(dataset), VirtualShards(8, 2), seed=3)
    loader = data.build_device_loader(args, dataset, sampler, CPU, 3)
    first = list(loader)
    for image, _ in loader:
        assert torch.equal(image, first[0][0])
        break
    assert all(torch.equal(image, again) for (image, _), (again, _) in zip(first, loader, strict=True))


def broken(payload):
    """Return a JPEG whose Huffman tables say more than they hold, which no decoder reads."""
    place = payload.index(b"\xff\xc4")
    return payload[: place + 5] + b"\xff" * 16 + payload[place + 21 :]


def test_an_image_that_nobody_can_decode_is_named(image_folder, tmp_path):
    folder = shutil.copytree(image_folder, tmp_path / "data")
    path = folder / "train" / "class1" / "image003.jpg"
    path.write_bytes(broken(path.read_bytes()))
    for argv in (["--workers", "0"], ["--workers", "1"]):
        with pytest.raises(ImageError, match=r"cannot read image .*class1/image003\.jpg \(class class1\): "):
            batches(folder, *argv)


def refuse(monkeypatch, odd):
    """Have the device refuse a JPEG, and every batch that it is in."""
    from torchcodec import decoders

    def refuse_one(jpegs, **options):
        if any(jpeg.numpy().tobytes() == bytes(odd) for jpeg in jpegs):
            raise RuntimeError("not supported")
        return decode_jpeg(jpegs, **options)

    decode_jpeg = decoders.decode_jpeg
    monkeypatch.setattr(decoders, "decode_jpeg", refuse_one)


def test_a_batch_with_an_image_that_the_device_refuses_is_decoded_one_by_one(monkeypatch):
    preset = ClassificationPresetEval(crop_size=24, resize_size=32, leaves_decoding=True)
    images = [preset.load(FILES[kind])._replace(number=number) for number, kind in enumerate(["4:2:0", "grey", "EXIF"])]
    expected = EncodedBatch(images).decode(CPU)
    refuse(monkeypatch, images[1].payload)
    batch = EncodedBatch(images)
    assert (batch.decode(CPU).int() - expected.int()).abs().max() <= 1
    assert batch.refused == [1]
    images[1] = images[1]._replace(payload=broken(bytes(images[1].payload)))
    refuse(monkeypatch, images[1].payload)
    with pytest.raises(UndecodableError) as caught:
        EncodedBatch(images).decode(CPU)
    assert caught.value.number == 1


def test_what_the_device_refuses_is_said_at_the_end_of_the_epoch(image_folder, monkeypatch, capsys):
    args = arguments(image_folder, "--workers", "0")
    dataset, _ = data.build_datasets(str(image_folder / "train"), str(image_folder / "val"), args)
    sampler = TrainSampler(len(dataset), VirtualShards(8, 2), seed=3)
    loader = data.build_device_loader(args, dataset, sampler, CPU, 3)
    number = int(next(iter(sampler)))
    refuse(monkeypatch, dataset.index.read(number))
    for _ in range(2):  # counted anew in each epoch
        list(loader)
    capsys.readouterr()
    data.report_images(loader, 1)
    line = capsys.readouterr().out
    assert line.startswith("Epoch: [1] 1 image had to be decoded by Pillow and not on cpu, ")
    assert line.endswith(f"(1 sample): {dataset.index.path(number)}\n")


def test_where_the_device_decodes_nothing_the_cpu_does_and_says_so(started, image_folder, tmp_path):
    assert find_obstacle(CPU) == "--device cpu decodes none"
    from tests.started import run_train

    argv = [*started.argv, "--output-dir", tmp_path / "out", "--epochs", 2, "--decode-device", "cuda"]
    outcome = run_train(tmp_path, *argv)
    outcome.check()
    assert outcome.output.count("--decode-device cuda: --device cpu decodes none; images are decoded on the CPU") == 1
    ours, theirs = (load_checkpoint(folder / "checkpoint.pth", "it") for folder in (tmp_path / "out", started.out))
    assert ours["args"]["decode_device"] == "cpu"
    assert all(torch.equal(value, theirs["model"][name]) for name, value in ours["model"].items())


def test_a_shortage_of_memory_is_not_taken_for_a_bad_image(monkeypatch):
    from torchcodec import decoders

    def run_out(jpegs, **options):
        raise torch.OutOfMemoryError("out of memory")

    images = [ClassificationPresetEval(crop_size=24, resize_size=32, leaves_decoding=True).load(FILES["4:2:0"])]
    monkeypatch.setattr(decoders, "decode_jpeg", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        EncodedBatch(images).decode(CPU)


def test_a_resumed_run_decodes_where_it_began(capsys):
    def settled(there, *argv):
        args = config.parse_args(["--data-path", "x", "--device", "cpu", "--decode-device", "cuda", *argv])
        where = encoded.settle_decode_device(args, CPU, {"args": {} if there is None else {"decode_device": there}})
        return where, capsys.readouterr().out

    for there in ("cpu", None):
        assert settled(there) == ("cpu", "--decode-device cpu: as in the checkpoint\n")
    for there, argv in [("cuda", []), ("cpu", ["--resume", "auto", "--allow-change", "decode-device"])]:
        decode_device, output = settled(there, *argv)
        assert decode_device == "cpu"  # and then the guard has its say
        assert "--device cpu decodes none" in output


def test_options_that_need_pixels_are_said_to_win():
    for argv, reason in [
        (["--auto-augment", "ra"], "--auto-augment ra works on images on the CPU"),
        (["--backend", "pil"], "exact pixels"),
        (["--synthetic"], "made-up images"),
    ]:
        args = config.parse_args(["--data-path", "x", "--device", "cpu", "--decode-device", "cuda", *argv])
        record, lines = config.on_machine(args)
        assert [line for line in lines if "--decode-device cuda has no effect" in line and reason in line]
        assert record.decode_device == "cpu"
    with pytest.raises(UserError, match="--bad-images skip: with --decode-device cuda"):
        config.parse_args(["--data-path", "x", "--decode-device", "cuda", "--bad-images", "skip"])

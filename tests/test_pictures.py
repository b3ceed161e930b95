"""Pictures of a run: their numbers by scikit-learn, their pixels read back, and the same files after kills."""

import io
import json
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import data
import sampler
from checkpointing.folder import OWN_FILES, PICTURES
from loading.forms import open_source
from monitoring import pictures
from presets import ClassificationPresetTrain
from tests.started import SMALL, run_train
from transforms import Normalize, RandomCutMix, pack_box

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def predictions(num_images=3000, num_classes=30, seed=0):
    generator = numpy.random.default_rng(seed)
    target = generator.integers(0, num_classes - 1, num_images)  # the last class has no images
    near = (target + generator.geometric(0.4, num_images) * generator.choice([-1, 1], num_images)) % num_classes
    predicted = numpy.where(generator.random(num_images) < 0.6, target, near)
    confidence = generator.integers(1, 301, num_images) / 300
    return pictures.Predictions(numpy.arange(num_images), target, predicted, confidence)


def test_the_numbers_are_those_of_scikit_learn():
    from sklearn.metrics import confusion_matrix

    found = predictions()
    whole = confusion_matrix(found.target, found.predicted, labels=range(30))
    chosen = pictures.find_confused(found, 30)
    counts = pictures.count_confusion(found, chosen, 30)
    assert numpy.array_equal(counts[:, :-1], whole[numpy.ix_(chosen, chosen)])
    assert numpy.array_equal(counts.sum(axis=1), whole.sum(axis=1)[chosen])


def cell(sheet, place, side):
    left, top = pictures.corner_of(place, side)
    return numpy.asarray(sheet)[top : top + side, left : left + side]


@pytest.mark.parametrize(("size", "shown"), [(32, 160), (120, 120)])
def test_a_mixed_batch_is_shown_pixel_for_pixel_with_its_shares(size, shown):
    image = torch.randint(0, 256, (6, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    names = ["cat", "dog", "a\nname\udc80"]
    batch = Normalize(MEAN, STD, torch.device("cpu"))(image)
    half = pack_box((0, 0, size // 4, size), size, size)
    mixed, target = RandomCutMix(3).mix(batch, torch.tensor([0, 1, 2, 0, 0, 1]), half)
    sheet = pictures.draw_batch("title", mixed, target, names, MEAN, STD)
    for place in range(6):
        expected = image[place].clone()
        expected[:, :, : size // 4] = image[place - 1][:, :, : size // 4]
        expected = expected.permute(1, 2, 0).numpy().repeat(shown // size, 0).repeat(shown // size, 1)
        assert numpy.array_equal(cell(sheet, place, shown), expected)
    captions = [
        ["75% cat", "25% dog"], ["75% dog", "25% cat"], ["75% a?name?", "25% dog"], ["75% cat", "25% a?name?"],
        ["cat"], ["75% dog", "25% cat"],
    ]  # fmt: skip
    squares = [Image.fromarray(cell(sheet, place, shown)) for place in range(6)]
    assert sheet.tobytes() == pictures.draw_grid("title", squares, captions).tobytes()
    captions[4] = ["99% cat"]
    assert sheet.tobytes() != pictures.draw_grid("title", squares, captions).tobytes()


def pictures_of(folder, images, *, step=3, bests=None):
    run = SimpleNamespace(is_resumed=False, is_evaluated=True, parts={}, step=step, steps_per_epoch=3)
    run.bests = {"best": bests}
    run.best_now = ["best"] if bests and bests["step"] == step else []
    index = open_source(images)
    return pictures.Pictures(folder, run, None, SimpleNamespace(index=index, classes=index.classes, transform=None))


def scores_of(numbers):  # of images, without a model
    return torch.stack([torch.randn(3, generator=torch.Generator().manual_seed(int(each))) for each in numbers])


def evaluate(drawing):
    index = drawing.val.index
    for batch in torch.arange(len(index)).split(3):
        labels = torch.tensor([index.label(number) for number in batch.tolist()])
        drawing.observe("val", scores_of(batch), labels, batch)
    drawing.draw()


def test_the_images_of_the_surest_mistakes_are_shown(image_folder, tmp_path):
    index = open_source(image_folder / "val")
    evaluate(pictures_of(tmp_path, image_folder / "val"))
    scores = scores_of(range(7)).softmax(1)
    wrong = [number for number in range(7) if int(scores[number].argmax()) != index.label(number)]
    wrong.sort(key=lambda number: -float(scores[number].max()))
    assert len(wrong) > 2
    counts = json.loads((tmp_path / "picture-counts-00000003.json").read_text())
    for number, (*words, share) in zip(wrong, counts["mistakes"], strict=True):
        names = [f"class{label}" for label in (index.label(number), int(scores[number].argmax()))]
        assert words == [index.path(number), *names]
        assert share == pytest.approx(float(scores[number].max()))
    sheet = Image.open(tmp_path / "picture-mistakes-00000003.png")
    for place, number in enumerate(wrong):
        with Image.open(io.BytesIO(index.read(number))) as image:
            square = image.crop((4, 0, 36, 32)).resize((160, 160), Image.Resampling.BICUBIC)  # of 40 x 32 pixels
        inner = slice(10, -10)  # at its edges the crop lacks its neighbours
        shown = cell(sheet, place, 160)[inner, inner].astype(int)
        assert abs(shown - numpy.asarray(square)[inner, inner]).max() <= 1


def test_pictures_of_a_long_run_are_few(image_folder, tmp_path):
    best = None
    for epoch in range(1, 41):
        if epoch in (1, 2, 11, 25):
            best = {"step": 3 * epoch}
        evaluate(pictures_of(tmp_path, image_folder / "val", step=3 * epoch, bests=best))
    names = [path.name for path in tmp_path.glob("picture-*")]
    assert {int(PICTURES.fullmatch(name)["step"]) for name in names} == {3 * 25, 3 * 40}
    assert all(OWN_FILES.fullmatch(name) for name in names)  # which --overwrite removes
    files = [json.loads((tmp_path / f"picture-counts-{step:08d}.json").read_text())["best"] for step in (75, 120)]
    assert files == ["best.pth", None]


def test_the_first_batch_is_what_the_model_sees(image_folder, tmp_path):
    argv = ["--data-path", image_folder, "--output-dir", tmp_path / "out", *SMALL, "--epochs", 1]
    run_train(tmp_path, *argv, "--batch-size", 4, "--global-batch-size", 8).check()
    images = data.IndexedImageFolder(image_folder / "train", ClassificationPresetTrain(crop_size=32))
    order = sampler.TrainSampler(29, sampler.VirtualShards(8, 2)).epoch_order()[:8:2].tolist()
    loaded = [images.load(sampler.SampleKey(number, 0)) for number in order]
    squares = [Image.fromarray(image.permute(1, 2, 0).numpy()).resize((160, 160), 0) for image, *_ in loaded]
    captions = [[f"class{label}"] for _, label in loaded]
    expected = pictures.draw_grid("first batch of 4 as the model sees it", squares, captions)
    assert Image.open(tmp_path / "out" / "picture-first-batch-00000000.png").tobytes() == expected.tobytes()


def test_tensorboards_file_shows_the_pictures_and_few_however_many_evaluations_there_are(image_folder, tmp_path):
    out = tmp_path / "out"
    argv = ["--data-path", image_folder, "--output-dir", out, *SMALL, "--batch-size", 8, "--lr", 0]
    run_train(tmp_path, *argv, "--epochs", 20).check()
    run_train(tmp_path, *argv, "--epochs", 30, "--resume", "auto", "--allow-change", "epochs").check()
    found = EventAccumulator(str(out), size_guidance={"images": 0, "scalars": 0}).Reload()
    assert [event.step for event in found.Scalars("val/loss")] == list(range(3, 93, 3))
    assert sorted(found.Tags()["images"]) == ["first-batch", "mistakes"]
    (first,), (*others, newest) = found.Images("first-batch"), found.Images("mistakes")
    assert first.encoded_image_string == (out / "picture-first-batch-00000000.png").read_bytes()
    assert newest.encoded_image_string == (out / "picture-mistakes-00000090.png").read_bytes()
    assert (newest.step, len(others) < 12) == (90, True), others
    with Image.open(io.BytesIO(newest.encoded_image_string)) as image:
        assert image.size == (newest.width, newest.height)
    assert len(list(out.glob("events.*"))) == 1

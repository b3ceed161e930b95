"""Parts of a set: a minival that is held out, and the images of a trial."""

import hashlib

import pytest

import config
import data
from errors import UserError
from loading.forms import open_source
from loading.source import Subset, first_of_each_class, minival_numbers, without
from monitoring import preview
from tests.images import write_images


def arguments(folder, *argv):
    sizes = ["--train-crop-size", "32", "--val-resize-size", "32", "--val-crop-size", "32"]
    words = ["--data-path", folder, "--device", "cpu", "--workers", "0", "--batch-size", "4", *sizes, *argv]
    return config.parse_args([str(word) for word in words])


def sets_of(folder, *argv):
    args = arguments(folder, *argv)
    return data.build_datasets(*config.split_dirs(args), args)


def names_of(source):
    return [source.name(number) for number in range(len(source))]


def held_out(folder, fraction):
    """Return the names that the documented formula holds out of the files in a folder of class folders."""
    held = set()
    for directory in folder.iterdir():
        names = [f"{directory.name}/{path.name}" for path in directory.iterdir()]
        names.sort(key=lambda name: hashlib.sha256(name.encode()).hexdigest())
        held |= set(names[: max(int(fraction * len(names) + 0.5), 1)])
    return held


@pytest.mark.parametrize("fraction", [0.02, 0.2, 0.45])
def test_a_minival_is_the_images_of_smallest_hashes_of_each_class(image_folder, fraction):
    train, minival = sets_of(image_folder, "--minival", fraction)
    assert set(names_of(minival.index)) == held_out(image_folder / "train", fraction)
    whole = {str(path.relative_to(image_folder / "train")) for path in (image_folder / "train").rglob("*.jpg")}
    assert sorted(names_of(train.index) + names_of(minival.index)) == sorted(whole)
    assert train.classes == minival.classes == ["class0", "class1", "class2"]


def test_each_class_has_at_least_one_image_on_either_side_where_it_has_two(tmp_path):
    source = open_source(write_images(tmp_path, {"train": [1, 2, 3, 40]}) / "train")
    held = minival_numbers(source, 0.01)
    assert sorted(source.label(number) for number in held) == [1, 2, 3]
    assert len(minival_numbers(source, 0.5)) == 0 + 1 + 2 + 20
    assert set(held) < set(minival_numbers(source, 0.1)) < set(minival_numbers(source, 0.5))


def test_nothing_to_hold_out_is_refused(tmp_path):
    write_images(tmp_path, {"train": [1, 1]})
    with pytest.raises(UserError, match="has one image of each class, and none to hold out"):
        sets_of(tmp_path, "--minival", "0.5")


def test_a_part_has_the_images_of_the_whole_under_new_numbers(image_folder):
    whole = open_source(image_folder / "train")
    part = Subset(whole, [20, 3, 11])
    for ours, theirs in enumerate([3, 11, 20]):
        assert part.name(ours) == whole.name(theirs)
        assert part.label(ours) == whole.label(theirs)
        assert part.read(ours) == whole.read(theirs)
        assert part.path(ours) == whole.path(theirs)
        assert part.size(ours) == len(whole.read(theirs))
    assert names_of(Subset(part, [0, 2])) == [whole.name(3), whole.name(20)]
    assert names_of(without(part, [1])) == [whole.name(3), whole.name(20)]
    assert len({part.fingerprint(), whole.fingerprint(), Subset(part, [0, 2]).fingerprint()}) == 3
    assert Subset(part, [0, 2]).fingerprint() == Subset(whole, [3, 20]).fingerprint()


@pytest.mark.parametrize(
    ("num_images", "of_each"), [(1, [1, 0, 0]), (7, [3, 2, 2]), (9, [3, 3, 3]), (28, [10, 10, 8]), (29, [11, 10, 8])]
)
def test_a_trial_takes_the_first_of_each_class_in_turn(image_folder, num_images, of_each):
    source = open_source(image_folder / "train")
    names = [source.name(number) for number in first_of_each_class(source, num_images)]
    assert names == [f"class{c}/image{n:03d}.jpg" for c, count in enumerate(of_each) for n in range(count)]


def test_without_val_there_is_a_validation_part(image_folder, tmp_path):
    (tmp_path / "train").symlink_to(image_folder / "train")
    assert list(map(len, sets_of(tmp_path, "--minival", 0.1))) == [26, 3]
    assert sets_of(tmp_path, "--minival", 0.1, "--test-only", "--weights", "DEFAULT")[0] is None


def test_a_preview_counts_the_images_that_are_trained_on(image_folder):
    assert "5 steps an epoch" in preview.preview(arguments(image_folder, "--minival", 0.2))  # of 23 images

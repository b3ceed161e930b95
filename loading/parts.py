"""Parts of a set of images: what `--minival` holds out, and the few images of a trial."""

from errors import UserError
from loading.source import Source
from loading.subset import Subset, first_of_each_class, minival_numbers, without


def hold_out(source: Source, fraction: float | None, fold: int = 0) -> tuple[Source, Source | None]:
    """Return the images that `--minival` holds out, and the others; without it all, and None. UserError if too few."""
    if not fraction:
        return source, None
    held = minival_numbers(source, fraction, fold)
    if not held:
        raise UserError(f"--minival {fraction}: {source.where} has too few images in each class to hold out")
    part = f"minival, fold {fold}" if fold else "minival"
    print(f"{part}: {len(held):,} of {len(source):,} training images are held out, and evaluated in place of val/")
    return Subset(source, held), without(source, held)


def limit_images(source: Source, num_images: int, flag: str) -> Source:
    """Return the first images of each class in turn, `num_images` in all, or all of a source of no more."""
    if num_images >= len(source):
        return source
    print(f"{flag} {num_images}: a trial on {num_images:,} of {len(source):,} images, the first of each class in turn")
    return Subset(source, first_of_each_class(source, num_images))

"""Write scikit-learn's handwritten digits as an image folder: real data to try everything on, from no download.

1,797 grey images of 8 x 8 px in ten classes (Alpaydin and Kaynak, UCI Machine Learning Repository, 1998). Every fifth
image of a class goes to val/, the others to train/; the split is fixed.
"""

import argparse
import sys
from pathlib import Path

from PIL import Image


def write_digits(folder: Path) -> tuple[int, int]:
    """Write train/ and val/ with ten class folders each, and return how many images went where."""
    from sklearn.datasets import load_digits  # a development requirement

    digits = load_digits()
    counts = {"train": 0, "val": 0}
    seen = [0] * 10
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "val" if seen[label] % 5 == 4 else "train"
        seen[label] += 1
        counts[split] += 1
        path = folder / split / str(label) / f"digit-{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Grey levels go from 0 to 16.
        Image.fromarray((pixels * 255 / 16).round().astype("uint8")).save(path)
    return counts["train"], counts["val"]


def main() -> None:
    """Write the digits where the command line says."""
    parser = argparse.ArgumentParser(prog="python -m scripts.make_digits", description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="DIR", type=Path, help="where train/ and val/ go, such as data/digits")
    folder = parser.parse_args().folder
    try:
        num_train, num_val = write_digits(folder)
    except ImportError:
        sys.exit(f"{parser.prog}: error: scikit-learn, which ships the digits, is missing; pip install scikit-learn")
    except OSError as error:
        sys.exit(f"{parser.prog}: error: cannot write to {folder}: {error.strerror}")
    print(f"wrote {num_train} training and {num_val} validation images to {folder}")


if __name__ == "__main__":
    main()

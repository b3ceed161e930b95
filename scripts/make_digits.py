"""Write scikit-learn's handwritten digits as an image folder: real data to try everything on, without a download.

1,797 grey images of 8 x 8 px in ten classes (Alpaydin and Kaynak, UCI Machine Learning Repository, 1998). Every fifth
image of a class goes to val/, the others to train/; the split is fixed.

Example:
  python -m scripts.make_digits data/digits
"""

import re
from collections import Counter
from pathlib import Path

from PIL import Image

from errors import UserError, one_line
from scripts.tool import as_path, build_parser, run

PROG = "python -m scripts.make_digits"


def write_digits(folder: Path) -> None:
    """Write train/ and val/ with ten class folders each."""
    try:
        from sklearn.datasets import load_digits  # a development requirement
    except ImportError as error:
        raise UserError("scikit-learn, which ships the digits, is missing; pip install scikit-learn") from error
    for path in [*folder.glob("train/**/*"), *folder.glob("val/**/*")]:
        if not re.fullmatch(r"(train|val)/\d(/digit-\d{4}\.png)?", str(path.relative_to(folder))) or path.is_symlink():
            raise UserError(f"{path} is not one of these digits, and stays; choose a new or empty folder")
    digits = load_digits()
    counts, seen = Counter(), Counter()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        seen[label] += 1
        split = "train" if seen[label] % 5 else "val"
        counts[split] += 1
        path = folder / split / str(label) / f"digit-{number:04d}.png"
        image = Image.fromarray((pixels * 255 / 16).round().astype("uint8"))  # grey levels go from 0 to 16
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
        except OSError as error:
            raise UserError(f"{folder} cannot be written to: {error.strerror}; choose another DIR") from error
    print(one_line(f"wrote {counts['train']} training and {counts['val']} validation images to {folder}"))


def main() -> None:
    """Write the digits to the folder that the command line names."""
    parser = build_parser(PROG, "DIR", __doc__)
    parser.add_argument("folder", metavar="DIR", type=as_path, help="gets train/ and val/, such as data/digits")
    run(PROG, lambda: write_digits(parser.parse_args().folder), "interrupted; the same command writes all images again")


if __name__ == "__main__":
    main()

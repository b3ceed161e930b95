"""Miniature archives of ImageNet in the official formats, Kaggle's layout and Hugging Face's parquet files."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy
from PIL import Image

# ILSVRC2012_ID, synset and words of some classes, as the official devkit has them; the numbers are in no order.
SYNSETS = {
    1: ("n02119789", "kit fox, Vulpes macrotis"),
    2: ("n02100735", "English setter"),
    3: ("n02110185", "Siberian husky"),
    490: ("n01751748", "sea snake"),
    444: ("n01440764", "tench, Tinca tinca"),
    449: ("n01443537", "goldfish, Carassius auratus"),
}
VAL_IDS = [490, 1, 449, 444, 2, 3, 3, 490, 444, 1, 2, 449]


def jpeg(seed: int) -> bytes:
    pixels = numpy.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=numpy.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((50, 40), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


def tree() -> dict[str, bytes]:
    images = {}
    for number, (synset, _) in enumerate(SYNSETS.values()):
        for image in range(3 + number % 3):
            images[f"train/{synset}/{synset}_{7 * image + 2}.JPEG"] = jpeg(100 * number + image)
    for number, label in enumerate(VAL_IDS, 1):
        images[f"val/{SYNSETS[label][0]}/ILSVRC2012_val_{number:08d}.JPEG"] = jpeg(1000 + number)
    return images


def tar_of(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, payload in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(payload)
            tar.addfile(member, io.BytesIO(payload))
    return content.getvalue()


def devkit(synsets: dict[int, tuple[str, str]], val_ids: list[int]) -> bytes:
    """Return the devkit's archive, with a meta.mat by scipy: a (1 + N, 1) array of structs, as the official one."""
    from scipy import io as scipy_io

    rows = [(number, *names, 0) for number, names in synsets.items()]
    rows += [(1001, "n02083346", "canine, canid", 2)]  # a node of WordNet above the classes, and no class
    names = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children"]
    table = numpy.empty((len(rows), 1), dtype=[(name, object) for name in names])
    for place, (number, synset, words, num_children) in enumerate(rows):
        table[place, 0] = float(number), synset, words, "", float(num_children), numpy.ones((1, num_children))
    meta = io.BytesIO()
    scipy_io.savemat(meta, {"synsets": table}, do_compression=True)
    truth = "".join(f"{label}\n" for label in val_ids).encode()
    files = {"meta.mat": meta.getvalue(), "ILSVRC2012_validation_ground_truth.txt": truth}
    return gzip.compress(tar_of({f"ILSVRC2012_devkit_t12/data/{name}": payload for name, payload in files.items()}))


def write_official(folder: Path) -> Path:
    """Write the three official archives; the order in them is another one than that of the names."""
    folder.mkdir(parents=True)
    class_tars, flat = {}, {}
    for path, payload in sorted(tree().items(), reverse=True):
        split, synset, file = path.split("/")
        images = flat if split == "val" else class_tars.setdefault(f"{synset}.tar", {})
        images[file] = payload
    class_tars = {name: tar_of(images) for name, images in class_tars.items()}
    (folder / "ILSVRC2012_img_train.tar").write_bytes(tar_of(class_tars))
    (folder / "ILSVRC2012_img_val.tar").write_bytes(tar_of(flat))
    (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(devkit(SYNSETS, VAL_IDS))
    return folder


def write_kaggle(folder: Path) -> Path:
    """Write Kaggle's layout: class folders for train, a flat val and a table of its classes."""
    rows = ["ImageId,PredictionString"]
    for path, payload in tree().items():
        split, synset, file = path.split("/")
        target = folder / "ILSVRC/Data/CLS-LOC" / (f"train/{synset}" if split == "train" else "val") / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(payload)
        if split == "val":
            rows.insert(1, f"{file.removesuffix('.JPEG')},{synset} 85 1 499 272 {synset} 5 6 7 8 ")
    (folder / "LOC_val_solution.csv").write_text("\n".join(rows) + "\n")
    return folder


def write_parquet(folder: Path, *, has_paths: bool = True) -> Path:
    """Write Hugging Face's form: two files a split, rows in no order, the synset behind each file's name."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True)
    rows = {"train": [], "validation": []}
    for path, payload in sorted(tree().items(), key=lambda item: item[1][-40:]):
        split, synset, file = path.split("/")
        name = f"{file.removesuffix('.JPEG')}_{synset}.JPEG" if has_paths else None
        rows["train" if split == "train" else "validation"].append({"image": {"bytes": payload, "path": name}})
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    for split, images in rows.items():
        for number in range(2):
            table = pyarrow.Table.from_pylist(images[number::2], schema=pyarrow.schema([("image", kind)]))
            parquet.write_table(table, folder / f"{split}-{number:05d}-of-00002.parquet")
    return folder

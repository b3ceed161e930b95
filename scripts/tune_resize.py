"""Find the sizes at which a model is evaluated best: `python -m scripts.tune_resize CHECKPOINT --data-path DIR`."""

import argparse
import math
import re
from pathlib import Path
from typing import Any

import config
import models
from data import IndexedImageFolder
from errors import UserError, aligned
from options import BY_NAME
from presets import build_presets
from scripts.evaluate import open_folder, score_set
from scripts.tool import as_json, build_parser, output_file, run, write_output
from scripts.trained import Evaluation, Trained, add_machine_options, add_options, open_given, settle

PROG = "python -m scripts.tune_resize"

EPILOG = """\
examples:
  python -m scripts.tune_resize best.pth --data-path /data/imagenet --resize 224-288:16
  python -m scripts.tune_resize resnet50.IMAGENET1K_V1 --data-path /data/imagenet --crop 224,256 --json sweep.json
  python -m scripts.tune_resize best_ema.pth --ema --data-path /data/imagenet --resize 224,232,256

Each cell of the table is Acc@1 on all images of val/, as scripts.evaluate computes it with --val-resize-size (the
shorter side, rows) and --val-crop-size (columns). Crops larger than the image are left out. Training with random crops
shows objects larger than evaluation does, so that a model is often best at larger crops than it was trained with
(Touvron et al., arXiv 1906.06423). Sizes that the model cannot take are refused.

Accuracy looks better than it is on the images on which the sizes were chosen: give --data-path a folder whose val/
holds other images, such as a part of train/.
"""

# The first size, the last one and the step; at most nine digits each, which int() takes.
_RANGE = re.compile(r"([1-9]\d{0,8})(?:-([1-9]\d{0,8}))?(?::([1-9]\d{0,8}))?", re.ASCII)


def sizes(text: str) -> list[int]:
    """Return the sizes that 224-288:16 or 224,256 means, in ascending order; an argparse type."""
    option, found = BY_NAME["val_crop_size"], set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last, step = (int(number or 0) for number in match.groups()) if match else (0, 0, 0)
        # Before the range is built, which may be one of billions.
        if not option.at_least <= first <= (last or first) <= option.at_most:
            raise argparse.ArgumentTypeError(
                f"{text}: expected sizes such as 224-288:16 or 224,256, from {option.at_least} to {option.at_most}"
            )
        found.update(range(first, (last or first) + 1, step or 1))
    return sorted(found)


def sweep(trained: Trained, args: config.Record, cells: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return the results of an evaluation at each (resize, crop)."""
    crops = sorted({crop for _, crop in cells})
    for crop in crops:
        models.check_sizes(trained.model, args.replaced(val_crop_size=crop))
    trained.model.eval()
    images = open_folder(Path(args.data_path) / "val", trained)
    presets = [build_presets(args.replaced(val_resize_size=resize, val_crop_size=crop))[1] for resize, crop in cells]
    sets = [IndexedImageFolder(images.source.root, preset, source=images.source) for preset in presets]
    # Loaders reserve memory for the largest crop.
    evaluation = Evaluation(trained, args.replaced(val_crop_size=crops[-1]), sets)
    results = []
    for place, (resize, crop) in enumerate(cells):
        ranks, nll, *_ = score_set(images, place, evaluation, 1, f"resize {resize}, crop {crop}").T
        results.append({
            "resize": resize, "crop": crop, "acc1": 100 * float((ranks < 1).mean()),
            "acc5": 100 * float((ranks < 5).mean()), "nll": math.fsum(nll) / len(nll), "n": len(ranks),
        })  # fmt: skip
    return results


def table(results: list[dict], best: dict) -> str:
    """Return Acc@1 by resize (rows) and crop (columns), the best one with a star."""
    crops = sorted({result["crop"] for result in results})
    rows = [["resize", *(f"crop {crop} " for crop in crops)]]
    for resize in sorted({result["resize"] for result in results}):
        found = {result["crop"]: result for result in results if result["resize"] == resize}
        marks = {crop: "*" if found.get(crop) is best else " " for crop in crops}
        rows.append(
            [str(resize), *(f"{found[crop]['acc1']:.3f}{marks[crop]}" if crop in found else "- " for crop in crops)]
        )
    return "\n".join(aligned(rows))


def work(options: argparse.Namespace) -> None:
    """Print the table, and write the files that the options name."""
    trained = open_given(options)
    args = settle(trained, options)
    crops = options.crop or [args.val_crop_size]
    resizes = options.resize or sorted({*range(min(crops), min(crops) + 65, 16), args.val_resize_size})
    cells = [(resize, crop) for resize in resizes for crop in crops if crop <= resize]
    if not cells:
        raise UserError(f"--crop {min(crops)} is larger than --resize {max(resizes)}; give a crop within the image")
    results = sweep(trained, args, cells)
    # Of equal results the one at the smallest sizes.
    best = min(results, key=lambda result: (-result["acc1"], result["crop"], result["resize"]))
    if options.json:
        content = {"checkpoint": options.checkpoint, "weights": trained.kind, "preprocessing": trained.preprocessing,
                   "best": best, "results": results}  # fmt: skip
        write_output(options.json, as_json(content), "--json")
    print(table(results, best))
    print(
        f"best: --val-resize-size {best['resize']} --val-crop-size {best['crop']}: Acc@1 {best['acc1']:.3f} "
        f"n={best['n']} (the checkpoint's own: {args.val_resize_size}, {args.val_crop_size})"
    )


def main() -> None:
    """Sweep the sizes of the command line."""
    usage = "CHECKPOINT --data-path DIR [options]"
    parser = build_parser(PROG, usage, "Evaluate at several sizes: a table of Acc@1.", EPILOG)
    add_options(parser)
    parser.add_argument("--data-path", metavar="DIR", required=True, help="as train.py's; its val/ is read")
    default = "from the crop on, 64 px in steps of 16"
    parser.add_argument("--resize", metavar="PX", type=sizes, help=f"224-288:16 or 224,256 (default: {default})")
    parser.add_argument("--crop", metavar="PX", type=sizes, help="likewise (default: the checkpoint's own)")
    parser.add_argument("--json", metavar="FILE", type=output_file(".json"), help="write all results to FILE")
    add_machine_options(parser)
    run(PROG, lambda: work(parser.parse_args()), "interrupted; start it again: nothing is kept")


if __name__ == "__main__":
    main()

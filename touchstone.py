"""Train and predict from a notebook: options as keywords, a curve in the cell, mistakes of one line.

    from touchstone import fit, open_trained

    run = fit(data_path="photos", minival=0.2, model="resnet50", weights="IMAGENET1K_V2", freeze=True, epochs=5)
    classes, shares = open_trained(run.best).predict(["cat.jpg", "dog.jpg"])

docs/notebook.md is its page, and examples/notebook.ipynb uses all of it. The script does not import it.
"""

import copy
import sys
import time
import traceback
from contextlib import redirect_stdout
from html import escape
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from distributed.ending import explain_limit
from errors import PreemptedError, UserError, as_user_error, warn_on_failure
from files import read_json
from loading.decode import decode_plainly
from models.classifier import classifier_layers
from scripts import predict, report, trained
from settings import config
from settings.machine import default_folder
from settings.rules import as_list, flag_of
from train import main


class Fitted:
    """A run, by its folder: `Fitted("runs/a")` is one of an earlier day.

    Attributes:
        folder: its --output-dir.
        state: finished, preempted (by a stop), stopped (by `stop_epoch`), failed or running, as in its status.json.
        best: the checkpoint of its best evaluation; the newest checkpoint if there was none.
        result: the record of that evaluation in metrics.jsonl; {} if there was none.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.state = read_json(self.folder / "status.json").get("state")
        self.best = next(self.folder.glob("best.pth"), self.folder / "checkpoint.pth")
        run = report.LoggedRun(self.folder)
        metric = report.best_metric(run)
        kind = "minival" if run.points("minival", metric) else "val"
        end = kind, report.best_step(run, kind, metric)
        self.result = next((each for each in run.records if (each["kind"], each["step"]) == end), {})

    def __repr__(self) -> str:
        return f"{self.state} run in {self.folder}, best: {self.result}"

    def records(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, for `pandas.DataFrame`."""
        return report.LoggedRun(self.folder).records


def fit(**options: Any) -> Fitted:
    """Train as train.py with these options; return the run, finished or as a stop of the notebook has left it.

    They are named as in `train.py --help`, with underscores. True is the switch, False its --no- form, a list several
    values, and None leaves an option out. After a stop `resume="auto"` goes on.

    Raises:
        UserError: an option, the data or the machine will not do; a notebook shows one line.
        KeyboardInterrupt: the notebook was stopped a second time, before the run had saved.
    """
    words: list[str] = []
    for name, value in options.items():
        if value is not None:
            values = [] if isinstance(value, bool) else as_list(value)
            words += [flag_of(f"no_{name}" if value is False else name), *map(str, values)]
    args = config.parse_args(words)
    if args.checkpoint.test_only or args.start.dry_run or args.start.list_recipes is not None:
        raise UserError("fit only trains: for --test-only, --dry-run and --list-recipes, `!python train.py ...`")
    folder = Path(args.checkpoint.output_dir or default_folder(args.model.model))
    is_in_cell = hasattr(getattr(sys.modules.get("IPython"), "get_ipython", object)(), "kernel")
    cell = _Cell(folder) if is_in_cell else None
    try:
        with redirect_stdout(cell or sys.stdout):
            main(args)
    except PreemptedError as stop:
        print(f'{stop}; resume="auto" continues')
    except (Exception, KeyboardInterrupt) as error:
        # The notebook keeps the error, and with its frames would keep the model in the device's memory.
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt('resume="auto" continues from the last checkpoint') from None
        raise explain_limit(error) or error from error.__cause__
    if cell is not None:
        cell.show()
    return Fitted(folder)


class _Cell:
    """A stream to a notebook's cell, which shows the curves and the newest line of a loop above all other lines."""

    def __init__(self, folder: Path) -> None:
        from IPython import display

        self.folder, self.stream, self.html = folder, sys.stdout, display.HTML
        self.place = display.display(display.HTML(""), display_id=True)
        self.begun, self.due_s = "", 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Print whole lines, but for those of loops, which log.txt has."""
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            if "  eta: " not in line and " Total time: " not in line:
                self.stream.write(f"{line}\n")
            elif time.monotonic() > self.due_s:
                self.show(line)
        return len(text)

    def show(self, line: str = "") -> None:
        """Show a line, and the records of metrics.jsonl as curves."""
        begin_s = time.monotonic()
        if not warn_on_failure("this cell has no curves", self._draw, line):
            self.place.update(self.html(escape(line)))
        # Drawing takes a quarter of a second: at most a twentieth of the time.
        self.due_s = time.monotonic() + 20 * (time.monotonic() - begin_s)

    def _draw(self, line: str) -> None:
        run = report.LoggedRun(self.folder)
        figures = report.draw_curves({"": [run]})
        shown = {name: figures[name] for name in (report.best_metric(run), "loss") if name in figures}
        curves = report.show_curves(shown).replace("</span>", "&emsp;</span>").replace("<img", '<img width="49%"')
        self.place.update(self.html(f"{curves}<pre>{escape(line)}</pre>"))


class Model(trained.Trained):
    """A trained model, for images in files or in memory.

    Images are one, or a sequence, of paths, PIL images, and (H, W, 3) RGB or (H, W) grey uint8 arrays. An image that
    cannot be read is a UserError.
    """

    def predict(self, images: Any) -> tuple[list[Any], Any]:
        """Return the class of each image, and an (images, classes) float64 array of shares, whose rows add up to 1.

        With `--multi-label` an image has a list of classes, those above one half, and each share stands by itself.
        """
        logits = self._compute(self.model, images)
        trained.check_finite(logits, self.kind)
        names = self.classes or [str(label) for label in range(logits.size(1))]
        if self.args.data.multi_label:
            return [[names[label] for label in row.nonzero()] for row in logits > 0], logits.sigmoid().numpy()
        return [names[label] for label in logits.argmax(1)], logits.softmax(1).numpy()

    def features(self, images: Any) -> Any:
        """Return an (images, features) float64 array: what the last layer has the scores from."""
        body = copy.deepcopy(self.model).cpu()
        for name in classifier_layers(body, self._replace(model=body).count_classes()):
            body.set_submodule(name, torch.nn.Identity())
        return self._compute(body, images).numpy()

    def _compute(self, model: torch.nn.Module, images: Any) -> torch.Tensor:
        is_one = isinstance(images, str | Path | Image.Image) or getattr(images, "ndim", 4) < 4
        images = [images] if is_one else list(images)
        if not images:
            raise UserError("there are no images; give paths, PIL images or arrays")
        preset, device = self.preset, trained.tool_options(self, None).distributed.device
        model.to(device)
        batches = predict.load_batches(lambda image: _load(preset, image), images, 32, "computing")
        with torch.inference_mode():
            return torch.cat([model(torch.stack(batch).to(device)).cpu().double() for batch in batches])


def _load(preset: Any, image: Any) -> torch.Tensor:
    with as_user_error(f"{image if isinstance(image, str | Path) else type(image).__name__} cannot be read"):
        if isinstance(image, str | Path):
            return preset(predict.open_image(Path(image), preset.decoding))
        copied = image.copy() if isinstance(image, Image.Image) else Image.fromarray(image)
        if copied.mode[0] in "IF":
            raise UserError(f"Pillow's mode {copied.mode} has no fixed white; give uint8, or the path of a file")
        copied.format = getattr(image, "format", None)  # Pillow turns a TIFF by itself
        return preset(decode_plainly(b"", how=preset.decoding, image=copied))


def open_trained(source: str | Path, *, model: str | None = None, ema: bool = False) -> Model:
    """Return the model of a run's checkpoint, a file of weights, or a published name such as resnet50.IMAGENET1K_V2.

    `model` is its name where the file does not say it; with `ema` the weights are the average.
    """
    opened = trained.open_trained(str(source), model=model, is_average=ema)
    trained.show_preprocessing(opened)
    return Model(*opened)

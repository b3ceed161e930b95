"""Turn a trained model into files for others.

forms:
  weights       NAME-SHA256.pth: a state dict that torchvision's model loads, hashed as torch's hub checks it
  safetensors   NAME.safetensors: the same weights; opening it can run nothing
  onnx          NAME.onnx: one file, 2 GiB at most, of (batch, C, S, S) to logits
  torch-export  NAME.pt2: a program of torch.export, for torch without this code

Examples:
  python -m scripts.export runs/a/best.pth --format weights onnx --output exported
  python -m scripts.export runs/a/best_ema.pth --ema --format safetensors torch-export --output exported
  python -m scripts.export resnet50.IMAGENET1K_V2 --format onnx --output exported

NAME is the model's, and ends in -ema for averaged weights. Beside the files lies NAME.json, which describes them. Every
file holds the preprocessing and the names of the classes, except the .pth of `weights`, for which NAME.json holds
them. `python -m scripts.predict FILE IMAGE` reads each of these files.

Each file is read back and compared with the checkpoint before it gets its name: weights in every bit; the logits of a
graph for 1 and for 3 images may differ by 0.0001 of the largest logit, or of 1 if all are smaller.

A .pt2 is a program: open only those that you trust.
"""

import argparse
import hashlib
import importlib
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.archive import load_checkpoint
from errors import UserError, as_user_error, counted
from files import read_json
from loading.progress import size_text
from scripts.tool import as_json, as_path, build_parser, clean_stdout, make_out, run, write_output
from scripts.trained import (
    EXTRA_FILE,
    FORMAT,
    OPTIONS,
    Trained,
    add_options,
    check_finite,
    checked,
    open_from_options,
    open_graph,
    packed,
)
from settings.options import short_name
from settings.packages import require_package

PROG = "python -m scripts.export"

# For each form: the end of its file's name, after the model's; the packages that it needs.
FORMS = {
    "weights": ("-SHA256.pth", ()),
    "safetensors": (".safetensors", ("safetensors.torch",)),
    "onnx": (".onnx", ("onnx", "onnxscript", "onnxruntime")),
    "torch-export": (".pt2", ()),
}

# Largest difference of logits, as a share of the largest logit (of 1 if all are smaller): kernels sum in other orders.
TOLERANCE = 1e-4

# Numbers of images that graphs are compared for: one alone is a case of its own to compilers.
_PROBES = (1, 3)


class Export:
    """One model on its way into files, by the options of the command line."""

    def __init__(self, trained: Trained, options: argparse.Namespace) -> None:
        self.trained, self.model, self.folder = trained, trained.model, options.output
        self.name = short_name(trained.args.model.model).rpartition("/")[2] + ("-ema" if options.ema else "")
        size = trained.args.augmentation.val_crop_size
        self.probe = torch.randn(3, trained.args.data.in_chans, size, size, generator=torch.Generator().manual_seed(0))
        self.expected = {number: logits_of(self.model, self.probe[:number]) for number in _PROBES}
        check_finite(self.expected[1], options.checkpoint)
        stream = io.BytesIO()
        torch.save(trained.model.state_dict(), stream)
        self.weights = stream.getvalue()
        self.sha256 = hashlib.sha256(self.weights).hexdigest()
        self.description = describe(trained, self.expected[1].shape[1], self.sha256)
        self.record_path = self.folder / f"{self.name}.json"
        self.files = self._files_of_before()

    def _files_of_before(self) -> dict[str, dict]:
        """Return the records of an earlier export's files that still exist; refuse records of other weights."""
        record = read_json(self.record_path)
        files, named = record.get("files"), record.get("preprocessing")
        if isinstance(named, dict):  # the same values may come from elsewhere
            record["preprocessing"] = {**named, "origin": self.description["preprocessing"]["origin"]}
        differing = [name for name, value in self.description.items() if record.get(name) != value]
        if self.record_path.exists() and (differing or not isinstance(files, dict)):
            raise UserError(
                f"{self.record_path} describes other weights, by its {', '.join(differing) or 'files'}; give another "
                "--output, or remove it and its files"
            )
        return {name: facts for name, facts in (files or {}).items() if (self.folder / name).is_file()}

    def write(self, form: str) -> str:
        """Write one form, which gets its name once it is read back and compared; return a line about it."""
        make = {
            "weights": lambda: self.weights, "safetensors": self.make_safetensors, "onnx": self.make_onnx,
            "torch-export": self.make_program,
        }[form]  # fmt: skip
        with as_user_error(f"{self.trained.args.model.model} cannot be exported as {form}"):
            payload = make()
        path = self.folder / (self.name + FORMS[form][0].replace("SHA256", self.sha256[:8]))

        def verify(temporary: Path) -> None:
            facts = {"form": form, "bytes": len(payload), "sha256": hashlib.sha256(temporary.read_bytes()).hexdigest()}
            self.files[path.name] = {**facts, "compared": self.compare(form, temporary, path.name)}
            # Before the file has its name: no weights without a description.
            write_output(self.record_path, as_json({**self.description, "files": self.files}))

        write_output(path, payload, verify=verify)
        return f"{form}: {path}, {size_text(len(payload))}, {self.files[path.name]['compared']}"

    def compare(self, form: str, path: Path, name: str) -> str:
        """Return words about a written file beside the model; UserError if it holds another one.

        Weights must be equal in every bit, and the logits of a graph within `TOLERANCE`.
        """
        if form in ("weights", "safetensors"):
            own = self.model.state_dict()
            if form == "weights":
                found = load_checkpoint(path, name)
            else:
                found = importlib.import_module("safetensors.torch").load_file(path)
            wrong = [key for key in own.keys() | found.keys() if not _are_same(own.get(key), found.get(key))]
            if wrong:
                raise UserError(f"{name} was read back and {min(wrong)} differs from the checkpoint's; not written")
            return f"{counted(len(own), 'tensor')} equal in every bit"
        graph, description = open_graph(path, name)
        if description != self.description:
            raise UserError(f"{name} was read back, and its description is another one; not written")
        allowed = TOLERANCE * max(1.0, *(logits.abs().max().item() for logits in self.expected.values()))
        with as_user_error(f"{name} was read back and cannot compute"):
            found = {number: logits_of(graph, self.probe[:number]) for number in self.expected}
        largest = max((found[number] - logits).abs().max().item() for number, logits in self.expected.items())
        if not largest <= allowed:
            raise UserError(f"{name} was read back, and its logits are {largest:.2g} off (allowed {allowed:.2g})")
        return f"largest difference of logits {largest:.2g} (allowed {allowed:.2g})"

    def make_safetensors(self) -> bytes:
        """Return the weights as safetensors, with the description as metadata."""
        save = importlib.import_module("safetensors.torch").save
        tensors = {name: tensor.clone().contiguous() for name, tensor in self.model.state_dict().items()}
        return save(tensors, metadata={"format": "pt", **packed(self.description)})

    def make_onnx(self) -> bytes:
        """Return the model as one ONNX message."""
        more: dict[str, Any] = {"dynamic_shapes": ({0: "batch"},), "input_names": ["input"], "output_names": ["logits"]}
        program = torch.onnx.export(self.model, (self.probe[:2],), dynamo=True, verbose=False, **more)
        proto = program.model_proto
        importlib.import_module("onnx").helper.set_model_props(proto, packed(self.description))
        return proto.SerializeToString()

    def make_program(self) -> bytes:
        """Return the model as an exported program for batches of any size, as a .pt2 archive."""
        batch = ({0: torch.export.Dim("batch", min=1)},)
        program = torch.export.export(self.model, (self.probe[:2],), dynamic_shapes=batch)
        stream = io.BytesIO()
        torch.export.save(program, stream, extra_files={EXTRA_FILE: json.dumps(packed(self.description))})
        return stream.getvalue()


def describe(trained: Trained, num_classes: int, sha256: str) -> dict[str, Any]:
    """Return the facts that a user of a model needs."""
    args = trained.args
    values = args.flat()
    preprocessing = {key: values[option] for key, option in OPTIONS.items()}
    preprocessing |= {"backend": args.data.backend or "pil", "origin": trained.origin}
    weights = args.model.weights or ""  # a file's folders are nobody's business
    initial = (weights if weights.startswith("hf-hub:") else Path(weights).name) or None
    description = {
        "schema": FORMAT, "model": args.model.model, "weights": trained.kind.partition(",")[0], "sha256": sha256,
        "initial_weights": initial, "num_classes": num_classes, "classes": trained.classes,
        "preprocessing": preprocessing, "has_several_labels": bool(args.data.multi_label),
    }  # fmt: skip
    return checked(description, "the checkpoint")


def logits_of(model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Return (B, num_classes) float32 logits of images on the CPU."""
    with torch.no_grad():
        return model(images).float()


def _are_same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return ours.contiguous().view(-1).view(torch.uint8).equal(theirs.contiguous().view(-1).view(torch.uint8))


def export(options: argparse.Namespace) -> None:
    """Write the chosen forms."""
    chosen = list(dict.fromkeys(options.forms))
    for form in chosen:
        for package in FORMS[form][1]:
            require_package(package, f"--format {form}")
    trained = open_from_options(options)
    make_out(options.output, "--output")
    job = Export(trained, options)
    for form in chosen:
        with clean_stdout() as stdout:
            print(job.write(form), file=stdout, flush=True)


def main() -> None:
    """Export the model of the command line."""
    parser = build_parser(PROG, "CHECKPOINT --format NAME --output DIR [options]", __doc__)
    add_options(parser)
    add, text = parser.add_argument, f"the forms to write: {', '.join(FORMS)}"
    add("--format", metavar="NAME", nargs="+", choices=FORMS, required=True, dest="forms", help=text)
    add("--output", metavar="DIR", type=as_path, required=True, help="the folder to write to")
    logging.disable(logging.WARNING)  # torch's exporters report each of their passes
    run(PROG, lambda: export(parser.parse_args()), "interrupted; whole files stay; run the same command again")


if __name__ == "__main__":
    main()

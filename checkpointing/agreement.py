"""Compare the processes of a run: options, code, versions, images and first weights have to be those of rank 0."""

import hashlib
import json
import shlex
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from checkpointing.guard import describe_environment, describe_processor, describe_set
from distributed import collectives
from errors import UserError
from settings.options import BY_NAME, parse_allowed
from settings.rules import AS_TYPED, OWN
from settings.stages import Resolved

# Facts of the environment that may change rounding but no pixel: differences are printed, not refused.
_OF_MACHINE = ("cpu", "gpu", "processor", "python")

# How many differences a line names.
_MOST_NAMED = 12


def check_processes(args: Resolved) -> None:
    """Refuse ranks whose options, own code or versions are not rank 0's; print in what their machines differ.

    Call it right after the processes have joined: with other options they might wait for each other for ever.
    Collective: every rank must call it.
    """
    if collectives.get_world_size() == 1:
        return
    found = {**describe_environment(args.data, args.distributed), "processor": describe_processor()}
    versions = {name: [f"{name} {value}", ""] for name, value in found.items()}
    machine = {name: versions.pop(name) for name in ("threads", *_OF_MACHINE) if name in versions}
    machine["threads"] = [f"{found['threads']} threads (OMP_NUM_THREADS)", ""]
    ranks = collectives.gather_plain([{**_describe_options(args), **versions}, machine])
    must_agree = [rank[0] for rank in ranks]
    if args.precision.use_deterministic_algorithms and "threads" not in parse_allowed(args.checkpoint.allow_change):
        # Another number of threads is another order of sums, and with it other bits.
        must_agree = [{**rank[0], "threads": rank[1]["threads"]} for rank in ranks]
    differences = _differing(must_agree, "differs from")
    if differences:
        raise UserError(f"{differences}; start each with the same command, code and versions", has_lines=True)
    differences = _differing([rank[1] for rank in ranks], "computes otherwise than")
    if differences:
        # A cluster of two kinds of machines can train; what it cannot promise is said.
        if args.precision.use_deterministic_algorithms:
            differences += "; bit-identical results are not guaranteed"
        print(differences)


def check_images(datasets: tuple) -> tuple:
    """Return the data sets; UserError if a rank has other images than rank 0. Collective: every rank must call it.

    Of single files 64 sizes are compared and no content, of tars all sizes, of packs the checksums.

    Args:
        datasets: the training set or None, the validation set, and those of `--eval-data` by their names.
    """
    if collectives.get_world_size() == 1:
        return datasets
    # Two states of a pack under one name, one on each node, were trained on without a word.
    train, val, more = datasets
    ours = {"sets": [f"sets val {' '.join(more)}", ""]}  # in their order
    for name, dataset in {"train": train, "val": val, **more}.items():
        if dataset is not None:
            facts = describe_set(dataset)
            facts["classes"] = hashlib.sha256(json.dumps(list(dataset.classes)).encode()).hexdigest()[:16]
            del facts["path"], facts["times"]  # each machine may have a copy of its own
            whole = getattr(dataset.index, "whole", dataset.index)  # of a part of the images: its source
            # One by one, so that the message can name a file that differs.
            for text in (facts.pop("sample") or "").split():
                number, _, size = text.partition(":")
                facts[f"bytes of {whole.name(int(number))}"] = size
            ours |= {f"data of {name}: {key}": [f"data of {name}: {key} {facts[key]}", ""] for key in facts}
    ranks, verb = collectives.gather_plain(ours), "reads different images than"
    # A set that is missing comes first: all of its facts differ too, and would hide its name.
    differences = _differing([{"sets": rank["sets"]} for rank in ranks], verb) or _differing(ranks, verb)
    if differences:
        raise UserError(f"{differences}; give every process the same images", has_lines=True)
    return datasets


def check_weights(module: Any) -> Any:
    """Return a model or a loss; UserError if its parameters or buffers are not rank 0's. Collective: all must call it.

    Before DDP gives every rank those of rank 0, of which an average of the weights would know nothing.
    """
    if collectives.get_world_size() == 1 or not isinstance(module, nn.Module):
        return module
    ours = {}
    # A checksum of each: all weights from each rank would be gigabytes at rank 0.
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        whole = torch.atleast_1d(tensor.detach()).cpu().contiguous().flatten().view(torch.uint8)
        ours[name] = [f"{type(module).__name__}.{name} {zlib.crc32(whole.numpy()):08x}", ""]
    differences = _differing(collectives.gather_plain(ours), "starts from other weights than")
    if differences:
        advice = "give all the same --weights, draw from torch, numpy and random alone, or use processors of one kind"
        raise UserError(f"{differences}; {advice}")
    return module


def _describe_options(args: Resolved) -> dict[str, list[str]]:
    """Return each option that ranks must share as it is typed, and where it is from; and hashes of own code."""
    ours = {"--device": [f"--device {torch.device(args.distributed.device).type}", ""]}
    values = args.flat()
    for name, option in BY_NAME.items():
        if option.ranks == OWN:
            continue
        # Compared too: a given value holds against a checkpoint's or a model's own, to which an equal default yields.
        origin = "by default"
        if name in args.origin.typed:
            origin = "from the command line"
        elif name in args.origin.given:
            origin = "from the recipe"
        shown = option.flag
        if option.ranks != AS_TYPED or name in args.origin.typed:  # else rank 0's value will hold for all
            shown = _typed(option.flag, values[name])
        ours[option.flag] = [shown, origin]
    ours["reference"] = [f"reference-global-batch {args.optimization.reference_global_batch}", ""]
    for text in filter(None, args.origin.code.split(", ")):
        name, _, digest = text.rpartition(" ")
        own, _, module = name.partition(" ")
        what = f"the module {module}" if module else "the file"
        whose = f"{what} of {BY_NAME[own].flag}"
        ours.setdefault(whose, [whose, ""])[0] += f" {digest}"  # --metrics may name several
    return ours


def _typed(flag: str, value: Any) -> str:
    """Return an option as a user types it."""
    if value in (None, ""):
        return f"no {flag}"
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    return shlex.join([flag, *map(str, value if isinstance(value, list) else [value])])


def _differing(ranks: Sequence[Mapping[str, list[str]]], verb: str) -> str:
    """Return in what the first rank that differs from rank 0 does, or an empty string.

    Args:
        ranks: of each rank, by a name, a text that is compared and shown, and one that is shown if only it differs.
        verb: between the names of the two ranks.
    """
    first = ranks[0]
    others = [rank for rank, each in enumerate(ranks) if each != first]
    if not others:
        return ""
    # One rank is enough: a node with another command has eight that differ alike.
    other = ranks[others[0]]
    texts = []
    for name in {**first, **other}:
        text, origin = other.get(name, ["none", ""])
        expected, expected_origin = first.get(name, ["none", ""])
        if text != expected:
            texts.append(f"{text} (rank 0: {expected})")
        elif origin != expected_origin:
            texts.append(f"{text} {origin} (rank 0: {expected} {expected_origin})")
    line = f"rank {others[0]} {verb} rank 0: {', '.join(texts[:_MOST_NAMED])}"
    if len(texts) > _MOST_NAMED:
        line += f", and {len(texts) - _MOST_NAMED} more"
    return line

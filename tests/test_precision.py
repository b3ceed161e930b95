"""The step: its precision and speed options change no number beyond their rounding."""

import json
import os
from functools import partial

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import train
from errors import UserError
from models import gradients, optim
from models.build import build_model, build_scaler, compile_model, move_to_device, set_grad_checkpointing, set_up_device
from models.ema import ExponentialMovingAverage
from monitoring.gauges import Stopwatch
from monitoring.monitor import read_records
from run import BareRun
from sampler import VirtualShards
from settings import config
from settings.options import DistributedOptions
from tests.endings import differing
from tests.ranks import run_check, run_ranks, torchrun_environment, train_rank
from tests.runs import FLAG, Runs, assert_same, set_variables
from tests.started import SMALL_PLAIN, run_train

CPU = torch.device("cpu")


def options(*argv):
    return config.parse_args(["--synthetic", "64", "--device", "cpu", "--workers", "0", "--lr", "0.005", *argv])


def small_model(seed=0):
    torch.manual_seed(seed)
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)


def random_batches(count, batch_size=32, size_px=32):
    generator = torch.Generator().manual_seed(3)  # classes can be told from the colours
    target = torch.randint(10, (count, batch_size), generator=generator)
    image = torch.randn(count, batch_size, 3, size_px, size_px, generator=generator)
    batches = list(zip(image + target[:, :, None, None, None] / 3, target, strict=True))
    return [batches[index % 4] for index in range(count)]


def losses_of(args, batches):
    model = move_to_device(small_model().to(batches[0][0].dtype), args.precision, CPU)
    compile_model(model, args.precision, args.augmentation)
    optimizer = optim.build_optimizer(
        args.optimization, args.precision, args.model.model, optim.build_parameter_groups(args.optimization, model)
    )
    found = []

    class Noted(BareRun):
        def measure(self, loss, output, target, index):
            found.append(loss.detach())

    parts = {"scaler": build_scaler(args.precision, CPU), "run": Noted(model, CPU)}
    train.train_one_epoch(model, nn.CrossEntropyLoss(), optimizer, batches, CPU, 0, args, **parts)
    return torch.stack(found), model


def written_out(batches, dtype=None):
    """The steps written out, with a loop over the parameters: losses, and the model after all."""
    model = small_model().to(batches[0][0].dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4, foreach=False)
    found = []
    for image, target in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(image), target)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found), model


def test_the_loop_has_the_bits_of_the_steps_written_out():
    for argv, dtype in (([], None), (["--amp", "--amp-dtype", "bfloat16"], torch.bfloat16)):
        batches = random_batches(6)
        expected, reference = written_out(batches, dtype)
        found, model = losses_of(options(*argv), batches)
        assert torch.equal(found, expected)
        assert differing(model.state_dict(), reference.state_dict()) == []


# The bounds of docs/performance.md: of a parameter's first change; and of 20 losses, which fall from 2.4 to 0.06 and
# amplify rounding on their way. A compiled BatchNorm forms its sums in another order.
@pytest.mark.parametrize(("argv", "step_tolerance", "curve_tolerance"), [
    ("--amp --amp-dtype bfloat16", 0.4, 0.25),
    pytest.param("--amp", 0.15, 0.2, marks=pytest.mark.slow),
    pytest.param("--compile --channels-last", 1e-2, 0.1, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_step_and_20_losses_are_those_of_plain_float32(argv, step_tolerance, curve_tolerance):
    args, batches, start = options(*argv.split()), random_batches(20), small_model().state_dict()
    (_, expected), (_, ours) = written_out(batches[:1]), losses_of(args, batches[:1])
    for name, value in expected.named_parameters():
        difference = (ours.get_parameter(name) - value).norm()
        assert difference <= step_tolerance * (value - start[name]).norm(), name
    found, curve = losses_of(args, batches)[0], written_out(batches)[0]
    assert curve[-5:].mean() < 0.1 * curve[:5].mean()  # there is something to compare: it learns
    torch.testing.assert_close(found.float(), curve, rtol=0, atol=curve_tolerance)


def test_nhwc_changes_nothing_but_the_order_of_sums():
    # In float64: float32 without FMA is further from itself than a rate 1.001 times as large, which this would show.
    batches = [(image.double(), target) for image, target in random_batches(3, 16)]
    found, _ = losses_of(options("--channels-last"), batches)
    torch.testing.assert_close(found, written_out(batches)[0], rtol=1e-9, atol=0)


def test_amp_computes_in_its_own_type_and_scales_the_loss_in_float16_only():
    types, kinds = [], (torch.float32, torch.float16, torch.float16, torch.bfloat16, torch.float32)
    model = nn.Linear(3, 5)
    model.register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
    loader = [(torch.randn(2, 3), torch.zeros(2, dtype=torch.int64))]
    for argv in ["", "--amp", "--amp --amp-dtype float16", "--amp --amp-dtype bfloat16",
                 "--amp --amp-dtype float32"]:  # fmt: skip
        args = options(*argv.split())
        train.evaluate_all(args, model, None, nn.CrossEntropyLoss(), {"val": loader}, CPU)
        train.train_one_epoch(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), loader, CPU, 0, args)
        assert build_scaler(args.precision, CPU).is_enabled() == (types[-1] == torch.float16)
    assert types == [kind for kind in kinds for _ in range(2)]


def test_muon_iterates_in_float32_if_the_run_computes_in_it():
    torch.manual_seed(0)
    start, gradient = torch.randn(8, 16), torch.randn(8, 16)
    expected = gradient / gradient.norm()
    for a, b, c in [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                    (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]:  # fmt: skip
        product = expected @ expected.mT
        expected = a * expected + (b * product + c * product @ product) @ expected
    for argv, is_exact in [("--amp --amp-dtype float32", True), ("--amp --amp-dtype bfloat16", False), ("", False)]:
        args = options("--opt", "timm/muon", "--weight-decay", "0", *argv.split())
        parameter = nn.Parameter(start.clone())
        parameter.grad = gradient.clone()
        optim.build_optimizer(args.optimization, args.precision, args.model.model, [{"params": [parameter]}]).step()
        direction = (start - parameter.detach()) / (0.005 * 0.2 * 16**0.5)
        assert ((direction - expected).norm() < 1e-4) == is_exact


LIKE_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # oneDNN reads it, which torch asks whether it has kernels for bfloat16
TYPES = {
    "--recipe imagenette": "float32", "--opt timm/muon": "float32", "--recipe imagenette --no-amp": "float32",
    "--recipe imagenette --amp": "bfloat16", "--amp --amp-dtype bfloat16": "bfloat16", "--recipe digits": None,
}  # fmt: skip


def check_types():
    os.environ.update(LIKE_AVX2)
    for argv, dtype in TYPES.items():
        args, lines = config.on_machine(config.parse_args(f"{argv} --synthetic 64 --device cpu".split()))
        assert args.precision.amp_dtype == dtype, argv
        option = "--amp-dtype float32" if dtype == "float32" else "--amp"
        words = f"{option}: this processor has no bfloat16 instructions"
        assert [line[: len(words)] for line in lines if "bfloat16" in line] == [words] * bool(dtype), (argv, lines)


def test_without_instructions_for_bfloat16_only_a_typed_one_is_done(tmp_path):
    run_ranks(check_types, 1, log_folder=tmp_path).check()


def test_all_ranks_and_a_resumed_run_keep_the_type_of_the_first_rank(tmp_path):
    recipe = tmp_path / "fast.toml"
    recipe.write_text('title = "fast"\n[precision]\namp = true\namp-dtype = "bfloat16"\n')
    argv = [*SMALL_PLAIN, "--synthetic", "16", "--batch-size", "4", "--lr", "0.01", "--print-freq", "1"]

    def types_of(name):
        described = json.loads((tmp_path / name / "run.json").read_text())["args"]
        losses = [record["loss"] for record in read_records(tmp_path / name) if record["kind"] == "train"]
        return described["amp_dtype"], losses

    def ranks(rank, world_size, port):
        return torchrun_environment(rank, world_size, port) | (LIKE_AVX2 if rank == 0 else {})

    mixed = [*argv, "--recipe", recipe, "--epochs", "1", "--output-dir", tmp_path / "mixed"]
    run_ranks(train_rank, 2, [*map(str, mixed)], [], log_folder=tmp_path, launcher=ranks).check()
    run_train(tmp_path, *argv, "--epochs", 1, "--output-dir", tmp_path / "plain", world_size=2).check()
    assert types_of("mixed") == ("float32", pytest.approx(types_of("plain")[1], rel=1e-5))
    run_train(tmp_path, *mixed, "--epochs", 2, "--resume", "auto", world_size=2).check()
    assert types_of("mixed")[0] == "float32"

    typed = [*argv, "--recipe", recipe, "--output-dir", tmp_path / "typed"]
    run_train(tmp_path, *typed, "--epochs", 1, "--amp-dtype", "bfloat16").check()
    typed += ["--epochs", 2, "--resume", "auto"]
    for words in (typed, [*argv, "--test-only", "--resume", tmp_path / "typed" / "checkpoint.pth"]):
        again = [*map(str, words)]
        done = run_ranks(train_rank, 1, again, [], (set_variables, LIKE_AVX2), log_folder=tmp_path).check()
        assert "--amp-dtype bfloat16: as in the checkpoint" in done.output
        assert "this processor has no" in done.output
    assert types_of("typed")[0] == "bfloat16"


def test_tf32_governs_convolutions_and_matrix_products():
    for flag in ("--tf32", "--no-tf32"):
        args = options(flag)
        set_up_device(args.precision, args.distributed, args.checkpoint.test_only)
        kinds = {torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision}
        assert (kinds == {"tf32"}) == (flag == "--tf32") == ("tf32" in kinds)


def test_recomputation_that_cannot_be_is_refused():
    for name in ("vit_b_32", "timm/resnet18", "timm/pit_ti_224"):
        with pytest.raises(UserError, match="--grad-checkpointing"):
            build_model(options("--grad-checkpointing", "--model", name), 3)


def test_recomputed_blocks_give_the_same_bits_and_hold_less():
    def count(tensor):
        kept.append(tensor.numel())
        return tensor

    kept, results, saved = [], [], []
    for is_recomputed in (False, True):
        torch.manual_seed(0)
        rates = {"drop_rate": 0.3, "attn_drop_rate": 0.2, "drop_path_rate": 0.5}
        model = timm.models.VisionTransformer(32, 8, num_classes=10, embed_dim=16, depth=4, num_heads=2, **rates)
        if is_recomputed:
            set_grad_checkpointing(model, "it")
        average = ExponentialMovingAverage(model, decay=0.5)
        step = gradients.ShardedStep(model, VirtualShards(8, 2), device=CPU)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        kept.clear()
        for number in range(2):
            optimizer.zero_grad()
            for shard, (image, target) in enumerate(random_batches(2, 4)):
                with step.shard(number, shard), torch.amp.autocast("cpu", torch.bfloat16):
                    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                        loss = nn.functional.cross_entropy(model(image), target)
                    loss.backward()
            optimizer.step()
            average.update_parameters(model)
        results.append({**model.state_dict(), **{f"average.{k}": v for k, v in average.state_dict().items()}})
        results[-1]["scores"] = average.eval()(image).detach()
        saved.append(sum(kept))
    assert differing(*results) == []
    assert saved[1] < saved[0] / 2


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    return Runs(image_folder, tmp_path_factory.mktemp("precision"))


FAST = "--amp --amp-dtype bfloat16 --channels-last".split()


def test_same_bits_at_another_world_size_in_bfloat16_and_nhwc(runs):
    argv = [FLAG, *FAST, "--epochs", 1, "--lr-warmup-epochs", 0]
    runs.run("two", 2, *argv).check()
    runs.run("one", 1, *argv).check()
    assert_same(runs, "one", "two")


@pytest.mark.slow
def test_compiled_in_bfloat16_killed_and_resumed_same_bits(runs):
    options = [FLAG, *FAST, "--compile", "--model", "squeezenet1_1", "--train-crop-size", 64, "--val-crop-size", 64]
    options += ["--val-resize-size", 64, "--norm-weight-decay", 0.1, "--lr", 0.01]
    runs.run("compiled", 2, *options, timeout_s=600).check()
    killed = runs.run("compiled-killed", 2, *options, faults=[(0, "torch.optim.SGD.step", 5, "after")], timeout_s=600)
    assert killed.codes[0] == -9, killed.output
    runs.run("compiled-killed", 2, *options, "--resume", "auto", timeout_s=600).check()
    assert_same(runs, "compiled-killed", "compiled")
    assert not any("_orig_mod" in name for name in runs.final("compiled"))


def compile_in_ddp(rank, world_size, cap_mb, num_graphs):
    """Train a model of four layers of 1.4 MB each that is compiled as `main` does, and count its graphs."""
    args, graphs = options("--compile"), []
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))
    # Inductor would take half a minute for the same graphs.
    model.compile = lambda mode, **kwargs: nn.Module.compile(
        model, backend=lambda graph, _: graphs.append(graph) or graph.forward, **kwargs
    )
    compile_model(model, args.precision, args.augmentation)
    gradients.DistributedDataParallel = partial(DistributedDataParallel, bucket_cap_mb=cap_mb)
    place = DistributedOptions(device="cpu", world_size=world_size, rank=rank, num_shards=world_size)
    wrapped = gradients.wrap_model(model, place, args.precision.compile)
    stopwatch = Stopwatch(CPU, wrapped)
    for _ in range(3):
        with stopwatch.timed():
            wrapped(torch.randn(2, 600)).sum().backward()
    assert wrapped.module is model
    assert wrapped._compiled_call_impl is None  # else its graph would end where DDP's own code begins
    assert len(graphs) == num_graphs, len(graphs)
    assert stopwatch.count() > 0


@pytest.mark.dist
@pytest.mark.parametrize(("cap_mb", "num_graphs"), [(1, 4), (25, 2)])  # of 25 MB, behind a first one of 1
def test_a_model_compiled_in_ddp_is_cut_at_the_buckets_whose_sums_so_overlap(tmp_path, cap_mb, num_graphs):
    run_check(2, compile_in_ddp, tmp_path, cap_mb, num_graphs)


def test_the_memory_order_of_restored_momenta_is_the_parameters():
    optimizers = []
    for argv in ([], ["--channels-last"]):
        args = options(*argv)
        model = move_to_device(nn.Conv2d(3, 4, 3), args.precision, CPU)
        optimizer = optim.build_optimizer(
            args.optimization, args.precision, "m", [{"params": list(model.parameters()), "weight_decay": 0.0}]
        )
        model(torch.randn(2, 3, 5, 5)).sum().backward()
        optimizer.step()
        optimizers.append((model, optimizer))
    (_, plain), (model, ours) = optimizers
    optim.OptimizerState(ours).load_state_dict(optim.OptimizerState(plain).state_dict())
    expected = plain.state[plain.param_groups[0]["params"][0]]["momentum_buffer"]
    restored = ours.state[model.weight]["momentum_buffer"]
    assert torch.equal(restored, expected)
    assert restored.stride() == model.weight.stride() != expected.stride()

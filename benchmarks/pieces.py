"""Divides a data set into pieces for a machine that can receive only small files: tars of JPEGs, packed with xz.

    git clone --bare https://github.com/seshuad/IMagenet tiny.git
    python -m benchmarks.pieces tiny.git tiny-imagenet-200 OUT --piece-mb 48

It reads the newest commit of a bare clone and writes OUT/train-0.tar.xz, OUT/train-1.tar.xz, ..., OUT/val-0.tar.xz with
members SPLIT/CLASS/FILE, which `--data OUT` reads as they are (docs/data.md, layout `tars`), and classes.txt. The bytes
of the JPEGs are unchanged; their order is shuffled, always in the same way. Two layouts are supported: SPLIT/CLASS/FILE
(Imagenette) and Stanford's Tiny ImageNet, whose validation images are sorted into classes by val_annotations.txt.
"""

from __future__ import annotations

import argparse
import io
import lzma
import random
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKED = 0.8  # fraction to which xz compresses small JPEGs in a tar, including headers; determines the number of pieces


def git(repo: Path, *words: str) -> str:
    return subprocess.run(["git", "--git-dir", str(repo), *words], check=True, capture_output=True, text=True).stdout


def members(repo: Path, root: str) -> dict[str, list[tuple[str, str, int]]]:
    """Returns split -> (name in the tar, blob, bytes) of every image."""
    prefix = f"{root.strip('/')}/" if root.strip("/") else ""
    found: dict[str, list[tuple[str, str, int]]] = {"train": [], "val": []}
    annotations = ""
    rows = []
    for line in git(repo, "ls-tree", "-r", "-l", "HEAD", *([prefix] if prefix else [])).splitlines():
        about, path = line.split("\t", 1)
        _, _, blob, size = about.split()
        path = path.removeprefix(prefix)
        if path.endswith("val_annotations.txt"):
            annotations = git(repo, "cat-file", "blob", blob)
        elif path.lower().endswith((".jpeg", ".jpg")):
            rows.append((path.split("/"), blob, int(size)))
    class_of = dict(line.split("\t")[:2] for line in annotations.splitlines())
    for parts, blob, size in rows:
        if parts[0] in found:
            label = class_of[parts[-1]] if parts[0] == "val" and class_of else parts[1]
            found[parts[0]].append((f"{parts[0]}/{label}/{parts[-1]}", blob, size))
    for split in found.values():
        split.sort()
        random.Random(0).shuffle(split)
    return found


def contents(repo: Path, blobs: Sequence[str]) -> Iterator[bytes]:
    """Yields the content of each blob, read by one process."""
    with subprocess.Popen(
        ["git", "--git-dir", str(repo), "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for blob in blobs:
            reader.stdin.write(f"{blob}\n".encode())
            reader.stdin.flush()
            size = int(reader.stdout.readline().split()[2])
            yield reader.stdout.read(size)
            reader.stdout.read(1)
        reader.stdin.close()


def write_piece(path: Path, repo: Path, rows: Sequence[tuple[str, str, int]]) -> None:
    with lzma.open(path, "wb", preset=6) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for (name, _, _), data in zip(rows, contents(repo, [blob for _, blob, _ in rows]), strict=True):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo", type=Path, help="a bare clone")
    parser.add_argument("root", help="the data set's folder in it; '' for the clone's own")
    parser.add_argument("out", type=Path)
    parser.add_argument("--piece-mb", type=float, default=48.0, help="about the largest piece [48]")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    found = members(args.repo, args.root)
    for split, rows in found.items():
        packed_bytes = PACKED * sum(size + 512 for _, _, size in rows)
        count = -(-packed_bytes // (args.piece_mb * 1e6))
        for piece in range(int(count)):
            path = args.out / f"{split}-{piece}.tar.xz"
            write_piece(path, args.repo, rows[piece :: int(count)])
            print(f"{path}: {len(rows[piece :: int(count)]):,} images, {path.stat().st_size / 1e6:.1f} MB", flush=True)
    classes = sorted({name.split("/")[1] for rows in found.values() for name, _, _ in rows})
    (args.out / "classes.txt").write_text("".join(f"{i}\t{name}\n" for i, name in enumerate(classes)))


if __name__ == "__main__":
    main()

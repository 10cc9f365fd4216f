"""`hyperbatch eval`, `predict` and `export`: the verbs for a trained model."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from hyperbatch.cli.shared import AddVerb, add_device, add_trust, add_weights, positive, show, written
from hyperbatch.errors import InputError
from hyperbatch.tables import printable
from hyperbatch.vocabulary import TTA

MODEL = "Folder of a run, a checkpoint, or a .safetensors file written by `hyperbatch export`."


def add(verb: AddVerb) -> None:
    parser = verb("eval", _eval, "Evaluate a run, a checkpoint or an exported model.")
    parser.add_argument("checkpoint", metavar="RUN|MODEL", help=MODEL)
    parser.add_argument("--data", metavar="DIR", help="Folder of the data set. [default: the data of the run]")
    add_device(parser)
    parser.add_argument("--tta", choices=TTA, help="Test-time augmentation. [default: the run's]")
    add_weights(parser)
    add_trust(parser)

    parser = verb("predict", _predict, "Predict the classes of images.")
    parser.add_argument("model", metavar="RUN|MODEL", help=MODEL)
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="Image files, or folders that are searched for them."
    )
    parser.add_argument("--top", type=positive, default=5, metavar="K", help="Classes to print per image. [default: 5]")
    parser.add_argument("--csv", action="store_true", help="Print a CSV table: image, rank, class, probability.")
    add_device(parser)
    add_weights(parser)
    add_trust(parser)

    parser = verb("export", _export, "Export a model as safetensors, ONNX or a distributed checkpoint.")
    parser.add_argument("run", metavar="RUN", help=MODEL)
    help = "File to write; a folder for dcp. [default: model.safetensors, model.onnx or model.dcp in the run's folder]"
    parser.add_argument("--output", metavar="FILE", help=help)
    help = (
        "safetensors holds the weights, the class names and the preprocessing. onnx holds the whole model as a "
        "program. dcp is a folder for torch.distributed.checkpoint, with the optimizer's state. [default: safetensors]"
    )
    parser.add_argument("--format", default="safetensors", choices=("safetensors", "onnx", "dcp"), help=help)
    add_weights(parser)
    add_trust(parser)


def _eval(args: argparse.Namespace) -> int:
    from hyperbatch.engine.evaluate import evaluate_checkpoint

    values = evaluate_checkpoint(
        Path(args.checkpoint),
        data=args.data,
        device=args.device,
        tta=args.tta,
        averaged=args.weights == "averaged",
        trust_code=args.trust_code,
    )
    which = ", averaged weights" if values["weights"] == "averaged" else ""
    lines = [f"top-1 {values['top1']:.2%} of {values['samples']:,} images (step {values['step']}{which})"]
    if values["tta"] != "none":
        lines.append(f"  without test-time augmentation ({values['tta']}) {values['top1_plain']:.2%}")
    top5 = f"top-5 {values['top5']:.2%}, " if "top5" in values else ""
    lines.append(f"  {top5}loss {values['val_loss']:.4f}")
    names, by_class = values["classes"], values["by_class"]
    for label, answer, count in by_class.get("confusions", ())[:3]:
        lines.append(f"  {names[label]} taken for {names[answer]}: {count:,} of {by_class['samples'][label]:,}")
    if bad := values["warnings"]:
        what = "1 image was unreadable" if len(bad) == 1 else f"{len(bad):,} images were unreadable"
        lines.append(f"  warning  {what} and evaluated as black, the first: {bad[0]} (--json lists all)")
    show(args, values, lambda: "\n".join(lines))
    return 0


def _predict(args: argparse.Namespace) -> int:
    from hyperbatch.predict import find_images, load_model

    if args.json and args.csv:
        raise InputError("--json and --csv cannot be combined; give only one of them")
    images = find_images(args.images)
    averaged = args.weights == "averaged"
    classifier = load_model(args.model, device=args.device, averaged=averaged, trust_code=args.trust_code)
    found = classifier.stream(images, top=args.top)
    failed = 0
    if args.json:
        answers = list(found)
        failed = sum(bool(answer.error) for answer in answers)
        show(args, {"model": args.model, "images": [answer.to_dict() for answer in answers]}, "")
        return 1 if failed else 0
    table = csv.writer(sys.stdout, lineterminator="\n")
    wide = min(60, max(len(str(image)) for image in images))
    with written():
        if args.csv:
            table.writerow(("image", "rank", "class", "probability"))
        for answer in found:
            if answer.error:
                failed += 1
                print(f"hyperbatch: {printable(answer.error)}", file=sys.stderr)
            elif args.csv:
                table.writerows((answer.image, rank, *best) for rank, best in enumerate(answer.top, start=1))
            else:
                best = ", ".join(f"{name} {share:.1%}" for name, share in answer.top)
                print(printable(f"{answer.image:{wide}}  {best}"), flush=True)
    return 1 if failed else 0


def _export(args: argparse.Namespace) -> int:
    from hyperbatch.export import EXPORTS

    output = Path(args.output) if args.output else None
    named = output.suffix.removeprefix(".") if output else ""
    if named in EXPORTS and named != args.format:
        raise InputError(f"--output {output}: --format {args.format} writes no .{named} file; add --format {named}")
    trust = {"trust_code": args.trust_code} if args.format == "onnx" else {}  # the other formats do not build the model
    path = EXPORTS[args.format](Path(args.run), output, averaged=args.weights == "averaged", **trust)
    show(args, {"weights": str(path)}, f"weights: {path}")
    return 0

"""Machine files: a cluster in TOML, with the unit in each field's name and a source for each figure.

    hyperbatch simulate sony_resnet50 --cluster abci              a built-in file of `machines/`, by name
    hyperbatch simulate sony_resnet50 --cluster my_cluster.toml   your own file

A quantity may be given in any unit of its kind: `bandwidth_gbit_per_s = 100` or `bandwidth_bytes_per_s = 12.5e9`.
`docs/simulator.md` lists the fields.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any

from hyperbatch.errors import InputError, nearest
from hyperbatch.plan.compute import PASSES
from hyperbatch.plan.inventory import has_table, layers, model_names, training_flops
from hyperbatch.plan.machine import Cluster, Device, Link, Measured, Network, Profile
from hyperbatch.recipes.files import read_toml
from hyperbatch.vocabulary import PRECISION_DTYPE, is_foreign

FOLDER = Path(__file__).parent / "machines"
LINKS = ("intra", "inter")
MOST_OF_A_COUNT, MOST = 1e9, 1e24  # upper limits in SI units; larger values would overflow in predictions
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")  # the keys that TOML allows without quotes

UNITS: dict[str, dict[str, float]] = {
    "bandwidth": {"bytes_per_s": 1.0, "gbyte_per_s": 1e9, "gbit_per_s": 1e9 / 8, "mbit_per_s": 1e6 / 8},
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "hours": 3600.0},
    "size": {"bytes": 1.0, "gib": 2.0**30, "gb": 1e9},
    "compute": {"flop_per_s": 1.0, "gflop_per_s": 1e9, "tflop_per_s": 1e12},
    "power": {"w": 1.0, "kw": 1e3},
    "price": {"usd_per_device_hour": 1.0},
}
UNITS["times"] = UNITS["time"]


@dataclass(frozen=True, slots=True)
class _Field:
    """One entry of a section.

    kind: a row of UNITS, or "count", "fraction", "number", "text", "flag" or "choices". "times" and "texts" are lists,
    and "times" has a unit of time.
    """

    kind: str
    required: bool = True
    zero: bool = False  # whether 0 is allowed
    choices: tuple[str, ...] = ()


_MEASURED_RUN = {
    "model": _Field("text"),
    "precision": _Field("text"),
    "image_size": _Field("count", required=False),
    "classes": _Field("count", required=False),
    "batch_per_device": _Field("count"),
}
_SECTIONS: dict[str, dict[str, _Field]] = {
    "": {
        "description": _Field("text", required=False),
        "devices": _Field("count"),
        "jitter": _Field("fraction", required=False, zero=True),
        "price": _Field("price", required=False, zero=True),
        "eval_overhead": _Field("time", required=False, zero=True),
        "init": _Field("time", required=False, zero=True),
        "node_mtbf": _Field("time", required=False),
        "storage_bandwidth": _Field("bandwidth", required=False),
    },
    "device": {
        "name": _Field("text"),
        "memory": _Field("size"),
        "memory_bandwidth": _Field("bandwidth"),
        "peak_fp64": _Field("compute", required=False),
        "peak_fp32": _Field("compute"),
        "peak_bf16": _Field("compute", required=False),
        "peak_fp16": _Field("compute", required=False),
        "layer_overhead": _Field("time", required=False, zero=True),
        "power": _Field("power"),
    },
    "node": {
        "devices": _Field("count"),
        "nics": _Field("count"),
        "power": _Field("power"),
        "collective_call": _Field("time", required=False, zero=True),
        "flat_algorithms": _Field("choices", required=False, choices=("ring", "tree")),
        "flat_uses_all_nics": _Field("flag", required=False),
        "torus_chunk": _Field("size", required=False),
    },
    "link": {
        "bandwidth": _Field("bandwidth"),
        "latency": _Field("time", zero=True),
        "efficiency": _Field("fraction", required=False),
    },
    "measured": {
        **_MEASURED_RUN,
        "images_per_s_per_device": _Field("number"),
        "devices": _Field("count", required=False),
        "overlapped": _Field("flag", required=False),
    },
    "profile": {
        **_MEASURED_RUN,
        "layers": _Field("texts"),
        "forward": _Field("times"),
        "backward": _Field("times"),
    },
}


def cluster_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_cluster(name_or_file: str | Path) -> Cluster:
    """Returns a built-in cluster by name, or reads a machine file."""
    text = str(name_or_file)
    path = Path(text)
    if not (path.suffix == ".toml" or "/" in text):
        if text not in cluster_names():
            raise InputError(
                f"unknown cluster {text!r}{nearest(text, cluster_names())}; or give a machine file, *.toml"
            )
        path = FOLDER / f"{text}.toml"
    _, values = read_toml(path, "machine file")
    return parse_cluster(values, name=path.stem, where=str(path))


def cluster_of_device(device: str) -> Cluster | None:
    """Finds the built-in cluster whose GPU has this name (such as "NVIDIA H200").

    If there are several, returns the smallest one without an hourly price, if any. "" stands for a CPU and returns
    `local`.
    """
    if not device:
        return load_cluster("local")
    words = set(re.findall(r"[A-Za-z]+[0-9]+", device.upper()))
    built_in = [load_cluster(name) for name in cluster_names()]
    same = [cluster for cluster in built_in if words & set(re.findall(r"\b[A-Z]+[0-9]{2,}\b", cluster.device.name))]
    rented = {cluster.name: cluster.price_usd_per_device_hour is not None for cluster in same}
    return min(same, key=lambda cluster: (rented[cluster.name], cluster.devices), default=None)


def parse_cluster(values: Mapping[str, Any], *, name: str, where: str) -> Cluster:
    """Returns the cluster that the tables of a machine file describe. InputError names the invalid field."""
    tables = dict(values)
    sources = tables.pop("sources", {})
    if not isinstance(sources, dict):
        raise InputError(f"machine file {where}: sources is a table of texts; write [sources]")
    parts = {key: _table(tables, key, where) for key in ("device", "node", "links")}
    measured, profiles = (parts["device"].pop(key, []) for key in ("measured", "profile"))
    for key in parts["links"]:
        if key not in LINKS:
            raise InputError(f"machine file {where}: links.{key} is not a link{nearest(key, LINKS)}")
    links = {key: _read(_table(parts["links"], key, where, "links."), "link", f"{where}: links.{key}") for key in LINKS}
    top = _read(tables, "", where)
    device = _read(parts["device"], "device", f"{where}: device")
    node = _read(parts["node"], "node", f"{where}: node")
    for key, rows in (("measured", measured), ("profile", profiles)):
        if not isinstance(rows, list):
            raise InputError(f"machine file {where}: device.{key} is a list of tables; write [[device.{key}]]")
    peaks = {p: device[f"peak_{p}"] for p in PRECISION_DTYPE if f"peak_{p}" in device}
    points = tuple(_measured(row, peaks, place) for place, row in _known_rows(measured, f"{where}: device.measured"))
    overhead = device.get("layer_overhead")
    return Cluster(
        name=name,
        description=top.get("description", ""),
        device=Device(
            name=device["name"],
            memory_bytes=device["memory"],
            memory_bandwidth_bytes_per_s=device["memory_bandwidth"],
            peak_flop_per_s=peaks,
            layer_overhead_s=fitted_overhead(points) if overhead is None else overhead,
            power_w=device["power"],
            measured=points,
            profiles=tuple(_profile(row, place) for place, row in _known_rows(profiles, f"{where}: device.profile")),
        ),
        network=Network(
            devices_per_node=node["devices"],
            nics_per_node=node["nics"],
            intra=_link(links["intra"]),
            inter=_link(links["inter"]),
            call_s=node.get("collective_call", 0.0),
            flat_algorithms=tuple(node.get("flat_algorithms", ("ring", "tree"))),
            flat_uses_all_nics=node.get("flat_uses_all_nics", True),
            torus_chunk_bytes=node.get("torus_chunk"),
        ),
        devices=top["devices"],
        node_power_w=node["power"],
        price_usd_per_device_hour=top.get("price"),
        jitter=top.get("jitter", 0.0),
        eval_overhead_s=top.get("eval_overhead", 0.0),
        init_s=top.get("init", 0.0),
        node_mtbf_s=top.get("node_mtbf"),
        storage_bytes_per_s=top.get("storage_bandwidth"),
        sources=dict(sources),
    )


def fitted_overhead(points: Sequence[Measured]) -> float:
    """Estimates a layer's time per pass that does not shrink with the batch, from a device's speeds at several batches.

    It is the intercept of a least-squares line through step time against batch; 0 if no model was measured at two
    batches.
    """
    found = []
    for model, precision in sorted({(point.model, point.precision) for point in points if point.devices == 1}):
        same = [p for p in points if (p.model, p.precision, p.devices) == (model, precision, 1)]
        if len({point.batch_per_device for point in same}) < 2:
            continue
        x = [float(point.batch_per_device) for point in same]
        y = [point.batch_per_device / point.images_per_s_per_device for point in same]
        intercept = linear_regression(x, y).intercept
        table = layers(model, classes=same[0].classes, image_size=same[0].image_size)
        found.append(max(0.0, intercept) / (PASSES * len(table)))
    return sum(found) / len(found) if found else 0.0


def format_machine_file(cluster: Cluster) -> str:
    """Returns the text of a machine file, in SI units, from which `load_cluster` reads this cluster."""
    device, network = cluster.device, cluster.network
    tables: dict[str, dict[str, Any]] = {
        "": {
            "description": cluster.description,
            "devices": cluster.devices,
            "jitter": cluster.jitter,
            "price_usd_per_device_hour": cluster.price_usd_per_device_hour,
            "eval_overhead_s": cluster.eval_overhead_s,
            "init_s": cluster.init_s,
            "node_mtbf_s": cluster.node_mtbf_s,
            "storage_bandwidth_bytes_per_s": cluster.storage_bytes_per_s,
        },
        "[device]": {
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
            **{f"peak_{precision}_flop_per_s": value for precision, value in device.peak_flop_per_s.items()},
            "layer_overhead_s": device.layer_overhead_s,
            "power_w": device.power_w,
        },
        "[node]": {
            "devices": network.devices_per_node,
            "nics": network.nics_per_node,
            "power_w": cluster.node_power_w,
            "collective_call_s": network.call_s,
            "flat_algorithms": list(network.flat_algorithms),
            "flat_uses_all_nics": network.flat_uses_all_nics,
            "torus_chunk_bytes": network.torus_chunk_bytes,
        },
        "[sources]": cluster.sources,
    }
    for name in LINKS:
        link: Link = getattr(network, name)
        tables[f"[links.{name}]"] = {
            "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
            "latency_s": link.latency_s,
            "efficiency": link.efficiency,
        }
    blocks = list(tables.items())
    blocks[2:2] = [("[[device.measured]]", asdict(point)) for point in device.measured]
    blocks[2:2] = [("[[device.profile]]", asdict(profile)) for profile in device.profiles]
    return "\n".join(_toml_block(title, values) for title, values in blocks)


def _toml_block(title: str, values: Mapping[str, Any]) -> str:
    # JSON writes texts, numbers, lists and booleans as TOML does, and also keys that need quotes.
    known = [(key, value) for key, value in values.items() if value is not None]
    lines = [f"{key if BARE_KEY.fullmatch(key) else json.dumps(key)} = {json.dumps(value)}" for key, value in known]
    return "\n".join([*([title] if title else []), *lines, ""])


def _table(values: dict[str, Any], key: str, where: str, prefix: str = "") -> dict[str, Any]:
    table = values.pop(key, None)
    if not isinstance(table, dict):
        raise InputError(f"machine file {where}: table [{prefix}{key}] is missing")
    return dict(table)


def _link(values: dict[str, Any]) -> Link:
    return Link(
        bandwidth_bytes_per_s=values["bandwidth"],
        latency_s=values["latency"],
        efficiency=values.get("efficiency", 1.0),
    )


def _known_rows(rows: list[Any], where: str) -> Iterator[tuple[str, Any]]:
    """Yields (place in the file, row).

    Rows of timm's or the user's own models are skipped unless the user has named the model: a file must not run code.
    """
    for i, row in enumerate(rows):
        model = row.get("model") if isinstance(row, dict) else None
        if not isinstance(model, str) or not is_foreign(model) or has_table(model):
            yield f"{where}[{i}]", row


def _measured(row: Any, peak_flop_per_s: Mapping[str, float], where: str) -> Measured:
    point = Measured(**_run(row, "measured", where))
    _check_possible(point, peak_flop_per_s.get(point.precision, peak_flop_per_s["fp32"]), where)
    return point


def _profile(row: Any, where: str) -> Profile:
    values = _run(row, "profile", where)
    forward_s, backward_s = tuple(values.pop("forward")), tuple(values.pop("backward"))
    shape = {key: values[key] for key in ("classes", "image_size") if key in values}
    known = [layer.name for layer in layers(values["model"], **shape) if layer.tensors]
    if values["layers"] != known:
        raise InputError(f"machine file {where}.layers: not the {len(known)} layers of {values['model']} in order")
    if not len(known) == len(forward_s) == len(backward_s):
        raise InputError(
            f"machine file {where}: forward and backward must have one time for each of {len(known)} layers"
        )
    return Profile(**{**values, "layers": tuple(known)}, forward_s=forward_s, backward_s=backward_s)


def _run(row: Any, section: str, where: str) -> dict[str, Any]:
    """Reads the fields of a measured run. Its model and precision must be known."""
    if not isinstance(row, dict):
        raise InputError(f"machine file {where}: is not a table")
    values = _read(row, section, where)
    for field, known in (("model", model_names()), ("precision", list(PRECISION_DTYPE))):
        if values[field] not in known and not (field == "model" and has_table(values[field])):
            raise InputError(f"machine file {where}.{field}: unknown {values[field]!r}{nearest(values[field], known)}")
    return values


def _check_possible(point: Measured, peak_flop_per_s: float, where: str) -> None:
    work = training_flops(point.model, classes=point.classes, image_size=point.image_size)
    most = peak_flop_per_s / work
    if point.images_per_s_per_device > most:
        raise InputError(
            f"machine file {where}: {point.images_per_s_per_device:g} images/s of {point.model} is more than the "
            f"device's {point.precision} peak allows ({most:,.0f}); check both"
        )


def _read(values: Mapping[str, Any], section: str, where: str) -> dict[str, Any]:
    """Reads all entries as numbers in SI units, texts or lists. Unknown, invalid and missing fields are InputErrors."""
    fields = _SECTIONS[section]
    out: dict[str, Any] = {}
    for key, value in values.items():
        base, scale = _match(key, fields, where)
        if base in out:
            raise InputError(f"machine file {where}: {base} is given twice, the second time as {key}")
        out[base] = _value(value, fields[base], scale, f"{where}: {key}")
    for base, field in fields.items():
        if field.required and base not in out:
            unit = next(iter(UNITS.get(field.kind, {})), "")
            raise InputError(f"machine file {where}: {base}{'_' * bool(unit)}{unit} is missing")
    return out


def _match(key: str, fields: Mapping[str, _Field], where: str) -> tuple[str, float]:
    """Returns the field that a key names and the factor of its unit. The longest matching field name is used."""
    for base in sorted(fields, key=len, reverse=True):
        units = UNITS.get(fields[base].kind)
        if units is None and key == base:
            return base, 1.0
        if units is not None and key.startswith(f"{base}_") and key[len(base) + 1 :] in units:
            return base, units[key[len(base) + 1 :]]
    for base in sorted(fields, key=len, reverse=True):
        units = UNITS.get(fields[base].kind)
        if units is not None and (key == base or key.startswith(f"{base}_")):
            raise InputError(
                f"machine file {where}: {key} has no known unit; write {base}_ and one of {', '.join(units)}"
            )
    known = [f"{base}_{unit}" for base, field in fields.items() for unit in UNITS.get(field.kind, {})]
    known += [base for base, field in fields.items() if field.kind not in UNITS]
    raise InputError(f"machine file {where}: unknown field {key!r}{nearest(key, known)}")


def _value(value: Any, field: _Field, scale: float, where: str) -> Any:
    def refuse(what: str) -> InputError:
        return InputError(f"machine file {where} = {value!r}: {what}")

    if field.kind == "text":
        if not isinstance(value, str):
            raise refuse("must be a text")
        return value
    if field.kind in ("texts", "times"):
        if not isinstance(value, list) or not value:
            raise refuse("must be a list")
        each = _Field("text" if field.kind == "texts" else "time", zero=True)
        return [_value(item, each, scale, f"{where}[{i}]") for i, item in enumerate(value)]
    if field.kind == "flag":
        if not isinstance(value, bool):
            raise refuse("must be true or false")
        return value
    if field.kind == "choices":
        if not isinstance(value, list) or not value or any(item not in field.choices for item in value):
            raise refuse(f"must be a list of {', '.join(field.choices)}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value < math.inf:
        raise refuse("must be a number")
    if field.kind == "count" and (value < 1 or value != int(value)):
        raise refuse("must be a whole number, at least 1")
    if value < 0 or (value == 0 and not field.zero):
        raise refuse("must be positive" if not field.zero else "must not be negative")
    if field.kind == "fraction" and value > 1:
        raise refuse("must be between 0 and 1")
    if value > (MOST_OF_A_COUNT if field.kind == "count" else MOST / scale):
        raise refuse("is implausibly large")
    return int(value) if field.kind == "count" else value * scale

"""Machine files: the built-in ones are complete and sourced; nonsense is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hyperbatch.errors import InputError
from hyperbatch.plan.clusters import FOLDER, cluster_names, format_machine_file, load_cluster, parse_cluster

NAMES = {
    "abci",
    "tencent_p40",
    "stampede2_knl",
    "stampede2_skx",
    "facebook_p100",
    "pfn_p100",
    "dgx1_v100",
    "dgx2h_v100",
    "dgx_a100",
    "dgx_h100",
    "h200x8",
    "cloud_h200_efa",
    "local",
}
GOOD = (FOLDER / "abci.toml").read_text()


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_every_cluster_of_the_design_is_there() -> None:
    assert set(cluster_names()) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_built_in_files_load_and_name_a_source_for_each_figure(name: str) -> None:
    import tomllib

    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.description
    values = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    sources = values.pop("sources")

    def sourced(key: str) -> bool:
        return any(key == source or key.startswith(f"{source}_") for source in sources)

    top = [key for key, value in values.items() if isinstance(value, int | float)]
    assert [key for key in top if not sourced(key)] == []
    assert {"device", "layer_overhead", "node", "collective_call", "links.intra", "links.inter"} <= set(sources)
    assert all(f"measured[{i}]" in sources for i in range(len(cluster.device.measured)))


def test_units_are_worth_what_they_say(tmp_path: Path) -> None:
    other = GOOD.replace("bandwidth_gbit_per_s = 100", "bandwidth_bytes_per_s = 12.5e9").replace(
        "power_kw = 2.1", "power_w = 2100"
    )
    mine, built_in = load_cluster(write(tmp_path, other)), load_cluster("abci")
    assert mine.network == built_in.network
    assert mine.node_power_w == built_in.node_power_w == pytest.approx(2100)
    assert built_in.network.inter.bandwidth_bytes_per_s == 12.5e9
    assert built_in.network.node_bytes_per_s == pytest.approx(2 * 12.5e9 * 0.9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth_gbit_per_s = 100", "bandwidth_gbit_per_s = -100", "bandwidth_gbit_per_s = -100: must be positive"),
        ("nics = 2", "nics = 0", "nics = 0: must be a whole number, at least 1"),
        ("devices = 4\n", "devices = 0\n", "devices = 0: must be a whole number, at least 1"),
        ("devices = 4\n", "devices = 4.5\n", "devices = 4.5: must be a whole number"),
        (
            "bandwidth_gbit_per_s = 100",
            "bandwidth_furlongs = 100",
            "has no known unit; write bandwidth_ and one of bytes_per_s",
        ),
        ("bandwidth_gbit_per_s = 100", "bandwidth = 100", "has no known unit"),
        ("nics = 2", "nics = 2\nnic = 2", "unknown field 'nic'; did you mean 'nics'"),
        ("nics = 2\n", "", "nics is missing"),
        ("latency_us = 4.0", 'latency_us = "fast"', "must be a number"),
        ("latency_us = 4.0", "latency_us = nan", "must be a number"),
        ("latency_us = 4.0", "latency_us = true", "must be a number"),
        ("efficiency = 0.9", "efficiency = 1.5", "between 0 and 1"),
        ("latency_us = 4.0", "latency_us = 4.0\nlatency_s = 1", "latency is given twice"),
        ("[links.inter]", "[links.outer]", "links.outer is not a link"),
        ('model = "resnet50"', 'model = "resnet51"', "unknown 'resnet51'"),
        ('flat_algorithms = ["ring"]', 'flat_algorithms = ["rings"]', "must be a list of ring, tree"),
        (
            "images_per_s_per_device = 1390",
            "images_per_s_per_device = 13900",
            "more than the device's fp16 peak allows",
        ),
        ("[node]", "[node", "not valid TOML"),
        ("memory_gib = 16", "memory_gib = 1e300", "memory_gib = 1e+300: is implausibly large"),
        ("devices = 4\n", f"devices = 1{400 * '0'}\n", "is implausibly large"),
        ("devices = 4352", "devices = 4352\nprice_usd_per_device_hour = -1", "must not be negative"),
    ],
)
def test_nonsense_is_one_clear_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    assert message in str(caught.value)
    assert "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_table_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"table \[node\] is missing"):
        load_cluster(write(tmp_path, GOOD.replace("[node]", "[nodes]")))
    with pytest.raises(InputError, match="cannot be read"):
        load_cluster(str(tmp_path / "absent.toml"))
    with pytest.raises(InputError, match="did you mean 'abci'"):
        load_cluster("abcj")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_written_file_reads_back_as_the_same_cluster(tmp_path: Path, name: str) -> None:
    cluster = load_cluster(name)
    assert load_cluster(write(tmp_path, format_machine_file(cluster))) == replace(cluster, name="mine")


def test_the_fixed_cost_of_a_layer_comes_from_two_batches(tmp_path: Path) -> None:
    """109 layers in 3 passes at 10 us: 3.27 ms that do not shrink, beside 1 ms an image."""
    rows = "".join(
        f"""[[device.measured]]
model = "resnet50"
precision = "fp16"
batch_per_device = {batch}
images_per_s_per_device = {batch / (0.00327 + batch * 0.001)}
"""
        for batch in (16, 64, 256)
    )
    start, end = GOOD.index("[[device.measured]]"), GOOD.index("[node]")
    text = GOOD[:start].replace("layer_overhead_us = 21.2\n", "") + rows + GOOD[end:]
    assert load_cluster(write(tmp_path, text)).device.layer_overhead_s == pytest.approx(10e-6)


def test_the_example_in_the_documentation_is_a_machine_file() -> None:
    import tomllib

    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    example = tomllib.loads(page.split("```toml")[1].split("```")[0])
    cluster = parse_cluster(example, name="example", where="docs/simulator.md")
    assert cluster.network.devices_per_node == 4
    with pytest.raises(InputError, match="sources is a table"):
        parse_cluster({**example, "sources": "data sheet"}, name="example", where="docs/simulator.md")


PROFILE = """
[[device.profile]]
model = "resnet8"
precision = "fp32"
image_size = 32
classes = 10
batch_per_device = 4
layers = LAYERS
forward_ms = TIMES
backward_ms = TIMES
"""


def profiled(**changes: str) -> str:
    from hyperbatch.plan.inventory import layers

    names = [layer.name for layer in layers("resnet8", classes=10, image_size=32) if layer.tensors]
    values = {"LAYERS": str(names), "TIMES": str([0.5] * len(names)), **changes}
    text = PROFILE
    for key, value in values.items():
        text = text.replace(key, value)
    return GOOD.replace("[node]", text + "[node]")


def test_layer_times_of_a_profile_come_back(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, profiled()))
    (profile,) = cluster.device.profiles
    assert set(profile.forward_s) == {0.5e-3}
    again = load_cluster(write(tmp_path, format_machine_file(cluster)))
    assert again.device.profiles == cluster.device.profiles


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LAYERS": '["conv1", "bn1"]'}, "layers: not the 19 layers of resnet8 in order"),
        ({"TIMES": "[0.5, 0.5]"}, "one time for each of 19 layers"),
        ({"TIMES": "[-0.5]"}, "forward_ms[0] = -0.5: must not be negative"),
        ({"TIMES": "0.5"}, "must be a list"),
        ({"_ms": "_furlongs"}, "no known unit; write forward_ and one of s, ms"),
        ({"resnet8": "resnet9"}, "unknown 'resnet9'"),
    ],
)
def test_nonsense_in_a_profile_is_one_clear_line(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_cluster(write(tmp_path, profiled(**changes)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

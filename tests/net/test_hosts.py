"""Two emulated hosts with two ranks each, in network namespaces, under torchrun: a run over a real network."""

import json
import os
import shutil
import subprocess
import sys

import pytest

# Of this process alone: what a killed run left behind must not stand in the way.
HOSTS = (f"hb{os.getpid()}a", f"hb{os.getpid()}b")


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=20)


@pytest.fixture
def hosts():
    """Two namespaces joined by a veth pair: 10.77.9.1 and 10.77.9.2."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command: network namespaces cannot be made")
    try:
        ip("netns", "add", HOSTS[0])
    except subprocess.CalledProcessError as error:
        if "not permitted" not in error.stderr:
            raise
        pytest.skip(f"network namespaces may not be made here: {error.stderr.strip()}")
    try:
        ip("netns", "add", HOSTS[1])
        ip("link", "add", "hbe0", "netns", HOSTS[0], "type", "veth", "peer", "name", "hbe1", "netns", HOSTS[1])
        for i, host in enumerate(HOSTS):
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "addr", "add", f"10.77.9.{i + 1}/24", "dev", f"hbe{i}")
            ip("-n", host, "link", "set", f"hbe{i}", "up")
        yield HOSTS
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def test_two_hosts_of_two_ranks(hosts, tmp_path):
    out = tmp_path / "run"
    processes = []
    for node, host in enumerate(hosts):
        words = ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"]
        words += ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node)]
        words += ["--master-addr", "10.77.9.1", "--master-port", "29611", "-m", "hyperbatch", "train", "digits"]
        words += ["--algorithm", "torus", "--max-steps", "5", "--eval-every-epochs", "0.2", "--out", str(out)]
        env = os.environ | {"GLOO_SOCKET_IFNAME": f"hbe{node}", "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    record = json.loads((out / "record.json").read_text())
    assert record["world_size"] == 4
    assert record["grid"] == "2x2"  # rows are the hosts, found by themselves
    assert record["environment"]["launcher"] == "torchrun"
    assert {group["algorithm"] for group in record["timing"]["groups"]} == {"torus"}
    assert record["result"]["steps"] == 5
    assert (out / "report.html").exists()
    assert outputs[1][0] == ""  # only rank 0 speaks

"""Reading a rank's place from the environment of torchrun, Slurm and Open MPI."""

import pytest

from hyperbatch import kernels
from hyperbatch.engine.ranks import Ranks, _gpu_index, _leave_processors_to_nccl, find_ranks, first_host, resolve
from hyperbatch.errors import InputError


def test_no_launcher():
    assert find_ranks({}) is None


def test_torchrun():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    env |= {"MASTER_ADDR": "h0", "MASTER_PORT": "123"}
    assert find_ranks(env) == Ranks(
        rank=5, world_size=8, local_rank=1, local_size=4, launcher="torchrun", master_addr="h0", master_port=123
    )


SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[03-04],login1",
}


def test_slurm_step():
    ranks = find_ranks(SLURM)
    assert ranks is not None
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_size) == (6, 7, 2, 3)
    assert ranks.master_addr == "gpu03"
    other_step = find_ranks(SLURM | {"SLURM_STEP_ID": "1"})
    assert other_step is not None
    assert other_step.master_port != ranks.master_port  # two steps of a job must not meet


def test_slurm_batch_script_and_single_task_are_no_launcher():
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert find_ranks(batch) is None
    assert find_ranks(SLURM | {"SLURM_NTASKS": "1"}) is None


def test_torchrun_inside_a_slurm_step_wins():
    ranks = find_ranks(SLURM | {"RANK": "0", "WORLD_SIZE": "2"})
    assert ranks is not None
    assert ranks.launcher == "torchrun"


def test_open_mpi():
    env = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    one_host = find_ranks(env | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert one_host is not None
    assert one_host.master_addr == "127.0.0.1"
    with pytest.raises(InputError, match="MASTER_ADDR"):
        find_ranks(env | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


def test_a_slurm_step_with_more_tasks_on_one_host_than_on_the_other():
    uneven = SLURM | {"SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_TASKS_PER_NODE": "2(x2)"}
    first = find_ranks(uneven | {"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"})
    last = find_ranks(uneven | {"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"})
    assert first is not None
    assert last is not None
    assert (first.local_rank, first.local_size) == (2, 3)
    assert (last.local_rank, last.local_size) == (0, 1)


@pytest.mark.parametrize("variable", ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"])
def test_two_mpi_jobs_on_a_host_do_not_meet(variable):
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    ports = {find_ranks(env | {variable: job}).master_port for job in ("host-1234@1", "host-1235@1")}
    assert len(ports) == 2
    assert all(20_000 <= port < 32_000 for port in ports)
    assert find_ranks(env).master_port == 29_500
    assert find_ranks(env | {variable: "host-1234@1", "MASTER_PORT": "77"}).master_port == 77


def test_a_master_that_has_no_address_is_named():
    resolve("127.0.0.1", 1.0)
    with pytest.raises(
        InputError, match=r"the host of rank 0, 'no-such-host\.invalid', cannot be found: .*MASTER_ADDR"
    ):
        resolve("no-such-host.invalid", 0.1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("nd0", "nd0"),
        ("nd[0-3]", "nd0"),
        ("gpu[03,07-9]-ib,x", "gpu03-ib"),
        ("a,b", "a"),
        ("r1n[5]", "r1n5"),
        ("rack[1-2]node[01-04]", "rack1node01"),
        ("rack[2,5-6]node[010-011,20]-ib.cluster,login[1-2]", "rack2node010-ib.cluster"),
        ("a,rack[1-2]node[01-04]", "a"),
    ],
)
def test_first_host_of_slurms_folded_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",a", "gpu[", "gpu[]", "gpu[1-2", "gpu]1["])
def test_a_node_list_that_is_not_understood_is_named(nodes):
    with pytest.raises(InputError, match="set MASTER_ADDR"):
        first_host(nodes)


def test_broken_environment_is_named():
    with pytest.raises(InputError, match="WORLD_SIZE"):
        find_ranks({"RANK": "0", "WORLD_SIZE": "two"})


@pytest.mark.parametrize(
    ("world", "limit", "left"), [(1, "32", None), (8, None, None), (8, "32", 32), (8, "many", None)]
)
def test_kernels_are_told_how_many_processors_nccl_may_take(monkeypatch, world, limit, left):
    """None: unknown, so that several ranks leave all that NCCL can ever take."""
    monkeypatch.setattr(kernels, "processors_left", 7)
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    if limit is not None:
        monkeypatch.setenv("NCCL_MAX_CTAS", limit)
    _leave_processors_to_nccl(Ranks(world_size=world))
    assert kernels.processors_left == left


@pytest.mark.parametrize(
    ("local_rank", "gpus", "launcher", "index"),
    [(3, 4, "torchrun", 3), (3, 1, "slurm", 0), (0, 1, "torchrun", 0)],
    ids=["all GPUs of the host", "srun --gpus-per-task=1", "torchrun --virtual-local-rank"],
)
def test_the_gpu_of_a_rank(local_rank, gpus, launcher, index):
    assert _gpu_index(Ranks(local_rank=local_rank, local_size=4, launcher=launcher), gpus) == index


def test_the_first_rank_without_a_gpu_says_so():
    """Those before it have found no mistake, and wait for the others."""
    told = []
    for local_rank in range(2, 4):
        with pytest.raises(InputError, match=f"no GPU for local rank {local_rank} on .*, where torch sees 2") as failed:
            _gpu_index(Ranks(local_rank=local_rank, local_size=4, launcher="torchrun"), 2)
        told.append(not failed.value.on_host)
    assert told == [True, False]

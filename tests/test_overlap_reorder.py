"""Where starts and waits stand, in the graph and in the code that Inductor makes of it."""

import dataclasses
import itertools
import re
import time
from collections.abc import Mapping

import pytest
import torch
from empty_kernels import leave_kernels_empty
from overlap_graphs import LLAMA_8B, SHAPE, Graphs, copy_graph, positions, trace
from torch.fx import GraphModule, Node

from trainer.distributed import fake_process_group
from trainer.loss import UNCOUNTED, sum_token_losses
from trainer.models.llama.model import Llama, initial_std
from trainer.models.llama.plan import BLOCKS, TENSOR_PARALLEL
from trainer.parallel.compile import build_sum_losses
from trainer.parallel.graph_report import GraphReport
from trainer.parallel.mesh import build_mesh
from trainer.parallel.overlap.arrange import Overlap, arrange
from trainer.parallel.overlap.find import CASTS, KINDS, WAIT, Collective
from trainer.parallel.parallelize import Layout, initialize, parallelize
from trainer.parallel.partition import Partition
from trainer.parallel.simple_fsdp import Precision
from trainer.parallel.tensor import build_loss

BLOCK = Overlap("block", True)
MATMUL = torch.ops.aten.mm.default
OVERLAPS = [BLOCK, Overlap("none", True), Overlap("block", False)]
MESHES = [{"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 2, "tp": 2}, {"replicate": 4}]


def of(graphs: Graphs, direction: str, serves: str, axis: str = "dp_shard") -> list[Collective]:
    return [c for c in graphs.collectives(direction, axis) if c.serves == serves]


def matmuls_between(gm: GraphModule, first: Node, last: Node) -> int:
    place = positions(gm)
    return sum(place[first] < place[node] < place[last] for node in gm.graph.nodes if node.target is MATMUL)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_gather_starts_before_the_stage_before_is_waited_for(direction: str) -> None:
    graphs = trace(shard=4).arranged(BLOCK)
    gm, gathers = getattr(graphs, direction), of(graphs, direction, "weight")
    place = positions(gm)
    for before, after in itertools.pairwise(gathers):
        assert place[after.start] < place[before.wait]
    for before, after in zip(gathers, gathers[2:], strict=False):
        assert place[before.wait] < place[after.start], "only two stages may be on their way or in use"
    # A block has seven matmuls forward. Backward has two of each, and the first wait is behind the first of them.
    hidden = [matmuls_between(gm, c.start, c.wait) for c in gathers if len(c.modules) == 9]
    assert hidden[1:] == [7, 7] if direction == "forward" else [14, 14], hidden


def test_the_first_gather_starts_at_once() -> None:
    graphs = trace(shard=4).arranged(BLOCK)
    for direction in ("forward", "backward"):
        gm, first = getattr(graphs, direction), of(graphs, direction, "weight")[0]
        before = [node for node in gm.graph.nodes if node < first.start and node.op == "call_function"]
        assert set(before) == set(first.copy_in())


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_shard_is_cast_where_its_gather_starts(direction: str) -> None:
    graphs = trace(shard=4).arranged(BLOCK)
    gm = getattr(graphs, direction)
    place = positions(gm)
    for c in of(graphs, direction, "weight"):
        chain = c.copy_in()
        assert any(node.target in CASTS for node in chain)
        assert {place[node] for node in chain} == set(range(place[c.start] - len(chain), place[c.start]))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_gather_is_waited_for_just_before_its_first_use(direction: str) -> None:
    graphs = trace(shard=4).arranged(BLOCK)
    gm = getattr(graphs, direction)
    place = positions(gm)
    for c in of(graphs, direction, "weight"):
        inside = {c.wait, *c.copy_out()}
        first_use = min(place[user] for node in inside for user in node.users if user not in inside)
        others = [n for n in gm.graph.nodes if place[c.wait] < place[n] < first_use and n not in inside]
        starting = {node for other in of(graphs, direction, "weight") for node in (other.start, *other.copy_in())}
        assert set(others) <= starting


def check_waits_of_sums(gm: GraphModule, sums: list[Collective]) -> None:
    """As many as fit into the memory of the largest are on their way, and none is waited for earlier."""
    largest = max(c.bytes_in for c in sums)
    place = positions(gm)
    for c in sums:
        on_its_way = [other for other in sums if place[other.start] <= place[c.start] < place[other.wait]]
        assert sum(other.bytes_in for other in on_its_way) <= largest
        asks = next((other for other in sums if place[other.start] > place[c.wait]), None)
        if asks:
            assert not matmuls_between(gm, c.wait, asks.start), "nothing asked for its memory yet"


def test_a_sum_starts_with_its_last_gradient_and_is_waited_for_as_late_as_memory_allows() -> None:
    graphs = trace(shard=4).arranged(BLOCK)
    sums = of(graphs, "backward", "gradient")
    check_waits_of_sums(graphs.backward, sums)
    assert [matmuls_between(graphs.backward, c.start, c.wait) for c in sums] == [14, 14, 14, 0, 0]


def test_sums_over_replicas_overlap_what_follows_as_well() -> None:
    graphs = trace(replicate=2, shard=2).arranged(BLOCK)
    scatters, sums = of(graphs, "backward", "gradient"), of(graphs, "backward", "gradient", "dp_replicate")
    place = positions(graphs.backward)
    assert [c.sums_before for c in sums] == [1] * len(scatters)
    for scatter, total in zip(scatters, sums, strict=True):
        assert place[scatter.wait] < place[total.start]
    check_waits_of_sums(graphs.backward, scatters)
    check_waits_of_sums(graphs.backward, sums)
    assert [matmuls_between(graphs.backward, c.start, c.wait) for c in sums] == [14, 14, 0, 0, 0]


@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_computation_keeps_its_order_and_the_graph_is_sorted(mesh: dict[str, int], overlap: Overlap) -> None:
    plain = trace(**mesh)
    arranged = plain.arranged(overlap)  # checks that it is sorted
    for before, after in ((plain.forward, arranged.forward), (plain.backward, arranged.backward)):
        assert computation(before) == computation(after)


def computation(gm: GraphModule) -> list[str]:
    """Names of what computes; layouts, casts and collectives may move."""
    heavy = ("mm", "scaled_dot", "embedding", "mul", "rsqrt", "sum", "pow")
    return [n.name for n in gm.graph.nodes if n.op == "call_function" and n.name.startswith(heavy)]


def test_arranging_does_not_depend_on_names_of_process_groups() -> None:
    graphs = trace(shard=4)
    one, other = graphs.arranged(BLOCK), graphs.arranged(BLOCK)
    assert str(one.backward.graph) == str(other.backward.graph)


@pytest.mark.slow
def test_passes_take_linear_time() -> None:
    seconds = {}
    for layers in (4, 32):
        graphs = trace(shape=dataclasses.replace(LLAMA_8B, n_layers=layers), shard=64)
        nodes = len(graphs.forward.graph.nodes) + len(graphs.backward.graph.nodes)
        seconds[nodes] = min(seconds_to_arrange(graphs) for _ in range(3))
    (few, short), (many, long) = seconds.items()
    assert many > 7 * few
    assert long / many < 3 * short / few, "each of many nodes would take 7 times as long, were a pass quadratic"


def seconds_to_arrange(graphs: Graphs) -> float:
    copies = [copy_graph(graphs.forward), copy_graph(graphs.backward)]
    begin = time.process_time()
    for gm in copies:
        arrange(gm, graphs.axes, BLOCK)
    return time.process_time() - begin


def planned(gm: GraphModule) -> list[str]:
    """Starts, waits with the number of their start, and matmuls, in order."""
    starts: dict[Node, int] = {}
    steps = []
    for node in gm.graph.nodes:
        if node.target in KINDS:
            starts[node] = len(starts)
            steps.append(KINDS[node.target])
        elif node.target is WAIT:
            steps.append(f"wait {starts[node.args[0]]}")
        elif node.target is MATMUL:
            steps.append("matmul")
    return steps


def generated(code: str) -> list[str]:
    """The same, read from Inductor's code."""
    starts: dict[str, int] = {}
    steps = []
    for line in code[code.index("def call") :].splitlines():
        collective = re.search(r"(?:(\w+) = )?torch\.ops\._c10d_functional\.(\w+)\.default\((\w+)", line)
        if collective is None:
            steps += ["matmul"] if re.search(r"extern_kernels\.(mm|addmm)\(", line) else []
            continue
        result, operation, given = collective.groups()
        if operation == "wait_tensor":
            steps.append(f"wait {starts[given]}")
            continue
        # An all-reduce in place has the name of what it takes, which started before as something else.
        starts[given if operation == "all_reduce_" else result] = sum("wait" not in s and s != "matmul" for s in steps)
        steps.append(re.sub(r"_into_tensor|_tensor|_$", "", operation))
    return steps


@dataclasses.dataclass
class PlanRecorder(GraphReport):
    """Also reads what is planned while it stands there: Inductor goes on to change the graph."""

    plans: list[list[str]] = dataclasses.field(default_factory=list)

    def record(self, graphs: Mapping[str, GraphModule], plans: Mapping[str, list[str]]) -> None:
        super().record(graphs, plans)
        self.plans = [planned(gm) for gm in graphs.values()]


def compile_with_inductor(replicate: int, shard: int, tp: int) -> tuple[list[list[str]], list[list[str]]]:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    mesh = build_mesh(torch.device("cpu"), dp_replicate=replicate, dp_shard=shard, tp=tp)
    shape = dataclasses.replace(SHAPE, n_layers=2, vocab_size=256, ffn_dim=48)
    with torch.device("meta"):
        model = Llama(shape)
    parallelize(model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, Precision(torch.float32, torch.float32)))
    initialize(model, torch.device("cpu"), initial_std(shape), seed=0)
    recorder = PlanRecorder(mesh.axis_of_group())
    sum_losses = build_sum_losses(
        model,
        build_loss(sum_token_losses, mesh, vocab_size=256, uncounted=UNCOUNTED, loss_parallel=True),
        enable=True,
        backend="inductor",
        loss_inside=True,
        partition=Partition(True, overlap=BLOCK),
        report=recorder,
    )
    tokens_BT = torch.zeros(2, 16, dtype=torch.int64)
    _, codes = run_and_get_code(lambda: sum_losses(tokens_BT, tokens_BT).backward())
    return recorder.plans, [generated(code) for code in codes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicate", "shard", "tp"), [(2, 1, 1), (2, 2, 1), (1, 2, 2)], ids=["DDP", "HSDP", "FSDP+TP"]
)
def test_inductor_runs_what_was_planned(replicate: int, shard: int, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is read is the code that calls the kernels; these are left empty, as their compilation takes longest.
    leave_kernels_empty(monkeypatch)
    with torch._inductor.config.patch(force_disable_caches=True), fake_process_group(replicate * shard * tp):
        plans, codes = compile_with_inductor(replicate, shard, tp)
    assert all("matmul" in plan for plan in plans)
    if tp > 1:  # Inductor puts some matmul that nothing waits for on the other side of tensor parallelism's collectives
        plans, codes = ([[step for step in steps if step != "matmul"] for steps in both] for both in (plans, codes))
    assert codes == plans
    assert any(kind in step for kind in ("all_gather", "all_reduce") for step in plans[1])

"""`schedule_graph`: shorter steps, the same numbers, Plans that can be applied again."""

from __future__ import annotations

import copy
import gc
import logging
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.stand_ins import run_alone
from undertow.capture.mesh import Mesh, fake_world
from undertow.capture.models import load
from undertow.capture.trace import trace_step
from undertow.errors import CostError, OrderError, ProgramError, UndertowError
from undertow.graph import as_inductor_pass, collective_call, convert
from undertow.graph.nodes import tensor_nbytes, tensors_of
from undertow.graph.schedule_graph import _default_cluster, _say_once, schedule_graph
from undertow.program import Order, verify
from undertow.schedule.buckets import Bucket
from undertow.schedule.limits import Limits
from undertow.schedule.plan import Plan, sequence_digest

ops = torch.ops._c10d_functional
wait = ops.wait_tensor
GROUPS = {"0": ("dp", tuple(range(4)))}
QUICK = Limits(peak_ratio=None, steps=200)
X, W = torch.arange(32.0).reshape(8, 4) / 32, torch.ones(4, 4) / 4


def traced(function: Any, *inputs: torch.Tensor) -> fx.GraphModule:
    with fake_world(4):
        return make_fx(function, tracing_mode="fake")(*inputs)


def estimate(node: fx.Node, nbytes: int | None = None) -> float:
    """Collectives whose latency is long against compute: the fewer, the better."""
    call = collective_call(node)
    if call is None:
        return 20e-6 + 1e-9 * sum(map(tensor_nbytes, tensors_of(node)))
    return 1e-3 + 1e-9 * (nbytes or call.work.nbytes or 0)


def gathers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Four gathers, each right before its use."""
    for k in range(4):
        whole = wait(ops.all_gather_into_tensor(w + k, 4, "0"))
        for _ in range(5):
            x = torch.relu(x @ whole[:4])
    return x


def scheduled(module: fx.GraphModule, **options: Any) -> tuple[fx.GraphModule, Plan]:
    settings = {"cluster": "h100x4", "groups": GROUPS, "limits": QUICK, **options}
    return schedule_graph(module, **settings)


def starts(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if collective_call(node)]


def assert_same_numbers(one: fx.GraphModule, other: fx.GraphModule, *inputs: torch.Tensor) -> None:
    for late in (False, True):
        wanted, got = (run_alone(module, list(inputs), late) for module in (one, other))
        for a, b in zip(wanted[0] + wanted[1], got[0] + got[1], strict=True):
            assert torch.equal(a, b)


def test_the_module_is_scheduled_in_place_and_computes_the_same():
    module = traced(gathers, X, W)
    before = copy.deepcopy(module)
    result, plan = scheduled(module, estimate=estimate)
    assert result is module
    assert plan.planned.total_ns < plan.captured.total_ns
    module.graph.lint()
    assert_same_numbers(before, module, X, W)
    assert module.code != before.code


def test_symbolic_sizes_stay_symbolic():
    with fake_world(4):
        module = make_fx(gathers, tracing_mode="symbolic")(X, W)
    before = copy.deepcopy(module)
    _, plan = scheduled(module, estimate=estimate)
    assert plan.buckets
    module.graph.lint()
    assert_same_numbers(before, module, torch.cat([X, X]), W)


def test_merging_can_be_switched_off():
    _, merged = scheduled(traced(gathers, X, W), estimate=estimate)
    module, alone = scheduled(traced(gathers, X, W), estimate=estimate, merge=False)
    assert merged.buckets
    assert not alone.buckets
    assert len(starts(module)) == 4


def exchanges(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Four all-to-alls, each right before its use, as those of experts."""
    for k in range(4):
        arrived = wait(ops.all_to_all_single(w + k, [1] * 4, [1] * 4, "0"))
        for _ in range(5):
            x = torch.relu(x @ arrived)
    return x


@pytest.mark.parametrize(
    ("step", "merge", "hows"),
    [
        (exchanges, True, {"copied"}),
        (exchanges, "copied", {"copied"}),
        (exchanges, "coalesced", set()),
        (gathers, True, {"coalesced"}),
        (gathers, "copied", {"copied"}),
        (gathers, "coalesced", {"coalesced"}),
    ],
)
def test_the_way_to_merge_is_chosen_by_what_it_takes_or_given(step, merge, hows):
    module = traced(step, X, W)
    before = copy.deepcopy(module)
    _, plan = scheduled(module, estimate=estimate, merge=merge)
    assert {bucket.how for bucket in plan.buckets} == hows
    assert plan.planned.total_ns < plan.captured.total_ns
    assert_same_numbers(before, module, X, W)
    again = copy.deepcopy(before)
    scheduled(again, plan=Plan.from_json(plan.to_json()))
    assert again.code == module.code


def test_all_to_alls_are_left_alone_where_copies_cost_more_than_they_save():
    def dear(node: fx.Node, nbytes: int | None = None) -> float:
        return 1e-6 if collective_call(node) else 20e-6  # no copy is as cheap as that

    _, plan = scheduled(traced(exchanges, X, W), estimate=dear)
    assert not plan.buckets


@pytest.mark.parametrize("merge", [True, "copied", False])
def test_odd_collectives_among_the_others_do_no_harm(merge):
    """Two waits for one, one that nobody waits for, a broadcast, a send and a receive."""

    def step(x, w):
        one = ops.all_reduce(x, "sum", "0")
        sent = ops.isend(x, 1, 0, "0")
        got = ops.irecv(torch.empty(8, 4), 1, 0, "0")
        two = ops.all_reduce(w, "sum", "0")
        never = ops.all_reduce(x + 1, "sum", "0")
        cast = ops.broadcast(x, 0, "0")
        return wait(one) + 1, wait(one), wait(two), wait(got), wait(cast), never, wait(sent)

    module, plan = scheduled(traced(step, X, W), estimate=estimate, merge=merge)
    module.graph.lint()
    merged = {True: 3, "copied": 2, False: 0}[merge]
    assert sum(len(bucket.members) for bucket in plan.buckets) == merged
    assert len(starts(module)) == (6 - merged + 1 if merged else 6)
    program = convert(module.graph, GROUPS).program
    verify(program, Order.captured(program))


def test_a_way_to_merge_that_does_not_exist_is_refused():
    with pytest.raises(OrderError, match="'flat' is no way to merge; give coalesced or copied"):
        scheduled(traced(gathers, X, W), merge="flat")


def steps() -> dict[str, tuple[fx.GraphModule, dict[str, Any]]]:
    found = {}
    for parallel, dims in {
        "fsdp": {"dp": 4},
        "ddp": {"dp": 4},
        "hsdp": {"replicate": 2, "shard": 2},
        "fsdp+tp": {"dp": 2, "tp": 2},
    }.items():
        step = trace_step(load("llama3-debug", seq=32), Mesh(dims), parallel, optimizer="adamw")
        groups = {g.name: ("-".join(g.dims), g.ranks) for g in step.groups.values()}
        found[parallel] = (step.graph_module, groups)
    return found


@pytest.fixture(scope="module")
def llama() -> dict[str, tuple[fx.GraphModule, dict[str, Any]]]:
    return steps()


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("parallel", ["fsdp", "ddp", "hsdp", "fsdp+tp"])
def test_the_graph_that_was_written_is_the_one_that_was_planned(llama, parallel, merge):
    original, groups = llama[parallel]
    module = copy.deepcopy(original)
    limits = Limits(peak_ratio=None if merge else 1.0)  # room for buckets, or none at all
    options: dict[str, Any] = {"groups": groups, "estimate": estimate, "limits": limits}
    _, plan = scheduled(module, merge=merge, **options)
    assert plan.planned.total_ns < plan.captured.total_ns
    assert bool(plan.buckets) == merge
    module.graph.lint()
    program = convert(module.graph, groups).program
    order = Order.captured(program)
    verify(program, order)
    assert tuple(task.name for task in program.tasks) == plan.order
    assert sequence_digest(program, order) == plan.digest
    # The same costs for the same nodes: what was written takes what was promised.
    _, again = scheduled(module, merge=False, **{**options, "limits": Limits(steps=0)})
    assert again.captured.total_ns == plan.planned.total_ns
    assert again.captured.exposed_ns == plan.planned.exposed_ns
    assert again.captured.peak_nbytes <= plan.planned.peak_nbytes
    assert merge or plan.planned.peak_nbytes <= plan.captured.peak_nbytes


def test_a_plan_is_applied_again_without_costs(llama):
    original, groups = llama["fsdp"]
    first, second = copy.deepcopy(original), copy.deepcopy(original)
    _, plan = scheduled(first, groups=groups, estimate=estimate)
    saved = Plan.from_json(plan.to_json())
    _, applied = scheduled(second, groups=groups, cluster=None, plan=saved)
    assert applied == plan
    assert str(second.graph) == str(first.graph)


def test_the_figures_of_a_plan_that_is_applied_are_for_the_costs_at_hand(llama):
    original, groups = llama["fsdp"]
    _, plan = scheduled(copy.deepcopy(original), groups=groups, estimate=estimate)
    assert (
        scheduled(copy.deepcopy(original), groups=groups, estimate=estimate, plan=plan)[1] == plan
    )

    def fast(node: fx.Node, nbytes: int | None = None) -> float:
        return estimate(node, nbytes) / 100

    _, applied = scheduled(copy.deepcopy(original), groups=groups, estimate=fast, plan=plan)
    assert (applied.order, applied.digest) == (plan.order, plan.digest)
    assert applied.bound_ns <= applied.planned.total_ns < plan.planned.total_ns / 5
    assert applied.captured.total_ns < plan.captured.total_ns / 5


def test_a_plan_for_another_step_is_refused(llama):
    _, plan = scheduled(copy.deepcopy(llama["fsdp"][0]), groups=llama["fsdp"][1])
    module, groups = llama["ddp"]
    before = str(module.graph)
    with pytest.raises(OrderError, match="made for another step"):
        scheduled(module, groups=groups, plan=plan)
    assert str(module.graph) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": Limits(peak_bytes=4096)}, "limits= contradicts the plan.*made under none"),
        ({"limits": Limits(peak_ratio=None, in_flight_bytes=1)}, "limits= contradicts the plan"),
        ({"merge": False}, r"merge= contradicts the plan, which merges collectives \(coalesced\)"),
        ({"merge": "copied"}, "merge= contradicts the plan"),
        ({"manual": ["layers.*"]}, "manual= contradicts the plan"),
    ],
)
def test_options_that_contradict_a_plan_are_refused(options, message):
    _, plan = scheduled(traced(gathers, X, W), estimate=estimate)
    assert plan.buckets
    module = traced(gathers, X, W)
    before = str(module.graph)
    with pytest.raises(OrderError, match=message):
        scheduled(module, plan=plan, **options)
    assert str(module.graph) == before
    same = {"limits": replace(plan.limits, steps=7), "merge": "coalesced"}
    assert scheduled(module, plan=plan, **same)[1].digest == plan.digest


def test_a_plan_that_was_edited_beyond_its_limit_is_refused_and_leaves_the_graph():
    _, plan = scheduled(traced(gathers, X, W), merge=False, limits=Limits())
    early = [name for name in plan.order if "gather" in name or "add" in name]
    waits = [name for name in plan.order if "wait" in name]
    rest = [name for name in plan.order if name not in {*early, *waits}]
    edited = replace(plan, order=(*early, *waits, *rest))
    module = traced(gathers, X, W)
    before = str(module.graph)
    for cluster in ("h100x4", None):
        with pytest.raises(
            OrderError, match=r"bytes at its peak, .* of the limit that it was made"
        ):
            scheduled(module, plan=edited, limits=None, cluster=cluster)
    assert str(module.graph) == before


def test_a_plan_that_merges_what_differs_is_refused():
    def step(x, w):
        return wait(ops.all_reduce(x, "sum", "0")), wait(ops.all_reduce(w, "max", "0"))

    _, plan = scheduled(traced(step, X, W), merge=False)
    module = traced(step, X, W)
    bucket = Bucket(("all_reduce", "all_reduce_1"))
    order = tuple(name for name in plan.order if name != "all_reduce_1")
    edited = replace(plan, buckets=(bucket,), order=order)
    with pytest.raises(OrderError):
        scheduled(module, plan=edited)


def test_a_graph_without_collectives_stays_as_it_is():
    module = traced(lambda x, w: torch.relu(x @ w), X, W)
    before = str(module.graph)
    _, plan = scheduled(module)
    assert str(module.graph) == before
    assert plan.order == ("mm", "relu")
    assert plan.captured == plan.planned
    assert plan.limits == QUICK


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf"), 1e300, "fast", True])
def test_an_estimate_that_is_no_time_is_an_error_that_names_the_node(bad):
    with pytest.raises(CostError, match="'mm_3'"):
        scheduled(
            traced(gathers, X, W),
            estimate=lambda node, nbytes=None: bad if node.name == "mm_3" else None,
        )


def test_a_merged_estimate_that_is_no_time_is_an_error_too():
    with pytest.raises(CostError, match="'all_gather_into_tensor'"):
        scheduled(
            traced(gathers, X, W),
            estimate=lambda node, nbytes=None: None if nbytes is None else -1.0,
        )


def test_an_estimate_is_asked_about_new_collectives_with_a_node_and_bytes():
    asked: list[tuple[fx.Node, int]] = []

    def recording(node: fx.Node, nbytes: int | None = None) -> float:
        if nbytes is not None:
            asked.append((node, nbytes))
        return estimate(node, nbytes)

    module = traced(gathers, X, W)
    _, plan = scheduled(module, estimate=recording)
    assert plan.buckets
    assert all(collective_call(node) for node, _ in asked)
    merged = W.nbytes * len(plan.buckets[0].members)
    assert merged in [nbytes for _, nbytes in asked]


def test_without_a_cluster_one_is_assumed_and_said_once(caplog):
    _default_cluster.cache_clear()
    with caplog.at_level(logging.WARNING):
        scheduled(traced(gathers, X, W), cluster=None)
        scheduled(traced(gathers, X, W), cluster=None)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["no cluster was given: costs are those of h100x4, one node; pass cluster="]


def test_limits_that_cannot_be_met_are_told_with_what_was_reached(caplog):
    with caplog.at_level(logging.WARNING):
        _, plan = scheduled(traced(gathers, X, W), limits=Limits(peak_bytes=1, in_flight_bytes=2))
    peak, flight = (record.getMessage() for record in caplog.records)
    assert peak.startswith("the memory limit of 1 B is not met: the captured order takes 704 B")
    assert f"{plan.planned.peak_nbytes - 1} B too much" in peak
    assert flight == ("the limit of 2 B in flight is not met: the least that was found is 320 B")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        scheduled(traced(gathers, X, W), limits=Limits())
    assert not caplog.records


def test_what_figures_rest_on_is_said_once(caplog):
    def step(x, landed):
        made = ops.all_gather_into_tensor(x, 4, "0")
        return torch.linalg.inv(x[:4]), wait(made), wait(landed)

    _say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        scheduled(traced(step, X, W))
        scheduled(traced(step, X, W))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("the graph waits for collectives that it did not start")
    assert re.match("costs rest on an assumption: .*inv.* is of no known class", said[1])


@pytest.mark.parametrize("donated", [["nonsense"], "x_1"])
def test_a_donated_name_that_is_not_there_is_refused(donated):
    module = traced(gathers, X, W)
    with pytest.raises(ProgramError, match=r"unknown placeholder 'nonsense'|the text 'x_1'"):
        scheduled(module, donated=["x_1", *donated] if isinstance(donated, list) else donated)
    scheduled(module, donated=["x_1"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimate": lambda node: 1e-3}, "estimate cannot be asked about a node and a size"),
        ({"estimate": 3}, "estimate is 3; give a function of a node and nbytes=None"),
        ({"limits": 3}, r"limits is 3; give Limits\(...\) or a text"),
        ({"limits": "lots"}, "'lots' is not a memory limit"),
        ({"plan": {"a": 1}}, "plan is a dict; Plan.from_json makes a Plan"),
        ({"groups": {"0": (0, 1, 2, 3)}}, r"groups\['0'\] is \(0, 1, 2, 3\); give the name"),
        ({"groups": {"0": ("dp", 4)}}, r"groups\['0'\] is \('dp', 4\)"),
        ({"groups": ["0"]}, r"groups is \['0'\]; give the name"),
    ],
)
def test_arguments_of_the_wrong_kind_get_a_sentence(options, message):
    module = traced(gathers, X, W)
    before = str(module.graph)
    with pytest.raises(UndertowError, match=message):
        scheduled(module, **options)
    assert str(module.graph) == before


def test_limits_may_be_text():
    _, plan = scheduled(traced(gathers, X, W), limits="+5%")
    assert plan.limits == Limits(peak_ratio=1.05)
    assert (
        as_inductor_pass("h100x4", limits="+5%").uuid()
        == as_inductor_pass("h100x4", limits=Limits(peak_ratio=1.05)).uuid()
    )


def test_a_group_without_ranks_is_an_error_that_says_what_to_give():
    with pytest.raises(CostError, match=r"group '0' has no ranks; give the group's ranks"):
        schedule_graph(traced(gathers, X, W), cluster="h100x4")


def test_collectives_that_write_to_what_they_are_given_are_merged_where_they_can():
    def step(x, w):
        a, b = x * 2, w * 2
        first = wait(ops.all_reduce_(a, "sum", "0"))
        second = wait(ops.all_reduce_(b, "sum", "0"))
        out = [torch.empty(16, 4), torch.empty(16, 4)]
        third = wait(ops.all_gather_into_tensor_out(w, 4, "0", out=out[0]))
        fourth = wait(ops.all_gather_into_tensor_out(w + 1, 4, "0", out=out[1]))
        return first.sum() + second.sum() + third.sum() + fourth.sum()

    module = traced(step, X, W)
    before = copy.deepcopy(module)
    _, plan = scheduled(module, estimate=estimate)
    assert {bucket.how for bucket in plan.buckets} == {"coalesced", "copied"}
    assert [str(node.target) for node in starts(module)] == [
        "_c10d_functional.all_gather_into_tensor.default",
        "_c10d_functional.all_reduce_coalesced_.default",
    ]
    assert_same_numbers(before, module, X, W)


def test_names_decide_nothing():
    module, renamed = traced(gathers, X, W), traced(gathers, X, W)
    for k, node in enumerate(renamed.graph.nodes):
        if node.op == "call_function":
            node._rename(f"n{k}")
    for each in (module, renamed):
        scheduled(each, estimate=estimate)
    targets = [[str(node.target) for node in each.graph.nodes] for each in (module, renamed)]
    assert targets[0] == targets[1]


def test_scheduling_twice_gives_the_same_graph():
    texts = []
    for _ in range(2):
        module, plan = scheduled(traced(gathers, X, W), estimate=estimate)
        texts.append((str(module.graph), plan.to_json()))
    assert texts[0] == texts[1]


def test_an_untraced_module_is_refused_with_a_sentence():
    module = fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(ProgramError, match="trace the model"):
        schedule_graph(module)


def test_nothing_keeps_the_graph_alive():
    module = traced(gathers, X, W)
    plan = scheduled(module, estimate=estimate)[1]
    watched = [weakref.ref(module.graph), weakref.ref(starts(module)[0])]
    del module
    gc.collect()
    assert plan.buckets
    assert [ref() for ref in watched] == [None, None]


def test_an_inductor_pass_can_be_cached_by_what_it_depends_on():
    one, other = as_inductor_pass("h100x8"), as_inductor_pass("h100x8", limits=QUICK)
    assert one.uuid() == as_inductor_pass("h100x8").uuid() != other.uuid()
    assert as_inductor_pass("h100x8", estimate=estimate).uuid() is None


def test_an_inductor_pass_is_another_one_with_other_sources(tmp_path, monkeypatch):
    from undertow.graph import inductor_bridge

    root = tmp_path / "undertow"
    shutil.copytree(
        Path(inductor_bridge.__file__).parents[1], root, ignore=shutil.ignore_patterns("*.so")
    )
    monkeypatch.setattr(inductor_bridge, "__file__", str(root / "graph" / "inductor_bridge.py"))
    scheduler = as_inductor_pass("h100x8")
    known = {scheduler.uuid()}
    for place in ("capture/schema.py", "native/core.c", "native/__init__.py", "graph/copies.py"):
        with (root / place).open("a") as file:
            file.write("\n")
        assert scheduler.uuid() not in known, place
        known.add(scheduler.uuid())


def test_an_inductor_pass_does_not_keep_the_graph():
    module = traced(gathers, X, W)
    scheduler = as_inductor_pass("h100x4", groups=GROUPS, limits=QUICK, pin=False)
    scheduler(module.graph)
    watched = weakref.ref(module.graph)
    del module
    gc.collect()
    assert len(scheduler.plans) == 1
    assert watched() is None


def test_work_that_hides_a_collective_is_pinned_between_its_start_and_its_wait():
    from undertow.graph.inductor_bridge import hiding_order

    def step(x, w):
        made = ops.all_gather_into_tensor(w, 4, "0")
        for _ in range(3):
            x = torch.relu(x @ w)
        return x @ wait(made)[:4]

    order = hiding_order(traced(step, X, W).graph)
    pinned = {node.name: [before.name for before in found] for node, found in order.items()}
    assert pinned == {"mm": ["all_gather_into_tensor"], "wait_tensor": ["mm_2"]}


def test_a_manual_plan_by_module_path_computes_the_same(llama):
    original, groups = llama["fsdp"]
    module = copy.deepcopy(original)
    settings = {"cluster": "h100x4", "groups": groups, "limits": Limits(peak_ratio=None)}
    _, plan = schedule_graph(module, manual=["layers.*", ["embedding", "norm"]], **settings)
    assert plan.planned.total_ns < plan.captured.total_ns
    assert len(plan.buckets) >= 2 * 3  # two layers: forward, backward, gradients
    module.graph.lint()
    again = convert(module.graph, groups).program
    verify(again, Order.captured(again))
    inputs = [
        (torch.rand(n.meta["val"].shape) * 0.1).to(n.meta["val"].dtype)
        for n in original.graph.nodes
        if n.op == "placeholder"
    ]
    assert_same_numbers(original, module, *inputs)


def layers(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
    for shard in shards:
        x = torch.relu(x @ wait(ops.all_gather_into_tensor(shard, 4, "0"))[:4])
    return x


def in_two_modules() -> Any:
    places = iter(["one", "one", "two", "two"])
    return lambda node: next(places) if collective_call(node) else None


def test_the_user_can_say_where_nodes_belong():
    module = traced(layers, X, W, W + 1, W + 2, W + 3)
    _, plan = scheduled(module, manual=["one", "two"], module_of=in_two_modules())
    assert [len(bucket.members) for bucket in plan.buckets] == [2, 2]


def test_an_inductor_pass_is_told_where_nodes_belong():
    options = {"groups": GROUPS, "limits": QUICK, "pin": False, "manual": ["one", "two"]}
    scheduler = as_inductor_pass("h100x4", module_of=in_two_modules(), **options)
    scheduler(traced(layers, X, W, W + 1, W + 2, W + 3).graph)
    assert [len(bucket.members) for bucket in scheduler.plans[0].buckets] == [2, 2]
    assert scheduler.uuid() is None


def test_a_manual_plan_for_no_module_is_refused(llama):
    original, groups = llama["fsdp"]
    with pytest.raises(UndertowError, match="unknown module path 'blocks"):
        schedule_graph(copy.deepcopy(original), groups=groups, manual=["blocks.*"])

"""Each symbol taken from an underscore path of torch still does what we need of it."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from undertow.capture import torch_api
from undertow.errors import UndertowError


def test_the_installed_torch_is_supported() -> None:
    torch_api.check_version(torch.__version__)


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cu130", "3.13.0", "2.1"])
def test_another_torch_is_refused_with_the_command_to_fix_it(version: str) -> None:
    with pytest.raises(UndertowError, match=r"torch 2\.13\.x.*pip install"):
        torch_api.check_version(version)


def test_fake_mode_gives_shapes_without_memory() -> None:
    with torch_api.new_fake_mode():
        huge = torch.empty(10**7, 10**7) @ torch.empty(10**7, 3)
    assert isinstance(huge, torch_api.FakeTensor)
    assert isinstance(torch_api.new_fake_mode(), torch_api.FakeTensorMode)
    assert huge.shape == (10**7, 3)
    assert huge.device.type == "cpu"


def test_truncated_normals_can_be_initialised_under_a_fake_mode() -> None:
    with torch_api.new_fake_mode(), torch_api.fake_initialisation():
        assert torch.nn.init.trunc_normal_(torch.empty(3)).shape == (3,)
    assert torch.nn.init.trunc_normal_(torch.full((3,), 9.0)).abs().max() <= 2


def test_fakes_can_be_left_for_a_while() -> None:
    with torch_api.new_fake_mode(), torch_api.without_fakes():
        assert not isinstance(torch.empty(2), torch_api.FakeTensor)


def test_a_graph_of_fakes_is_traced_again_with_operators_taken_apart() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(lambda x: x.softmax(0), tracing_mode="fake")(torch.randn(3))
    softmax = torch.ops.aten._softmax.default
    table = {softmax: torch_api.registered_decompositions()[softmax]}
    again = torch_api.retrace(gm, table)
    targets = [node.target for node in again.graph.nodes]
    assert softmax not in targets
    assert torch.ops.aten.exp.default in targets
    assert isinstance(again.graph.output_node().args[0], tuple)


def test_fake_mode_takes_real_tensors_too() -> None:
    with torch_api.new_fake_mode():
        assert (torch.empty(2) + torch.ones(2)).shape == (2,)


@pytest.mark.parametrize(
    "look", [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0]]
)
def test_looking_at_values_raises_what_we_translate(look) -> None:  # type: ignore[no-untyped-def]
    with torch_api.new_fake_mode(), pytest.raises(torch_api.UNTRACEABLE):
        look(torch.empty(3))


def test_dispatch_mode_sees_operations_below_autograd() -> None:
    seen = []

    class Mode(torch_api.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Mode():
        torch.autograd.grad((x * x).sum(), x)
    assert seen.count(torch.ops.aten.mul.Tensor) >= 3  # one forward, two backward


def test_a_strided_tensor_is_made_from_sizes_strides_and_type() -> None:
    made = torch_api.empty_strided_cpu((2, 3), (1, 2), torch.float64)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.float64)
    assert torch_api.empty_strided_cpu((), (), torch.bool).dim() == 0


def test_sequence_numbers_tell_when_autograd_nodes_were_made() -> None:
    x = torch.ones(2, requires_grad=True)
    before = torch_api.sequence_number()
    y = x * 2
    after = torch_api.sequence_number()
    assert before <= torch_api.node_sequence_number(y.grad_fn) < after


def test_calls_with_an_effect_take_a_token_and_return_one() -> None:
    check = torch.ops.aten._linalg_check_errors.default
    found = torch_api.with_effects(
        None, check, torch.zeros((), dtype=torch.int32), "inv", is_matrix=True
    )
    assert found[0].numel() == 0
    with pytest.raises(torch.linalg.LinAlgError):
        torch_api.with_effects(
            None, check, torch.ones((), dtype=torch.int32), "inv", is_matrix=True
        )


def test_storage_key_is_shared_by_views_only() -> None:
    x = torch.ones(4)
    assert torch_api.storage_key(x) == torch_api.storage_key(x.view(2, 2).t())
    assert torch_api.storage_key(x) != torch_api.storage_key(x.clone())


def test_a_storage_comes_with_its_key() -> None:
    x = torch.ones(4, dtype=torch.float64)
    key, storage = torch_api.keyed_storage(x[1:])
    assert key == torch_api.storage_key(x)
    assert storage.nbytes() == 32


def test_symbolic_sizes_are_told_apart() -> None:
    fixed = torch_api.FakeTensorMode().from_tensor(torch.empty(6, 4))
    dynamic = torch_api.FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(6, 4))
    assert [torch_api.is_symbolic(x) for x in (torch.empty(2), fixed, dynamic)] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_views_of_fakes_share_their_storage_and_keep_their_device(is_dynamic: bool) -> None:
    mode = torch_api.FakeTensorMode(shape_env=ShapeEnv() if is_dynamic else None)
    x = mode.from_tensor(torch.empty(6, 4))
    with mode:
        y = torch.empty(6, 4, device="cuda") if not is_dynamic else x
    split, view = torch.ops.aten.split_with_sizes.default, torch.ops.aten.view.default
    parts = torch_api.view_of(split, y, [2, 4], 0)
    found = torch_api.view_of(view, parts[1], [2, 8])
    expected = view(split(y, [2, 4], 0)[1], [2, 8])
    assert isinstance(found, torch_api.FakeTensor)
    assert found.fake_mode is mode
    assert found.device == expected.device == y.device
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert found.storage_offset() == expected.storage_offset() == 8
    assert torch_api.storage_key(found) == torch_api.storage_key(y)


def test_a_new_empty_tensor_is_like_one_that_was_dispatched() -> None:
    mode = torch_api.new_fake_mode()
    with mode:
        like = torch.empty(6, 4, device="cuda")
    found, expected = torch_api.new_empty(like, 24, torch.bfloat16), like.new_empty([24])
    assert isinstance(found, torch_api.FakeTensor)
    assert found.fake_mode is mode
    assert (found.device, found.dtype) == (like.device, torch.bfloat16)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    other = torch_api.new_empty(like, 24, torch.bfloat16)
    assert torch_api.storage_key(found) != torch_api.storage_key(other)
    assert torch_api.new_empty(torch.ones(2), 3, torch.float64).shape == (3,)


def test_fake_store_makes_a_group_of_any_size() -> None:
    dist.init_process_group("fake", rank=3, world_size=512, store=torch_api.fake_store())
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (3, 512)
        assert torch_api.backend_of_group(dist.group.WORLD.group_name) == "fake"
        assert torch_api.backend_of_group("nobody") == ""
    finally:
        dist.destroy_process_group()


def test_backend_of_group_is_known_by_the_groups_name() -> None:
    assert torch_api.backend_of_group("0") == ""
    dist.init_process_group("fake", rank=0, world_size=2, store=torch_api.fake_store())
    try:
        assert torch_api.backend_of_group("0") == "fake"
        assert torch_api.backend_of_group("nobody's") == ""
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("all_gather_into_tensor", "Tensor input, int group_size, str group_name"),
        ("reduce_scatter_tensor", "Tensor input, str reduce_op, int group_size, str group_name"),
        ("all_reduce", "Tensor input, str reduce_op, str group_name"),
        ("all_reduce_", "Tensor input, str reduce_op, str group_name"),
        ("wait_tensor", "Tensor tensor"),
    ],
)
def test_collectives_have_the_schema_we_call(name: str, arguments: str) -> None:
    schema = getattr(torch_api.collectives, name).default._schema
    declared = ", ".join(f"{arg.type} {arg.name}" for arg in schema.arguments)
    assert declared.replace("Any", "str") == arguments or arguments in str(schema)


def test_all_to_all_takes_split_sizes_and_a_group() -> None:
    schema = torch_api.collectives.all_to_all_single.default._schema
    names = [arg.name for arg in schema.arguments]
    assert names == ["input", "output_split_sizes", "input_split_sizes", "group_name"]


def test_operators_carry_a_schema_with_alias_information() -> None:
    node = fx.Graph().call_function(torch.ops.aten.add_.Tensor)
    assert node.target._schema.is_mutable
    assert node.target._schema.arguments[0].alias_info.is_write


def test_without_a_job_a_group_has_no_backend() -> None:
    assert torch_api.backend_of_group("0") == ""


def test_resizing_a_storage_is_an_operator_that_declares_no_write() -> None:
    schema = torch.ops.inductor.resize_storage_bytes_.default._schema
    assert schema.name == "inductor::resize_storage_bytes_"
    assert not schema.is_mutable


def test_a_joint_graph_is_cut_where_its_tags_say() -> None:
    seen = []

    def compiler(gm: fx.GraphModule, inputs: object) -> object:
        seen.append(gm)
        return gm.forward

    backend = torch_api.aot_backend(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=torch_api.min_cut_partition
    )
    x = torch.randn(3, requires_grad=True)
    torch.compile(lambda x: x.sin().cos().sum(), backend=backend)(x).backward()
    assert len(seen) == 2
    torch.testing.assert_close(x.grad, -x.sin().sin() * x.cos())


def test_operators_are_told_from_other_callables() -> None:
    assert isinstance(torch.ops.aten.mm.default, torch_api.OpOverload)
    assert not isinstance(torch.mm, torch_api.OpOverload)


def test_wrappers_of_a_process_without_them_are_not_seen() -> None:
    assert torch_api.active_ddp() is None
    assert not torch_api.has_fully_sharded_modules()
    assert torch_api.job_store() is None
    assert not torch_api.uses_python_reducer()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        assert torch_api.uses_python_reducer()


def test_groups_are_found_by_name_and_a_job_that_talks_to_nobody_has_no_store() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=torch_api.fake_store())
    try:
        world = dist.group.WORLD
        assert world is not None
        assert torch_api.process_group(world.group_name) is world
        assert torch_api.job_store() is None
    finally:
        dist.destroy_process_group()


def test_all_works_of_a_tensor_are_waited_for_with_it() -> None:
    waited = []

    class Work(dist.Work):
        def wait(self, timeout: object = None) -> bool:
            waited.append(self)
            return True

    tensor, works = torch.zeros(2), [Work(), Work()]
    for work in works:
        torch_api.register_work(tensor, work)
    assert torch_api.collectives.wait_tensor(tensor) is tensor
    assert waited == works


def test_modules_that_were_fully_sharded_are_seen() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("fake", rank=0, world_size=2, store=torch_api.fake_store())
    try:
        module = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
        assert torch_api.has_fully_sharded_modules()
        del module
        gc.collect()
    finally:
        dist.destroy_process_group()


def test_dynamo_tells_when_it_begins_also_after_a_reset() -> None:
    from torch._dynamo.callback import callback_handler

    before, heard = callback_handler.start_callbacks, []
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    try:
        torch_api.before_compilations(lambda: heard.append("one"))
        torch_api.before_compilations(lambda: heard.append("other"))
        for _ in range(2):
            compiled(torch.ones(2))
            torch._dynamo.reset()
    finally:
        callback_handler.start_callbacks = before
    assert heard == ["one", "other"] * 2


def test_backward_is_recorded_as_one_graph() -> None:
    seen = []

    def compiler(gm: fx.GraphModule) -> fx.GraphModule:
        seen.append(gm)
        return gm

    x = torch.randn(3, requires_grad=True)
    with torch_api.compiled_autograd(compiler):
        x.sin().sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(x.grad, x.cos())


def test_registered_decompositions_have_the_ones_we_take() -> None:
    names = {str(op) for op in torch_api.registered_decompositions()}
    assert {"aten._softmax.default", "aten.native_layer_norm_backward.default"} <= names


def test_fakes_are_propagated_through_a_graph() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.sum.dim_IntList, (x, [0]))
    graph.output((y,))
    mode = torch_api.new_fake_mode()
    with mode:
        given = torch.empty(3, 4)
    torch_api.propagate_fakes(fx.GraphModule(torch.nn.Module(), graph), mode, [given])
    assert y.meta["val"].shape == (4,)


def test_composite_operators_are_known_as_such() -> None:
    assert isinstance(torch.ops.aten.reshape.default, torch_api.OpOverload)
    assert torch_api.is_composite(torch.ops.aten.reshape.default)
    assert not torch_api.is_composite(torch.ops.aten.view.default)


def test_holders_of_a_tensor_and_of_its_storage_are_counted() -> None:
    tensor = torch.randn(4)
    assert torch_api.tensor_users(tensor) == 1
    assert torch_api.storage_users(tensor.untyped_storage()) == 2
    view = tensor[1:]
    assert torch_api.storage_users(view.untyped_storage()) == 3
    assert torch_api.has_storage(tensor)
    assert not torch_api.has_storage(tensor.to_sparse())
    assert not torch_api.has_storage(3)


def test_donated_inputs_of_backward_are_told() -> None:
    assert torch_api.donated_places() == frozenset()
    told = []

    def backward(gm: fx.GraphModule, inputs: object) -> object:
        names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        told.append({names[place] for place in torch_api.donated_places()})
        return gm.forward

    compiler = torch_api.aot_backend(fw_compiler=lambda gm, _: gm.forward, bw_compiler=backward)
    x = torch.randn(4, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(lambda x: (x.exp() * 2).tanh().sum(), backend=compiler)(x).backward()
    assert len(told) == 1
    assert told[0]
    assert not any(name.startswith(("primals", "tangents")) for name in told[0])


def test_the_places_of_parameters_are_known_while_a_forward_is_compiled() -> None:
    assert torch_api.static_places() == frozenset()
    told = []

    def forward(gm: fx.GraphModule, inputs: object) -> object:
        shapes = [node.meta["val"].shape for node in gm.graph.find_nodes(op="placeholder")]
        told.append(sorted(tuple(shapes[place]) for place in torch_api.static_places()))
        return gm.forward

    compiler = torch_api.aot_backend(fw_compiler=forward, bw_compiler=lambda gm, _: gm.forward)
    torch._dynamo.reset()
    torch.compile(torch.nn.Linear(3, 2), backend=compiler)(torch.ones(5, 3)).sum().backward()
    assert told == [[(2,), (2, 3)]]


def test_a_gradient_that_is_on_its_way_is_waited_for_by_whoever_uses_it() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch_api.AsyncCollectiveTensor(torch.full((6,), 2.0).view(2, 3))
    assert isinstance(parameter.grad, torch_api.AsyncCollectiveTensor)
    assert float(torch.nn.utils.clip_grad_norm_([parameter], 1e9)) == pytest.approx(24**0.5)


def test_symbols_that_only_values_tell_are_recognised() -> None:

    assert torch_api.unbacked_symbols([torch.randn(3), None, 2.5]) == frozenset()
    mode = torch_api.FakeTensorMode(
        shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True), allow_non_fake_inputs=True
    )
    with mode:
        found = torch.nonzero(torch.empty(5))
    assert len(torch_api.unbacked_symbols(found)) == 1
    assert torch_api.unbacked_symbols(found.shape[0]) == torch_api.unbacked_symbols((found, 1))


def test_a_tensor_like_a_known_one_has_its_form_and_memory_of_its_own() -> None:
    real = torch.empty(4, 6, dtype=torch.bfloat16).t()
    with torch_api.new_fake_mode():
        fake = torch.empty(4, 6, dtype=torch.bfloat16, device="cuda").t()
    for known in (real, fake):
        made = torch_api.new_like(known)
        assert type(made) is type(known)
        assert (made.shape, made.stride()) == ((6, 4), (1, 6))
        assert (made.dtype, made.device) == (known.dtype, known.device)
        assert torch_api.storage_key(made) != torch_api.storage_key(known)

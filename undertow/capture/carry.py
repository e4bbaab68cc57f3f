"""Gradients that are still being reduced when the next step begins.

A step with data parallel cannot hide all of its communication behind itself: gradients come after
forward, and those of the first layers last. With `carry_over` the backward graph does not wait for
its reductions, `optimizer.step` only notes what to do, and the next forward graph updates the
parameters of a bucket right before it first needs one of them. The numbers are those of a step that
waits: every parameter is updated by the same gradient before it is read.
"""

from __future__ import annotations

import gc
import itertools
import logging
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from undertow.capture import torch_api
from undertow.capture.full_state import plain
from undertow.errors import UndertowError

_optim = torch.optim
# What they do with one parameter does not depend on the others.
_INDEPENDENT: tuple[type[_optim.Optimizer], ...] = (
    _optim.SGD, _optim.Adam, _optim.AdamW, _optim.NAdam, _optim.RAdam, _optim.Adamax,
    _optim.Adadelta, _optim.Adagrad, _optim.RMSprop, _optim.Rprop, _optim.ASGD, _optim.Adafactor,
    _optim.Muon,
)  # fmt: skip
_PATIENCE = 10  # steps that leave nothing to the next one until that is said
_log = logging.getLogger(__name__)
_OWNER = "_undertow_carried_by"  # an attribute of parameters
_library = torch.library.Library("undertow", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "ready(Tensor(a!)[] parameters, Tensor[] after, int crossing) -> ()"
)


class CarryOverError(UndertowError):
    """Gradients that cannot be carried over into the next step."""


@dataclass(eq=False, slots=True)
class _Bucket:
    """Gradients that one collective reduces, and whose they are."""

    flat: Tensor
    grads: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    received: int = 0  # elements that autograd has handed over as gradients
    is_done: bool = False

    def wait(self) -> None:
        if self.is_done:
            return
        try:
            torch_api.collectives.wait_tensor(self.flat)
        except RuntimeError as error:
            error.add_note(
                "undertow: these are gradients of the step before; if it is about a connection or "
                "a time limit, another rank has failed or left, and its own error says why"
            )
            raise
        self.is_done = True


@dataclass(eq=False, slots=True)
class _Update:
    """What is left to do for the parameters of a bucket, with the settings of when it was asked
    for: a schedule of learning rates may have gone on since."""

    carried: CarryOver
    bucket: _Bucket
    grads: list[tuple[nn.Parameter, Tensor]]
    settings: list[dict[str, Any]]


def _apply(updates: Sequence[_Update]) -> None:
    """Make these updates, those of one step by one call of its optimizer."""
    steps: dict[tuple[CarryOver, int], list[_Update]] = {}
    for update in updates:
        for parameter, _ in update.grads:
            _updates.pop(id(parameter), None)
        update.bucket.wait()
        steps.setdefault((update.carried, id(update.settings)), []).append(update)
    for (carried, _), together in steps.items():
        grads = [pair for update in together for pair in update.grads]
        carried.update(grads, together[0].settings)


class Crossing:
    """A forward graph, whose parameters are updated as it comes to them, and its backward, which
    leaves reductions on their way."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.parameters: dict[int, nn.Parameter] = {}  # that forward has been given
        self.calls = 0  # of forward in this step
        _crossings[self.number] = self

    def leave(self, flat: Tensor) -> Tensor:
        """In place of the wait for a bucket: note that it is on its way. Waits where somebody
        would read it too early."""
        if not self._can_leave():
            torch_api.collectives.wait_tensor(flat)
            return flat
        _buckets[flat.untyped_storage().data_ptr()] = _Bucket(flat)
        # A bucket of one vector is its gradient as it is. Autograd copies what others hold, as the
        # collective does, so it gets an alias.
        return flat.detach()

    def _can_leave(self) -> bool:
        """Whether autograd only hands gradients over. It adds those of several calls of forward,
        and those of a parameter that has a gradient, and hooks are shown them."""
        if unsettled or self.calls != 1 or not self.parameters:
            return False
        return all(map(self._is_left_alone, self.parameters.values()))

    def _is_left_alone(self, parameter: nn.Parameter) -> bool:
        owner = _owner(parameter)
        if owner is None or owner.crossing_of(parameter) is not self:
            return False
        return parameter.grad is None and not parameter._backward_hooks

    def see(self, parameters: Sequence[nn.Parameter]) -> None:
        """Forward has come to these. The first of them say that a call begins."""
        first = id(parameters[0])
        if not self.parameters or first == next(iter(self.parameters)):
            self.calls += 1
            if self.calls > 1:  # gradients that no step has taken are added to
                _wait_for_gradients()
        for parameter in parameters:
            self.parameters[id(parameter)] = parameter
            owner = _owner(parameter)
            if owner is not None:
                owner.meet(parameter, self)


class CarryOver:
    """What `carry_over` returns: an optimizer whose updates the next step makes."""

    def __init__(self, model: nn.Module, optimizer: _optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._step: Callable[..., Any] = optimizer.step
        self._places: dict[int, int] = {}  # parameter -> its group
        self._met: dict[int, Crossing | None] = {}  # in this step; None: more than one reads it
        self.left = 0  # updates of buckets that were left to the next step so far
        self._idle = 0  # steps that left nothing, one after the other
        for place, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                self._adopt(parameter, place)
        optimizer.step = self._stand_in()  # type: ignore[method-assign]
        optimizer.register_state_dict_pre_hook(lambda _: self.settle())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle())
        for module in model.modules():
            for register in (
                module.register_state_dict_pre_hook,
                module.register_load_state_dict_pre_hook,
            ):
                register(lambda *_: self.settle())  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(lambda *_: self._before_forward())
        _carrying.add(self)

    def _stand_in(self) -> Any:
        """`optimizer.step` as others know it: schedules of learning rates look into it."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def step(_: _optim.Optimizer, closure: Callable[[], float] | None = None) -> float | None:
            return self._deferred(closure)

        step.__dict__.update(getattr(self._step, "__dict__", {}))
        return types.MethodType(step, self._optimizer)

    def _adopt(self, parameter: nn.Parameter, place: int) -> None:
        if _owner(parameter) is not None:
            raise CarryOverError(
                "carry_over was called twice for the same parameters; call it once, for the "
                "optimizer that updates them"
            )
        setattr(parameter, _OWNER, self)
        self._places[id(parameter)] = place
        parameter.register_post_accumulate_grad_hook(_receive)  # type: ignore[no-untyped-call]

    def meet(self, parameter: nn.Parameter, crossing: Crossing) -> None:
        """A forward graph reads this parameter. Gradients of several graphs are added up by
        autograd, so they have to be there when backward ends."""
        known = self._met.setdefault(id(parameter), crossing)
        if known is not crossing:
            self._met[id(parameter)] = None

    def crossing_of(self, parameter: nn.Parameter) -> Crossing | None:
        return self._met.get(id(parameter))

    def settle(self) -> None:
        """Finish what was left to the next step: parameters and gradients are as after a step that
        waits. `state_dict` of the model and of the optimizer do this by themselves; call it before
        you read parameters in another way."""
        mine = [update for update in _updates.values() if update.carried is self]
        _apply(list(dict.fromkeys(mine)))
        _wait_for_gradients()

    def _before_forward(self) -> None:
        if not torch.compiler.is_compiling():  # nobody updates parameters on the way
            self.settle()

    def _deferred(self, closure: Callable[[], float] | None = None) -> float | None:
        """`optimizer.step`: what is on its way is noted, the rest is done now."""
        optimizer = self._optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules look for it
        for crossing in dict.fromkeys(self._met.values()):
            if crossing is not None:
                crossing.calls = 0
        self._met.clear()
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if closure is not None or hooks or not _buckets:
            self._tell_if_idle()
            self.settle()
            return self._step(closure) if closure is not None else self._step()  # type: ignore
        self._check()
        _drop_replaced()
        settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        for key, bucket in list(_buckets.items()):
            mine = [pair for pair in bucket.grads if id(pair[0]) in self._places]
            bucket.grads = [pair for pair in bucket.grads if id(pair[0]) not in self._places]
            if not bucket.grads:
                del _buckets[key]
            if mine:
                self._note(_Update(self, bucket, mine, settings))
        rest = [
            (parameter, parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if rest:
            self.update(rest, settings)
        return None

    def _tell_if_idle(self) -> None:
        self._idle += not unsettled
        if self._idle == _PATIENCE:
            _log.warning(
                "undertow.carry_over: %d steps have left nothing to the next one; it is for models "
                "that parallelize(..., 'ddp') has made and the undertow backend compiles after it "
                "was called, one forward and backward to a step, without hooks on gradients",
                _PATIENCE,
            )

    def _note(self, update: _Update) -> None:
        self.left, self._idle = self.left + 1, 0
        for parameter, _ in update.grads:
            parameter.grad = None  # nobody zeroes it while it is reduced
            _updates[id(parameter)] = update

    def _check(self) -> None:
        """Every element of a bucket is the gradient of a parameter, or somebody has copied or added
        to what was not reduced yet."""
        for bucket in _buckets.values():
            if bucket.received != bucket.flat.numel():
                _buckets.clear()
                raise CarryOverError(
                    "autograd has added to or copied a gradient before it was reduced, so this "
                    "step is lost: a parameter is also used outside of the compiled model (in the "
                    "loss, say). Train such a model without undertow.carry_over"
                )

    def update(
        self, grads: Sequence[tuple[nn.Parameter, Tensor]], settings: Sequence[dict[str, Any]]
    ) -> None:
        """The optimizer's own step, on these parameters alone and with these settings."""
        groups = self._optimizer.param_groups
        kept = [dict(group) for group in groups]
        before = [parameter.grad for parameter, _ in grads]
        chosen: list[list[nn.Parameter]] = [[] for _ in groups]
        for parameter, grad in grads:
            parameter.grad = grad
            chosen[self._places[id(parameter)]].append(parameter)
        for group, then, parameters in zip(groups, settings, chosen, strict=True):
            group.update(then, params=parameters)
        try:
            self._step()
        finally:
            for group, was in zip(groups, kept, strict=True):
                group.update(was)
            for (parameter, _), grad_before in zip(grads, before, strict=True):
                parameter.grad = grad_before


_numbers = itertools.count()
_crossings: weakref.WeakValueDictionary[int, Crossing] = weakref.WeakValueDictionary()
_carrying: weakref.WeakSet[CarryOver] = weakref.WeakSet()
_buckets: dict[int, _Bucket] = {}  # on their way and not asked for by a step, by their storage
_updates: dict[int, _Update] = {}  # asked for and not made, by the parameter
unsettled: set[int] = set()
"""The graphs of this process whose costs are still being measured: what they take now is not what
they will take, and nothing is carried over from one to the next."""


def carry_over(model: nn.Module, optimizer: _optim.Optimizer) -> CarryOver:
    """Let reductions of gradients go on during the next step's forward, which makes the updates.

    For data parallel models that the undertow backend compiles, before the first step; the training
    loop stays as it is:

        model = undertow.parallelize(model, mesh, "ddp")
        optimizer = torch.optim.AdamW(model.parameters())
        undertow.carry_over(model, optimizer)
        model = torch.compile(model, backend="undertow")

    Between two steps parameters are not up to date and gradients are None: `settle()` of what is
    returned finishes both.
    """
    if type(optimizer) not in _INDEPENDENT:
        known = ", ".join(kind.__name__ for kind in _INDEPENDENT)
        raise CarryOverError(
            f"carry_over updates parameters one bucket at a time, which {type(optimizer).__name__} "
            f"may not allow; it knows {known}"
        )
    return CarryOver(plain(model), optimizer)


def is_carrying() -> bool:
    """Whether graphs that are compiled now should be ready for it: all ranks say the same, however
    long what they have dropped stays around."""
    if _carrying:
        gc.collect()
    return bool(_carrying)


def _owner(parameter: Tensor) -> CarryOver | None:
    return getattr(parameter, _OWNER, None)


def _receive(parameter: Tensor) -> None:
    """Autograd has handed over a gradient. Whoever uses one that is on its way waits for it."""
    grad = parameter.grad
    if grad is None or not _buckets or isinstance(grad, torch_api.AsyncCollectiveTensor):
        return
    bucket = _buckets.get(grad.untyped_storage().data_ptr())
    if bucket is not None:
        assert isinstance(parameter, nn.Parameter)
        bucket.grads.append((parameter, grad))
        bucket.received += grad.numel()
        parameter.grad = torch_api.AsyncCollectiveTensor(grad)


def _drop_replaced() -> None:
    """Forget gradients that were set to None, or to others, since autograd handed them over: no
    step may make an update of them, and nobody else would let go of their memory."""
    for key, bucket in list(_buckets.items()):
        bucket.grads = [
            (parameter, grad)
            for parameter, grad in bucket.grads
            if getattr(parameter.grad, "elem", None) is grad  # what waits for it is still there
        ]
        if not bucket.grads:
            bucket.wait()
            del _buckets[key]


def _wait_for_gradients() -> None:
    """Gradients that no step has asked for are plain tensors from here on."""
    for bucket in _buckets.values():
        bucket.wait()
        for parameter, grad in bucket.grads:
            if isinstance(parameter.grad, torch_api.AsyncCollectiveTensor):
                parameter.grad = grad
    _buckets.clear()


def _ready(parameters: list[nn.Parameter], after: list[Tensor], crossing: int) -> None:
    """Forward is about to read these parameters: make the updates that they wait for."""
    known = _crossings.get(crossing)
    if known is not None:
        known.see(parameters)
    if _updates:
        found = [_updates.get(id(parameter)) for parameter in parameters]
        _apply([update for update in dict.fromkeys(found) if update is not None])


_library.impl("ready", _ready, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]

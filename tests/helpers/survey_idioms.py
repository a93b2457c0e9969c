# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Idioms of training loops, each written as people write it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from survey_cases import Loop, Subject
from training import Optimizer, perceptron, regression

IDIOMS: dict[str, Subject] = {}
Step = Callable[[Loop, int], None]


def adamw(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.003)]


def momentum(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]


def idiom(name: str, **settings: Any) -> Callable[[Step], Step]:
    """Makes a step an idiom."""

    def add(step: Step) -> Step:
        IDIOMS[name] = Subject(name, settings.pop("make", adamw), step, **settings)
        return step

    return add


def between(name: str, change: Callable[[Loop, int], object], **settings: Any) -> None:
    """Adds an idiom that does something between backward and step."""

    def step(c: Loop, number: int) -> None:
        c.backward(number)
        change(c, number)
        c.optimizer.step()
        c.optimizer.zero_grad()

    idiom(name, **settings)(step)


def afterwards(name: str, change: Callable[[Loop, int], object], **settings: Any) -> None:
    """Adds an idiom that does something after the step."""

    def step(c: Loop, number: int) -> None:
        c.backward(number)
        c.optimizer.step()
        c.optimizer.zero_grad()
        change(c, number)

    idiom(name, **settings)(step)


def everything(c: Loop) -> list[Any]:
    return list(c.model.parameters())


def each_grad(work: Callable[[Any], object]) -> Callable[[Loop, int], None]:
    """Returns what does something with each parameter that has a gradient."""

    def change(c: Loop, _number: int) -> None:
        for each in everything(c):
            if each.grad is not None:
                work(each)

    return change


def each_parameter(work: Callable[[Any], Any]) -> Callable[[Loop, int], None]:
    def change(c: Loop, _number: int) -> None:
        for each in everything(c):
            work(each)

    return change


# --- gradients --------------------------------------------------------------------------------------------------------


@idiom("zero_grad() first")
def zero_first(c: Loop, number: int) -> None:
    c.optimizer.zero_grad()
    c.backward(number)
    c.optimizer.step()


@idiom("zero_grad(set_to_none=False)")
def keep_zeros(c: Loop, number: int) -> None:
    c.backward(number)
    c.optimizer.step()
    c.optimizer.zero_grad(set_to_none=False)


@idiom("model.zero_grad()")
def zero_model(c: Loop, number: int) -> None:
    c.backward(number)
    c.optimizer.step()
    c.model.zero_grad()


@idiom("p.grad.zero_() by hand")
def zero_by_hand(c: Loop, number: int) -> None:
    for each in everything(c):
        if each.grad is not None:
            each.grad.detach_()
            each.grad.zero_()
    c.backward(number)
    c.optimizer.step()


def set_grad(each: Any) -> None:
    each.grad = each.grad * 0.5


def set_data(each: Any) -> None:
    each.grad.data = each.grad.data * 0.5


def scale_by_hand(
    c: Loop, _number: int, norm: Callable[[torch.Tensor], torch.Tensor] = torch.linalg.vector_norm
) -> None:
    total = torch.stack([norm(each.grad) for each in everything(c)]).square().sum().sqrt()
    for each in everything(c):
        each.grad.mul_((0.05 / total).clamp(max=1.0))


def drop_first(c: Loop, number: int) -> None:
    if number < 3:
        everything(c)[0].grad = None


def zero_rows(each: Any) -> None:
    each.grad[: len(each) // 2].zero_()


def set_rows(each: Any) -> None:
    each.grad[: len(each) // 2] = 0.0


def halve_and_clip(c: Loop, number: int) -> None:
    each_grad(set_grad)(c, number)
    clip_grad_norm_(c.model.parameters(), 0.05)


def centre(each: Any) -> None:
    if each.dim() > 1:
        each.grad.sub_(each.grad.mean(dim=1, keepdim=True))


between("clip_grad_norm_", lambda c, _: clip_grad_norm_(c.model.parameters(), 0.05))
between("clip_grad_norm_, largest element", lambda c, _: clip_grad_norm_(c.model.parameters(), 0.01, torch.inf))
between("clip_grad_norm_ of each layer", lambda c, _: [clip_grad_norm_(each.parameters(), 0.02) for each in c.model])
between("clip_grad_value_", lambda c, _: clip_grad_value_(c.model.parameters(), 0.01))
between("norm by hand, torch.linalg.vector_norm", scale_by_hand)
between("norm by hand, p.grad.norm()", lambda c, _: scale_by_hand(c, _, lambda grad: grad.norm()))
between("norm by hand, (p.grad ** 2).sum()", lambda c, _: scale_by_hand(c, _, lambda grad: (grad**2).sum().sqrt()))
# By momentum, as Adam's updates are the same at every scale of gradients.
between("p.grad.mul_(0.5)", each_grad(lambda each: each.grad.mul_(0.5)), make=momentum)
between("p.grad *= 0.5", each_grad(lambda each: each.grad.__imul__(0.5)), make=momentum)
between("p.grad.data.mul_(0.5)", each_grad(lambda each: each.grad.data.mul_(0.5)), make=momentum)
between("p.grad = p.grad * 0.5", each_grad(set_grad), make=momentum)
between("p.grad.data = ...", each_grad(set_data), make=momentum)
between("p.grad = p.grad * 0.5, then clipping", halve_and_clip, make=momentum)
between("p.grad = None for some", drop_first)
between("p.grad = None for some, momentum", drop_first, make=momentum)
between("p.grad[...].zero_()", each_grad(zero_rows), make=momentum)
between("p.grad[...] = 0", each_grad(set_rows), make=momentum)
between("weight decay into p.grad", each_grad(lambda each: each.grad.add_(each.detach(), alpha=0.1)))
between("gradient centralisation", each_grad(centre))
between("sign of the gradient", each_grad(lambda each: each.grad.sign_()))


@idiom("accumulation under no_sync()")
def accumulate(c: Loop, number: int) -> None:
    if c.members is None:
        with c.model.no_sync():
            c.backward(number)
    else:
        c.backward(number)
    c.backward(number, 1)
    c.optimizer.step()
    c.optimizer.zero_grad()


@idiom("accumulation without no_sync()")
def accumulate_plainly(c: Loop, number: int) -> None:
    c.backward(number)
    c.backward(number, 1)
    c.optimizer.step()
    c.optimizer.zero_grad()


@idiom("accumulation, then clipping")
def accumulate_and_clip(c: Loop, number: int) -> None:
    c.backward(number, scale=lambda loss: loss / 2)
    c.backward(number, 1, scale=lambda loss: loss / 2)
    clip_grad_norm_(c.model.parameters(), 0.05)
    c.optimizer.step()
    c.optimizer.zero_grad()


@idiom("closure")
def closure(c: Loop, number: int) -> None:
    def compute() -> None:
        c.optimizer.zero_grad()
        c.backward(number)

    c.optimizer.step(compute)


@idiom("GradScaler")
def scaler(c: Loop, number: int) -> None:
    found = c.memo.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3))
    c.backward(number, scale=found.scale)
    found.unscale_(c.optimizer)
    clip_grad_norm_(c.model.parameters(), 0.05)
    found.step(c.optimizer)
    found.update()
    c.optimizer.zero_grad()


def penalised(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    given = given.clone().requires_grad_()
    loss = regression(model, given)
    (slope,) = torch.autograd.grad(loss, given, create_graph=True)
    return loss + slope.square().sum()


def with_autocast(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return regression(model, given)


def recomputing(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    first, middle, last = model.children()
    out: torch.Tensor = last(checkpoint(nn.Sequential(first, middle), given, use_reentrant=False))
    return (out - given[:, :6].sin()).square().mean()


between("gradient penalty", lambda c, _: None, objective=penalised)
between("autocast", lambda c, _: None, objective=with_autocast)
between("activation checkpointing", lambda c, _: None, objective=recomputing)


# --- parameters -------------------------------------------------------------------------------------------------------


def project(each: Any) -> None:
    each.data = each.data / each.data.norm().clamp(min=1.0)


@torch.no_grad()
def shrink(each: Any) -> None:
    each.mul_(0.99)


def look_ahead(c: Loop, number: int) -> None:
    slow = c.memo.setdefault("slow", [each.detach().clone() for each in everything(c)])
    if number % 3 == 2:
        with torch.no_grad():
            for kept, each in zip(slow, everything(c), strict=True):
                kept.lerp_(each, 0.5)
                each.copy_(kept)


def average(c: Loop, _number: int) -> None:
    c.memo.setdefault("ema", AveragedModel(c.model)).update_parameters(c.model)


def average_by_hand(c: Loop, _number: int) -> None:
    kept = c.memo.setdefault("ema", [each.detach().clone() for each in everything(c)])
    for mean, each in zip(kept, everything(c), strict=True):
        mean.lerp_(each.detach(), 0.1)


def freeze(c: Loop, number: int) -> None:
    if number >= 2:
        everything(c)[0].requires_grad_(False)


def unfreeze(c: Loop, number: int) -> None:
    if number == 2:
        everything(c)[0].requires_grad_(True)


def frozen() -> nn.Module:
    model = perceptron()
    next(model.parameters()).requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = perceptron()
    model.append(nn.Linear(6, 24))
    model.append(nn.Linear(24, 6))
    model[4].weight = model[2].weight
    return model


def normalised() -> nn.Module:
    model = perceptron()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    return model


def unused() -> nn.Module:
    model = perceptron()
    model.append(nn.Identity())
    model[3].spare = nn.Parameter(torch.ones(5))
    return model


def swap_in_data(c: Loop, number: int) -> None:
    if number == 2:
        for each in everything(c):
            each.data.copy_(torch.linspace(-0.5, 0.5, each.numel()).view(each.shape))


afterwards("p.data.clamp_()", each_parameter(lambda each: each.data.clamp_(-0.2, 0.2)))
afterwards("p.data = ...", each_parameter(project))
afterwards("p.data.copy_()", swap_in_data)
afterwards("p.mul_() under no_grad", each_parameter(shrink))
afterwards("Lookahead by hand", look_ahead, keeps=True)
afterwards("AveragedModel (EMA, SWA)", average)
afterwards("moving average by hand", average_by_hand)
afterwards("freezing after a step", freeze)
afterwards("unfreezing", unfreeze, model=frozen)
afterwards("tied weights", lambda c, _: None, model=tied)
afterwards("weight_norm", lambda c, _: None, model=normalised)
afterwards("unused parameter", lambda c, _: None, model=unused)


@idiom("sharpness-aware (SAM) by hand", make=momentum)
def sharpness(c: Loop, number: int) -> None:
    c.backward(number)
    kept = [each.detach().clone() for each in everything(c)]
    with torch.no_grad():
        for each in everything(c):
            each.add_(each.grad.sign(), alpha=0.01)
    c.optimizer.zero_grad()
    c.backward(number)
    with torch.no_grad():
        for each, before in zip(everything(c), kept, strict=True):
            each.copy_(before)
    c.optimizer.step()
    c.optimizer.zero_grad()


# --- optimizers -------------------------------------------------------------------------------------------------------


def scheduled(name: str, of: Callable[[Any], Any], **settings: Any) -> None:
    """Adds a loop with a scheduler, which a joining rank restarts."""

    def begin(c: Loop) -> None:
        c.memo["scheduler"] = of(c.optimizer)

    def change(c: Loop, number: int) -> None:
        scheduler = c.memo["scheduler"]
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()

    afterwards(name, change, ready=begin, **settings)


def halve_rate(c: Loop, number: int) -> None:
    for group in c.optimizer.param_groups:
        group["lr"] *= 0.8


def groups(model: nn.Module) -> list[Optimizer]:
    few = [each for each in model.parameters() if each.dim() < 2]
    many = [each for each in model.parameters() if each.dim() > 1]
    both: list[dict[str, Any]] = [{"params": many}, {"params": few, "lr": 0.01, "weight_decay": 0.0}]
    return [torch.optim.AdamW(both, lr=0.003)]


def halves(model: nn.Module) -> list[Optimizer]:
    few = [each for each in model.parameters() if each.dim() < 2]
    many = [each for each in model.parameters() if each.dim() > 1]
    return [torch.optim.Muon(many, lr=0.02), torch.optim.AdamW(few, lr=0.003)]


def lbfgs(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)]


def add_group(c: Loop, number: int) -> None:
    if number == 2:
        c.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def load(c: Loop, number: int) -> None:
    if number == 2:
        c.memo["model"] = {name: each.clone() for name, each in c.model.state_dict().items()}
    elif number == 5:
        c.model.load_state_dict(c.memo.get("model") or c.model.state_dict())


def load_optimizer(c: Loop, number: int) -> None:
    if number % 3 == 2:
        c.optimizer.load_state_dict(c.optimizer.state_dict())


def clear(c: Loop, number: int) -> None:
    if number == 2:
        c.optimizer.state.clear()


def set_state(c: Loop, number: int) -> None:
    if number == 2:
        for each in everything(c):
            c.optimizer.state[each] = {}


def pop_state(c: Loop, number: int) -> None:
    if number == 2:
        for each in everything(c):
            if each in c.optimizer.state:
                c.optimizer.state.pop(each)


def new_state(c: Loop, number: int) -> None:
    if number == 2:
        c.optimizer.state = defaultdict(dict)


def read_state(c: Loop, _number: int) -> None:
    float(c.optimizer.state[everything(c)[0]]["exp_avg"].sum())


def hook_before(c: Loop) -> None:
    c.optimizer.register_step_pre_hook(lambda *_: each_grad(lambda each: each.grad.clamp_(-0.01, 0.01))(c, 0))


def hook_after(c: Loop) -> None:
    c.optimizer.register_step_post_hook(lambda *_: each_parameter(lambda each: each.data.clamp_(-0.2, 0.2))(c, 0))


def hook_gradients(c: Loop) -> None:
    for each in everything(c):
        each.register_hook(lambda grad: grad * 0.5)


def halve_grad(each: Any) -> None:
    each.grad.mul_(0.5)


def hook_accumulated(c: Loop) -> None:
    for each in everything(c):
        each.register_post_accumulate_grad_hook(halve_grad)


plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
one_cycle = torch.optim.lr_scheduler.OneCycleLR
scheduled("LambdaLR", lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step), make=momentum)
scheduled("OneCycleLR, which changes momentum", lambda o: one_cycle(o, 0.1, total_steps=200), make=momentum)
scheduled("ReduceLROnPlateau of a common loss", lambda o: plateau(o, patience=1))
afterwards("group['lr'] *= 0.8", halve_rate)
afterwards("parameter groups", lambda c, _: None, make=groups)
afterwards("add_param_group", add_group)
afterwards("load_state_dict of the model", load)
afterwards("load_state_dict of the optimizer", load_optimizer)
afterwards("optimizer.state.clear()", clear, make=momentum)
afterwards("optimizer.state[p] = {}", set_state)
afterwards("optimizer.state.pop(p)", pop_state)
afterwards("optimizer.state = defaultdict(dict)", new_state)
afterwards("optimizer.state[p]['exp_avg'], read", read_state)
afterwards("hook before a step", lambda c, _: None, ready=hook_before)
afterwards("hook after a step", lambda c, _: None, ready=hook_after)
afterwards("p.register_hook", lambda c, _: None, ready=hook_gradients)
afterwards("register_post_accumulate_grad_hook", lambda c, _: None, ready=hook_accumulated)


@idiom("two optimizers (Muon and AdamW)", make=halves)
def two(c: Loop, number: int) -> None:
    c.backward(number)
    for each in c.optimizers:
        each.step()
        each.zero_grad()


@idiom("LBFGS", make=lbfgs)
def second_order(c: Loop, number: int) -> None:
    def compute() -> torch.Tensor:
        c.optimizer.zero_grad()
        c.backward(number)
        return torch.ones(())

    c.optimizer.step(compute)


def compile_model(c: Loop) -> None:
    model = c.model
    compiled: Any = torch.compile(model, backend="eager")
    objective = c.objective
    c.objective = lambda _model, given: objective(compiled, given)


def compile_step(c: Loop) -> None:
    def step() -> None:
        c.optimizer.step()

    c.memo["step"] = torch.compile(step, backend="eager")


afterwards("torch.compile(model)", lambda c, _: None, ready=compile_model)


@idiom("torch.compile of optimizer.step", ready=compile_step)
def compiled_step(c: Loop, number: int) -> None:
    c.backward(number)
    c.memo["step"]()
    c.optimizer.zero_grad()

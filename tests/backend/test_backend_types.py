"""Every dtype with every operation, and tensors of every shape and stride, beside what torch itself makes of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reference import divided
from stormtorch_lab.jobs.ranks import Member, run_ranks

pytestmark = pytest.mark.pure

gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
HALVES = [torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
BYTES_ONLY = [
    getattr(torch, name)
    for name in (
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
]
"""For torch itself these are for storage: what is sent arrives, but nothing is added up."""
DTYPES = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX, *BYTES_ONLY]

OPS: dict[str, tuple[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "SUM": (dist.ReduceOp.SUM, torch.add),
    "AVG": (dist.ReduceOp.AVG, torch.add),
    "PRODUCT": (dist.ReduceOp.PRODUCT, torch.mul),
    "MIN": (dist.ReduceOp.MIN, torch.minimum),
    "MAX": (dist.ReduceOp.MAX, torch.maximum),
    "BAND": (dist.ReduceOp.BAND, torch.bitwise_and),
    "BOR": (dist.ReduceOp.BOR, torch.bitwise_or),
    "BXOR": (dist.ReduceOp.BXOR, torch.bitwise_xor),
}


def allowed(name: str, dtype: torch.dtype) -> bool:
    if dtype in BYTES_ONLY:
        return False
    if name.startswith("B"):
        return dtype is torch.bool or dtype in INTEGERS
    if name == "AVG":
        return dtype is not torch.bool
    # Of the complex products, torch itself refuses some before the backend is asked.
    return not (name in ("MIN", "MAX", "PRODUCT") and dtype in COMPLEX)


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers that every type can hold, the top bit of unsigned types included."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype in BYTES_ONLY:
        size = torch.empty(1, dtype=dtype).element_size()
        return torch.randint(0, 120, (count * size,), generator=generator, dtype=torch.uint8).view(dtype)
    whole = torch.randint(-3, 4, (count,), generator=generator)
    if dtype is torch.bool:
        return whole > 0
    if dtype in COMPLEX:
        return torch.complex(whole.to(torch.float64), whole.flip(0).to(torch.float64)).to(dtype)
    return whole.to(dtype)  # -1 becomes the largest unsigned number


def expected(name: str, dtype: torch.dtype, count: int, world: int) -> torch.Tensor:
    """Reduced by torch in a type that it can compute with, one rank after the other."""
    wide = torch.int64 if dtype in INTEGERS else torch.float32 if dtype in HALVES and name == "AVG" else dtype
    each = [numbers(rank, count, dtype) for rank in range(world)]
    if dtype in INTEGERS and name == "AVG":
        return quotients([one.tolist() for one in each], dtype, world)
    if dtype is torch.uint64 and name in ("MIN", "MAX"):  # beyond int64: by the order of Python's own numbers
        pick = min if name == "MIN" else max
        return torch.tensor([pick(column) for column in zip(*(one.tolist() for one in each), strict=True)], dtype=dtype)
    result = each[0].to(wide)
    for one in each[1:]:
        result = OPS[name][1](result, one.to(wide))
    return (divided(result, world) if name == "AVG" else result).to(dtype)


def quotients(rows: list[list[int]], dtype: torch.dtype, world: int) -> torch.Tensor:
    """By Python's own numbers: the sum as the type holds it, divided towards zero."""
    limits = torch.iinfo(dtype)
    sums = [(sum(column) - limits.min) % 2**limits.bits + limits.min for column in zip(*rows, strict=True)]
    return torch.tensor([abs(each) // world * (1 if each > 0 else -1) for each in sums], dtype=dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in shape, type and every bit."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))


def refused(name: str, dtype: torch.dtype, rank: int, world: int) -> None:
    """The error is raised before anything is sent, by torch or by the backend, and names the type."""
    op = OPS[name][0]
    saying = "complex" if dtype in COMPLEX else str(dtype).replace(".", r"\.")
    with pytest.raises((ValueError, RuntimeError), match=saying):
        dist.all_reduce(numbers(rank, 2, dtype), op)
    if name == "PRODUCT" and dtype in COMPLEX:
        return
    with pytest.raises((ValueError, RuntimeError), match=saying):
        dist.reduce(numbers(rank, 2, dtype), 0, op)
    with pytest.raises((ValueError, RuntimeError), match=saying):
        reduce_scatter_single(numbers(rank, 2, dtype), numbers(rank, 2 * world, dtype), op)


def reductions(rank: int, world: int) -> None:
    count = 12
    for dtype in DTYPES:
        for name, (op, _) in OPS.items():
            what = f"{name} of {dtype}"
            if not allowed(name, dtype):
                refused(name, dtype, rank, world)
                continue
            goal = expected(name, dtype, count, world)
            everywhere = numbers(rank, count, dtype)
            dist.all_reduce(everywhere, op)
            assert same(everywhere, goal), (what, everywhere, goal)
            rooted = numbers(rank, count, dtype)
            dist.reduce(rooted, 1, op)
            assert same(rooted, goal if rank == 1 else numbers(rank, count, dtype)), (what, rooted, goal)
            part = torch.zeros(count // world, dtype=dtype)
            reduce_scatter_single(part, numbers(rank, count, dtype), op)
            assert same(part, goal.chunk(world)[rank]), (what, part, goal)


def moves(rank: int, world: int) -> None:
    count = 6
    for dtype in DTYPES:
        mine, theirs = numbers(rank, count, dtype), [numbers(peer, count, dtype) for peer in range(world)]

        def blank(size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype)

        def check(got: torch.Tensor, goal: torch.Tensor, what: str) -> None:
            assert same(got, goal), (what, dtype, got, goal)  # noqa: B023

        shared = mine.clone()
        dist.broadcast(shared, 1)
        check(shared, theirs[1], "broadcast")
        gathered = [blank(count) for _ in range(world)]
        dist.all_gather(gathered, mine)
        for got, goal in zip(gathered, theirs, strict=True):
            check(got, goal, "all_gather")
        single = blank(count * world)
        gather_single(single, mine)
        for got, goal in zip(single.chunk(world), theirs, strict=True):
            check(got, goal, "all_gather_single")
        rooted = [blank(count) for _ in range(world)] if rank == 0 else None
        dist.gather(mine, rooted, 0)
        for got, goal in zip(rooted or [], theirs, strict=False):
            check(got, goal, "gather")
        part = blank(count)
        dist.scatter(part, theirs if rank == 1 else None, 1)
        check(part, theirs[rank], "scatter")
        pieces = [blank(count // world) for _ in range(world)]
        dist.all_to_all(pieces, list(mine.chunk(world)))
        for got, goal in zip(pieces, theirs, strict=True):
            check(got, goal.chunk(world)[rank], "all_to_all")
        got = blank(count)
        works = [dist.isend(mine, (rank + 1) % world), dist.irecv(got, (rank - 1) % world)]
        for work in works:
            assert work is not None
            work.wait()
        check(got, theirs[(rank - 1) % world], "send and recv")


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda whole: whole[:4, :6].t(),
    "strided": lambda whole: whole[::2, 1::3],
    "a column": lambda whole: whole[:, 2],
    "a view from the middle": lambda whole: whole[1:3],
    "empty": lambda whole: whole[:0],
    "empty in its second dimension": lambda whole: whole[:, :0],
    "0-dim": lambda whole: whole[1, 1],
    "channels last": lambda whole: whole.view(1, 2, 4, 6).contiguous(memory_format=torch.channels_last),
}


def layouts(rank: int, world: int) -> None:

    def sheet(of: int) -> torch.Tensor:
        return torch.arange(48.0).view(8, 6) + 100 * of

    for name, cut in LAYOUTS.items():
        goals = [cut(sheet(peer)) for peer in range(world)]
        total = torch.stack(goals).sum(0)

        def mine(cut: Callable[[torch.Tensor], torch.Tensor] = cut) -> tuple[torch.Tensor, torch.Tensor]:
            whole = sheet(rank)
            return whole, cut(whole)

        whole, tensor = mine()
        dist.all_reduce(tensor)
        assert tensor.equal(total), name
        # Of what lies between the elements nothing was touched.
        outside = torch.ones_like(whole, dtype=torch.bool)
        if tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            cut(outside).fill_(False)
        assert whole[outside].equal(sheet(rank)[outside]), name
        _, tensor = mine()
        dist.reduce(tensor, 1)
        assert tensor.equal(total if rank == 1 else goals[rank]), name
        _, tensor = mine()
        dist.broadcast(tensor, 1)
        assert tensor.equal(goals[1]), name
        # Into outputs of the same strides, inside sheets of their own.
        outs = [cut(torch.zeros(8, 6)) for _ in range(world)]
        dist.all_gather(outs, goals[rank])
        assert all(out.equal(goal) for out, goal in zip(outs, goals, strict=True)), name
        outs = [cut(torch.zeros(8, 6)) for _ in range(world)]
        dist.gather(goals[rank], outs if rank == 0 else None, 0)
        assert rank != 0 or all(out.equal(goal) for out, goal in zip(outs, goals, strict=True)), name
        out = cut(torch.zeros(8, 6))
        dist.scatter(out, goals if rank == 1 else None, 1)
        assert out.equal(goals[rank]), name
        outs = [cut(torch.zeros(8, 6)) for _ in range(world)]
        dist.all_to_all(outs, [goals[rank]] * world)
        assert all(out.equal(goal) for out, goal in zip(outs, goals, strict=True)), name
        out = cut(torch.zeros(8, 6))
        dist.reduce_scatter(out, [goals[rank]] * world)
        assert out.equal(total), name
        out = cut(torch.zeros(8, 6))
        works = [dist.isend(goals[rank], (rank + 1) % world), dist.irecv(out, (rank - 1) % world)]
        for work in works:
            assert work is not None
            work.wait()
        assert out.equal(goals[(rank - 1) % world]), name

    # One number in memory seen as many: it can be given, and every one of them is what arrives.
    expanded = torch.full((1,), float(rank)).expand(5)
    outs = [torch.zeros(5) for _ in range(world)]
    dist.all_gather(outs, expanded)
    assert [out.tolist() for out in outs] == [[float(peer)] * 5 for peer in range(world)]
    with pytest.raises(RuntimeError, match="expanded"):
        dist.all_reduce(expanded)

    # A single tensor with strides, both ways.
    wide = torch.zeros(3, 2 * world).t()
    gather_single(wide, sheet(rank)[:2, :3])
    assert wide.equal(torch.cat([sheet(peer)[:2, :3] for peer in range(world)]))
    narrow = torch.zeros(3, 2).t()
    reduce_scatter_single(narrow, torch.ones(3, 2 * world).t())
    assert narrow.equal(torch.full((2, 3), float(world)))


def uneven(rank: int, world: int) -> None:
    """Parts of different sizes, some of them empty."""

    def part(source: int, target: int) -> torch.Tensor:
        return torch.full((source * target, 2), float(10 * source + target))

    outs = [torch.zeros(peer * rank, 2) for peer in range(world)]
    dist.all_to_all(outs, [part(rank, peer) for peer in range(world)])
    assert all(out.equal(part(peer, rank)) for peer, out in enumerate(outs))
    single = torch.zeros(sum(peer * rank for peer in range(world)), 2)
    dist.all_to_all_single(
        single,
        torch.cat([part(rank, peer) for peer in range(world)]),
        [peer * rank for peer in range(world)],
        [rank * peer for peer in range(world)],
    )
    assert single.equal(torch.cat([part(peer, rank) for peer in range(world)]))
    outs = [torch.zeros(peer, 3) for peer in range(world)]
    dist.all_gather(outs, torch.full((rank, 3), float(rank)))
    assert all(out.equal(torch.full((peer, 3), float(peer))) for peer, out in enumerate(outs))
    shard = torch.zeros(rank, 3)
    dist.reduce_scatter(shard, [torch.full((peer, 3), float(rank + 1)) for peer in range(world)])
    assert shard.equal(torch.full((rank, 3), float(sum(range(1, world + 1)))))


def job(member: Member) -> None:
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world)
    for part in (reductions, moves, layouts, uneven):
        part(member.rank, member.world)
    dist.destroy_process_group()


def test_every_dtype_operation_and_layout_gives_what_torch_gives() -> None:
    run_ranks(job, 3, timeout_s=120)


def premultiplied_job(member: Member) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world)
    rank, world, count = member.rank, member.world, 12
    make = getattr(dist, "_make_nccl_premul_sum")  # noqa: B009  # FSDP calls it, and types do not know it
    for factor in (0.5, torch.tensor(0.25)):
        op: Any = make(factor)
        given = [numbers(each, count, torch.float32) for each in range(world)]
        expected = torch.stack([each * factor for each in given]).sum(0)
        tensor = given[rank].clone()
        calls: Any = dist
        calls.all_reduce(tensor, op)
        assert torch.equal(tensor, expected)
        tensor = given[rank].clone()
        calls.reduce(tensor, 1, op)
        assert torch.equal(tensor, expected if rank == 1 else given[rank])
        part, whole = torch.zeros(count // world), given[rank].clone()
        reduce_scatter_single(part, whole, op)
        assert torch.equal(part, expected.chunk(world)[rank]) and torch.equal(whole, given[rank])
        calls.reduce_scatter(part.zero_(), list(whole.chunk(world)), op)
        assert torch.equal(part, expected.chunk(world)[rank]) and torch.equal(whole, given[rank])
    dist.destroy_process_group()


def test_what_is_multiplied_before_it_is_added_up_as_by_fsdp() -> None:
    run_ranks(premultiplied_job, 2, (), timeout_s=60)

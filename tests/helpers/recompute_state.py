# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""What a recomputed session has: every element's value and state once, its steps, and how a view passes it on."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from recompute_program import Program
from recompute_recordings import Differs, Process

# A norm over all shards, and a mean of what arrived, are added up in another order than here.
ROUNDING = 1e-6


@dataclass
class Shared:
    """Values and state of all elements of a session, bucket by bucket: each element exists once."""

    values: list[torch.Tensor]
    state: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    has: list[torch.Tensor] = field(default_factory=list)
    """Whether an element has state."""

    def copy(self) -> Shared:
        return copy.deepcopy(self)


class Recomputed:
    """One session of a job, from what its processes have written down."""

    def __init__(self, program: Program, number: int, processes: Sequence[Process], counts: Counter[str]) -> None:
        self.program, self.number, self.counts = program, number, counts
        self.processes = processes
        self.model = program.model()
        everything = [id(each) for each in self.model.parameters()]
        self.indices = [everything.index(id(each)) for each in program.trained(self.model)[number][1]]
        # Of each process: its records of this session, and those of no session.
        self.views: dict[int, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
        self.rounds: dict[int, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
        self.recorded: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
        self.ranks: dict[str, int] = {}
        for process in processes:
            self._read(process)
        first = self.views[1][0][1]
        self.slots, self.elements = first["slots"], first["elements"]
        self.per_chunk = first["per_chunk"]
        flats = self._flat([each.detach() for each in self.model.parameters()])
        self.now = Shared(flats, {}, [torch.zeros(each.numel(), dtype=torch.bool) for each in flats])
        self.before = self.now.copy()
        self.view = 1
        self.missing: set[int] = set()
        """Owners that died after a round, before they had used its gradients."""

    def _read(self, process: Process) -> None:
        for record in process.records:
            kind = record["kind"]
            if kind == "begins":
                self.ranks[process.name] = record["rank"]
            if record.get("session") != self.number:
                continue
            if kind == "view":
                self.views[record["number"]].append((process.name, record))
            elif kind == "round":
                self.rounds[record["round"]].append((process.name, record))
            else:
                self.recorded[process.name, record["round"], kind].append(record)

    # --- parameters and buckets ---------------------------------------------------------------------------------------

    def _flat(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Returns buckets with what all parameters of the model have."""
        flats = [torch.zeros(count) for count in self.elements]
        for flat, slots in zip(flats, self.slots, strict=True):
            for slot in slots:
                given = tensors[self.indices[slot.parameter]]
                if given is not None:
                    flat[slot.first : slot.first + slot.count] = given.reshape(-1)
        return flats

    def _after(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what the program makes of a session's parameters after a step."""
        found = [each.clone() for each in flats]
        for flat, slots in zip(found, self.slots, strict=True):
            self.program.after([flat[slot.first : slot.first + slot.count] for slot in slots])
        return found

    def _fail(self, round_: int, what: str, one: torch.Tensor, other: torch.Tensor, bucket: int) -> None:
        bad = (~((one == other) | (one.isnan() & other.isnan()))).nonzero().flatten()
        apart = float((one - other).abs().max()) if one.shape == other.shape else float("nan")
        at = int(bad[0]) if bad.numel() else -1
        slot = next((each.parameter for each in self.slots[bucket] if each.first <= at < each.first + each.count), None)
        raise Differs(
            f"session {self.number}, round {round_}, bucket {bucket}, parameter {slot}: {what} differs in "
            f"{bad.numel()} of {one.numel()} elements, by up to {apart:.3g}"
        )

    def _same(
        self, round_: int, what: str, ours: Sequence[Any], theirs: Sequence[Any], *, rounded: bool = False
    ) -> None:
        self.counts[what.partition(" of ")[0]] += 1
        for bucket, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all()):
                continue
            if rounded and one.shape == other.shape:
                scale = float(other.abs().max()) + 1e-30
                if float((one - other).abs().max()) <= ROUNDING * scale:
                    self.counts["rounded: " + what.partition(" of ")[0]] += 1
                    continue
            self._fail(round_, what, one, other, bucket)

    def _cut(self, view: int) -> dict[str, Any]:
        return self.views[view][0][1]

    def _pieces(self, view: int) -> list[tuple[int, int, int, int, int]]:
        """Owner, bucket, parameter, first and count of all pieces."""
        spans = self._cut(view)["spans"]
        return [
            (owner, bucket, slot.parameter, begin, end - begin)
            for bucket, slots in enumerate(self.slots)
            for owner, (first, count) in enumerate(spans[bucket])
            for slot in slots
            if (begin := max(first, slot.first)) < (end := min(first + count, slot.first + slot.count))
        ]

    def compute(self, computes: list[dict[str, Any]], void: bool) -> tuple[list[torch.Tensor], float]:
        """Returns the gradient of what a process has computed, and its scale."""
        if void or not computes:
            return [torch.zeros(count) for count in self.elements], 0.0
        parameters = list(self.model.parameters())
        record = computes[-1]
        with torch.no_grad():
            for each, given in zip(parameters, record["values"], strict=True):
                each.copy_(given)
        self.model.zero_grad()
        part = self.program.parts(self.model)[record["part"]]
        for loss in self.program.losses(part, record["rank"], record["steps"], record["scale"]):
            loss().backward()
        return self._flat([each.grad for each in parameters]), float(record["scale"])

    # --- the optimizer ------------------------------------------------------------------------------------------------

    def _step(self, finals: Sequence[torch.Tensor], view: int) -> None:
        """Steps all pieces but those of owners that are missing."""
        now = self.now
        pieces = [each for each in self._pieces(view) if each[0] not in self.missing]
        stand_ins = [
            torch.nn.Parameter(now.values[bucket][first : first + count].clone())
            for _, bucket, _, first, count in pieces
        ]
        optimizer = self.program.make(stand_ins, self.number)
        for (_, bucket, _, first, count), stand_in in zip(pieces, stand_ins, strict=True):
            where = slice(first, first + count)
            if bool(now.has[bucket][where].all()):
                optimizer.state[stand_in] = {
                    name: each[bucket][first].clone() if name == "step" else each[bucket][where].clone()
                    for name, each in now.state.items()
                }
            stand_in.grad = finals[bucket][where].clone()
        optimizer.step()
        for (_, bucket, _, first, count), stand_in in zip(pieces, stand_ins, strict=True):
            where = slice(first, first + count)
            now.values[bucket][where] = stand_in.detach()
            now.has[bucket][where] = True
            for name, value in optimizer.state[stand_in].items():
                if name not in now.state:
                    now.state[name] = [torch.zeros(elements) for elements in self.elements]
                now.state[name][bucket][where] = value.float()

    # --- views --------------------------------------------------------------------------------------------------------

    def _enter(self, latest: int, round_: int) -> None:
        """Goes on to a view."""
        if latest == self.view:
            return
        if latest not in self.views:
            raise Differs(f"round {round_} was made in view {latest}, which nobody has begun")
        chain = [latest]
        while (base := self._cut(chain[-1])["base"]) > self.view:
            if base not in self.views:
                raise Differs(f"view {chain[-1]} comes from view {base}, which nobody has begun")
            chain.append(base)
        for number in reversed(chain):
            self._begin(number, round_)

    def _begin(self, number: int, round_: int) -> None:
        """Checks that a view begins with what the one before had, but for what it says it lacks."""
        cut = self._cut(number)
        missing, self.missing = self.missing, set()
        former = cut["before"] or self._cut(self.view)["members"]
        spans = cut["spans_before"]
        for name, record in self.views[number]:
            if any(record[what] != cut[what] for what in ("lost", "late", "unequal", "members")) and record["before"]:
                raise Differs(f"view {number}: {name} tells another story than {self.views[number][0][0]}")
        owned = {record["own"]["shard"]: record["own"] for _, record in self.views[number]}
        lacking = set(cut["lost"]) | set(cut["late"]) | set(cut["unequal"])
        # Who owns nothing has no update that could be lost.
        missing = {shard for shard in missing if spans is None or any(each[shard][1] for each in spans)}
        if missing - lacking:
            raise Differs(
                f"view {number}: rank {sorted(former[each] for each in missing - lacking)} had not used its last "
                "gradients, and nobody says that this update is lost"
            )
        for shard in cut["late"]:
            self.counts["named: last update lost"] += 1
            if shard not in missing:
                self._restore(spans, shard)
        for shard in (*cut["lost"], *cut["unequal"]):
            self.counts["named: state begins anew" if shard in cut["lost"] else "named: unequal"] += 1
            self._adopt(number, spans, shard, owned, keep=shard in cut["unequal"])
        self.view = number
        for _, bucket, _, first, count in self._pieces(number):
            where = slice(first, first + count)
            if "step" in self.now.state:
                steps = self.now.state["step"][bucket][where]
                steps.fill_(float(steps.max()))
            self.now.has[bucket][where] &= bool(self.now.has[bucket][where].all())
        for name, record in self.views[number]:
            self._holds(round_, f"shard of {name} in view {number}", record["own"], record["spans"])
            if record["followed"] is not None:
                self._holds(round_, f"standby of {name} in view {number}", record["followed"], record["spans"])
            self._same(round_, f"copies at a view of {name}", record["flats"], self.now.values)
        self.counts["views"] += 1

    def _restore(self, spans: Any, shard: int) -> None:
        """Takes a shard back to what it was before the last step."""
        for bucket, each in enumerate(spans):
            first, count = each[shard]
            where = slice(first, first + count)
            self.now.values[bucket][where] = self.before.values[bucket][where]
            self.now.has[bucket][where] = self.before.has[bucket][where]
            for name, state in self.now.state.items():
                earlier = self.before.state.get(name)
                state[bucket][where] = 0.0 if earlier is None else earlier[bucket][where]

    def _adopt(self, number: int, spans: Any, shard: int, owned: dict[int, Any], *, keep: bool) -> None:
        """Takes over what the job has of a shard of which it has said that something is lost."""
        for bucket, each in enumerate(spans):
            first, count = each[shard]
            for owner, (begin, length) in enumerate(self._cut(number)["spans"][bucket]):
                low, high = max(first, begin), min(first + count, begin + length)
                if low < high and owner in owned:
                    taken = owned[owner]["masters"][bucket][low - begin : high - begin]
                    near = [each[bucket][low:high] for each in self._copies_before(number)]
                    if not keep and not any(torch.equal(taken, each) for each in near):
                        self._fail(-1, "copy of a shard that was lost", taken, near[0], bucket)
                    self.now.values[bucket][low:high] = taken
            for slot in self.slots[bucket]:
                if not keep and slot.first < first + count and first < slot.first + slot.count:
                    self.now.has[bucket][slot.first : slot.first + slot.count] = False
                    for state in self.now.state.values():
                        state[bucket][slot.first : slot.first + slot.count] = 0.0

    def _copies_before(self, number: int) -> list[list[torch.Tensor]]:
        """Returns the parameters that each process had when a view began."""
        found = []
        for process in self.processes:
            flats = None
            for record in process.records:
                if record.get("session") != self.number:
                    continue
                if record["kind"] == "view" and record["number"] >= number:
                    break
                if record["kind"] == "arrived":
                    flats = self._after(record["flats"])
                elif record["kind"] == "view":
                    flats = record["flats"]
            if flats is not None:
                found.append(flats)
        return found

    def _holds(self, round_: int, what: str, held: dict[str, Any], spans: Any) -> None:
        """Compares what a rank holds of a shard: values and state."""
        shard = held["shard"]
        ours = [self.now.values[bucket].narrow(0, *each[shard]) for bucket, each in enumerate(spans)]
        self._same(round_, what, held["masters"], ours)
        for (bucket, first, count), state in held["states"].items():
            where = slice(first, first + count)
            if bool(self.now.has[bucket][where].all()) != bool(state):
                raise Differs(
                    f"round {round_}: {what}: bucket {bucket}, element {first}: state {sorted(state)} is there or not"
                )
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    expected = self.now.state[name][bucket][where]
                    if not torch.equal(value.float().expand(count) if value.dim() == 0 else value, expected):
                        self._fail(round_, f"{name} in {what}", value.float().expand(count), expected, bucket)

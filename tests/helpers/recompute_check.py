# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Recomputes a job in one process, from what its ranks have written down: who gave what, and what of it arrived.

Everything else follows: the gradient that each rank gave from the parameters that it had, the mean from what arrived,
the owner's next parameters and state from the mean, every copy from what its owner sent, and every new view from the
one before. Nothing of the product's own code computes here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from recompute_apart import ModelsApart
from recompute_program import Schedule
from recompute_recordings import Differs, Process, check_end, longest_wait, read
from recompute_state import Recomputed


def check(schedule: Schedule, folder: Path) -> Counter[str]:
    """Recomputes a job. Returns how often what was compared, and what was named.

    Raises:
        Differs: Something is not what must come out; says where.
    """
    processes = read(folder)
    counts: Counter[str] = Counter()
    for process in processes:
        counts["wait, ms"] = max(counts["wait, ms"], round(1000 * longest_wait(process)))
        check_end(process)
    kind = ModelsApart if schedule.program.diloco else Session
    for number in range(len(schedule.program.trained(schedule.program.model()))):
        kind(schedule.program, number, processes, counts).run()
    ends = [(each.name, record) for each in processes for record in each.records if record["kind"] == "end"]
    if not ends:
        raise Differs("no process has reached the end")
    for name, record in ends[1:]:
        for place, (one, other) in enumerate(zip(ends[0][1]["values"], record["values"], strict=True)):
            if not torch.equal(one, other):
                raise Differs(f"end, tensor {place}: {name} has other parameters than {ends[0][0]}")
    counts["ends"] += len(ends)
    return counts


class Session(Recomputed):
    """The rounds of a session, and the copies of its parameters."""

    # --- all rounds ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Recomputes all rounds."""
        for round_ in sorted(self.rounds):
            latest = max(record["view"] for _, record in self.rounds[round_])
            self._enter(latest, round_)
            here = [(name, record) for name, record in self.rounds[round_] if record["view"] == latest]
            for name, record in self.rounds[round_]:
                if record["view"] != latest:
                    self._check_gone(name, round_)
            self._round(round_, dict(here))
        self._copies()
        for process in self.processes:
            for record in process.records:
                if record["kind"] == "end":
                    self._same(-1, f"end of {process.name}", self._flat(record["values"]), self.now.values)

    def _check_gone(self, name: str, round_: int) -> None:
        """Checks that a process which has completed a round in an earlier view than others did nothing later."""
        for record in next(each.records for each in self.processes if each.name == name):
            if record.get("session") == self.number and record["kind"] == "round" and record["round"] > round_:
                view = max(each["number"] for _, each in self.views.get(record["view"], []))
                if not any(one == name for one, _ in self.views[view]):
                    raise Differs(f"{name} has made round {round_} in a view that the others had left, and went on")

    def _round(self, round_: int, here: dict[str, dict[str, Any]]) -> None:
        cut = self._cut(self.view)
        members, spans = cut["members"], cut["spans"]
        given = self._gradients(round_, here, members)
        program = self.program
        finals: list[torch.Tensor] = [torch.zeros(count) for count in self.elements]
        owners: dict[int, str] = {members.index(self.ranks[name]): name for name in here}
        means: dict[int, list[torch.Tensor]] = {}
        for place, name in owners.items():
            record = here[name]
            means[place] = self._mean(round_, place, record, given, spans)
            self._same(round_, f"mean of {name}", record["means"], means[place], rounded=self._partly(record))
        if not any(self.recorded[name, round_, "final"] for name in owners.values()):
            if program.scaler and not all(bool(each.isfinite().all()) for found in means.values() for each in found):
                self.counts["steps skipped"] += 1
                self.now.values = self._after(self.now.values)
                return
            raise Differs(f"session {self.number}, round {round_}: no owner has made a step, and nothing overflowed")
        scale = self._scale(round_, given)
        factor = self._factor(round_, owners, here, scale)
        self.missing = set()
        for place, name in owners.items():
            recorded = self.recorded[name, round_, "final"]
            if not recorded:
                self.missing.add(place)
                continue
            expected = [each["means"][bucket] for each in [here[name]] for bucket in range(len(spans))]
            expected = [each * (1.0 / scale) for each in expected] if program.scaler else expected
            if factor is None or not math.isnan(factor):
                expected = [each * (factor or 1.0) for each in expected]
                self._same(round_, f"gradient of {name}", recorded[-1]["grads"], expected, rounded=factor is not None)
            for bucket, (first, count) in enumerate(each[place] for each in spans):
                finals[bucket][first : first + count] = recorded[-1]["grads"][bucket]
        self.missing |= set(range(len(members))) - set(owners)
        self.before = self.now.copy()
        self._step(finals, self.view)
        for place, name in owners.items():
            for record in self.recorded[name, round_, "stepped"]:
                ours = [self.now.values[bucket].narrow(0, *each[place]) for bucket, each in enumerate(spans)]
                self._same(round_, f"step of {name}", record["masters"], ours)
        self.now.values = self._after(self.now.values)
        self.counts["rounds"] += 1

    def _partly(self, record: dict[str, Any]) -> bool:
        """Whether something was lost, so that a mean is divided by how many have arrived."""
        return bool(self.program.loss) or any(
            not bool(mask.all()) for masks in record["masks"].values() for mask in masks.values()
        )

    def _gradients(
        self, round_: int, here: dict[str, dict[str, Any]], members: Sequence[int]
    ) -> dict[int, tuple[list[torch.Tensor], float]]:
        """Returns what each member gave in a round, which is what its parameters and its data give, by place."""
        found: dict[int, tuple[list[torch.Tensor], float]] = {}
        for process in self.processes:
            rank = self.ranks.get(process.name, -1)
            if rank not in members:
                continue
            grads: dict[int, torch.Tensor] = {}
            computes: list[dict[str, Any]] = []
            void, used_void = False, False
            latest: list[dict[str, Any]] = []
            for record in process.records:
                kind = record["kind"]
                if kind == "iteration":
                    computes, void = [], False
                elif kind == "compute" and (self.program.sessions != "models" or record["part"] == self.number):
                    computes, void = [record], False
                elif record.get("session") != self.number:
                    continue
                elif kind == "changed" and not record["held"]:
                    void = True
                elif kind == "given" and record["round"] + 1 == round_:
                    grads[record["bucket"]] = record["grads"]
                    latest, used_void = list(computes), void
            if not grads:
                continue
            ours, scale = self.compute(latest, used_void)
            place = members.index(rank)
            if place in found and process.name not in here:
                continue  # an earlier process of the same rank, which has died before the round was complete
            found[place] = [grads.get(bucket, torch.zeros(count)) for bucket, count in enumerate(self.elements)], scale
            given = [grads[bucket] for bucket in sorted(grads)]
            if factor := self.program.scaler and self._rescaled(given, [ours[bucket] for bucket in sorted(grads)]):
                ours = [each * factor for each in ours]
                scale *= factor
                found[place] = found[place][0], scale
            self._same(round_, f"gradient given of {process.name}", given, [ours[bucket] for bucket in sorted(grads)])
        return found

    def _rescaled(self, given: Sequence[torch.Tensor], ours: Sequence[torch.Tensor]) -> float:
        """Returns the power of two by which a rank has multiplied its gradients, to bring them to others' scale."""
        norms = float(torch.cat(list(given)).norm()), float(torch.cat(list(ours)).norm())
        if not all(0.0 < each < math.inf for each in norms) or norms[0] == norms[1]:
            return 0.0
        self.counts["named: gradients rescaled"] += 1
        return float(2.0 ** round(math.log2(norms[0] / norms[1])))

    def _scale(self, round_: int, given: dict[int, tuple[list[torch.Tensor], float]]) -> float:
        """Returns the scale of all gradients of a round."""
        scales = {scale for _, scale in given.values()} - {0.0}
        if len(scales) > 1:
            raise Differs(
                f"session {self.number}, round {round_}: gradients of the scales {sorted(scales)} were averaged"
            )
        return scales.pop() if scales else 1.0

    def _mean(self, round_: int, place: int, record: dict[str, Any], given: Any, spans: Any) -> list[torch.Tensor]:
        """Returns the mean of what arrived at an owner."""
        means = []
        for bucket, each in enumerate(spans):
            first, count = each[place]
            total, copies = torch.zeros(count), torch.zeros(count)
            masks = record["masks"].get(bucket, {})
            for peer in sorted({place, *masks}):
                if peer == place:
                    there = torch.ones(count, dtype=torch.bool)
                else:
                    there = masks[peer].repeat_interleave(self.per_chunk[bucket])[:count]
                if not bool(there.any()):
                    continue
                if peer not in given:
                    raise Differs(f"round {round_}: something arrived of place {peer}, which has given nothing")
                total += torch.where(there, given[peer][0][bucket][first : first + count], 0.0)
                copies += there
            means.append(total / copies)
        return means

    def _lacks_norm(self, names: Collection[str], round_: int) -> bool:
        """Whether a process has said that the norm of a round lacks a part."""
        for process in self.processes:
            within = False
            for record in process.records if process.name in names else ():
                if record["kind"] == "round" and record.get("session") == self.number:
                    within = record["round"] == round_
                elif within and record["kind"] == "log" and "the norm of the gradients" in record["words"]:
                    return True
        return False

    def _factor(self, round_: int, owners: Any, here: Any, scale: float) -> float | None:
        """Returns by what clipping multiplies gradients; None if there is none.

        The norm over all sessions of a model is that of their means, which are compared apart.
        """
        if self.program.clip is None:
            return None
        if self._lacks_norm(set(owners.values()), round_):
            self.counts["named: norm lacks a shard"] += 1
            return math.nan
        # As measured at the owners: the ratio of what was used to what was averaged, the same everywhere.
        ratios = []
        for name in owners.values():
            for record in self.recorded[name, round_, "final"][-1:]:
                mean = torch.cat(here[name]["means"]).double() / scale
                used = torch.cat(record["grads"]).double()
                if float(mean.norm()) > 0:
                    ratios.append(float(used @ mean / (mean @ mean)))
        if max(ratios) - min(ratios) > 1e-5 * max(ratios):
            raise Differs(f"session {self.number}, round {round_}: ranks clip by different factors, {sorted(ratios)}")
        if self.program.sessions == "one":
            squares = sum(
                float((torch.cat(here[name]["means"]).double() / scale).square().sum()) for name in owners.values()
            )
            if len(owners) == len(self._cut(self.view)["members"]):
                expected = min(1.0, self.program.clip / (squares**0.5 + 1e-6))
                if abs(expected - ratios[0]) > 1e-5 * expected:
                    raise Differs(f"round {round_}: gradients were clipped by {ratios[0]} in place of {expected}")
                self.counts["norms"] += 1
        return ratios[0]

    # --- copies -------------------------------------------------------------------------------------------------------

    def _copies(self) -> None:
        """Checks that all copies of all ranks are what owners have sent, or what they were before."""
        sent: dict[tuple[int, int, int, int], torch.Tensor] = {}
        for process in self.processes:
            view = 1
            for record in process.records:
                if record.get("session") != self.number:
                    continue
                if record["kind"] == "view":
                    view = record["number"]
                elif record["kind"] == "sent":
                    place = self._cut(view)["members"].index(self.ranks[process.name])
                    sent[record["round"], view, place, record["bucket"]] = record["values"]
        for process in self.processes:
            self._copies_of(process, sent)

    def _copies_of(self, process: Process, sent: dict[tuple[int, int, int, int], torch.Tensor]) -> None:
        view, stepped, skipped = 1, None, False
        flats: list[torch.Tensor] = []
        for record in process.records:
            if record["kind"] == "compute" and flats:
                flats = self._after(flats) if skipped else flats
                ours = self._flat(record["values"])
                self._same(-1, f"copies of {process.name} at step {record['steps']}", ours, flats)
            if record.get("session") != self.number:
                continue
            if record["kind"] == "view":
                view, flats = record["number"], [each.clone() for each in record["flats"]]
            elif record["kind"] == "round":
                skipped = True
            elif record["kind"] == "stepped":
                stepped, skipped = record["masters"], False
            elif record["kind"] == "arrived":
                cut = self._cut(view)
                own = cut["members"].index(self.ranks[process.name])
                for bucket, spans in enumerate(cut["spans"]):
                    for place, (first, count) in enumerate(spans):
                        where = slice(first, first + count)
                        if place == own:
                            assert stepped is not None
                            flats[bucket][where] = stepped[bucket]
                            continue
                        mask = record["masks"].get(bucket, {}).get(place, torch.zeros(1, dtype=torch.bool))
                        there = mask.repeat_interleave(self.per_chunk[bucket])[:count]
                        if bool(there.any()):
                            came = sent[record["round"], view, place, bucket]
                            flats[bucket][where] = torch.where(there, came, flats[bucket][where])
                self._same(record["round"], f"copies of {process.name}", record["flats"], flats)
                flats = self._after(flats)

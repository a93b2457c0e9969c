"""Recomputes a job whose ranks train models of their own and average them by an outer step (DiLoCo).

Each rank's model follows from its data and what has come; each anchor from what its owner has got; each new view from
the one before.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from recompute_recordings import Differs, Process
from recompute_state import Recomputed
from stormtorch import DiLoCo


class ModelsApart(Recomputed):
    """The rounds of a session under DiLoCo, and the models between them."""

    def run(self) -> None:
        """Recomputes all rounds and all models."""
        self.sent: dict[tuple[int, int, int, int], torch.Tensor] = {}
        self.answers: dict[tuple[int, int, int, int], torch.Tensor] = {}
        updates: dict[int, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
        combined: dict[tuple[int, int, int, int], tuple[str, dict[str, Any]]] = {}
        for process in self.processes:
            for record in process.records:
                if record.get("session") != self.number or record["kind"] not in ("given", "combined", "updated"):
                    continue
                place = self._place(process, record["view"])
                key = record["round"], record["view"], place, record["bucket"]
                if record["kind"] == "given":
                    self.sent[key] = record["values"]
                elif record["kind"] == "combined":
                    combined[key] = process.name, record
                else:
                    self.answers[key] = record["answer"]
                    updates[record["view"]].append((process.name, record))
        for key in combined.keys() - self.answers.keys():
            # The owner died between the two: its standby may have the mean, and make the step.
            updates[key[1]].append(combined[key])
        anchors = [each.clone() for each in self.now.values]
        self.owned = {"anchor": anchors, "speed": [torch.zeros_like(each) for each in anchors]}
        self.earlier = {name: [each.clone() for each in found] for name, found in self.owned.items()}
        for number in sorted(self.views):
            self._view(number)
            for round_ in sorted({record["round"] for _, record in updates[number]}):
                self.earlier = {name: [each.clone() for each in found] for name, found in self.owned.items()}
                for name, record in updates[number]:
                    if record["round"] == round_:
                        self._outer_step(name, record)
                self.counts["rounds"] += 1
        lasts = {}
        for process in self.processes:
            values = self._local(process)
            if values is not None:
                lasts[self.ranks[process.name]] = values
        self._end(lasts)

    def _place(self, process: Process, view: int) -> int:
        place: int = self._cut(view)["members"].index(self.ranks[process.name])
        return place

    # --- owners -------------------------------------------------------------------------------------------------------

    def _outer_step(self, name: str, record: dict[str, Any]) -> None:
        """Recomputes an owner's mean, and its step by torch's SGD."""
        view, bucket, policy = record["view"], record["bucket"], self.program.policy()
        assert isinstance(policy, DiLoCo)
        cut = self._cut(view)
        place = cut["members"].index(self.ranks[name])
        first, count = cut["spans"][bucket][place]
        where = slice(first, first + count)
        total, copies = torch.zeros(count), torch.zeros(count)
        for peer in sorted({place, *record["masks"]}):
            there = torch.ones(count, dtype=torch.bool)
            if peer != place:
                there = record["masks"][peer].repeat_interleave(self.per_chunk[bucket])[:count]
            if bool(there.any()):
                total += torch.where(there, self.sent[record["round"], view, peer, bucket][where], 0.0)
                copies += there
        round_ = record["round"]
        partly = any(not bool(each.all()) for each in record["masks"].values())
        self._same(round_, f"mean of {name}", [record["mean"]], [total / copies], rounded=partly)
        anchor = torch.nn.Parameter(self.owned["anchor"][bucket][where].clone())
        outer = torch.optim.SGD([anchor], lr=policy.outer_lr, momentum=policy.momentum, nesterov=policy.nesterov)
        outer.state[anchor] = {"momentum_buffer": -self.owned["speed"][bucket][where]}
        anchor.grad = anchor.detach() - record["mean"]
        outer.step()
        if "answer" in record:
            self._same(round_, f"outer step of {name}", [record["answer"]], [anchor.detach()])
        self.owned["anchor"][bucket][where] = anchor.detach()
        self.owned["speed"][bucket][where] = -outer.state[anchor]["momentum_buffer"]

    # --- views --------------------------------------------------------------------------------------------------------

    def _view(self, number: int) -> None:
        """Checks that owners and standbys have what those before them had, but for what died with both."""
        for name, record in self.views[number]:
            members = record["members"]
            for what, place in (("own", record["place"]), ("followed", record["place"] - 1)):
                for bucket, found in enumerate(record[what]):
                    first, count = record["spans"][bucket][place % len(members)]
                    self._memory(number, f"{what} of {name}", found, bucket, slice(first, first + count))
        self.counts["views"] += 1

    def _memory(self, number: int, what: str, found: dict[str, torch.Tensor], bucket: int, where: slice) -> None:
        latest = {name: self.owned[name][bucket][where] for name in found}
        same = torch.stack([found[name] == latest[name] for name in found]).all(0)
        if not bool(same.all()):
            earlier = {name: self.earlier[name][bucket][where] for name in found}
            before = torch.stack([found[name] == earlier[name] for name in found]).all(0)
            anew = found["speed"] == 0.0
            if not bool((same | before | anew).all()):
                self._fail(number, f"anchors, {what} in view {number}", found["anchor"], latest["anchor"], bucket)
            self.counts["named: outer step lost" if bool((same | before).all()) else "named: anchor begins anew"] += 1
            for name in found:
                self.owned[name][bucket][where] = found[name]
        self.counts["anchors"] += 1

    # --- each rank's own model ----------------------------------------------------------------------------------------

    def _local(self, process: Process) -> list[torch.Tensor] | None:
        """Recomputes a process's model from its data and what has come; returns it as it was at the end."""
        values = self._flat([each.detach() for each in self.program.model().parameters()])
        model = self.program.model()
        parameters = list(model.parameters())
        optimizer = self.program.make(parameters, self.number)
        for record in process.records:
            kind = record["kind"]
            if kind == "compute":
                self._same(record["steps"], f"model of {process.name}", self._flat(record["values"]), values)
                grads, _ = self.compute([record], False)
                self._write(parameters, values)
                self._write([each.grad for each in self._with_grads(parameters)], grads)
                optimizer.step()
                values = self._flat([each.detach() for each in parameters])
            elif kind == "end":
                return values
            if record.get("session") != self.number:
                continue
            if kind == "given":
                bucket = record["bucket"]
                self._same(record["round"], f"given of {process.name}", [record["values"]], [values[bucket]])
            elif kind == "arrived":
                self._arrive(process, record, values)
            elif kind == "view":
                roots = [each for _, each in self.views[record["number"]] if each["held"]]
                if not record["held"]:
                    if not any(self._equal(each["flats"], record["flats"]) for each in roots):
                        raise Differs(f"view {record['number']}: {process.name} has got a model that nobody had")
                    self.counts["models handed over"] += 1
                    values = [each.clone() for each in record["flats"]]
                else:
                    self._same(record["round"], f"model kept of {process.name}", record["flats"], values)
        return None

    def _arrive(self, process: Process, record: dict[str, Any], values: list[torch.Tensor]) -> None:
        bucket, cut = record["bucket"], self._cut(record["view"])
        expected = values[bucket].clone()
        for owner, (first, count) in enumerate(cut["spans"][bucket]):
            if not count:
                continue
            there = record["masks"][first].repeat_interleave(self.per_chunk[bucket])[:count]
            if bool(there.any()):
                came = self.answers[record["round"], record["view"], owner, bucket]
                where = slice(first, first + count)
                expected[where] = torch.where(there, came, expected[where])
        self._same(record["round"], f"copies of {process.name}", [record["values"]], [expected])
        values[bucket] = expected

    def _equal(self, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))

    def _with_grads(self, parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        for each in parameters:
            each.grad = torch.zeros_like(each)
        return parameters

    @torch.no_grad()
    def _write(self, tensors: list[Any], flats: list[torch.Tensor]) -> None:
        """Writes buckets into tensors that are shaped as parameters."""
        for flat, slots in zip(flats, self.slots, strict=True):
            for slot in slots:
                target = tensors[self.indices[slot.parameter]]
                target.copy_(flat[slot.first : slot.first + slot.count].view_as(target))

    def _end(self, lasts: dict[int, list[torch.Tensor]]) -> None:
        """Checks that `exact` gave the mean of all models."""
        ends = [(each.name, record) for each in self.processes for record in each.records if record["kind"] == "end"]
        members = self._cut(max(self.views))["members"]
        if not set(members) <= set(lasts):
            return  # one was killed at the end
        for name, record in ends:
            ours = self._flat(record["values"])
            for bucket, values in enumerate(ours):
                mean = sum(lasts[rank][bucket] for rank in members) / len(members)
                self._same(-1, f"end of {name}", [values], [mean], rounded=True)

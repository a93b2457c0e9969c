"""Position of one rank in an epoch, its checkpoint, and the exchange of positions when the view changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stormtorch.data.epoch_plan import Cursor, EpochPlan, Progress
from stormtorch.data.spans import Spans, union

_Name = tuple[int, int]
"""Epoch of a plan, and number of the view that it was made for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerSettings:
    """Settings of the sampler, which must be the same on all ranks."""

    length: int
    """Samples of an epoch."""
    batch_size: int
    constant: bool
    """Whether the global batch stays the same for any number of ranks."""
    drop_last: bool
    shuffle: bool

    def check(self, other: Mapping[str, Any], whose: str) -> None:
        """Raises ValueError if another rank has other settings."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), other[name]
            if mine != theirs:
                raise ValueError(
                    f"{whose} has an ElasticSampler with {name}={theirs}, this rank one with {name}={mine}: "
                    "give all ranks the same data and settings"
                )


@dataclass(slots=True)
class _PlanPosition:
    """A plan, and this rank's progress in it."""

    name: _Name
    plan: EpochPlan
    done: int
    drawn: Cursor
    hand: int
    before: int
    """Batches that this rank used in the epoch before the plan was made."""

    def to_json(self) -> dict[str, Any]:
        progress = {"done": self.done, "drawn": self.drawn, "hand": self.hand}
        # A string within the JSON: a receiver of many equal plans decodes only one.
        return {"name": self.name, "plan": json.dumps(self.plan.to_json()), "progress": progress}


class EpochPosition:
    """Position of one rank in the epoch: which batch it draws next, which steps are complete, what the next plan is.

    A view may be superseded before all its members have a plan for it. All then return to the plan of the last view
    that all had installed, so a rank keeps that one until it goes on training.

    Args:
        terms: Settings of the sampler.
        seed: Random seed of the order of samples.
        rank: This rank.
        members: Ranks that train together.
    """

    def __init__(self, terms: SamplerSettings, seed: int, rank: int, members: Sequence[int]) -> None:
        self.terms = terms
        self.seed = seed
        self.epoch = 0
        self.rank = rank
        self.members = tuple(sorted(members))
        self.view = 0
        self.global_batch: int | None = None
        """Samples of every step, if the global batch is constant; known from the first plan on."""
        self._left: Spans = union([(0, terms.length)])  # at the begin of the first plan
        self._plan_position: _PlanPosition | None = None
        self._earlier: _PlanPosition | None = None  # in the last earlier view that all members had installed

    # --- training ---------------------------------------------------------------------------------------------------

    @property
    def inside(self) -> bool:
        """Whether this rank is a member."""
        return self.rank in self.members

    @property
    def busy(self) -> bool:
        """Whether the training loop is in the middle of a step."""
        return self._plan_position is not None and self._plan_position.hand > 0

    @property
    def untouched(self) -> bool:
        """Whether nothing has been drawn or trained on in the present plan."""
        return self._plan_position is None or (self._plan_position.done, self._plan_position.drawn) == (0, (0, 0))

    @property
    def drawn(self) -> Cursor:
        """The first batch that this rank has not drawn."""
        return self._begin().drawn

    @property
    def done(self) -> int:
        """Steps that are complete in the present plan."""
        return self._begin().done

    @property
    def plan(self) -> EpochPlan:
        """The plan of the rest of the epoch."""
        return self._begin().plan

    def begin(self) -> int:
        """Makes the plan of the epoch if there is none yet, and returns the number of the epoch."""
        self._begin()
        return self.epoch

    def draw(self) -> Spans | None:
        """Returns the next batch, which may be empty; None at the end of the plan."""
        position = self._begin()
        if not self.inside or position.drawn[0] >= position.plan.steps:
            return None
        self._earlier = None  # training goes on, so all members have installed the view
        step, number = position.drawn
        position.drawn = position.plan.after(position.drawn, self.rank)
        return position.plan.batches(step, self.rank)[number]

    def rewind(self) -> None:
        """Returns unused batches to the plan: they will be drawn again."""
        position = self._begin()
        if self.inside and position.done < position.plan.steps:
            count = len(position.plan.batches(position.done, self.rank))
            position.drawn = (position.done, position.hand) if position.hand < count else (position.done + 1, 0)

    def take_in_hand(self) -> None:
        """Records that the training loop has taken one more batch of the step in progress."""
        self._earlier = None  # training goes on, so all members have installed the view
        self._begin().hand += 1

    def put_back(self) -> None:
        """Records that the step in progress will not be completed with the batches taken so far."""
        self._begin().hand = 0

    def assume_busy(self) -> None:
        """Records that a loop that does not report the batches it takes may be in the middle of a step."""
        position = self._begin()
        if not position.hand and position.drawn > (position.done, 0):
            position.hand = len(position.plan.batches(position.done, self.rank))

    def step_done(self) -> None:
        """Records that a step is complete. The last step of an epoch begins the next one."""
        self._earlier = None  # training goes on, so all members have installed the view
        position = self._begin()
        position.done += 1
        position.hand = 0
        position.drawn = max(position.drawn, (position.done, 0))
        if position.done >= position.plan.steps:
            self.go_to(self.epoch + 1)

    def go_to(self, epoch: int) -> None:
        """Begins an epoch and drops the rest of the present one."""
        self.epoch = epoch
        self._left = union([(0, self.terms.length)])
        self._plan_position = self._earlier = None

    def count(self) -> int:
        """Returns how many batches this rank uses in this epoch if the members stay the same."""
        position = self._begin()
        return position.before + (position.plan.count(self.rank) if self.inside else 0)

    # --- membership -------------------------------------------------------------------------------------------------

    def set_members(self, rank: int, view: int, members: Sequence[int]) -> None:
        """Sets this rank and the members, before anything is drawn."""
        self.rank, self.view, self.members = rank, view, tuple(sorted(members))
        self._plan_position = None

    def give(self) -> bytes:
        """Returns this rank's contribution to the exchange at a view change."""
        places = [self._begin(), *([self._earlier] if self._earlier else [])]
        return json.dumps(
            {
                "terms": {name: getattr(self.terms, name) for name in SamplerSettings.__slots__},
                "seed": self.seed,
                "global_batch": self.global_batch,
                "busy": self.busy,
                "places": [position.to_json() for position in places],
            }
        ).encode()

    def take(
        self,
        given: Mapping[int, bytes],
        view: int,
        members: Sequence[int],
        base: int,
    ) -> bool:
        """Makes the plan for a new view from the contributions of the ranks. All members make the same one.

        Args:
            given: Contribution of each rank; missing or empty for ranks that have just joined.
            view: Number of the view.
            members: Ranks in it.
            base: Number of the last view that all its members had installed.

        Returns:
            Whether the batches that this rank has drawn are still its own.
        """
        known = {rank: json.loads(each) for rank, each in given.items() if each}
        for rank, each in known.items():
            self.terms.check(each["terms"], f"rank {rank}")
        names = [tuple(position["name"]) for each in known.values() for position in each["places"]]
        names = [name for name in names if name[1] <= base]
        if not names:
            self.set_members(self.rank, view, members)
            return True
        name = max(names)
        places = {
            rank: position
            for rank, each in known.items()
            for position in each["places"]
            if tuple(position["name"]) == name
        }
        first = known[min(places)]
        plan = EpochPlan.from_json(json.loads(places[min(places)]["plan"]))
        progress = {rank: _progress(position["progress"]) for rank, position in places.items()}
        busy = [rank for rank in sorted(members) if rank in known and rank not in places and known[rank]["busy"]]
        self._adopt(name, plan.follow(members, progress, busy), view, members)
        self.seed, self.global_batch = first["seed"], first["global_batch"]
        return self.rank in places

    def _adopt(self, name: _Name, plan: EpochPlan, view: int, members: Sequence[int]) -> None:
        mine = [each for each in (self._plan_position, self._earlier) if each and each.name == name]
        before = mine[0].before if mine else 0
        if mine and self.rank in mine[0].plan.members:
            before += mine[0].plan.count(self.rank, mine[0].done)
        self._earlier = mine[0] if mine else None
        self.epoch, self.view, self.members = name[0], view, tuple(sorted(members))
        drawn = plan.cursor(len(plan.kept.get(self.rank, ())), self.rank) if self.inside else (0, 0)
        hand = plan.hands.get(self.rank, 0)
        self._plan_position = _PlanPosition((self.epoch, view), plan, 0, drawn, hand, before)
        if not plan.steps:
            self.go_to(self.epoch + 1)  # what was left is dropped

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns a checkpoint after the complete steps, which a job of any size can load."""
        left = self._plan_position.plan.unused(self._plan_position.done) if self._plan_position else self._left
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "length": self.terms.length,
            "left": [list(span) for span in left],
            "global_batch": self.global_batch,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint."""
        if state["length"] != self.terms.length:
            raise ValueError(
                f"the state is of a data set of {state['length']} samples, this one has {self.terms.length}: "
                "load it with the data set with which it was saved"
            )
        self.go_to(state["epoch"])
        self.seed = state["seed"]
        self._left = union((first, end) for first, end in state["left"])
        self.global_batch = state["global_batch"] if self.terms.constant else None

    def _begin(self) -> _PlanPosition:
        while self._plan_position is None or self._plan_position.done >= self._plan_position.plan.steps:
            whole = union([(0, self.terms.length)])
            if self._plan_position is not None:
                if self._plan_position.plan.left == whole:
                    raise ValueError(
                        f"drop_last leaves nothing of {self.terms.length} samples, as a step of {len(self.members)} "
                        f"ranks needs {self._plan_position.plan.samples_per_step}: set drop_last=False or a smaller "
                        "batch_size"
                    )
                self.go_to(self.epoch + 1)  # what was left is dropped
            if self.terms.constant and self.global_batch is None:
                self.global_batch = self.terms.batch_size * len(self.members)
            plan = EpochPlan(
                members=self.members,
                batch_size=self.terms.batch_size,
                global_batch=self.global_batch,
                drop_last=self.terms.drop_last,
                left=self._left,
            )
            self._plan_position = _PlanPosition((self.epoch, self.view), plan, 0, (0, 0), 0, 0)
        return self._plan_position


def _progress(given: Mapping[str, Any]) -> Progress:
    step, batch = given["drawn"]
    return Progress(done=given["done"], drawn=(step, batch), hand=given["hand"])

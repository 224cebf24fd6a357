"""Environments: what an agent acts in, by name.

    popgym:RepeatPreviousEasy   Morad et al. 2023: memory tasks of numpy alone
    minigrid:MemoryS7           Chevalier-Boisvert et al. 2023
    gymnasium:CartPole-v1       whatever gymnasium knows by that name
    recall                      our own, for which gymnasium is enough: a colour, some grey steps, then: which was it?

An observation is one vector (what is one of several is one-hot), followed by the action before it, one-hot, which is 0 in the
first: a history has both. Whoever has none is not shown it, for an action can be a note to oneself. An action is one choice or
several at once. An episode follows from its seed and the actions
alone, so that a run that goes on can come back to where it was by taking the same actions again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyformer.value import nearest

Vector = NDArray[np.float32]
Picture = NDArray[np.uint8]

LIBRARIES = {"popgym": "popgym-", "minigrid": "MiniGrid-", "gymnasium": ""}  # with what the names of each begin
COLOURS = np.array([(214, 69, 65), (65, 131, 215), (38, 166, 91), (245, 215, 110), (190, 190, 190), (255, 255, 255)])


class Recall:
    """One of four colours, `delay` grey steps, then white: the action then is to be the number of the colour."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    colours, grey, white = 4, 4, 5

    def __init__(self, delay: int = 4):
        spaces = _library("gymnasium").spaces
        self.delay = delay
        self.observation_space, self.action_space = spaces.Discrete(6), spaces.Discrete(self.colours)
        self.cue, self.time = 0, 0

    @property
    def seen(self) -> int:
        return self.cue if self.time == 0 else self.grey if self.time <= self.delay else self.white

    def reset(self, *, seed: int) -> tuple[int, dict[str, Any]]:
        self.cue, self.time = int(np.random.default_rng(seed).integers(self.colours)), 0
        return self.seen, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        asked = self.seen == self.white
        self.time += 1
        return self.seen, float(asked and action == self.cue), asked, False, {}

    def render(self) -> Picture:
        return np.full((32, 32, 3), COLOURS[self.seen], dtype=np.uint8)


class Environment:
    """An environment of a name, with vectors for observations and whole numbers, one for each part, for an action."""

    def __init__(self, name: str, history: bool = True, pictures: bool = False):
        self.name, self.history, self.space_of = name, history, _library("gymnasium").spaces
        self.inner: Any = Recall() if name == "recall" else _made(name, pictures)
        self.read, width = self._observe(self.inner.observation_space)
        self.choices, self.lowest = self._actions(self.inner.action_space)
        self.offset = np.cumsum((0, *self.choices))  # of the parts of an action, one behind the other
        self.inputs = width + history * sum(self.choices)

    def begin(self, seed: int) -> Vector:
        return self._with_action(self.inner.reset(seed=seed)[0], None)

    def step(self, action: Sequence[int]) -> tuple[Vector, float, bool, bool]:
        """What is seen next, the reward, and whether the episode has ended or was cut off."""
        taken = [number + low for number, low in zip(action, self.lowest, strict=True)]
        single = isinstance(self.inner.action_space, self.space_of.Discrete)
        seen, reward, ended, cut, _ = self.inner.step(taken[0] if single else np.array(taken))
        return self._with_action(seen, action), float(reward), bool(ended), bool(cut)

    def draws(self) -> bool:
        """Can it be seen in pictures?"""
        return "rgb_array" in (self.inner.metadata.get("render_modes") or ())

    def picture(self) -> Picture:
        return np.asarray(self.inner.render(), dtype=np.uint8)

    def _with_action(self, seen: Any, action: Sequence[int] | None) -> Vector:
        if not self.history:
            return self.read(seen).astype(np.float32)
        before = np.zeros(self.offset[-1], dtype=np.float32)
        if action is not None:
            before[self.offset[:-1] + action] = 1
        return np.concatenate((self.read(seen), before), dtype=np.float32)

    def _observe(self, space: Any) -> tuple[Callable[[Any], Vector], int]:
        """What makes a vector of an observation, and how long it is."""
        spaces = self.space_of
        if isinstance(space, spaces.Dict) and "mission" in space.spaces:  # of minigrid
            if getattr(space["mission"], "ordered_placeholders", None):
                raise ValueError(
                    f"{self.name} tells its mission in words, which differ from episode to episode and are not read here; choose "
                    "one whose mission is always the same, such as minigrid:MemoryS7"
                )
            return _grid(space)
        try:
            width = int(spaces.flatdim(space))
        except (NotImplementedError, ValueError) as error:
            raise ValueError(
                f"the observations of {self.name} are {space}, of no fixed length ({error}); choose another"
            ) from None
        return lambda seen: spaces.flatten(space, seen), width

    def _actions(self, space: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many choices each part of an action has, and the number of the first."""
        if isinstance(space, self.space_of.Discrete):
            return (int(space.n),), (int(space.start),)
        if isinstance(space, self.space_of.MultiDiscrete) and space.nvec.ndim == 1:
            return tuple(map(int, space.nvec)), tuple(map(int, space.start))
        raise ValueError(
            f"the actions of {self.name} are {space}, but an agent here chooses one of several (Discrete, MultiDiscrete); choose "
            "another environment"
        )


def fingerprint(name: str) -> str:
    """What an environment is: its name and the version of what has it."""
    library = name.partition(":")[0] if ":" in name else "gymnasium"
    return f"{name} of {library} {version(library)}"


def _made(name: str, pictures: bool) -> Any:
    library, colon, short = name.partition(":")
    if not colon or library not in LIBRARIES:
        raise ValueError(
            f"no environment is named {name!r}: give recall, or LIBRARY:NAME with the library "
            f"{', '.join(LIBRARIES)}, such as popgym:RepeatPreviousEasy"
        )
    _library(library)
    gymnasium, begin = _library("gymnasium"), LIBRARIES[library]
    known = {one for one in gymnasium.registry if one.startswith(begin)}
    by_short = {one.removeprefix(begin).rpartition("-v")[0]: one for one in sorted(known)}  # the last version of each
    found = short if short in known else by_short.get(short)
    if found is None:
        raise ValueError(f"{library} has no environment {short!r}; {nearest(short, by_short)}")
    if pictures:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # of pygame: no window
    try:
        # Its checker looks at every step and warns of what others' environments do.
        return gymnasium.make(found, disable_env_checker=True, **({"render_mode": "rgb_array"} if pictures else {}))
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"{name} cannot be made: {error}; install what it needs, or choose another") from None


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(
            f"the control task needs {name}, which cannot be imported ({error}); pip install 'everyformer[control]'"
        ) from None


def _grid(space: Any) -> tuple[Callable[[Any], Vector], int]:
    """Of minigrid: kind, colour and state of every cell in sight, one-hot, and which way the agent looks."""
    constants = _library("minigrid.core.constants")
    sizes = [len(one) for one in (constants.OBJECT_TO_IDX, constants.COLOR_TO_IDX, constants.STATE_TO_IDX)]
    cells = int(np.prod(space["image"].shape[:2]))
    place_N3 = np.arange(cells)[:, None] * sum(sizes) + np.cumsum((0, *sizes[:2]))
    ways, length = int(space["direction"].n), cells * sum(sizes)

    def read(seen: Any) -> Vector:
        found = np.zeros(length + ways, dtype=np.float32)
        found[place_N3 + seen["image"].reshape(cells, 3)] = 1
        found[length + int(seen["direction"])] = 1
        return found

    return read, length + ways

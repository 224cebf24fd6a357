"""Reinforcement-learning environments by name.

    popgym:RepeatPreviousEasy   Morad et al. 2023: memory tasks
    minigrid:MemoryS7           Chevalier-Boisvert et al. 2023
    gymnasium:CartPole-v1       any environment that gymnasium has registered
    recall                      our own, which needs gymnasium only: name the colour shown some grey steps ago

An observation is one vector (categories are one-hot), followed by the previous action, one-hot, which is all zeros at the first
step. An agent without memory is not given the previous action, because it could use it to pass notes to itself. An action is one
choice or several at once. An episode depends on its seed and the actions only, so a resumed run restores it by repeating the actions.
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
Frame = NDArray[np.uint8]

LIBRARIES = {"popgym": "popgym-", "minigrid": "MiniGrid-", "gymnasium": ""}  # prefix of its environments' names
COLOURS = np.array([(214, 69, 65), (65, 131, 215), (38, 166, 91), (245, 215, 110), (190, 190, 190), (255, 255, 255)])


class Recall:
    """Shows one of four colours, `delay` grey steps, then white; the reward is 1 if the last action is the index of the colour."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    colours, grey, white = 4, 4, 5

    def __init__(self, delay: int = 4):
        spaces = _import("gymnasium").spaces
        self.delay = delay
        self.observation_space, self.action_space = spaces.Discrete(6), spaces.Discrete(self.colours)
        self.cue, self.time = 0, 0

    @property
    def observation(self) -> int:
        return self.cue if self.time == 0 else self.grey if self.time <= self.delay else self.white

    def reset(self, *, seed: int) -> tuple[int, dict[str, Any]]:
        self.cue, self.time = int(np.random.default_rng(seed).integers(self.colours)), 0
        return self.observation, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        last = self.observation == self.white
        self.time += 1
        return self.observation, float(last and action == self.cue), last, False, {}

    def render(self) -> Frame:
        return np.full((32, 32, 3), COLOURS[self.observation], dtype=np.uint8)


class Environment:
    """A named environment whose observations are vectors and whose actions are sequences of integers.

    Args:
        name: the name, as listed at the top of this module.
        history: whether observations include the previous action.
        render: whether `render` will be called.
    """

    def __init__(self, name: str, history: bool = True, render: bool = False):
        self.name, self.history, self.spaces = name, history, _import("gymnasium").spaces
        self.inner: Any = Recall() if name == "recall" else _make(name, render)
        self.to_vector, width = self._observation(self.inner.observation_space)
        self.choices, self.lowest = self._actions(self.inner.action_space)
        self.offset = np.cumsum((0, *self.choices))  # of each component of an action in its one-hot vector
        self.inputs = width + history * sum(self.choices)

    def reset(self, seed: int) -> Vector:
        """Starts an episode and returns its first observation."""
        return self._with_action(self.inner.reset(seed=seed)[0], None)

    def step(self, action: Sequence[int]) -> tuple[Vector, float, bool, bool]:
        """Returns the next observation, the reward, and whether the episode was terminated or truncated."""
        values = [number + low for number, low in zip(action, self.lowest, strict=True)]
        single = isinstance(self.inner.action_space, self.spaces.Discrete)
        observation, reward, terminated, truncated, _ = self.inner.step(values[0] if single else np.array(values))
        return self._with_action(observation, action), float(reward), bool(terminated), bool(truncated)

    def can_render(self) -> bool:
        """Returns whether the environment can be rendered as images."""
        return "rgb_array" in (self.inner.metadata.get("render_modes") or ())

    def render(self) -> Frame:
        """Returns an image of the current state."""
        return np.asarray(self.inner.render(), dtype=np.uint8)

    def _with_action(self, observation: Any, action: Sequence[int] | None) -> Vector:
        if not self.history:
            return self.to_vector(observation).astype(np.float32)
        one_hot = np.zeros(self.offset[-1], dtype=np.float32)
        if action is not None:
            one_hot[self.offset[:-1] + action] = 1
        return np.concatenate((self.to_vector(observation), one_hot), dtype=np.float32)

    def _observation(self, space: Any) -> tuple[Callable[[Any], Vector], int]:
        """Returns a function that turns an observation into a vector, and the length of the vector."""
        spaces = self.spaces
        if isinstance(space, spaces.Dict) and "mission" in space.spaces:  # of minigrid
            if getattr(space["mission"], "ordered_placeholders", None):
                raise ValueError(
                    f"{self.name} states a mission in words that changes from episode to episode, which is not supported; choose an "
                    "environment with a fixed mission, such as minigrid:MemoryS7"
                )
            return _minigrid(space)
        try:
            width = int(spaces.flatdim(space))
        except (NotImplementedError, ValueError) as error:
            raise ValueError(
                f"the observations of {self.name} are {space}, which have no fixed length ({error}); choose another environment"
            ) from None
        return lambda observation: spaces.flatten(space, observation), width

    def _actions(self, space: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the number of choices of each component of an action, and the value of its first choice."""
        if isinstance(space, self.spaces.Discrete):
            return (int(space.n),), (int(space.start),)
        if isinstance(space, self.spaces.MultiDiscrete) and space.nvec.ndim == 1:
            return tuple(map(int, space.nvec)), tuple(map(int, space.start))
        raise ValueError(
            f"the actions of {self.name} are {space}, but only Discrete and one-dimensional MultiDiscrete are supported; choose "
            "another environment"
        )


def fingerprint(name: str) -> str:
    """Returns the environment's name and the version of its library."""
    library = name.partition(":")[0] if ":" in name else "gymnasium"
    return f"{name} of {library} {version(library)}"


def _make(name: str, render: bool) -> Any:
    library, colon, short = name.partition(":")
    if not colon or library not in LIBRARIES:
        raise ValueError(
            f"no environment is named {name!r}; give recall, or LIBRARY:NAME with one of the libraries "
            f"{', '.join(LIBRARIES)}, such as popgym:RepeatPreviousEasy"
        )
    _import(library)
    gymnasium, prefix = _import("gymnasium"), LIBRARIES[library]
    registered = {one for one in gymnasium.registry if one.startswith(prefix)}
    by_short = {one.removeprefix(prefix).rpartition("-v")[0]: one for one in sorted(registered)}  # the latest version
    full_name = short if short in registered else by_short.get(short)
    if full_name is None:
        raise ValueError(f"{library} has no environment {short!r}; {nearest(short, by_short)}")
    if render:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # keeps pygame from opening a window
    try:
        # The checker would warn about other libraries' environments at every step.
        return gymnasium.make(full_name, disable_env_checker=True, **({"render_mode": "rgb_array"} if render else {}))
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(
            f"{name} cannot be created: {error}; install what it needs, or choose another environment"
        ) from None


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(
            f"the control task needs {name}, which cannot be imported ({error}); run pip install 'everyformer[control]'"
        ) from None


def _minigrid(space: Any) -> tuple[Callable[[Any], Vector], int]:
    """As `Environment._observation`, for minigrid: object, color and state of each visible cell and the direction, all one-hot."""
    constants = _import("minigrid.core.constants")
    sizes = [len(one) for one in (constants.OBJECT_TO_IDX, constants.COLOR_TO_IDX, constants.STATE_TO_IDX)]
    cells = int(np.prod(space["image"].shape[:2]))
    offset_N3 = np.arange(cells)[:, None] * sum(sizes) + np.cumsum((0, *sizes[:2]))
    directions, length = int(space["direction"].n), cells * sum(sizes)

    def to_vector(observation: Any) -> Vector:
        vector = np.zeros(length + directions, dtype=np.float32)
        vector[offset_N3 + observation["image"].reshape(cells, 3)] = 1
        vector[length + int(observation["direction"])] = 1
        return vector

    return to_vector, length + directions

"""Completion in a shell: `everyformer completion bash` prints a script, which asks `everyformer complete WORDS` at each tab.

Members, sizes and settings are read from family.json and settings.json, so that nothing waits for torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from everyformer.cli.settings_listing import read_listing, settings_of

SCRIPTS = {
    "bash": r"""_everyformer() {
    local line="${COMP_LINE:0:COMP_POINT}" words current prefix
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    current="${words[-1]}"
    mapfile -t COMPREPLY < <(everyformer complete -- "${words[@]:1}" 2>/dev/null)
    prefix="${current%"${current##*[=:]}"}"  # bash starts a new word after = and :
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
    [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
    return 0
}
complete -o default -F _everyformer everyformer""",
    "zsh": r"""#compdef everyformer
_everyformer() {
    local -a found
    found=("${(@f)$(everyformer complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -z "$found" ]]; then _files; return; fi
    compadd -Q -S '' -- ${(M)found:#*=}
    compadd -Q -- ${found:#*=}
}
compdef _everyformer everyformer""",
    "fish": r"""function __everyformer
    set -l words (commandline -opc) (commandline -ct)
    everyformer complete -- $words[2..] 2>/dev/null
end
complete -c everyformer -a '(__everyformer)'""",
}


def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print the completion script of a shell. Bash and zsh: eval "$(everyformer completion bash)"; fish: ... | source.

    Parameters
    ----------
    shell
        The shell: bash, zsh or fish.
    """
    print(SCRIPTS[shell])
    return 0


def complete(app: App) -> Callable[..., int]:
    """The command that the scripts call."""

    def print_candidates(*words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
        print("\n".join(candidates(app, words)))
        return 0

    return print_candidates


def candidates(app: App, words: Sequence[str]) -> list[str]:
    """The words that may stand in place of the last one, which has been typed in part. Empty where a file may stand."""
    *before, current = words or ("",)
    verb = next((word for word in before if not word.startswith("-")), None)
    if verb is None:
        return _starting(current, _commands(app))
    if verb not in _commands(app):
        return []
    rest, options = before[before.index(verb) + 1 :], _options(app[verb])
    if rest and rest[-1] in options and options[rest[-1]]:  # the value of an option
        return _starting(current, _values(rest[-1], rest))
    if current.startswith("-"):
        return _starting(current, options)
    if names := _commands(app[verb]):
        return [] if rest else _starting(current, names)
    given = [word for word in rest if not word.startswith("-")]
    if verb == "compare" and "." not in current:
        return _starting(current, read_listing()["members"])
    if verb in ("train", "tune", "plan", "settings", "family", "contracts") and not given:
        return _starting(current, read_listing()["members"])
    if verb in ("train", "tune", "plan", "resume") or (verb == "compare" and given):
        return _setting(current, [] if verb == "resume" else given, rest, run_only=verb == "resume")
    return _starting(current, ("bash", "zsh", "fish")) if verb == "completion" else []


def _commands(app: App) -> list[str]:
    return [name for name in app if not name.startswith("-") and app[name].show]


def _options(app: App) -> dict[str, bool]:
    """The options of a command, and whether each takes a value."""
    found = {"--help": False}
    if app.default_command is not None:
        for argument in app.assemble_argument_collection():
            for name in argument.names:
                if name.startswith("--"):
                    found[name] = argument.hint is not bool
    return found


def _values(option: str, rest: Sequence[str]) -> list[str]:
    listing = read_listing()
    member = next((word for word in rest if word in listing["members"]), None)
    if option == "--size" and member:
        return list(listing["members"][member]["sizes"])
    known = {"--task": list(listing["tasks"]), "--diff": list(listing["members"]), "--device": ["auto", "cpu", "cuda"]}
    return known.get(option, [])


def _setting(current: str, given: Sequence[str], rest: Sequence[str], run_only: bool) -> list[str]:
    """Paths of settings, or after = the values of one."""
    listing = read_listing()
    task = rest[rest.index("--task") + 1] if "--task" in rest[:-1] else None
    task = task if task in listing["tasks"] else "control" if task and ":" in task else None
    rows: list[dict[str, Any]] = listing["run"] if run_only else settings_of(given[0], None, task)
    name, equals, _ = current.partition("=")
    if equals:
        return _starting(current, (f"{name}={one}" for row in rows if row["name"] == name for one in row["choices"]))
    return _starting(current, (f"{row['name']}=" for row in rows))


def _starting(current: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(current))

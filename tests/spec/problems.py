"""The answers of each generated problem, from its question alone. `question` has all characters that are given, without answers."""

from __future__ import annotations

import re
from collections.abc import Callable


def copy(question: str) -> str:
    return question.removesuffix("=")


def reverse(question: str) -> str:
    answer = ""
    for digit in question.removesuffix("="):
        answer = digit + answer
    return answer


def addition(question: str) -> str:
    """Both numbers, and their sum, have the lowest digit first."""
    first, second = question.removesuffix("=").split("+")
    return str(int(first[::-1]) + int(second[::-1]))[::-1]


def sorting(question: str) -> str:
    digits = list(question.removesuffix("="))
    for _ in digits:  # bubble sort
        for index in range(len(digits) - 1):
            if digits[index] > digits[index + 1]:
                digits[index : index + 2] = digits[index + 1], digits[index]
    return "".join(digits)


def mqar(question: str) -> str:
    """Arora et al. 2023: u_i is the value v_j of the key k_j = x_i that was given before."""
    given, asked = question.split("=")
    answer = ""
    for key in asked:
        place = given.index(key)
        assert given.count(key) == 1
        answer += given[place + 1]
    return answer


def induction(question: str) -> str:
    """What followed the only earlier star."""
    before, last = question[:-1], question[-1]
    assert last == "*" and before.count("*") == 1
    return before[before.index("*") + 1]


def selective_copy(question: str) -> str:
    return "".join(one for one in question if one not in ".=")


def needle(question: str) -> str:
    """The number of the name that is asked for at the end."""
    (name,) = re.findall(r"The number of (\w+) is $", question)
    (number,) = re.findall(rf"The number of {name} is (\d+)\.", question)
    return str(number)


def listops(question: str) -> str:
    """Nangia & Bowman 2018: < minimum, > maximum, ~ median rounded down, + sum modulo 10, each up to its ]."""

    def value(at: int) -> tuple[int, int]:
        """The value of the expression that starts at an index, and the index after it."""
        if question[at].isdigit():
            return int(question[at]), at + 1
        arguments, end = [], at + 1
        while question[end] != "]":
            one, end = value(end)
            arguments.append(one)
        ordered, count = sorted(arguments), len(arguments)
        assert count >= 2
        results = {
            "<": ordered[0],
            ">": ordered[-1],
            "~": (ordered[(count - 1) // 2] + ordered[count // 2]) // 2,
            "+": sum(arguments) % 10,
        }
        return results[question[at]], end + 1

    answer, end = value(0)
    assert question[end:] == "="
    return str(answer)


def parity(question: str) -> str:
    odd = False
    for bit in question.removesuffix("="):
        odd ^= bit == "1"
    return str(int(odd))


def even_pairs(question: str) -> str:
    """Whether the number of the pairs ab and ba is even."""
    letters = question.removesuffix("=")
    pairs = sum(letters[index : index + 2] in ("ab", "ba") for index in range(len(letters)))
    return str(int(pairs % 2 == 0))


def modular_arithmetic(question: str) -> str:
    return str(eval(question.removesuffix("=")) % 5)


def cycle_navigation(question: str) -> str:
    """The position on a circle of five after the steps: < back, > on, . none."""
    moves = question.removesuffix("=")
    return str((moves.count(">") - moves.count("<")) % 5)


def dyck(question: str) -> str:
    """The brackets that close those left open, from the innermost on."""
    closing, stack = {"(": ")", "[": "]", "{": "}", "<": ">"}, []
    for bracket in question.removesuffix("="):
        if bracket in closing:
            stack.append(closing[bracket])
        else:
            assert stack.pop() == bracket
    return "".join(reversed(stack))


def pathfinder(question: str) -> str:
    """Whether the two ends o lie on one dashed path: pixels of a path are at most two apart, those of two paths more."""
    pixels = question.removesuffix("=")
    side = round(len(pixels) ** 0.5)
    drawn = {divmod(index, side) for index, pixel in enumerate(pixels) if pixel != "."}
    first, second = (divmod(match.start(), side) for match in re.finditer("o", pixels))
    reached, edge = {first}, [first]
    while edge:
        y, x = edge.pop()
        near = {(v, u) for v, u in drawn - reached if max(abs(v - y), abs(u - x)) <= 2}
        reached |= near
        edge += near
    return str(int(second in reached))


ANSWERS: dict[str, Callable[[str], str]] = {
    "copy": copy,
    "reverse": reverse,
    "addition": addition,
    "sorting": sorting,
    "mqar": mqar,
    "noisy-recall": mqar,
    "induction": induction,
    "selective-copy": selective_copy,
    "needle": needle,
    "listops": listops,
    "parity": parity,
    "even-pairs": even_pairs,
    "modular-arithmetic": modular_arithmetic,
    "cycle-navigation": cycle_navigation,
    "dyck": dyck,
    "pathfinder": pathfinder,
}

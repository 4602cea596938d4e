"""Prompts for the demonstration, made of templates: sums in words and small functions mostly, on which a learned policy
gains most with the built-in target, and some talk, on which it gains little.

Prompts of one template are alike, so that the gains of the demonstration say nothing about other prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from graft_dist.prompts import Prompt, prompt_hash

_SUMS = (
    "{name} has {a} {things} and buys {b} boxes with {c} {things} in each. How many {things} does {name} have now?",
    "{name} puts {a} {things} into bags of {b}. How many bags are full, and how many {things} are left over?",
    "One of the {things} costs {b} dollars. {name} buys {c} of them and pays with {a}0 dollars. What is the change?",
    "{name} makes {c} {things} a day and gives away {b} at the end of each week. How many are left after four weeks?",
    "{name} had {a} {things}, sold half of them, and then found {b} more. How many {things} are there in the end?",
    "There are {b} shelves with {c} {things} each. {name} adds {a} more {things}. How many are there now?",
    "{name} and two friends share {a} {things} as equally as they can. How many does each get, and how many are left?",
    "{name} needs {c} minutes for each of the {b} {things} and rests for {a} minutes. How many hours does it all take?",
)
_NAMES = ("Anna", "Boris", "Chloe", "Dinesh", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas")
_THINGS = ("apples", "stamps", "candles", "marbles", "notebooks", "tickets", "cakes", "bricks")

_TASKS = (
    "returns the {} of", "checks whether there are any repeats in", "counts how often 7 occurs in", "reverses",
    "removes every second element of", "splits into two halves", "prints, one to a line,",
)  # fmt: skip
_MEASURES = ("sum", "largest", "smallest", "average", "median", "number", "product")
_COLLECTIONS = (
    "the numbers in a list", "the digits of a whole number", "the even numbers in a list", "the values of a dictionary",
    "the numbers in a text file", "the squares of the numbers from 1 to n", "the lengths of the words in a sentence",
    "the numbers in a nested list", "the elements of a tuple", "the prices in a list of pairs",
)  # fmt: skip
_ENDINGS = ("", " Add a docstring.", " Show an example of its use.", " Explain how it works.")

_WAYS = (
    "Explain in a few sentences what {} is.",
    "List five facts about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a letter to a friend about {}.",
)
_SUBJECTS = (
    "bread", "a bicycle", "rain", "the moon", "a library", "chess", "a garden", "the sea", "a violin", "winter",
    "a bridge", "coffee", "a hospital", "glass", "a volcano", "a market", "paper", "a clock", "honey", "a train",
    "a river", "salt", "a school", "wool", "a lighthouse", "a forest", "steel", "a theatre", "ice", "a camera",
    "rice", "a desert", "silk", "a harbour", "a kitchen", "wind", "a museum", "gold", "a farm", "a radio",
)  # fmt: skip


def made_prompts() -> list[Prompt]:
    """All of them, mixed, in an order that stays put.

    The order is that of their hashes, which is also the order in which a retraining takes fresh prompts: who begins at
    the end asks others than it does.
    """
    found = [("math", text) for text in _sums()] + [("code", text) for text in _functions()]
    found += [("chat", way.format(subject)) for way, subject in product(_WAYS, _SUBJECTS)]
    prompts = []
    for task, text in found:
        key = prompt_hash((text,))
        prompts.append((key, Prompt(f"made-{key[:12]}", task, (text,))))
    return [prompt for _, prompt in sorted(prompts)]


def _sums() -> Iterator[str]:
    for number, (template, name, things) in enumerate(product(_SUMS, _NAMES, _THINGS)):
        a, b, c = 40 + number * 17 % 59, 3 + number * 5 % 7, 11 + number * 7 % 13
        yield template.format(name=name, things=things, a=a, b=b, c=c)


def _functions() -> Iterator[str]:
    tasks = [_TASKS[0].format(measure) for measure in _MEASURES] + list(_TASKS[1:])
    for task, collection, ending in product(tasks, _COLLECTIONS, _ENDINGS):
        yield f"Write a Python function that {task} {collection}.{ending}"

"""Generated documents of facts, and questions whose answers only they hold. It knows no models.

Five documents make a case. Every answer stands in one document of its case alone, and the case's two-hop questions need
two: one names who keeps a thing, another where that person stays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

NUM_DOCUMENTS = 5
"""Documents in a case."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words(
    "Ada Amos Bela Bruno Cora Cyrus Dora Edgar Elsa Emil Faye Felix Greta Hugo Ida Igor Jonas Julia Kira Lars Leon "
    "Lydia Marco Mira Nadia Nils Olga Oscar Paula Pedro Rosa Rufus Silas Sonia Tessa Tobias Ursula Viktor Wanda Yusuf"
)
LAST_NAMES = _words(
    "Abara Bauer Castell Dahl Engel Fischer Galvez Hansen Ivanov Jansen Keller Lindt Marsh Novak Okafor Petrov Quist "
    "Rossi Silva Tanaka Ulrich Vance Weber Xavier Yates Zeller Arden Brandt Conway Duarte Ericson Farrow Grimm Holm "
    "Jarvis Kovac Lorenz Mendel Norris Osman"
)
PLACE_STARTS = _words("Ash Bram Corn Dell Elm Fern Glen Hart Kings Lang Marl Nor Oak Pen Rav Stan Thorn Wes Win Yar")
PLACE_ENDS = _words("bridge brook burn bury dale field ford gate ham hurst ley mouth port stead ton wick")
WORD_STARTS = _words("Vel Tor Mar Zan Kor Lum Bal Rin Sol Dra Fen Gal")
WORD_ENDS = _words("mora vik dane tara lix gor bis nia pell rath sen dor")
THINGS = _words("pump crane ferry loom kiln turbine press furnace tram mill printer compressor")
MONTHS = _words("January February March April May June July August September October November December")


class Question(NamedTuple):
    """What is asked, how the answer begins, and how it goes on. `kind` is a kind of `KINDS`, or "two-hop"."""

    kind: str
    text: str
    lead: str
    answer: str


class Fact(NamedTuple):
    sentence: str
    question: Question


@dataclass(frozen=True)
class Document:
    text: str
    questions: tuple[Question, ...]


class Hop(NamedTuple):
    """A question that needs document `first`, which names a person, and `second`, which names that person's place."""

    question: Question
    first: int
    second: int


@dataclass(frozen=True)
class Case:
    """Documents that belong together. Each names a person whose place the next one gives; the last one, the first's."""

    documents: tuple[Document, ...]
    hops: tuple[Hop, ...]

    def hops_within(self, num_documents: int) -> list[Hop]:
        """Those that the first documents alone can answer."""
        return [hop for hop in self.hops if max(hop.first, hop.second) < num_documents]


class _Draw:
    """Words of one case, none of them twice."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        firsts, lasts = chance.sample(FIRST_NAMES, 20), chance.sample(LAST_NAMES, 20)
        self.people = iter([f"{first} {last}" for first, last in zip(firsts, lasts, strict=True)])
        starts_and_ends = [(start, end) for start in PLACE_STARTS for end in PLACE_ENDS]
        self.places = iter([start + end for start, end in chance.sample(starts_and_ends, 30)])
        self.numbers = iter(str(number) for number in chance.sample(range(1100, 9900), 20))
        days = [f"{day} {month}" for day in range(10, 29) for month in MONTHS]
        self.days = iter(chance.sample(days, 20))
        words = [start + end for start in WORD_STARTS for end in WORD_ENDS]
        things = zip(chance.sample(words, NUM_DOCUMENTS), chance.sample(THINGS, NUM_DOCUMENTS), strict=True)
        self.things = [f"{word} {thing}" for word, thing in things]

    def subject(self, thing: str) -> str:
        """What a sentence calls a thing."""
        return self.chance.choice((f"The {thing}", "It"))


def _leader(thing: str, draw: _Draw) -> Fact:
    role = draw.chance.choice(("lead engineer", "inspector", "designer"))
    person = next(draw.people)
    question = Question("name", f"Who is the {role} of the {thing}?", f"The {role} is", person)
    return Fact(f"The {role} is {person}.", question)


def _size(thing: str, draw: _Draw) -> Fact:
    return _number(thing, draw, *draw.chance.choice((("weighs", "kilograms"), ("lifts", "stones"))))


def _price(thing: str, draw: _Draw) -> Fact:
    return _number(thing, draw, *draw.chance.choice((("costs", "crowns"), ("uses", "litres"))))


def _number(thing: str, draw: _Draw, verb: str, unit: str) -> Fact:
    number = next(draw.numbers)
    question = Question("number", f"How many {unit} does the {thing} {verb[:-1]}?", f"It {verb}", number)
    return Fact(f"{draw.subject(thing)} {verb} {number} {unit}.", question)


def _day(thing: str, draw: _Draw) -> Fact:
    verb = draw.chance.choice(("delivered", "repaired", "sold"))
    day = next(draw.days)
    question = Question("date", f"On which day was the {thing} {verb}?", f"It was {verb} on", day)
    return Fact(f"{draw.subject(thing)} was {verb} on {day}.", question)


def _refusal(thing: str, draw: _Draw) -> Fact:
    """Of three places, the one of which it is not true."""
    verb = draw.chance.choice(("tested", "shown", "used"))
    odd, one, other = (next(draw.places) for _ in range(3))
    phrasings = (
        f"was {verb} in {one} and {other}, but not in {odd}",
        f"was not {verb} in {odd}, only in {one} and {other}",
    )
    question = Question("negation", f"Where was the {thing} not {verb}?", f"It was not {verb} in", odd)
    return Fact(f"{draw.subject(thing)} {draw.chance.choice(phrasings)}.", question)


def _keeper(thing: str, person: str) -> Fact:
    question = Question("name", f"Who keeps the key of the {thing}?", "The key is kept by", person)
    return Fact(f"The key of the {thing} is kept by {person}.", question)


def _place(person: str, draw: _Draw) -> Fact:
    town = next(draw.places)
    question = Question("place", f"Where does {person} stay?", f"{person} stays in", town)
    return Fact(f"{person} stays in {town}.", question)


def case(number: int, seed: int = 0) -> Case:
    """The case of a number; equal arguments, equal documents."""
    draw = _Draw(random.Random(f"{seed}-{number}"))
    keepers = [next(draw.people) for _ in range(NUM_DOCUMENTS)]
    documents, towns = list[Document](), list[str]()
    simple: tuple[Callable[[str, _Draw], Fact], ...] = (_leader, _size, _price, _day, _refusal)
    for index, (thing, keeper) in enumerate(zip(draw.things, keepers, strict=True)):
        place = _place(keepers[index - 1], draw)
        towns.append(place.question.answer)
        facts = [*(make(thing, draw) for make in simple), _keeper(thing, keeper), place]
        draw.chance.shuffle(facts)
        text = " ".join([f"Report on the {thing}.", *(fact.sentence for fact in facts)])
        documents.append(Document(text, tuple(fact.question for fact in facts)))
    hops = (_hop(index, draw.things[index], towns[(index + 1) % NUM_DOCUMENTS]) for index in range(NUM_DOCUMENTS))
    return Case(tuple(documents), tuple(hops))


def _hop(index: int, thing: str, town: str) -> Hop:
    text = f"Where does the person stay who keeps the key of the {thing}?"
    question = Question("two-hop", text, "That person stays in", town)
    return Hop(question, index, (index + 1) % NUM_DOCUMENTS)


def cases(num_documents: int, seed: int = 0) -> Iterator[Case]:
    """As many cases as hold that many documents."""
    for number in range(-(-num_documents // NUM_DOCUMENTS)):
        yield case(number, seed)


def rotated(questions: tuple[Question, ...], count: int, turn: int) -> list[Question]:
    """`count` of the questions, other ones at every turn."""
    return [questions[(turn * count + index) % len(questions)] for index in range(min(count, len(questions)))]

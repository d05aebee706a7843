"""The demo's prompts, written for this project: six kinds, from seeded templates.

In: how many, and a seed. Out: distinct chats of a short system message and one user turn, their kind as `source`. Words
and numbers vary so that the target's answers differ.
"""

import random
from collections.abc import Callable
from typing import Any

from headrace.errors import PrepareError

_NAMES = (
    "Ada Ben Chloe David Elif Farah Goran Hana Ivan Jade Kofi Lena Marco Nora Omar Petra Quinn Rosa Sven Tara".split()
)
_THINGS = (
    "apples books chairs coins cups flowers keys lamps maps nails pencils plates ropes shells stamps tickets".split()
)
_PLACES = "Lisbon Oslo Cairo Lima Kyoto Nairobi Quebec Sofia Tallinn Perth Izmir Bergen Porto Hanoi Cusco Malmo".split()
_JOBS = (
    "baker carpenter dentist engineer farmer gardener librarian nurse painter pilot plumber tailor teacher vet".split()
)
_ANIMALS = (
    "badger crane dolphin eagle ferret goat heron ibex jackal koala lynx mole otter penguin raven seal toad".split()
)
_TOPICS = (
    "bread,bridges,clouds,coffee,compasses,forests,glass,gravity,honey,ice,kites,lighthouses,magnets,maps,"
    "mountains,paper,rain,rivers,salt,sleep,snow,soap,steam,tea,tides,trains,volcanoes,windmills"
).split(",")
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_VERBS = "walked drove cycled sailed flew hurried travelled wandered".split()
_FUNCTIONS = (
    "reverses a string|counts the vowels in a string|returns the largest number in a list|checks if a number is even|"
    "adds two numbers|returns the factorial of n|removes duplicates from a list|checks if a word is a palindrome|"
    "converts Celsius to Fahrenheit|sums the squares of a list|joins words by dashes|finds the shortest word in a list|"
    "returns the first n even numbers|counts words in a sentence|swaps two values|returns the average of a list|"
    "checks if a year is a leap year|capitalises every word|finds the index of an item|multiplies all numbers in a list"
).split("|")
_NAMING = "solve compute helper run_it do_task process calculate work answer handle".split()

Kind = Callable[[random.Random], str]


def _arithmetic(rng: random.Random) -> str:
    name, other = rng.sample(_NAMES, 2)
    thing = rng.choice(_THINGS)
    a, b, c = rng.randint(3, 60), rng.randint(2, 30), rng.randint(2, 9)
    return rng.choice(
        [
            f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?",
            f"{name} packs {a} {thing} into each of {c} boxes. How many {thing} are there in all?",
            f"{other} had {a + b} {thing} and gave {b} of them to {name}. How many are left?",
            f"A shop sells {thing} for {c} dollars each. How much do {b} {thing} cost?",
            f"What is {a} plus {b}? Explain each step.",
            f"What is {a * c} divided by {c}? Show your work.",
            f"{name} reads {b} pages a day. How many pages does {name} read in {c} days?",
            f"{name} and {other} share {2 * a} {thing} equally. How many does each get?",
            f"A train travels {a} miles every hour. How far does it go in {c} hours?",
            f"Subtract {b} from {a + b} and explain how you did it.",
            f"There are {c} rows with {b} {thing} in each row. How many {thing} are there?",
            f"{name} saves {c} dollars every week. How much money is saved after {b} weeks?",
        ]
    )


def _code(rng: random.Random) -> str:
    what, name = rng.choice(_FUNCTIONS), rng.choice(_NAMING)
    return rng.choice(
        [
            f"Write a Python function that {what}.",
            f"Write a short Python function named {name} that {what}.",
            f"Show me Python code that {what}.",
            f"In Python, write a function called {name} that {what}. Keep it short.",
            f"Give me a Python function that {what}, with a docstring.",
            f"How do I write a function that {what} in Python?",
            f"Please write {name}(), a Python function that {what}.",
            f"Write a function in JavaScript that {what}.",
            f"Write Python code for a function that {what} and call it once.",
            f"I need a small function that {what}. Use Python.",
            f"Define a function {name} in Python. It {what}.",
            f"Write a one-line Python function that {what}.",
        ]
    )


def _extraction(rng: random.Random) -> str:
    name, other = rng.sample(_NAMES, 2)
    place, job, day, verb = rng.choice(_PLACES), rng.choice(_JOBS), rng.choice(_DAYS), rng.choice(_VERBS)
    number, thing = rng.randint(2, 90), rng.choice(_THINGS)
    text = rng.choice(
        [
            f"{name}, a {job} from {place}, {verb} to the market on {day} and bought {number} {thing}.",
            f"On {day}, {name} met {other} in {place}. {other} works as a {job} and has {number} {thing}.",
            f"The {job} {name} sent {number} {thing} to {other} in {place} last {day}.",
            f"{name} {verb} from {place} on {day} with {number} {thing} for {other}, the {job}.",
        ]
    )
    return rng.choice(
        [
            f"Extract the name, the job, the city and the day as key: value lines. {text}",
            f"Turn this text into a JSON object with the keys name, job, place and day: {text}",
            f"Write a JSON object with the keys name, place, day and number for this text: {text}",
            f"List all the facts in this text, one on each line: {text}",
            f"List every name, place, day and number in this text: {text}",
            f"Copy this text word for word, then list the names in it: {text}",
            f"Fill in this form. Name: Job: Place: Day: Text: {text}",
            f"Make a table with the columns name, job, place and day for this text: {text}",
            f"Extract the person, the thing and the number from this sentence: {text}",
            f"Quote the text and say which day it names: {text}",
            f"Write the names, then the places, then the days of this text: {text}",
            f"Turn this text into YAML with name, job, place, day and number: {text}",
        ]
    )


def _rewriting(rng: random.Random) -> str:
    name, other = rng.sample(_NAMES, 2)
    place, day = rng.choice(_PLACES), rng.choice(_DAYS)
    animal, thing, topic = rng.choice(_ANIMALS), rng.choice(_THINGS), rng.choice(_TOPICS)
    text = rng.choice(
        [
            f"The {animal} sat near the {thing} in {place} and waited for {name} until {day}.",
            f"{name} likes {topic} and goes to {place} every {day} to buy {thing}.",
            f"We were looking for the {thing} when the {animal} came back to {place}.",
            f"{name} said that the meeting about {topic} in {place} is moved to {day}.",
            f"On {day} the {animal} ran past {name}, who was counting {thing} in {place}.",
        ]
    )
    return rng.choice(
        [
            f"Repeat this sentence, but write {other} instead of {name}: {text}",
            f"Rewrite this sentence in capital letters: {text}",
            f"Rewrite this sentence in the past tense: {text}",
            f"Rewrite this sentence in the future tense: {text}",
            f"Repeat this sentence three times: {text}",
            f"Turn this sentence into a question: {text}",
            f"Rewrite this sentence and add the word slowly: {text}",
            f"Write this sentence as a polite email: {text}",
            f"Copy this sentence, then make it shorter: {text}",
            f"Correct this sentence if it has a mistake, else repeat it: {text}",
            f"Write this sentence as a newspaper headline, then repeat the sentence: {text}",
            f"Put this sentence in quotation marks and say who is in it: {text}",
        ]
    )


def _short(rng: random.Random) -> str:
    topic, animal, job, place = rng.choice(_TOPICS), rng.choice(_ANIMALS), rng.choice(_JOBS), rng.choice(_PLACES)
    return rng.choice(
        [
            f"Spell the word {topic} letter by letter, with a dash between letters.",
            f"What does a {job} do? Begin with: A {job} is a person who",
            f"Is a {animal} an animal? Begin with: Yes, a {animal} is",
            f"Which country is {place} in? Begin with: {place} is a city in",
            f"Define {topic} in one sentence. Begin with: {topic.capitalize()}",
            f"Use the word {topic} in three short sentences.",
            f"Use the words {animal} and {topic} in one sentence, then repeat the sentence.",
            f"Say hello to a {job} from {place} in one sentence.",
            f"Write one sentence that begins with: The {job} from {place}",
            f"How many letters does the word {topic} have? Spell it first.",
            f"Write the word {animal} ten times.",
            f"Say in one sentence that a {job} in {place} likes {topic}.",
        ]
    )


def _lists(rng: random.Random) -> str:
    topic, animal, job, place = rng.choice(_TOPICS), rng.choice(_ANIMALS), rng.choice(_JOBS), rng.choice(_PLACES)
    a, b = rng.randint(2, 40), rng.randint(2, 12)
    number = rng.randint(3, 6)
    return rng.choice(
        [
            f"Count from {a} to {a + 15}.",
            f"Count down from {a + 15} to {a}.",
            f"Write the multiplication table of {a}.",
            f"List the first ten multiples of {a}.",
            f"Count from {a} to {a + 12 * b} in steps of {b}.",
            f"List the even numbers from {2 * a} to {2 * a + 24}.",
            f"Write a numbered list of {number} facts about {topic}.",
            f"Name {number} things to see in {place}, as a numbered list.",
            f"List {number} tools that a {job} needs, as a numbered list.",
            f"Write {number} questions about {topic}, as a numbered list.",
            f"Write a table of {a} plus 1 to {a} plus 10, one sum on each line.",
            f"Write a numbered list of {number} short sentences about a {animal}.",
        ]
    )


KINDS: dict[str, Kind] = {
    "arithmetic": _arithmetic,
    "code": _code,
    "extraction": _extraction,
    "rewriting": _rewriting,
    "short answers": _short,
    "lists": _lists,
}
_MOST_TRIES = 200
SYSTEM = "Be brief."  # the target's own is longer than most of these prompts


def demo_prompts(num: int, seed: int = 0) -> list[dict[str, Any]]:
    """Write `num` distinct prompts, the kinds in turn; the first n of a larger number are the same.

    Raises: PrepareError when the templates cannot give so many.
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    rows: list[dict[str, Any]] = []
    for i in range(num):
        kind = list(KINDS)[i % len(KINDS)]
        for _ in range(_MOST_TRIES):
            text = KINDS[kind](rng)
            if text not in seen:
                break
        else:
            raise PrepareError(f"{num} distinct prompts", f"{len(seen)}", "lower prepare.num_demo_prompts")
        seen.add(text)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        rows.append({"messages": messages, "source": kind})
    return rows
